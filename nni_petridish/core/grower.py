"""Growth in a training loop of your own, with your own optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nni_petridish.core.alpha_table import Schedule
from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import (
    attach_candidates,
    can_grow,
    candidate_parameters,
    detach_candidates,
    finalize_candidates,
    genotype_of,
    has_candidates,
    lay_out,
    sites,
)
from nni_petridish.core.optimizer_groups import (
    add_parameters,
    add_twins,
    arrange_groups,
    group_of,
    named_groups,
    remove_parameters,
)
from nni_petridish.core.scalars import scalar_ids
from nni_petridish.core.wrappers import check_next_wrapper, inside
from nni_petridish.errors import GrowthError

Change = Literal["attached", "finalized"]
_VERSION = 1


@dataclass(frozen=True)
class GrowthSchedule:
    """The times of growths, counted in calls of `Grower.step`.

    Parameters
    ----------
    wait
        Calls before candidates are attached, at the start and after each growth.
    weak
        Calls from attaching candidates to finalizing them.
    growths
        The largest number of growths.
    patience
        If given, candidates are attached only when the number passed to `Grower.step`, such as the
        validation loss, has not fallen for so many calls; ``wait`` holds as well.
    """

    wait: int = 10
    weak: int = 5
    growths: int = 1
    patience: int | None = None

    def __post_init__(self) -> None:
        counts = {"wait": (self.wait, 0), "weak": (self.weak, 1), "growths": (self.growths, 0)}
        if self.patience is not None:
            counts["patience"] = (self.patience, 1)
        for name, (value, least) in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise GrowthError(
                    f"{name} must be a whole number of at least {least} but got {value!r}."
                )


class Grower:
    """Grows a network inside any training loop and keeps its optimizer up to date, in place.

    Parameters and state of the optimizer that belong to the network so far stay as they are, bit
    for bit. Candidates join when they are attached; those that are dropped leave. While candidates
    learn, the network's own parameters are updated as they would be without them, unless the loop
    couples parameters itself, for instance by clipping one norm over all gradients: clip
    `network_parameters` and `nni_petridish.core.candidate_parameters` apart.

    New parameters join the group of their neighbors and follow its schedule; α and η join a copy of
    the group without weight decay. Make the Grower before a learning-rate scheduler, or pass it.

    Parameters
    ----------
    net
        A growable network, such as ``make_growable(module, example)`` returns, compiled or not. For
        DistributedDataParallel, pass the module inside and wrap it anew after each change; a
        wrapper that does not know all parameters is refused.
    optimizer
        Any optimizer of ``torch.optim`` over its parameters.
    l1
        λ, the weight of the L1 term on α (Eq. 6), or a schedule of it.
    i_max
        I_max: the number of shortcuts that each weak learner keeps.
    schedule
        When to grow, for `step`; None if you call `attach` and `finalize` yourself.
    seed
        Seeds the weights of candidates. The loop's own random numbers are not touched.
    schedulers
        The learning-rate schedulers of the optimizer, if they were made before.

    Examples
    --------
    >>> import torch
    >>> from nni_petridish import Grower, make_growable
    >>> module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    >>> net = make_growable(module, torch.zeros(1, 4), sites=["2"], sources=["0"])
    >>> optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    >>> grower = Grower(net, optimizer, schedule=GrowthSchedule(wait=2, weak=2))
    >>> changes = []
    >>> for epoch in range(6):
    ...     loss = net(torch.ones(3, 4)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     changes.append(grower.step())
    >>> changes
    [None, 'attached', None, 'finalized', None, None]
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        *,
        l1: float | Schedule = 0.001,
        i_max: int = 3,
        schedule: GrowthSchedule | None = None,
        seed: int = 0,
        schedulers: Sequence[LRScheduler] = (),
    ) -> None:
        net = inside(net)
        genotype_of(net)  # raises if it cannot grow, or is wrapped
        if not any(id(p) in group_of(optimizer) for p in net.parameters()):
            raise GrowthError("optimizer must have parameters of the network but has none.")
        self.net, self.optimizer = net, optimizer
        self.l1, self.i_max, self.schedule, self.seed = l1, i_max, schedule, seed
        self.growths = 0
        self._calls = 0
        self._best, self._stalled = math.inf, 0
        add_twins(optimizer, schedulers)

    @property
    def is_learning(self) -> bool:
        """Whether candidates are attached."""
        return has_candidates(self.net)

    def network_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the network without those of attached candidates."""
        passing = {id(parameter) for parameter in candidate_parameters(self.net)}
        return [p for p in self.net.parameters() if id(p) not in passing]

    def attach(self) -> None:
        """Attach candidates (Algorithm 1) and hand them to the optimizer."""
        before = {id(parameter) for parameter in self.net.parameters()}
        _attach(self.net, self.l1, self.seed + self.growths)
        self._add_new(before)
        check_next_wrapper(self.net)
        self._calls = 0

    def finalize(self, scores: Mapping[str, Sequence[float]] | None = None) -> Genotype:
        """Keep the best candidates (Algorithm 2); the others leave the optimizer.

        Parameters
        ----------
        scores
            Numbers to select by in place of |α|, see `nni_petridish.core.select`.

        Returns
        -------
        Genotype
            The grown architecture.
        """
        before = {id(parameter) for parameter in self.net.parameters()}
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + self.growths)
            genotype = finalize_candidates(self.net, self.i_max, scores=scores)
        after = {id(parameter) for parameter in self.net.parameters()}
        self._add_new(before)
        remove_parameters(self.optimizer, before - after)
        check_next_wrapper(self.net)
        self.growths += 1
        self._calls, self._best, self._stalled = 0, math.inf, 0
        return genotype

    def detach(self) -> None:
        """Drop all candidates, as if they had never been attached."""
        gone = {id(parameter) for parameter in candidate_parameters(self.net)}
        detach_candidates(self.net)
        remove_parameters(self.optimizer, gone)
        check_next_wrapper(self.net)
        self._calls = 0

    def step(self, metric: float | None = None) -> Change | None:
        """Count one epoch, or whatever the loop calls this for, and grow when it is time.

        Parameters
        ----------
        metric
            A number to minimize, for a schedule with ``patience``.

        Returns
        -------
        str or None
            ``"attached"`` or ``"finalized"`` if the network changed.
        """
        if self.schedule is None:
            raise GrowthError("step needs a schedule: Grower(..., schedule=GrowthSchedule(...)).")
        self._calls += 1
        if self.is_learning:
            if self._calls < self.schedule.weak:
                return None
            self.finalize()
            return "finalized"
        if not self._is_due(self.schedule, metric):
            return None
        self.attach()
        return "attached"

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on later, as plain data.

        Save it with the state dicts of the network and the optimizer.
        """
        return {
            "version": _VERSION,
            "genotype": genotype_of(self.net).to_dict(),
            "is_learning": self.is_learning,
            "growths": self.growths,
            "calls": self._calls,
            "best": self._best,
            "stalled": self._stalled,
            "groups": named_groups(self.optimizer, self.net),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring a network and its optimizer into the structure in which they were saved.

        Build the network and its optimizer as at the start, load this state, and then the state
        dicts of network and optimizer. A network that has the structure already keeps it.
        """
        before = {id(parameter) for parameter in self.net.parameters()}
        restore_structure(self.net, state, l1=self.l1, seed=self.seed)
        self._add_new(before)
        check_next_wrapper(self.net)
        self.growths = state["growths"]
        arrange_groups(self.optimizer, self.net, state["groups"])
        self._calls, self._best = state["calls"], state["best"]
        self._stalled = state["stalled"]

    def _is_due(self, schedule: GrowthSchedule, metric: float | None) -> bool:
        if schedule.patience is not None:
            if metric is None:
                raise GrowthError("step needs a metric: the schedule has patience.")
            self._stalled = 0 if metric < self._best else self._stalled + 1
            self._best = min(self._best, metric)
            if self._stalled < schedule.patience:
                return False
        has_room = self.growths < schedule.growths and can_grow(self.net)
        return has_room and self._calls >= schedule.wait

    def _add_new(self, before: set[int]) -> None:
        """Hand the parameters that came to the optimizer, beside those of their site."""
        groups = group_of(self.optimizer)
        first = groups[id(next(p for p in self.net.parameters() if id(p) in groups))]
        found: dict[int, tuple[nn.Parameter, int]] = {}
        for site in sites(self.net):
            known = [groups[id(p)] for p in site.parameters() if id(p) in groups]
            index = known[0] if known else first
            for parameter in site.parameters():
                if id(parameter) not in before and id(parameter) not in groups:
                    found.setdefault(id(parameter), (parameter, index))
        add_parameters(self.optimizer, found.values(), scalar_ids(self.net))


def restore_structure(
    net: nn.Module, state: Mapping[str, Any], *, l1: float | Schedule = 0.001, seed: int = 0
) -> None:
    """Give a network the weak learners and candidates of `Grower.state_dict`, without weights.

    Parameters
    ----------
    net
        The network as at the start, or in the structure that was saved.
    state
        The saved state.
    l1, seed
        As the `Grower` has them.
    """
    if state.get("version") != _VERSION:
        raise GrowthError(f"version must be {_VERSION} but got {state.get('version')!r}.")
    if has_candidates(net) and not state["is_learning"]:
        raise GrowthError("candidates are attached: load the state into a fresh network.")
    _build(net, Genotype.from_dict(state["genotype"]))
    if state["is_learning"] and not has_candidates(net):
        _attach(net, l1, seed + state["growths"])


def _attach(net: nn.Module, l1: float | Schedule, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        attach_candidates(net, l1)


def _build(net: nn.Module, genotype: Genotype) -> None:
    """Add the weak learners that the genotype has and the network has not."""
    wanted = genotype.learners_by_key()
    for site in sites(net):
        own = tuple(learner.shortcuts for learner in site.learners)
        learners = tuple(map(tuple, wanted.get(site.key, ())))
        if learners[: len(own)] != own:
            raise GrowthError(f"the network has other weak learners at {site.key!r}.")
        like = next(iter(site.parameters()), next(iter(net.parameters())))
        for learner in learners[len(own) :]:
            site.add_learner(learner, genotype.merge)
        site.to(device=like.device, dtype=like.dtype)
        lay_out(site)
    setattr(net, "genotype", genotype)  # noqa: B010 - nn.Module declares no such attribute
