"""One process of two under DistributedDataParallel: grow a network, and report what came of it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nni_petridish import (
    alpha_tables,
    attach_candidates,
    extra_loss,
    finalize_candidates,
    make_growable,
    sites,
)
from search_spaces import RecurrentSpace
from tests.support.networks import batch, small_space

PROCESSES = 2
STEPS = 2
L1 = 0.05

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A network, its data, and how it is wrapped and trained."""

    build: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    i_max: int = 2
    weak_learning: str = "isolated"
    with_extra_loss: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + super().forward(x), inplace=True)


def ordinary_module() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        Residual(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)),
        nn.Conv2d(4, 6, 3, 2, padding=1),
        Residual(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def any_model() -> nn.Module:
    return make_growable(ordinary_module(), torch.zeros(1, 2, 8, 8), sources=["0", "1"])


def vision() -> nn.Module:
    space = small_space()
    return space.build(space.seed())


def recurrent() -> nn.Module:
    space = RecurrentSpace(vocabulary=11, embedding=6)
    return space.build(space.seed())


def images(seed: int) -> Batch:
    return batch(small_space(), seed=seed)


def words(seed: int) -> Batch:
    text = torch.randint(11, (6, 3), generator=torch.Generator().manual_seed(seed))
    return text[:-1], text[1:].flatten()


CASES = {
    "vision, cells": Case(vision, images),
    "vision, extra_loss": Case(vision, images, with_extra_loss=True),
    "vision, joint": Case(vision, images, weak_learning="joint"),
    "vision, static graph": Case(
        vision, images, options={"static_graph": True, "gradient_as_bucket_view": True}
    ),
    "any model": Case(any_model, images),
    "recurrent": Case(recurrent, words, i_max=1),
}


def loss_of(net: nn.Module, data: Batch) -> Tensor:
    inputs, targets = data
    outputs = net(inputs)
    logits = outputs[0].flatten(0, 1) if isinstance(outputs, tuple) else outputs
    return F.cross_entropy(logits, targets)


def predict(net: nn.Module, data: Batch) -> list[float]:
    net.eval()
    with torch.no_grad():
        outputs = net(data[0])
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return first.flatten().tolist()


def expected_alpha_gradients(net: nn.Module, data: Batch) -> dict[str, list[float]]:
    """Mean over the processes of the gradients without L1, then λ·sign(α) once."""
    alone = copy.deepcopy(net).train()
    tables = {site.key: site.weak_learner.table for site in sites(alone)}
    for table in tables.values():
        table.l1 = 0.0
    loss_of(alone, data).backward()
    result = {}
    for key, table in tables.items():
        gradient = table.alpha.grad.clone()
        dist.all_reduce(gradient)
        result[key] = (gradient / PROCESSES + L1 * table.alpha.detach().sign()).tolist()
    return result


def run_case(case: Case, rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)  # whatever is made anew differs between the processes at first
    net, common = case.build(), case.data(99)
    attach_candidates(net, L1, weak_learning=case.weak_learning)
    wrapped = DistributedDataParallel(net, **case.options)
    found: dict[str, Any] = {"expected": expected_alpha_gradients(net, case.data(rank))}
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(wrapped.train(), case.data(PROCESSES * step + rank))
        (loss + extra_loss(net) if case.with_extra_loss else loss).backward()
        if step == 0:
            found["gradients"] = {
                site.key: site.weak_learner.table.alpha.grad.tolist() for site in sites(net)
            }
        optimizer.step()
    found["backward_passes"] = [int(site.weak_learner.table.backward_passes) for site in sites(net)]
    found["alphas"] = alpha_tables(net)
    before = predict(wrapped, common)
    found["genotype"] = finalize_candidates(net, case.i_max).to_json()
    found["predictions"] = predict(net, common)
    found["unchanged"] = before == found["predictions"]
    wrapped = DistributedDataParallel(net, **case.options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped.train(), case.data(50 + PROCESSES * step + rank)).backward()
        optimizer.step()
    found["trained on"] = predict(wrapped, common)
    return found


def work(rank: int, folder: str) -> None:
    """Run all cases as one process of the group and write down what was found."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting-point",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )
    try:
        found = {name: run_case(case, rank) for name, case in CASES.items()}
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()
