from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError, GalleryError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.runner import run_search
from nni_petridish.search.events import Event, model_event
from nni_petridish.search.ranges import OptunaChooser, Range, gain, split_ranges
from nni_petridish.search.records import Growth, ModelRecord, Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import Limits, SearchSettings
from tests.support.chaos import check_gallery, write_config

RANGES = {"l1": Range(1e-5, 0.1), "i_max": Range(2, 4)}


def settings(models: int) -> SearchSettings:
    return SearchSettings(limits=Limits(max_models=models))


def outcome(growth: Growth, parent: Outcome | None) -> Outcome:
    """Grow without training: I_max = 4 gains most, and most per multiply-add."""
    if parent is None:
        return Outcome(growth.id, 0.9, 1000, 10)
    noise = random.Random(growth.seed).uniform(0.9, 1.1)
    drop = {2: 0.01, 3: 0.02, 4: 0.08}[growth.i_max] * noise * parent.error
    return Outcome(growth.id, parent.error - drop, parent.multiply_adds + 100, 10)


def simulate(folder: Path, models: int, interrupt: bool = False) -> list[dict[str, Any]]:
    """Run a search on invented outcomes; return the growths that the journal holds."""
    gallery = Gallery.create(folder, {}, {})
    chooser = OptunaChooser(RANGES, settings(models), gallery.journal.read_all)
    rng = random.Random(0)

    def start() -> Search:
        def commit(event: Event) -> None:
            gallery.journal.append(event)
            search.apply(event)

        events = gallery.journal.read_all()
        search = Search.replay(settings(models), events, chooser, commit)
        for growth in search.running():
            search.release(growth.id)
        return search

    search = start()
    while isinstance(growth := search.ask(), Growth):
        if interrupt and rng.random() < 0.3:
            search = start()  # asked but never done: it is handed out again
            continue
        parents = {record.id: record.outcome for record in search.models()}
        search.tell(outcome(growth, parents.get(growth.parent or "")))
    events = gallery.journal.read_all()
    return [event["growth"] for event in events if event["event"] == "ask"]


def test_every_pair_lies_in_the_ranges_and_the_first_is_the_papers(tmp_path: Path) -> None:
    growths = [g for g in simulate(tmp_path / "g", 12) if g["parent"]]
    assert (growths[0]["l1"], growths[0]["i_max"]) == (0.001, 3)
    assert all(1e-5 <= g["l1"] <= 0.1 and g["i_max"] in (2, 3, 4) for g in growths)
    assert len({g["l1"] for g in growths}) == len(growths)


def test_what_gains_more_per_multiply_add_is_chosen_more_often(tmp_path: Path) -> None:
    growths = [g for g in simulate(tmp_path / "g", 40) if g["parent"]]
    late = Counter(g["i_max"] for g in growths[15:])
    assert late[4] > late[2] + late[3]


def test_an_interrupted_search_chooses_what_it_would_have_chosen(tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole", 12)
    broken = simulate(tmp_path / "broken", 12, interrupt=True)
    assert len(broken) > len(whole)  # some growths were handed out twice
    assert {g["id"]: g for g in broken} == {g["id"]: g for g in whole}


def test_a_replay_never_asks(tmp_path: Path) -> None:
    simulate(tmp_path / "g", 6)

    def refuse(number: int) -> tuple[float, int]:
        raise AssertionError("asked")

    search = Search.replay(settings(6), Gallery(tmp_path / "g").journal.read_all(), chooser=refuse)
    assert len(search.models()) == 6


def test_gain_is_the_drop_of_the_error_per_multiply_add() -> None:
    def record(error: float, multiply_adds: int) -> ModelRecord:
        growth = Growth("g00001", None, 0, 0.1, 1)
        return ModelRecord(growth, Outcome("g00001", error, multiply_adds, 1))

    assert gain(record(0.5, 100), record(0.3, 140)) == pytest.approx(0.2 / 40)
    assert gain(record(0.5, 100), record(0.6, 200)) == pytest.approx(-0.001)
    assert gain(record(0.5, 100), record(0.4, 100)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("l1", {"low": 0.1, "high": 0.01}, "l1.low must be at most l1.high but got 0.1 and 0.01"),
        ("l1", {"low": 0, "high": 0.1}, "l1.low must be above 0 but got 0"),
        ("l1", {"low": -1.0, "high": 0.1}, "l1.low must be at least 0 but got -1.0"),
        ("l1", {"low": "1e-5", "high": 0.1}, "write 1e-05"),
        ("l1", {"low": 0.1}, "l1.high is missing"),
        ("i_max", {"low": 0, "high": 2}, "i_max.low must be at least 1 but got 0"),
        ("i_max", {"low": 2, "high": 2.5}, "i_max.high must be a whole number but got 2.5"),
        ("i_max", {"low": 2, "high": 4, "step": 1}, "i_max.step is not a known key"),
    ],
)
def test_a_bad_range_gives_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    given: dict[str, Any],
    said: str,
) -> None:
    path = with_ranges(tmp_path, {name: given})
    for command in ("check", "search", "run"):
        assert main([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert f"tuner.classArgs.{name}" in error
        assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["config.yml"]


def with_ranges(folder: Path, ranges: dict[str, Any], models: int = 4) -> Path:
    path = write_config(folder, models)
    document = yaml.safe_load(path.read_text())
    document["tuner"]["classArgs"] |= {
        "seed_epochs": 1,
        "weak_epochs": 1,
        "final_epochs": 1,
        **ranges,
    }
    path.write_text(yaml.safe_dump(document))
    return path


def test_numbers_stay_numbers() -> None:
    assert split_ranges({"l1": 0.5, "i_max": 2}) == ({"l1": 0.5, "i_max": 2}, {})
    with pytest.raises(ConfigError):
        split_ranges({"i_max": {"low": 3}})


def test_a_search_with_ranges_runs_and_keeps_them(tmp_path: Path) -> None:
    given = {"l1": {"low": 1.0e-5, "high": 0.1}, "i_max": {"low": 1, "high": 2}}
    config = SearchConfig.from_yaml(with_ranges(tmp_path, given))
    search = run_search(config)
    check_gallery(config, 4)
    gallery = Gallery(config.gallery)
    assert SearchConfig.of_gallery(gallery) == config
    for record in search.models():
        if record.parent is not None:
            assert record.growth.i_max in (1, 2)
            # The choice was carried out: so many shortcuts were kept.
            assert gallery.load_documents(record.id)["alphas"]["i_max"] == record.growth.i_max
            assert gallery.load_documents(record.id)["lineage"]["l1"] == record.growth.l1
    other = with_ranges(tmp_path, {**given, "i_max": {"low": 1, "high": 3}})
    with pytest.raises(GalleryError, match=r"i_max\.high is 2 there but 3 here"):
        SearchConfig.from_yaml(other).check_gallery()


def test_without_ranges_optuna_is_never_imported(tmp_path: Path) -> None:
    path = with_ranges(tmp_path, {})
    code = (
        "import sys; from nni_petridish.running.config import SearchConfig;"
        f"config = SearchConfig.from_yaml({str(path)!r});"
        "assert config.make_chooser(config.open_gallery()) is None;"
        "print('optuna' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_tuner_hands_out_chosen_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nni_petridish.nni_adapter.tuner import PetridishTuner

    monkeypatch.chdir(tmp_path)
    given = {"l1": {"low": 1.0e-5, "high": 1.0e-4}, "i_max": {"low": 1, "high": 2}}
    document = yaml.safe_load(with_ranges(tmp_path, given).read_text())
    tuner = PetridishTuner(**document["tuner"]["classArgs"])
    tuner.update_search_space(document["searchSpace"])
    gallery = Gallery(tmp_path / "gallery")
    for number in range(3):
        (parameters,) = tuner.generate_multiple_parameters([number])
        event = gallery.journal.read_all()[-1]
        growth = Growth.from_dict(event["growth"])
        assert growth.id in str(parameters)
        if growth.parent is not None:
            assert 1e-5 <= growth.l1 <= 1e-4
            assert growth.i_max in (1, 2)
        result = Outcome(growth.id, 0.9 - 0.1 * number, 1000 + number, 10)
        gallery.journal.append(model_event(growth, result))
        tuner.receive_trial_result(number, parameters, None)
