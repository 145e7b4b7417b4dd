from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nni_petridish.config import SearchConfig
from nni_petridish.errors import GalleryError
from nni_petridish.export import from_gallery, write_model
from nni_petridish.gallery import Gallery
from nni_petridish.growth import run_growth
from nni_petridish.plan import Plan
from nni_petridish.records import Growth
from nni_petridish.task import VisionTask
from nni_petridish.warm_start import warm_start
from tests.small_gallery import recurrent_gallery, vision_gallery


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
    plan = Plan(seed_epochs=1, weak_epochs=1, final_epochs=1)
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
