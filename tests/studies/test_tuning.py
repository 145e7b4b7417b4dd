from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.trial import TrialState, create_trial

from nni_petridish import tune
from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.select import most_accurate
from nni_petridish.nni_adapter.nnictl import free_port
from nni_petridish.running.config import SearchConfig
from nni_petridish.search.search import Search
from nni_petridish.studies.tuning import tables
from nni_petridish.studies.tuning.plots import plot_study
from nni_petridish.studies.tuning.queue import CONTINUES, OWNER, Queue, first_number, live
from nni_petridish.studies.tuning.settings import Tuning
from nni_petridish.studies.tuning.storage import IDENTITY, distributions_of, open_study
from nni_petridish.studies.tuning.study import make_pruner
from tests.support.chaos import check_gallery, write_config

ROOT = Path(__file__).parents[2]
SPACE = {"l1": {"low": 1.0e-5, "high": 0.1}, "i_max": {"low": 2, "high": 4}}

# Optuna's warnings are errors wherever it is used here.
pytestmark = pytest.mark.filterwarnings(
    "error::optuna.exceptions.ExperimentalWarning", "error::UserWarning", "error::FutureWarning"
)


def write(where: Path, models: int = 2, **tuning: Any) -> Path:
    """Write a study of searches that are as small as possible."""
    path = write_config(where, models)
    document = yaml.safe_load(path.read_text())
    document["searchSpace"]["ops"] = ["identity", "max_pool_3x3"]
    arguments = document["tuner"]["classArgs"]
    arguments |= {"seed_epochs": 1, "weak_epochs": 1, "final_epochs": 1}
    arguments["data"]["limit"] = 64
    arguments["tuning"] = {"folder": "study", "trials": 2, "space": SPACE, **tuning}
    path.write_text(yaml.safe_dump(document))
    return path


def gallery_errors(tuning: Tuning, trial: optuna.trial.FrozenTrial) -> list[float]:
    """Read the lowest errors of a trial's searches from their galleries."""
    found = []
    for repeat in range(tuning.section.repeats):
        folder = tuning.folder / f"trial-{first_number(trial):04d}" / f"run-{repeat}"
        events = Gallery(folder).journal.read_all()
        found.append(min(e["outcome"]["error"] for e in events if e["event"] == "model"))
    return found


# Bad input.

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"sampling": "tpe"}, "tuning.sampling is not a known key"),
    "unknown sampler": ({"sampler": "bayes"}, "sampler must be one of tpe, random, gp"),
    "unknown pruner": ({"pruner": "mean"}, "pruner must be one of median, hyperband, none"),
    "reversed l1": (
        {"space": {"l1": {"low": 0.1, "high": 0.001}}},
        "space.l1.low must be at most space.l1.high but got 0.1 and 0.001",
    ),
    "l1 of 0": ({"space": {"l1": {"low": 0, "high": 0.1}}}, "space.l1.low must be above 0"),
    "negative l1": ({"space": {"l1": {"low": -1, "high": 1}}}, "space.l1.low must be at least 0"),
    "linear l1 of 0": (
        {"space": {"l1": {"low": 0.0, "high": 0.1, "log": False}}},
        "space.l1 must be above 0",
    ),
    "text l1": ({"space": {"l1": {"low": "1e-5", "high": 1}}}, "write 1e-05"),
    "i_max of 0": ({"space": {"i_max": {"low": 0, "high": 2}}}, "i_max must be at least 1"),
    "i_max of 0 chosen": ({"space": {"i_max": {"choices": [0, 1]}}}, "i_max must be at least 1"),
    "half an i_max": ({"space": {"i_max": {"low": 1.5, "high": 2}}}, "i_max must be a whole"),
    "no end": ({"space": {"l1": {"low": 0.1}}}, "space.l1.high is missing"),
    "both": ({"space": {"l1": {"low": 0.1, "choices": [1]}}}, "low and high, or choices"),
    "no choices": ({"space": {"l1": {"choices": []}}}, "space.l1.choices must be a list"),
    "empty space": ({"space": {}}, "space must name at least one"),
    "space a list": ({"space": [1]}, "space must be a mapping"),
    "no trials": ({"trials": 0}, "trials must be a whole number of at least 1"),
    "no repeats": ({"repeats": 0}, "repeats must be a whole number of at least 1"),
    "limit": ({"max_multiply_adds": -1}, "max_multiply_adds must be a number of at least 1"),
    "study a number": ({"study": 3}, "study must be a text but got 3"),
    "huge i_max": ({"space": {"i_max": {"low": 1, "high": 10**400}}}, "i_max.high must be at most"),
    "a number's name": ({"space": {3: {"low": 1, "high": 2}}}, "names as its keys but got 3"),
    "huge grid": (
        {"sampler": "grid", "space": {"i_max": {"low": 1, "high": 10**9}}},
        "grid can try 10000 settings at most",
    ),
    "grid over a range": ({"sampler": "grid"}, "sampler grid needs choices or whole numbers"),
}
BROKEN_TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "unknown setting": ({"space": {"lambda": {"low": 1, "high": 2}}}, "lambda"),
    "not tunable": ({"space": {"seed": {"low": 1, "high": 2}}}, "space.seed cannot be tuned"),
    "bad schedule": (
        {"space": {"l1_schedule": {"choices": ["steps"]}}},
        "l1_schedule must be one of constant",
    ),
    "bad rate": ({"space": {"recipe.lr": {"choices": [-1]}}}, "recipe.lr"),
    "limit below the seed": ({"max_multiply_adds": 10}, "the seed model's, but got 10"),
    "gallery": ({"folder": "gallery"}, "must not be the gallery"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_section_gives_one_line_whatever_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes, said = BROKEN[name]
    path = write(tmp_path, **changes)
    for command in ("tune", "check", "search"):
        assert main([command, str(path)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert said in captured.err
        assert "tuner.classArgs.tuning" in captured.err
    assert [p.name for p in tmp_path.iterdir()] == ["config.yml"]


@pytest.mark.parametrize("name", BROKEN_TOGETHER)
def test_a_study_that_makes_no_sense_gives_one_line_before_any_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes, said = BROKEN_TOGETHER[name]
    assert main(["tune", str(write(tmp_path, **changes))]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not list(tmp_path.glob("study/trial-*"))


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////nowhere/at/all/study.db",
        "journal:/nowhere/at/all/study.log",
        "nonsense",
        "nobase://host/name",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///{folder}/config.yml",
    ],
)
def test_a_storage_that_cannot_be_opened_gives_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    path = write(tmp_path)
    assert main(["tune", str(path), "--storage", url.format(folder=tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "cannot be opened" in error
    assert [p.name for p in tmp_path.iterdir()] == ["config.yml"]  # no folder is left behind


@pytest.mark.parametrize("options", [["--jobs", "0"], ["--trials", "0"], ["--sampler", "grid"]])
def test_a_bad_option_gives_one_line_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    path = write(tmp_path)
    assert main(["tune", str(path), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert options[0].lstrip("-") in error
    assert [p.name for p in tmp_path.iterdir()] == ["config.yml"]


def test_a_password_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "nobase://someone:secret@host/name"
    assert main(["tune", str(write(tmp_path)), "--storage", url]) == 2
    assert "secret" not in capsys.readouterr().err


def test_a_study_of_another_space_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_study(Tuning.from_yaml(write(tmp_path)))
    for changes, said in (
        ({"space": {**SPACE, "l1": {"low": 1.0e-4, "high": 0.1}}}, "space.l1.low is 1e-05 there"),
        (
            {"space": {"i_max": {"low": 2, "high": 4}}},
            "space.l1 is {'low': 1e-05, 'high'",
        ),
        ({"repeats": 2}, "repeats is 1 there but 2 here"),
        ({"multi_objective": True}, "multi_objective is False there but True here"),
        ({"models": 3}, "search.limits.max_models is 2 there but 3 here"),
    ):
        assert main(["tune", str(write(tmp_path, **changes))]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    open_study(Tuning.from_yaml(write(tmp_path, trials=99, sampler="random", pruner="none")))


def test_a_study_that_is_somebody_elses_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/other.db"
    other = optuna.create_study(storage=url, study_name="petridish")
    other.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(ConfigError, match="is not one of Petridish"):
        tune(write(tmp_path), storage=url)


# Whole studies.


def test_a_study_runs_continues_and_shows_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    tuning = Tuning.from_yaml(path)
    study = tune(path)
    assert study.trials[0].params == {"l1": 0.001, "i_max": 3}
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 2
    for trial in study.trials:
        assert [trial.value] == gallery_errors(tuning, trial)
        assert sorted(trial.intermediate_values) == [0, 1]
        assert trial.intermediate_values[1] == trial.value
    assert study.best_value <= study.trials[0].value

    before = {p: p.read_bytes() for p in tuning.folder.glob("trial-*/run-*/journal.jsonl")}
    assert main(["tune", str(path), "--trials", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "trial 2:" in captured.out
    assert "trial 1:" not in captured.out  # it was not run again
    assert all(p.read_bytes() == data for p, data in before.items())
    assert len(open_study(tuning).trials) == 3
    for name in ("history", "pareto"):
        assert (tuning.folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert "Average lowest error per λ" in (tuning.folder / "results.md").read_text()
    assert main(["tune", str(path), "--show"]) == 0
    assert "complete *" in capsys.readouterr().out


def test_repeats_are_averaged_over_searches_with_other_seeds(tmp_path: Path) -> None:
    path = write(tmp_path, trials=1, repeats=2, storage=f"journal:{tmp_path}/study.log")
    tuning = Tuning.from_yaml(path)
    trial = tune(path).trials[0]
    assert trial.value == pytest.approx(statistics.fmean(gallery_errors(tuning, trial)))
    assert [one["seed"] for one in trial.user_attrs["searches"]] == [0, 1]
    assert sorted(trial.intermediate_values) == [0, 1, 2, 3]
    galleries = [Gallery(tuning.folder / "trial-0000" / f"run-{r}") for r in (0, 1)]
    seeds = [g.journal.read_all()[0]["growth"]["seed"] for g in galleries]
    assert seeds[0] != seeds[1]


def test_two_objectives_keep_the_pareto_front(tmp_path: Path) -> None:
    path = write(tmp_path, trials=3, multi_objective=True, space={"i_max": {"low": 1, "high": 3}})
    study = tune(path)
    points = {t.number: tuple(t.values) for t in study.trials}
    front = {
        number
        for number, (error, size) in points.items()
        if not any(e <= error and s <= size and (e, s) != (error, size) for e, s in points.values())
    }
    assert {t.number for t in tables.best_trials(study)} == front
    for trial in study.trials:
        assert trial.values[1] == trial.user_attrs["searches"][0]["multiply_adds"]
    assert tmp_path / "pareto.png" in plot_study(study, tmp_path)


def test_only_models_within_the_limit_count(tmp_path: Path) -> None:
    search = tune(write(tmp_path, trials=1)).trials[0].user_attrs["searches"][0]
    events = Gallery(tmp_path / "study" / search["gallery"]).journal.read_all()
    models = Search.replay(Tuning.from_yaml(tmp_path / "config.yml").config({}).settings, events)
    seed, child = models.models()
    assert most_accurate([seed, child], seed.multiply_adds) == seed
    assert most_accurate([seed, child], seed.multiply_adds - 1) is None
    best = min([seed, child], key=lambda r: (r.error, r.multiply_adds))
    assert most_accurate([seed, child], None) == best


def complete(study: optuna.Study, tuning: Tuning, errors: list[float], **values: Any) -> None:
    """Add a trial that is done."""
    study.add_trial(
        create_trial(
            params=values,
            distributions=distributions_of(tuning.section.space),
            value=errors[-1],
            intermediate_values=dict(enumerate(errors)),
            user_attrs={"searches": [{"error": errors[-1], "multiply_adds": 9, "models": 1}]},
        )
    )


def test_pruners_go_by_name(tmp_path: Path) -> None:
    def made(**changes: Any) -> optuna.pruners.BasePruner:
        return make_pruner(Tuning.from_yaml(write(tmp_path, models=9, repeats=2, **changes)))

    assert isinstance(made(), optuna.pruners.MedianPruner)
    assert isinstance(made(pruner="hyperband"), optuna.pruners.HyperbandPruner)
    assert isinstance(made(pruner="none"), optuna.pruners.NopPruner)
    assert isinstance(made(multi_objective=True), optuna.pruners.NopPruner)


def test_only_a_study_that_is_there_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    assert main(["tune", str(path), "--show"]) == 2
    assert "There is no study yet" in capsys.readouterr().err
    tuning = Tuning.from_yaml(path)
    complete(open_study(tuning), tuning, [0.25], l1=0.01, i_max=2)
    assert main(["tune", str(path), "--show"]) == 0
    assert "complete *" in capsys.readouterr().out
    assert main(["tune", str(path), "--show", "--study", "none"]) == 2
    assert "There is no study 'none'" in capsys.readouterr().err


def pretend(study: optuna.Study, queue: Queue, error: float, steps: int) -> TrialState:
    """Carry out a trial without any training: the same error after every growth."""
    trial = queue.take()
    assert trial is not None
    for step in range(steps):
        trial.report(error, step)
        if trial.should_prune():
            study.tell(trial, state=TrialState.PRUNED)
            return TrialState.PRUNED
    study.tell(trial, error)
    return TrialState.COMPLETE


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_a_pruned_search_stops_at_once_and_keeps_its_gallery(tmp_path: Path, pruner: str) -> None:
    # Hyperband puts trials into brackets by their numbers: 5 is in that which prunes first.
    path = write(tmp_path, models=9, trials=6, pruner=pruner)
    tuning = Tuning.from_yaml(path)
    study = open_study(tuning)
    study.pruner = make_pruner(tuning)
    queue = Queue(study, tuning)
    for _ in range(5):  # errors that no search reaches
        assert pretend(study, queue, 0.0, steps=9) == TrialState.COMPLETE
    trial = tune(path).trials[-1]
    assert trial.state == TrialState.PRUNED
    models = len(trial.intermediate_values)
    assert models < 9
    folder = tuning.folder / f"trial-{trial.number:04d}" / "run-0"
    config = tuning.config(trial.params, folder)
    check_gallery(config, models)
    assert "pruned" in tables.to_text(tables.trial_rows(study))


def test_hyperband_prunes_others_but_never_the_best_so_far(tmp_path: Path) -> None:
    path = write(tmp_path, models=9, trials=24, sampler="random", pruner="hyperband")
    tuning = Tuning.from_yaml(path)
    study = open_study(tuning)
    study.pruner = make_pruner(tuning)
    queue = Queue(study, tuning)
    errors = [(7 * i + 12) % 24 / 24 for i in range(24)]
    states = [pretend(study, queue, error, steps=9) for error in errors]
    assert states.count(TrialState.PRUNED) >= 4
    for number, state in enumerate(states):
        if errors[number] == min(errors[: number + 1]):
            assert state == TrialState.COMPLETE
    assert study.best_value == min(errors)


@pytest.mark.parametrize("sampler", ["tpe", "random", "gp", "nsgaii"])
@pytest.mark.parametrize("objectives", [1, 2])
def test_every_sampler_proposes_settings_of_the_space(
    tmp_path: Path, sampler: str, objectives: int
) -> None:
    space = {**SPACE, "l1_schedule": {"choices": ["constant", "linear"]}}
    tuning = Tuning.from_yaml(
        write(tmp_path, trials=12, sampler=sampler, space=space, multi_objective=objectives == 2)
    )
    study = open_study(tuning)
    queue = Queue(study, tuning)
    for _ in range(12):
        trial = queue.take()
        assert trial is not None
        assert 1e-5 <= trial.params["l1"] <= 0.1
        assert trial.params["i_max"] in (2, 3, 4)
        # As if the lowest error were at λ = 0.1.
        study.tell(trial, [1 - trial.params["l1"], trial.params["i_max"]][:objectives])
    assert queue.take() is None
    assert len({trial.params["l1"] for trial in study.trials}) > 5
    if sampler == "nsgaii":  # which is random search until a generation is complete
        assert any(trial.system_attrs.get("NSGAIISampler:generation") for trial in study.trials)


def test_a_search_in_which_everything_fails_is_a_failed_trial(tmp_path: Path) -> None:
    path = write(tmp_path, trials=1, space={"recipe.lr": {"low": 1.0e12, "high": 1.0e13}})
    study = tune(path)
    assert [t.state for t in study.trials] == [TrialState.FAIL]
    assert "not finite" in study.trials[0].user_attrs["failure"]
    assert tables.best_trials(study) == []


def test_a_trial_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    path = write(tmp_path, models=3, trials=1)
    tuning = Tuning.from_yaml(path)
    folder = tuning.folder / "trial-0000" / "run-0"
    study = tune(path, stop=lambda: (folder / "models" / "g00000").exists())
    first, waiting = study.trials
    assert first.state == TrialState.FAIL
    assert waiting.state == TrialState.WAITING
    done = tune(path).trials[1]
    assert done.state == TrialState.COMPLETE
    assert done.params == first.params
    assert first_number(done) == 0
    check_gallery(tuning.config(done.params, folder), 3)
    assert not (tuning.folder / "trial-0001").exists()


# The queue, on every storage.

STORAGES = ("sqlite:///{}/study.db", "journal:{}/study.log")


@pytest.fixture(params=STORAGES, ids=["sqlite", "journal"])
def tuning(request: pytest.FixtureRequest, tmp_path: Path) -> Tuning:
    url = request.param.format(tmp_path)
    return Tuning.from_yaml(write(tmp_path, trials=3, storage=url, lost_after=1))


def test_trials_of_other_code_are_shown_and_left_alone(tuning: Tuning) -> None:
    study = open_study(tuning)
    foreign = study.ask(distributions_of(tuning.section.space))
    queue = Queue(study, tuning)
    assert queue.is_done()
    for _ in range(3):
        time.sleep(0.5)  # longer than lost_after
        queue._revive(queue._trials())
    assert study.trials[foreign.number].state == TrialState.RUNNING
    study.tell(foreign, 0.5)
    for i in range(3):
        complete(study, tuning, [0.1 + i / 10], l1=1e-4 * 2**i, i_max=2 + i)
    assert len(tables.trial_rows(study)) == 4
    assert plot_study(study, tuning.folder)
    assert tables.to_text(tables.ablation_by_i_max(study))


def test_own_objects_of_optuna_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path, trials=1)
    storage, sampler = optuna.storages.InMemoryStorage(), optuna.samplers.RandomSampler(seed=7)
    study = tune(path, storage=storage, sampler=sampler, pruner=optuna.pruners.NopPruner())
    assert study._storage is storage
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE]
    with pytest.raises(ConfigError, match="jobs must be 1 with own objects"):
        tune(path, trials=2, jobs=2, sampler=sampler)


def test_a_study_hands_out_exactly_its_trials(tuning: Tuning) -> None:
    # No heart beats here: no trial may be taken for lost on a slow disk.
    tuning = replace(tuning, section=replace(tuning.section, lost_after=60.0))
    queues = [Queue(open_study(tuning), tuning) for _ in range(2)]
    taken = [queues[i % 2].take() for i in range(5)]
    trials = [trial for trial in taken if trial is not None]
    assert [trial.number for trial in trials] == [0, 1, 2]
    assert len({trial.params["l1"] for trial in trials}) == 3
    assert not queues[0].is_done()
    assert queues[0].neighbors() == 3  # who share the cores of this machine
    trials[1].set_user_attr(OWNER, ["elsewhere", 1, 0.0])
    trials[2].set_user_attr(OWNER, [trials[0].user_attrs[OWNER][0], 2**22 + 1, 0.0])  # gone
    assert queues[0].neighbors() == 1
    study = open_study(tuning)
    for trial in trials:
        study.tell(trial.number, 0.5)
    assert queues[0].is_done()
    assert queues[0].take() is None


def test_a_trial_whose_process_is_gone_is_taken_over_at_once(tuning: Tuning) -> None:
    code = (
        "import os, sys; from nni_petridish.studies.tuning.settings import Tuning;"
        "from nni_petridish.studies.tuning.storage import open_study;"
        "from nni_petridish.studies.tuning.queue import Queue;"
        f"tuning = Tuning.from_yaml({str(tuning.base / 'config.yml')!r});"
        f"tuning = tuning.change(storage={tuning.storage!r});"
        "trial = Queue(open_study(tuning), tuning).take();"
        "print(trial.number, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("0", -signal.SIGKILL)
    study = open_study(tuning)
    trial = Queue(study, tuning).take()
    assert trial is not None
    assert first_number(trial) == 0
    assert trial.params == study.trials[0].params
    assert study.trials[0].state == TrialState.FAIL


def test_a_trial_of_another_machine_is_taken_over_after_silence_only(tuning: Tuning) -> None:
    study = open_study(tuning)
    queue = Queue(study, tuning.change(trials=1))
    trial = queue.take()
    assert trial is not None
    trial.set_user_attr(OWNER, ["elsewhere", 1, 0.0])
    for beat in range(8):  # 2 s, longer than lost_after
        trial.set_user_attr("pulse", beat)
        assert queue.take() is None
        time.sleep(0.25)
    time.sleep(1.2)
    again = queue.take()
    assert again is not None
    assert first_number(again) == trial.number
    with pytest.raises(optuna.exceptions.UpdateFinishedTrialError):
        trial.set_user_attr("pulse", 99)  # so the other one learns that it is out


def test_a_trial_that_kills_its_process_each_time_is_given_up(tuning: Tuning) -> None:
    study = open_study(tuning)
    for _ in range(3):
        trial = Queue(study, tuning).take()
        assert trial is not None
        assert first_number(trial) == 0
        trial.set_user_attr(OWNER, [trial.user_attrs[OWNER][0], 2**22 + 1, 0.0])
    fourth = Queue(study, tuning).take()
    assert fourth is not None
    assert CONTINUES not in fourth.user_attrs
    assert [first_number(t) for t in live(study.trials)] == [0, fourth.number]


def test_a_grid_is_tried_once_with_the_papers_setting_first(tmp_path: Path) -> None:
    space = {"l1": {"choices": [0.1, 0.001, 1.0e-5]}, "i_max": {"low": 2, "high": 4}}
    tuning = Tuning.from_yaml(write(tmp_path, trials=20, sampler="grid", space=space))
    study = open_study(tuning)
    queue = Queue(study, tuning)
    taken = []
    while (trial := queue.take()) is not None:
        taken.append((trial.params["l1"], trial.params["i_max"]))
        study.tell(trial, 0.5)
    assert taken[0] == (0.001, 3)
    assert sorted(taken) == sorted((l1, i) for l1 in (0.1, 0.001, 1e-5) for i in (2, 3, 4))


# What others read.


def test_the_dashboard_reads_the_study(tuning: Tuning) -> None:
    study = open_study(tuning)
    for i in range(3):
        complete(study, tuning, [0.5, 0.4 - i / 10], l1=0.001 * (i + 1), i_max=2 + i)
    port = free_port()
    url = f"http://127.0.0.1:{port}/api/studies"
    program = str(Path(sys.executable).with_name("optuna-dashboard"))
    shown = tuning.storage.removeprefix("journal:")
    server = subprocess.Popen(
        [program, "--host", "127.0.0.1", "--port", str(port), shown],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        (summary,) = patient_get(url)["study_summaries"]
        assert summary["study_name"] == "petridish"
        found = patient_get(f"{url}/{summary['study_id']}")
    finally:
        server.terminate()
        server.wait()
    assert [trial["values"] for trial in found["trials"]] == [t.values for t in study.trials]
    assert [t["intermediate_values"][0]["value"] for t in found["trials"]] == [0.5] * 3
    assert {p["name"] for p in found["trials"][0]["params"]} == {"l1", "i_max"}


def patient_get(url: str) -> Any:
    """Ask a server that is about to start."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(200):
        try:
            with opener.open(url, timeout=5) as answer:
                return json.load(answer)
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


# Two processes, one killed.


def command(path: Path) -> list[str]:
    return [sys.executable, "-m", "nni_petridish", "tune", str(path)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "url", [pytest.param(STORAGES[0], id="sqlite"), pytest.param(STORAGES[1], id="journal")]
)
def test_kill_9_of_one_of_two_processes_loses_no_trial_and_repeats_none(
    tmp_path: Path, url: str
) -> None:
    path = write(tmp_path, models=4, trials=3, pruner="none", storage=url.format(tmp_path))
    tuning = Tuning.from_yaml(path)
    processes = [
        subprocess.Popen(command(path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    victim, other = processes
    try:
        killed = kill_in_the_middle(tuning, victim)
        _, errors = other.communicate(timeout=200)
        assert other.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    study = open_study(tuning)
    settings = live(study.trials)
    assert [t.state for t in settings] == [TrialState.COMPLETE] * 3
    assert len({t.params["l1"] for t in settings}) == 3
    assert len(study.trials) == 4
    (heir,) = (t for t in settings if t.user_attrs.get(CONTINUES))
    assert first_number(heir) == killed
    assert heir.params == study.trials[killed].params
    for trial in settings:
        folder = tuning.folder / f"trial-{first_number(trial):04d}" / "run-0"
        check_gallery(tuning.config(trial.params, folder), 4)  # no growth was trained twice
        assert [trial.value] == gallery_errors(tuning, trial)


def kill_in_the_middle(tuning: Tuning, victim: subprocess.Popen[bytes]) -> int:
    """Kill -9 a process when the search of its trial has a model but not all; return the trial."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert victim.poll() is None
        for trial in running(tuning, victim.pid):
            folder = tuning.folder / f"trial-{trial:04d}" / "run-0" / "models"
            if folder.is_dir() and 1 <= len(os.listdir(folder)) <= 2:
                os.kill(victim.pid, signal.SIGKILL)
                victim.wait()
                return trial
        time.sleep(0.1)
    raise AssertionError("the process never came to the middle of a search")


def running(tuning: Tuning, pid: int) -> list[int]:
    if not tuning.folder.exists():
        return []
    return [
        t.number
        for t in open_study(tuning).trials
        if t.state == TrialState.RUNNING and t.user_attrs.get(OWNER, [0, 0])[1] == pid
    ]


@pytest.mark.slow
def test_jobs_share_a_study(tmp_path: Path) -> None:
    path = write(tmp_path, trials=3)
    done = subprocess.run(
        [*command(path), "--jobs", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    study = open_study(Tuning.from_yaml(path))
    assert [t.state for t in study.trials] == [TrialState.COMPLETE] * 3
    owners = {json.dumps(t.user_attrs[OWNER]) for t in study.trials}
    assert len(owners) == 2


# Tables.


def test_the_ablation_tables_are_the_averages(tmp_path: Path) -> None:
    tuning = Tuning.from_yaml(write(tmp_path))
    study = open_study(tuning)
    results = [(2e-5, 2, 0.2), (5e-4, 3, 0.1), (3e-3, 3, 0.14), (0.03, 4, 0.3), (0.1, 4, 0.4)]
    for l1, i_max, error in results:
        complete(study, tuning, [error], l1=l1, i_max=i_max)
    by_i_max = {row["I_max"]: row for row in tables.ablation_by_i_max(study)}
    by_l1 = {row["λ"]: row for row in tables.ablation_by_l1(study)}
    assert {k: v["average lowest error"] for k, v in by_i_max.items()} == {
        "2": "0.2000",
        "3": "0.1200",
        "4": "0.3500",
    }
    assert {k: v["average lowest error"] for k, v in by_l1.items()} == {
        "1e-05": "0.2000",
        "0.001": "0.1200",
        "0.1": "0.3500",
    }
    assert by_i_max["3"]["standard deviation"] == f"{statistics.stdev([0.1, 0.14]):.4f}"
    assert [t.values[0] for t in tables.best_trials(study)] == [0.1]


def test_all_plots_are_drawn_where_there_is_enough_to_draw(tmp_path: Path) -> None:
    tuning = Tuning.from_yaml(write(tmp_path))
    study = open_study(tuning)
    assert plot_study(study, tmp_path / "plots") == []
    for i in range(12):
        complete(study, tuning, [0.1 + i % 5 / 10], l1=1e-5 * 2**i, i_max=2 + i % 3)
    paths = plot_study(study, tmp_path / "plots")
    assert {path.stem for path in paths} == {"history", "importance", "contour", "pareto"}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths)


def read_config(name: str, folder: Path) -> Tuning:
    document = yaml.safe_load((ROOT / "configs" / f"{name}.yml").read_text())
    document["tuner"]["codeDirectory"] = str(folder)
    (folder / "config.yml").write_text(yaml.safe_dump(document))
    return Tuning.from_yaml(folder / "config.yml")


def test_recurrent_settings_are_grouped_by_powers_of_ten(tmp_path: Path) -> None:
    tuning = read_config("petridish_rnn", tmp_path)
    study = open_study(tuning)
    for l1, error in [(0.0002, 60.0), (0.008, 50.0), (0.02, 51.0), (0.09, 70.0)]:
        complete(study, tuning, [error], l1=l1)
    averages = {row["λ"]: row["average lowest perplexity"] for row in tables.ablation_by_l1(study)}
    assert averages == {"0.0001": "60.0000", "0.01": "50.5000", "0.1": "70.0000"}


@pytest.mark.parametrize(
    ("name", "default", "l1"),
    [
        ("petridish", {"l1": 0.001, "i_max": 3}, (1e-5, 0.1)),
        ("petridish_rnn", {"l1": 0.01}, (1e-4, 0.1)),
    ],
)
def test_without_a_word_about_tuning_a_study_begins_with_the_default_setting(
    tmp_path: Path, name: str, default: dict[str, float], l1: tuple[float, float]
) -> None:
    tuning = read_config(name, tmp_path)
    trial = Queue(open_study(tuning), tuning).take()
    assert trial is not None
    assert trial.params == default
    assert tuning.section.space["l1"].corners() == l1


def test_the_config_is_a_study_and_a_search(tmp_path: Path) -> None:
    path = ROOT / "configs" / "tune.yml"
    SearchConfig.from_yaml(path)
    tuning = Tuning.from_yaml(path)
    assert tuning.default() == {"l1": 0.001, "i_max": 3}
    assert json.loads(json.dumps(tuning.identity()))["space"]["l1"]["low"] == 1e-5
    assert IDENTITY == "petridish"
