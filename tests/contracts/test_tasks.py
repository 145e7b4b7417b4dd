"""The contract of a task, on every one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nni_petridish import attach_candidates
from nni_petridish.errors import Interrupted
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase
from tests.contracts.listed import TASKS


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Any:
    """Every listed task in turn."""
    return TASKS[request.param]()


def seed_net(task: Any) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = task.build(task.seed())
    return net


def train(
    task: Any, net: nn.Module, callbacks: Callbacks = NO_CALLBACKS, checkpoint: Path | None = None
) -> list[Any]:
    """Train for two epochs and return the records."""
    phase = Phase("weak", 2, random_seed=3, label="contract", checkpoint=checkpoint)
    return list(task.train(net, phase, callbacks))


def trained(
    task: Any, net: nn.Module, callbacks: Callbacks = NO_CALLBACKS, checkpoint: Path | None = None
) -> nn.Module:
    train(task, net, callbacks, checkpoint)
    return net


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_training_goes_on_from_its_checkpoint_bit_for_bit(task: Any, tmp_path: Path) -> None:
    whole = trained(task, attach_candidates(seed_net(task)))
    again = trained(task, attach_candidates(seed_net(task)))
    assert same(whole, again)
    epochs: list[Any] = []
    parts = attach_candidates(seed_net(task))
    halting = Callbacks(lambda phase, record: epochs.append(record), lambda: len(epochs) == 1)
    with pytest.raises(Interrupted):
        trained(task, parts, halting, tmp_path)
    assert len(epochs) == 1
    assert not same(parts, whole)
    torch.manual_seed(99)
    resumed = trained(task, attach_candidates(task.build(task.seed())), checkpoint=tmp_path)
    assert same(resumed, whole)


def test_training_reports_every_epoch(task: Any) -> None:
    seen: list[Any] = []
    callbacks = Callbacks(lambda phase, record: seen.append((phase, record["epoch"])))
    records = train(task, seed_net(task), callbacks)
    assert [record["epoch"] for record in records] == [1, 2]
    assert seen == [("weak", 1), ("weak", 2)]
    assert all(math.isfinite(record["loss"]) for record in records)


def test_evaluation_says_the_error_and_changes_nothing(task: Any) -> None:
    net = trained(task, seed_net(task))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    measured = task.evaluate(net)
    assert math.isfinite(measured["error"])
    assert task.evaluate(net) == measured
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_validation_losses_sum_to_the_loss(task: Any) -> None:
    net = trained(task, seed_net(task)).eval()
    parts = list(task.validation_losses(net))
    assert all(part.requires_grad for part in parts)
    assert float(sum(part.detach() for part in parts)) == pytest.approx(
        task.evaluate(net)["loss"], rel=1e-5
    )


def test_its_size_is_that_of_its_space(task: Any) -> None:
    net = seed_net(task)
    assert task.size(net) == task.space.size(net)
    assert min(task.size(net)) > 0


def test_steps_grow_with_the_epochs(task: Any) -> None:
    assert 0 < task.steps(1) < task.steps(2)
