"""The end of weak learning before its last epoch: once the selection is stable.

A step of weak learning costs several steps of the parent, and the largest |α| often belong to the
same candidates long before the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from nni_petridish.core.site import sites
from nni_petridish.tasks.checkpoint import fits, load_checkpoint, restore, save_checkpoint
from nni_petridish.tasks.task import Record

_log = logging.getLogger(__name__)

CHECK_STEPS = 20
"""Steps between two checks of the selection."""


class StableSelection:
    """Asked before every step; tells when the selection by |α| has not changed for some checks.

    Parameters
    ----------
    net
        A network with candidates attached.
    i_max
        I_max.
    patience
        The number of checks in a row with the same selection.
    stop
        Asked first, whether the training shall stop for other reasons.
    """

    def __init__(self, net: nn.Module, i_max: int, patience: int, stop: Callable[[], bool]) -> None:
        self._net, self._i_max, self._patience, self._stop = net, i_max, patience, stop
        self._last: dict[str, frozenset[int]] | None = None
        self._same = 0
        self.steps = 0

    @property
    def is_stable(self) -> bool:
        """Whether the selection has been the same for long enough."""
        return self._same >= self._patience

    def should_stop(self) -> bool:
        """Count a step, and check the selection if it is time."""
        if self._stop():
            return True
        if self.steps and self.steps % CHECK_STEPS == 0:
            self._check()
        if self.is_stable:
            return True
        self.steps += 1
        return False

    def _check(self) -> None:
        tables = {
            site.key: site.weak_learner.table for site in sites(self._net) if site.weak_learner
        }
        selection = {key: frozenset(table.top(self._i_max)) for key, table in tables.items()}
        self._same = self._same + 1 if selection == self._last else 0
        self._last = selection


@dataclass(frozen=True)
class Learned:
    """Facts about the weak learning of a growth.

    Parameters
    ----------
    seed
        The random seed of the phase, by which the growth is known.
    steps
        The number of steps.
    records
        The records of the epochs that were completed.
    """

    seed: int
    steps: int
    records: list[Record]


def save_learned(folder: Path, net: nn.Module, learned: Learned) -> None:
    """Keep a network after weak learning, so that a growth that is continued needs no more."""
    save_checkpoint(folder, net, _no_optimizer(net), asdict(learned))


def restore_learned(folder: Path, net: nn.Module, seed: int) -> Learned | None:
    """Restore what `save_learned` kept of the growth with this seed; None if nothing is there."""
    found = load_checkpoint(folder)
    if found is None:
        return None
    tensors, facts = found
    if facts.get("seed") != seed or not fits(tensors, net, _no_optimizer(net)):
        _log.warning("%s holds a checkpoint of another run; weak learning starts anew.", folder)
        return None
    restore(tensors, net, _no_optimizer(net))
    return Learned(seed, facts["steps"], facts["records"])


def _no_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without state: that of weak learning ends with it."""
    return torch.optim.SGD(net.parameters(), lr=0.0)
