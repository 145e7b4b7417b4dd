"""A gallery belongs to its evaluator and data: another one is refused, and named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import nni
import numpy as np
import pytest
import torch
from nni.nas.evaluator.pytorch import Classification, DataLoader, Trainer
from torch.utils.data import TensorDataset

from nni_petridish.errors import GalleryError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.nni_adapter.compat.nas import FunctionalEvaluator, SimplifiedModelSpace
from nni_petridish.nni_adapter.evaluators.fingerprint import describe, fingerprint
from nni_petridish.nni_adapter.evaluators.recipe import RecipeEvaluator
from nni_petridish.nni_adapter.prepared_search import PreparedSearch
from nni_petridish.search.records import plain
from nni_petridish.strategy import Petridish
from search_spaces import VisionSpace
from tests.support import nni_evaluators as users

LR = 0.1


def train(net: Any, lr: float = 0.1) -> None:
    """Use a global."""
    nni.report_final_result(LR * lr)


def data(seed: int = 0, rows: int = 50) -> Any:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(rows, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.zeros(rows, dtype=torch.int64))


def classification(
    lr: float = 0.01, batch_size: int = 8, data: Any = None, epochs: int = 1, **loader: Any
) -> Any:
    given = nni.trace(users.Digits)("train") if data is None else data
    return Classification(
        learning_rate=lr,
        num_classes=10,
        train_dataloaders=DataLoader(dataset=given, batch_size=batch_size, **loader),
        val_dataloaders=DataLoader(dataset=given, batch_size=batch_size),
        max_epochs=epochs,
        **users.QUIET,
    )


def changed() -> dict[str, tuple[Any, Any, str]]:
    return {
        "lr": (classification(), classification(lr=0.02), "learning_rate is 0.01 there but 0.02"),
        "batch": (classification(), classification(batch_size=4), "batch_size is 8 there but 4"),
        "data": (classification(data=data(0)), classification(data=data(1)), "content"),
        "rows": (classification(data=data(0)), classification(data=data(0, 60)), "length is 50"),
        "traced data": (
            classification(data=nni.trace(users.Digits)("train")),
            classification(data=nni.trace(users.Digits)("validation")),
            "split is 'train' there but 'validation'",
        ),
        "argument": (
            FunctionalEvaluator(train, lr=0.1),
            FunctionalEvaluator(train, lr=0.2),
            "lr is 0.1 there but 0.2",
        ),
        "function": (
            FunctionalEvaluator(users.train_by_hand),
            FunctionalEvaluator(users.train_once),
            "function",
        ),
        "recipe": (
            RecipeEvaluator("digits", recipe={"lr": 0.1}),
            RecipeEvaluator("digits", recipe={"lr": 0.2}),
            "recipe.lr is 0.1 there but 0.2",
        ),
        "kind": (classification(), FunctionalEvaluator(train), "class"),
    }


def prepare(folder: Path, evaluator: Any, **options: Any) -> PreparedSearch:
    space = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=4, stages=2)
    seen = SimplifiedModelSpace.from_model(space.model_space(), evaluator)  # as NNI passes it on
    return PreparedSearch(Petridish(folder, **options)._settings, seen)


def with_a_model(folder: Path) -> None:
    (folder / "models" / "g00000").mkdir()


@pytest.mark.parametrize("name", changed())
def test_a_changed_evaluator_is_refused_in_a_line_that_names_it(name: str, tmp_path: Path) -> None:
    before, after, words = changed()[name]
    folder = tmp_path / "gallery"
    prepare(folder, before)
    with_a_model(folder)
    prepare(folder, before)  # the same one goes on
    with pytest.raises(GalleryError) as caught:
        prepare(folder, after)
    assert words in str(caught.value)
    assert "allow_changed_evaluator=True" in str(caught.value)
    assert "\n" not in str(caught.value)
    prepare(folder, after, allow_changed_evaluator=True)


def test_what_decides_no_result_may_change(tmp_path: Path) -> None:
    folder = tmp_path / "gallery"
    prepare(folder, classification(), final_epochs=1)
    with_a_model(folder)
    prepare(folder, classification(num_workers=2, pin_memory=False), final_epochs=1)


def test_without_a_model_the_new_evaluator_counts(tmp_path: Path) -> None:
    folder = tmp_path / "gallery"
    prepare(folder, FunctionalEvaluator(train, lr=0.1))
    prepare(folder, FunctionalEvaluator(train, lr=0.2))
    assert Gallery(folder).settings["evaluator"]["lr"] == 0.2


def test_a_gallery_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "gallery"
    prepare(folder, FunctionalEvaluator(train))
    with_a_model(folder)
    gallery = Gallery(folder)
    del gallery.settings["evaluator"]
    gallery.change_settings()
    prepare(folder, FunctionalEvaluator(train, lr=3))


def test_a_global_number_and_a_closure_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def maker(step: float) -> Any:
        return lambda net: step

    before = describe(train)
    monkeypatch.setitem(train.__globals__, "LR", 0.2)
    assert describe(train) != before
    assert describe(maker(1)) == describe(maker(1))
    assert describe(maker(1)) != describe(maker(2))


def test_large_data_are_sampled_and_no_random_number_is_drawn() -> None:
    large = np.zeros(2**24, dtype=np.uint8)
    before, states = describe(large), (torch.get_rng_state(), random.getstate())
    large[-1] = 1
    assert describe(large) != before
    found = fingerprint({"seed": classification(data=data()), "weak": FunctionalEvaluator(train)})
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert plain(found) == found
    assert len(json.dumps(found)) < 10_000


def test_a_trainer_is_known_by_what_was_given() -> None:
    assert describe(Trainer(max_epochs=3, gradient_clip_val=1.0, **users.QUIET)) == {
        "class": "Trainer",
        "gradient_clip_val": 1.0,
    }
