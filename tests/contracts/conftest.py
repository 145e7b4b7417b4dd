"""Networks of every listed space."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nni_petridish import attach_candidates, finalize_candidates, sites
from nni_petridish.core.space import Space
from tests.contracts.listed import SPACES, ListedSpace


@dataclass(frozen=True)
class Subject:
    """A listed space, with the networks that a contract is tested on."""

    name: str
    listed: ListedSpace
    space: Space

    def seed_net(self) -> nn.Module:
        """Return the seed after some training."""
        return copy.deepcopy(_seed_net(self.name))

    def grown_net(self) -> nn.Module:
        """Return a network that has grown once and trained on, with η away from 0."""
        return copy.deepcopy(_grown_net(self.name))

    def loss(self, net: nn.Module) -> Tensor:
        """Return the loss on the batch."""
        return self.listed.loss(net(self.listed.inputs), self.listed.targets)

    def train(self, net: nn.Module, steps: int = 3) -> nn.Module:
        """Train in place."""
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        net.train()
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(net).backward()
            optimizer.step()
        return net

    @torch.no_grad()
    def prediction(self, net: nn.Module, training: bool = False) -> Tensor:
        """Return the outputs; in training mode batch norms take the statistics of the batch."""
        outputs = copy.deepcopy(net).train(training)(self.listed.inputs)
        return outputs[0] if isinstance(outputs, tuple) else outputs

    def gradients(self, net: nn.Module) -> dict[str, Tensor]:
        """Return the gradients of all parameters in training mode, by name."""
        net = copy.deepcopy(net).train()
        net.zero_grad()
        self.loss(net).backward()
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@cache
def _subject(name: str) -> Subject:
    return Subject(name, SPACES[name], SPACES[name].make())


@cache
def _seed_net(name: str) -> nn.Module:
    subject = _subject(name)
    torch.manual_seed(0)
    return subject.train(subject.space.build(subject.space.seed()))


@cache
def _grown_net(name: str) -> nn.Module:
    subject = _subject(name)
    torch.manual_seed(1)
    net = attach_candidates(copy.deepcopy(_seed_net(name)))
    finalize_candidates(subject.train(net), SPACES[name].i_max)
    return subject.train(net)


def alphas(net: nn.Module) -> dict[str, Any]:
    """Return α of every table, by key."""
    return {s.key: s.weak_learner.table.alpha for s in sites(net) if s.weak_learner is not None}


@pytest.fixture(params=SPACES)
def subject(request: pytest.FixtureRequest) -> Subject:
    """Every listed space in turn."""
    return _subject(request.param)


@pytest.fixture(params=["seed", "grown"])
def net(request: pytest.FixtureRequest, subject: Subject) -> nn.Module:
    """A network of the space that has not grown, and one that has."""
    return subject.seed_net() if request.param == "seed" else subject.grown_net()
