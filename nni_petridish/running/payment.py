"""Did a growth pay? Its loss against what training its parent on would have brought in that time.

With ``anneal`` the networks of a lineage are trained at one constant learning rate, so that the
curve of the parent can be continued (`nni_petridish.core.learning_curve`) to the age of the child:
the seconds of training at that rate, all ancestors and weak learning included. Both losses are
those before the decay. A growth pays unless its loss is above that forecast by more than the
standard error of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from nni_petridish.core.learning_curve import forecast_loss
from nni_petridish.running.trunk import held_epochs
from nni_petridish.search.records import PAYMENT, PAYS
from nni_petridish.tasks.task import Record

AGE = "age"
History = Mapping[str, Sequence[Record]]


def payment(history: History, parent: Mapping[str, Any] | None, anneal: float) -> dict[str, Any]:
    """Return what a growth brought, as plain data for the metrics of its model.

    Parameters
    ----------
    history
        The records of the growth, by phase.
    parent
        The documents of the parent; None for a seed model.
    anneal
        The share of a training in which the learning rate decays.

    Returns
    -------
    dict
        ``age``, the seconds of training; and if the curve of the parent allows a forecast, what
        training on would have brought (``training_on``), its standard error (``error``), the
        growth's own ``loss``, and whether it ``pays``.
    """
    before = _payment_of(parent)
    records = _at_full_rate(history, anneal)
    spent = sum(record["seconds"] for record in (*history.get("weak", ()), *records))
    found: dict[str, Any] = {AGE: before.get(AGE, 0.0) + spent}
    if parent is None or not records or AGE not in before:
        return found
    curve = _at_full_rate(parent["history"], anneal)
    ages = list(itertools.accumulate(record["seconds"] for record in curve))
    start = before[AGE] - ages[-1] if ages else 0.0
    losses = [record.get("validation_loss", float("nan")) for record in curve]
    expected = forecast_loss([max(start, 0.0) + age for age in ages], losses, found[AGE])
    loss = records[-1].get("validation_loss")
    if expected is None or loss is None:
        return found
    return {
        **found,
        "training_on": expected.mean,
        "error": expected.error,
        "loss": loss,
        PAYS: loss <= expected.mean + expected.error,
    }


def _payment_of(documents: Mapping[str, Any] | None) -> Mapping[str, Any]:
    metrics = {} if documents is None else documents["metrics"].get("metrics", {})
    found: Mapping[str, Any] = metrics.get(PAYMENT, {})
    return found


def _at_full_rate(history: History, anneal: float) -> Sequence[Record]:
    """Return the records of the last training before its learning rate decayed."""
    records = history.get("final") or history.get("seed") or ()
    return records[: held_epochs(len(records), anneal)]
