"""One process of two: a `Grower` under DistributedDataParallel."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nni_petridish import Grower
from nni_petridish.errors import GrowthError
from tests.support.networks import batch, small_space

PROCESSES = 2


def run(rank: int) -> dict[str, Any]:
    """Grow once and report what came of it, beside a network that trains without candidates."""
    space = small_space()
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(space.build(space.seed()))
    net, plain = nets
    torch.manual_seed(rank)
    images, labels = batch(space, 8)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in nets]
    grower = Grower(net, optimizers[0], i_max=2)

    def train(wrapper: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(wrapper(images), labels).backward()
            optimizer.step()

    def refusal(wrapper: nn.Module) -> str:
        try:
            wrapper(images)
        except GrowthError as error:
            return str(error)
        return ""

    stale = DistributedDataParallel(net)
    train(stale, optimizers[0])
    grower.attach()
    refused = [refusal(stale)]
    stale = DistributedDataParallel(net)
    train(stale, optimizers[0])
    train(DistributedDataParallel(plain), optimizers[1], 4)
    state = net.state_dict()
    same = all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    genotype = grower.finalize()
    refused.append(refusal(stale))
    train(DistributedDataParallel(net), optimizers[0])
    return {
        "refused": refused,
        "same as without candidates": same,
        "genotype": genotype.to_json(),
        "parameters": [parameter.detach().double().sum().item() for parameter in net.parameters()],
    }


def work(rank: int, folder: str) -> None:
    """Join the group and write down what was found."""
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
        Path(folder, f"{rank}.json").write_text(json.dumps(run(rank)))
        dist.barrier()
    finally:
        dist.destroy_process_group()
