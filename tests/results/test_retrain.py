from __future__ import annotations

import json
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nni_petridish
from nni_petridish.__main__ import main
from nni_petridish.core.complexity import count_multiply_adds, count_parameters
from nni_petridish.errors import ConfigError, GalleryError, Interrupted
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.registry import ERROR
from nni_petridish.results.retrain.preparation import prepare_retraining
from nni_petridish.results.retrain.repetitions import run_repetitions, summary
from nni_petridish.running.process import INTERRUPTED
from nni_petridish.tasks.distributed import ALONE
from nni_petridish.tasks.task import Callbacks
from nni_petridish.tasks.vision import retraining
from nni_petridish.tasks.vision.data import load_data
from nni_petridish.tasks.vision.retraining import VisionRetraining, widest
from nni_petridish.tasks.vision.training import evaluate
from search_spaces import VisionSpace
from tests.support.small_gallery import recurrent_gallery, vision_gallery
from tests.support.terminal import on_terminal


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    return vision_gallery(tmp_path_factory.mktemp("vision"))


SMALL: dict[str, Any] = {"cells_per_stage": 1, "filters": 2, "epochs": 2}


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the trainings short: the first 64 images of the data that were asked for."""
    monkeypatch.setattr(retraining, "load_data", lambda **options: load_data(**options, limit=64))


def test_the_defaults_are_the_papers(gallery: Gallery) -> None:
    training = prepare_retraining(gallery.folder)
    assert (training.space.cells_per_stage, training.space.filters) == (6, 32)
    assert training.recipe.epochs == 600
    assert training.model == "g00003"


def test_its_size_is_that_of_the_network_without_the_auxiliary_head(gallery: Gallery) -> None:
    training = prepare_retraining(gallery.folder, **SMALL)
    net = training.space.build(training.genotype, auxiliary=True)
    shape = training.space.image_shape
    assert training.size() == (count_multiply_adds(net, shape), count_parameters(net))


def test_all_training_images_are_used_and_the_test_set_is_looked_at_once(
    gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    loaded: list[dict[str, Any]] = []

    def counted(net: Any, split: Any, recipe: Any) -> Any:
        seen.append(len(split))
        return evaluate(net, split, recipe)

    def load(**options: Any) -> Any:
        loaded.append(options)
        return load_data(**options)

    monkeypatch.setattr(retraining, "evaluate", counted)
    monkeypatch.setattr(retraining, "load_data", load)
    monkeypatch.setattr(
        "nni_petridish.tasks.vision.training.evaluate", None
    )  # no look during the training
    training = prepare_retraining(
        gallery.folder, **{**SMALL, "epochs": 1}, changes={"batch_size": 499}
    )
    (result,) = run_repetitions(training, tmp_path / "a")
    assert result["images"] == 1497  # of 1797, 300 are the test set; the search had 96
    assert seen == [300]
    run_repetitions(training, tmp_path / "a")
    assert (len(seen), len(loaded)) == (1, 1)


@pytest.mark.usefixtures("few_images")
def test_the_trained_model_loads_and_errs_as_reported(gallery: Gallery, tmp_path: Path) -> None:
    results = run_repetitions(
        prepare_retraining(gallery.folder, "g00001", **SMALL), tmp_path / "a", 2
    )
    data = load_data("digits", validation=0, limit=64)
    for result in results:
        home = tmp_path / "a" / f"run-{result['repetition']}"
        net = nni_petridish.load_model(home / "model.safetensors")
        assert evaluate(net, data.test).error == pytest.approx(result["test_error"])
        assert net.facts["normalisation"]["mean"] == pytest.approx(data.train.mean.tolist())
        assert not (home / "checkpoint").exists()
    assert results[0]["history"] != results[1]["history"]


@pytest.mark.usefixtures("few_images")
def test_an_interrupted_training_ends_as_if_it_had_not_been(
    gallery: Gallery, tmp_path: Path
) -> None:
    training = prepare_retraining(gallery.folder, **SMALL)
    (straight,) = run_repetitions(training, tmp_path / "a")
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == 4  # in the second epoch: two steps each

    with pytest.raises(Interrupted):
        run_repetitions(training, tmp_path / "b", callbacks=Callbacks(should_stop=stop))
    (resumed,) = run_repetitions(training, tmp_path / "b")
    assert resumed["test_loss"] == straight["test_loss"]
    one, other = (
        nni_petridish.load_model(tmp_path / name / "run-0" / "model.safetensors").state_dict()
        for name in "ab"
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_batch_of_one_image_is_refused_where_it_cannot_be_normalized(
    gallery: Gallery, tmp_path: Path
) -> None:
    one = {"batch_size": 1}
    with pytest.raises(ConfigError, match="at least 2 images"):  # of the auxiliary head
        run_repetitions(prepare_retraining(gallery.folder, **SMALL, changes=one), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    plain = prepare_retraining(gallery.folder, **SMALL, changes={**one, "auxiliary_weight": 0.0})
    plain.check_world(ALONE)


@pytest.mark.usefixtures("few_images")
def test_another_training_does_not_touch_a_folder(gallery: Gallery, tmp_path: Path) -> None:
    training = prepare_retraining(gallery.folder, **{**SMALL, "epochs": 1})
    run_repetitions(training, tmp_path / "a")
    before = (tmp_path / "a" / "run-0" / "result.json").read_bytes()
    for other in (replace(training, seed=5), replace(training, model="g00001")):
        with pytest.raises(GalleryError, match="another final training"):
            run_repetitions(other, tmp_path / "a")
    assert (tmp_path / "a" / "run-0" / "result.json").read_bytes() == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").touch()
    with pytest.raises(GalleryError, match="not empty"):
        run_repetitions(training, tmp_path / "b")


def test_the_summary_is_best_mean_and_standard_deviation() -> None:
    errors = [0.031, 0.027, 0.029]
    text = summary([{"test_error": error} for error in errors], ERROR)
    assert text == f"test error 0.0270 | 0.0290 ± {statistics.stdev(errors):.4f}  (3 runs)"
    assert summary([{"test_error": 0.5}], ERROR) == "test error 0.5000 | 0.5000  (1 run)"


@pytest.mark.parametrize("limit", [400_000, 40_000_000])
def test_the_widest_network_fits_and_the_next_does_not(limit: int) -> None:
    space = VisionSpace((3, 32, 32), 10, cells_per_stage=1, filters=1)
    genotype = space.seed().grown(dict.fromkeys(("normal", "reduce"), (("prev", "identity"),)))
    filters = widest(space, genotype, limit)

    def size(filters: int) -> int:
        training = VisionRetraining("", genotype, replace(space, filters=filters), None, {})  # type: ignore[arg-type]
        return training.size()[0]

    assert size(filters) <= limit < size(filters + 1)


def test_what_cannot_be_trained_is_refused_in_one_line(gallery: Gallery, tmp_path: Path) -> None:
    for options, message in (
        ({"id": "g00099"}, "no model 'g00099'"),
        ({"filters": 0}, "filters must be"),
        ({"cells_per_stage": 0}, "cells_per_stage must be"),
        ({"filters": 3, "max_multiply_adds": 1e6}, "Only one of"),
        ({"max_multiply_adds": 5}, "Even F = 1"),
        ({"changes": {"learning_rate": 1}}, "but got 'learning_rate'"),
        ({"changes": {"lr": -1}}, "lr must be"),
    ):
        with pytest.raises((ConfigError, GalleryError), match=message):
            prepare_retraining(gallery.folder, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="filters is for vision but the space is recurrent"):
        prepare_retraining(recurrent_gallery(tmp_path).folder, filters=3)
    with pytest.raises(ConfigError, match="layers is for no kind of space"):
        prepare_retraining(gallery.folder, layers=3)
    search = vision_gallery(tmp_path / "search")
    # As in a gallery of NasExperiment: no configuration, no recipe.
    nas = Gallery.create(tmp_path / "nas", search.space, {"seed": 0}).folder
    shutil.copytree(search.folder / "models", nas / "models", dirs_exist_ok=True)
    shutil.copy(search.folder / "journal.jsonl", nas)
    with pytest.raises(ConfigError, match="does not say which data"):
        prepare_retraining(nas)
    assert prepare_retraining(nas, data={"name": "digits"}).data == {"name": "digits"}
    cuda = prepare_retraining(gallery.folder, **SMALL, changes={"device": "cuda"})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device must be available"):
            run_repetitions(cuda, tmp_path / "cuda")
    assert not (tmp_path / "cuda").exists()


@pytest.mark.usefixtures("few_images")
def test_the_command_trains_and_goes_on(
    gallery: Gallery, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(gallery.folder), "--best", "--cells", "1", "--filters", "2"]
    arguments += ["--epochs", "1", "--set", "lr=0.01"]
    assert main([*arguments, "--repetitions", "1"]) == 0
    first = capsys.readouterr().out
    folder = gallery.folder / "final" / "g00003-N1-F2-1epochs"
    assert json.loads((folder / "settings.json").read_text())["recipe"]["lr"] == 0.01
    assert main([*arguments, "--repetitions", "2"]) == 0
    second = capsys.readouterr().out
    assert next(line for line in first.splitlines() if "run 0" in line) in second
    assert "±" in second.splitlines()[-1]
    assert main([*arguments, "--set", "lr"]) == 2
    assert main([*arguments, "--embedding", "8"]) == 2


@pytest.mark.usefixtures("few_images")
def test_the_command_shows_repetition_epoch_and_time_left(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(gallery.folder), "--best", "--cells", "1", "--filters", "2"]
    arguments += ["--set", "lr=0.01", "--repetitions", "2"]
    with on_terminal(monkeypatch, until=" left") as terminal:
        assert main([*arguments, "--epochs", "3000"]) == INTERRUPTED
    shown = terminal.text()
    assert "training g00003 · 0/2 repetitions · " in shown
    assert re.search(r"g00003 run 0  retraining  ━+  epoch \d+/3000  loss \d", shown)
    assert "the training goes on from its last epoch with" in shown
    assert main([*arguments, "--epochs", "1", "--quiet"]) == 0
    (last,) = capsys.readouterr().out.splitlines()
    assert last.startswith("test error ")
    assert main([*arguments, "--epochs", "1"]) == 0
    assert "2 of 2 repetitions" in capsys.readouterr().out


def test_cp_end_replaces_the_weighted_sums_in_the_end_alone(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path)
    plain = prepare_retraining(gallery.folder, **SMALL)
    ws = prepare_retraining(gallery.folder, **SMALL, merge="weighted_sum")
    back = prepare_retraining(gallery.folder, **SMALL, merge="concat_project")
    assert (plain.genotype, plain.identity()) == (back.genotype, back.identity())
    assert ws.genotype.cells == plain.genotype.cells
    assert (ws.genotype.merge, ws.space.merge) == ("weighted_sum", "weighted_sum")
    # A projection from k shortcuts of width C costs k·C·C at every pixel, and nothing else differs.
    projections = sum(
        len(learner) * shape.channels**2 * (8 // 2**shape.level) ** 2
        for shape, key in zip(plain.space.shapes(), plain.space.keys(), strict=True)
        for learner in plain.genotype.cells[key]
    )
    assert plain.size()[0] - ws.size()[0] == projections
    assert ws.name != plain.name  # so that both may lie in one gallery
