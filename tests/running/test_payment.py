from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nni_petridish.running.growth import run_growth
from nni_petridish.running.payment import payment
from nni_petridish.search.records import PAYMENT
from nni_petridish.search.settings import GrowthSettings
from tests.running.test_growth import CHILD, SEED, digits_task, new_gallery


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
