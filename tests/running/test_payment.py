from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nni_petridish.errors import Interrupted
from nni_petridish.results.report import write_report
from nni_petridish.running.growth import run_growth
from nni_petridish.running.payment import payment
from nni_petridish.search.events import model_event
from nni_petridish.search.records import PAYMENT
from nni_petridish.search.search import Search
from nni_petridish.search.settings import GrowthSettings, SearchSettings
from nni_petridish.tasks.task import Callbacks
from tests.running.test_growth import CHILD, SEED, digits_task, new_gallery, same_models


def records(losses: list[float], seconds: float) -> list[dict[str, float]]:
    return [{"validation_loss": loss, "seconds": seconds} for loss in losses]


def seed_document() -> dict[str, Any]:
    """Return a seed of 16 epochs of a second; the loss is 2/√t, and the last 8 decay."""
    losses = [2 / math.sqrt(t) for t in range(1, 9)] + [0.5] * 8
    history = {"seed": records(losses, 1.0)}
    return {"history": history, "metrics": {"metrics": {PAYMENT: payment(history, None, 0.5)}}}


@pytest.mark.parametrize(("loss", "pays"), [(0.49, True), (0.51, False)])
def test_a_growth_is_compared_with_training_on_for_the_same_time(loss: float, pays: bool) -> None:
    parent = seed_document()
    assert parent["metrics"]["metrics"][PAYMENT] == {"age": 8.0}
    # 2 seconds of weak learning and 6 of training before the decay: 16 in all
    own = {"weak": records([1.0], 2.0), "final": records([0.9, 0.8, loss, 0.1, 0.1, 0.1], 2.0)}
    found = payment(own, parent, 0.5)
    assert found["age"] == 16.0
    assert found["training_on"] == pytest.approx(2 / math.sqrt(16))
    assert found["loss"] == loss
    assert found["pays"] is pays


def test_growths_with_one_decay_tell_whether_they_paid(tmp_path: Path) -> None:
    plan = GrowthSettings(seed_epochs=8, weak_epochs=1, final_epochs=2, anneal=0.5)
    gallery, task = new_gallery(tmp_path), digits_task()
    first = run_growth(SEED, task, plan, gallery).metrics[PAYMENT]
    second = run_growth(CHILD, task, plan, gallery).metrics[PAYMENT]
    assert first.keys() == {"age"}
    assert second["age"] > first["age"]
    assert second["pays"] is (second["loss"] <= second["training_on"] + second["error"])
    last = replace(CHILD, id="g00002", last=True)
    assert PAYMENT not in run_growth(last, task, plan, gallery).metrics


def test_a_model_can_be_trained_on_from_its_trunk(tmp_path: Path) -> None:
    plan = GrowthSettings(seed_epochs=4, weak_epochs=1, final_epochs=4, anneal=0.5)
    whole, broken = new_gallery(tmp_path / "a"), new_gallery(tmp_path / "b")
    on = replace(CHILD, trains_on=True)

    def stop(phase: str, record: dict[str, float]) -> None:
        assert phase == "final"
        if record["epoch"] == 3:
            raise Interrupted("stop")

    for gallery in (whole, broken):
        seed = run_growth(SEED, digits_task(), plan, gallery)
    outcome = run_growth(on, digits_task(), plan, whole)
    with pytest.raises(Interrupted):
        run_growth(on, digits_task(), plan, broken, Callbacks(stop))
    run_growth(on, digits_task(), plan, broken)
    assert same_models(whole, broken, on.id)
    assert (outcome.multiply_adds, outcome.epochs) == (seed.multiply_adds, 4)
    assert outcome.metrics[PAYMENT].keys() == {"age"}
    documents = [whole.load_documents(id) for id in (SEED.id, on.id)]
    assert documents[0]["genotype"] == documents[1]["genotype"]
    assert documents[1]["lineage"]["trains_on"] is True
    rates = [record["lr"] for record in documents[1]["history"]["final"]]
    assert rates[:2] == [digits_task().recipe.lr] * 2
    # The growth after it is judged by the learning curve of the training on.
    child = replace(CHILD, id="g00002", parent=on.id, seed=13)
    last = run_growth(child, digits_task(), plan, whole)
    assert last.metrics[PAYMENT]["age"] > outcome.metrics[PAYMENT]["age"]
    search = Search(SearchSettings())
    for growth, found in ((SEED, seed), (on, outcome), (child, last)):
        search.apply(model_event(growth, found))
    assert on.id in write_report(search, whole.folder).read_text()
