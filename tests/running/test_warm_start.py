from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError, GalleryError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.saved_model import from_gallery, write_model
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.growth import run_growth
from nni_petridish.running.warm_start import warm_start
from nni_petridish.search.records import Growth
from nni_petridish.search.settings import GrowthSettings
from nni_petridish.tasks.vision.task import VisionTask
from tests.support.chaos import write_config
from tests.support.small_gallery import recurrent_gallery, vision_gallery


def task_of(gallery: Gallery) -> VisionTask:
    task = SearchConfig.of_gallery(gallery).load_task()
    assert isinstance(task, VisionTask)
    return task


def test_the_seed_is_the_model_with_its_weights(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path)
    write_model(from_gallery(gallery.folder, "g00001"), tmp_path / "file")
    weights, documents = gallery.load_model("g00001")
    for path, id in ((gallery.folder, "g00001"), (tmp_path / "file", None)):
        task = warm_start(task_of(gallery), path, id)
        net = task.build(task.seed())
        assert task.seed().to_dict() == documents["genotype"]
        state = net.state_dict()
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert warm_start(task_of(gallery), gallery.folder).seed().growths == 2  # the best by default


def test_a_search_grows_on_from_it(tmp_path: Path) -> None:
    old = vision_gallery(tmp_path)
    task = warm_start(task_of(old), old.folder, "g00001")
    new = Gallery.create(tmp_path / "new", {"space": "vision"}, {})
    plan = GrowthSettings(seed_epochs=1, weak_epochs=1, final_epochs=1)
    run_growth(Growth("g00000", None, 1, 0.001, 2), task, plan, new)
    run_growth(Growth("g00001", "g00000", 2, 0.001, 2), task, plan, new)
    first, second = (new.load_documents(id)["genotype"]["cells"] for id in ("g00000", "g00001"))
    assert first == old.load_documents("g00001")["genotype"]["cells"]
    assert [len(second[key]) for key in ("normal", "reduce")] == [2, 2]
    assert all(second[key][:1] == first[key] for key in first)


def test_new_classes_get_a_new_head_and_the_rest_is_kept(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path)
    task = task_of(gallery)
    other = replace(task, space=replace(task.space, num_classes=7))
    warm = warm_start(other, gallery.folder, "g00001")
    state = warm.build(warm.seed()).state_dict()
    weights, _ = gallery.load_model("g00001")
    assert state["classifier.weight"].shape[0] == 7
    kept = [name for name in weights if not name.startswith("classifier.")]
    assert all(torch.equal(state[name], weights[name]) for name in kept)


def test_a_model_of_another_space_is_refused_at_once(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path / "v")
    task = task_of(gallery)
    wider = replace(task, space=replace(task.space, filters=5))
    macro = replace(task, space=replace(task.space, mode="macro"))
    language = recurrent_gallery(tmp_path / "r")
    for target, folder in ((wider, gallery), (macro, gallery), (task, language)):
        with pytest.raises(GalleryError, match="of another space"):
            warm_start(target, folder.folder)
    with pytest.raises(GalleryError, match="no model 'g00044'"):
        warm_start(task, gallery.folder, "g00044")


def new_config(folder: Path, start: Any, **arguments: Any) -> Path:
    """Write the configuration of a second search, in a folder of its own."""
    path = write_config(folder, models=2)
    document = yaml.safe_load(path.read_text())
    document["searchSpace"] |= arguments.pop("space", {})
    document["tuner"]["classArgs"] |= {"start": start, **arguments}
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_config_starts_from_a_finished_search_with_other_data(tmp_path: Path) -> None:
    old = vision_gallery(tmp_path / "old")
    start = {"from": str(old.folder), "model": "g00001"}
    path = new_config(tmp_path / "new", start, data={"name": "digits", "limit": 64, "seed": 3})
    assert main(["search", str(path)]) == 0
    new = Gallery(tmp_path / "new" / "gallery")
    seed, grown = (new.load_documents(id)["genotype"]["cells"] for id in ("g00000", "g00001"))
    assert seed == old.load_documents("g00001")["genotype"]["cells"]
    assert [len(grown[key]) for key in seed] == [2, 2]
    # Its seed is trained: what it started from may go, and the search can still be continued.
    (old.folder / "models" / "g00001" / "weights.safetensors").unlink()
    path.write_text(path.read_text().replace("max_models: 2", "max_models: 3"))
    assert main(["search", str(path), "--resume"]) == 0
    assert len(new.model_ids()) == 3


def test_without_seed_epochs_the_model_is_taken_as_it_is(tmp_path: Path) -> None:
    old = vision_gallery(tmp_path / "old")
    write_model(from_gallery(old.folder, "g00001"), tmp_path / "exported")
    for name, start in (
        ("gallery", {"from": str(old.folder), "model": "g00001"}),
        ("file", {"from": str(tmp_path / "exported")}),
    ):
        limits = {"max_models": 1}
        path = new_config(tmp_path / name, start, seed_epochs=0, limits=limits)
        assert main(["search", str(path)]) == 0
        weights, _ = old.load_model("g00001")
        found, documents = Gallery(tmp_path / name / "gallery").load_model("g00000")
        assert all(torch.equal(found[key], weights[key]) for key in weights)
        assert documents["metrics"]["epochs"] == 0


def test_another_start_is_another_search(tmp_path: Path) -> None:
    old = vision_gallery(tmp_path / "old")
    path = new_config(tmp_path / "new", {"from": str(old.folder), "model": "g00001"})
    SearchConfig.from_yaml(path).open_gallery()
    SearchConfig.from_yaml(path).check_gallery()
    path.write_text(path.read_text().replace("g00001", "g00003"))
    with pytest.raises(GalleryError, match=r"of another search: settings\.start\.model"):
        SearchConfig.from_yaml(path).check_gallery()


def test_a_start_that_does_not_fit_is_one_line_before_anything_is_made(tmp_path: Path) -> None:
    old = vision_gallery(tmp_path / "old")
    language = recurrent_gallery(tmp_path / "language")
    here = {"from": str(old.folder)}
    for start, arguments, message in (
        ({**here, "model": "g00042"}, {}, "no model 'g00042'"),
        ({"from": str(tmp_path / "nowhere")}, {}, "no model and no gallery at"),
        ({"from": str(tmp_path)}, {}, "gallery.json is missing"),
        ({**here, "id": 1}, {}, r"start.id is not a known key"),
        ({}, {}, r"start.from is missing"),
        (here, {"space": {"filters": 5}}, "another space: its filters is 3 but the search's 5"),
        (here, {"space": {"mode": "macro"}}, "its mode is 'cell' but the search's 'macro'"),
        ({"from": str(language.folder)}, {}, "its space is 'recurrent' but the search's 'vision'"),
        (None, {"seed_epochs": 0}, "seed_epochs must be at least 1 without a start"),
    ):
        path = new_config(tmp_path / "new", start, **arguments)
        with pytest.raises((ConfigError, GalleryError), match=message):
            SearchConfig.from_yaml(path)
        assert main(["check", str(path)]) == 2
    assert not (tmp_path / "new" / "gallery").exists()
    weights = old.folder / "models" / "g00001" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    path = new_config(tmp_path / "new", {**here, "model": "g00001"})
    assert main(["search", str(path)]) == 2  # nothing is made either
    assert not (tmp_path / "new" / "gallery").exists()
