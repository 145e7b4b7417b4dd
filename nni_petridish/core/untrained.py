"""Promises of the architectures of children, whatever their candidates learned.

A candidate's child is the network with that shortcut and fresh weights. Its zero-cost scores and
its size take one batch, where weak learning trains all candidates on many. docs/results/judge.md
tells how well they rank children, alone and together with |α|.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.core.alpha_table import AlphaTable
from nni_petridish.core.complexity import count_for_inputs
from nni_petridish.core.consensus import consensus
from nni_petridish.core.grow import finalize_candidates
from nni_petridish.core.held_out import Losses, alpha_tables_of
from nni_petridish.core.modes import evaluation_mode
from nni_petridish.core.readout import READOUT_SCORES, readouts
from nni_petridish.core.site import sites
from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.core.zero_cost import jacov, nwot
from nni_petridish.errors import GrowthError

_IMAGES = 32
_FIRST, _SECOND = 2.0, 1.0  # scores that select one candidate whatever the others have

Numbers = dict[str, list[float]]
"""One number for each candidate, in the order of each α table, by its key."""


class Promise(NamedTuple):
    """The promise of the architecture of a child; each number is the larger the better."""

    jacov: float
    nwot: float
    multiply_adds: float


def prior_score(net: nn.Module, losses: Losses) -> Numbers:
    """Return the consensus of jacov, nwot and multiply-adds of each candidate's child.

    It needs no weak learning.

    Parameters
    ----------
    net
        A network with candidates attached. It does not change.
    losses
        Returns parts of the loss on held-out batches; the inputs of the first one are used.
    """
    return _consensus(net, _by_field(promises(net, losses)))


def consensus_score(net: nn.Module, losses: Losses) -> Numbers:
    """Return the consensus of |α|, residual gain, jacov, nwot and multiply-adds.

    Parameters
    ----------
    net
        A network with candidates attached, in isolated weak learning. It does not change.
    losses
        Returns parts of the loss on held-out batches.
    """
    gain = READOUT_SCORES["residual_gain"]
    learned = [
        {key: table.magnitudes().tolist() for key, table in alpha_tables_of(net).items()},
        {key: [gain(one) for one in table] for key, table in readouts(net, losses).items()},
    ]
    return _consensus(net, [*learned, *_by_field(promises(net, losses))])


def promises(net: nn.Module, losses: Losses) -> dict[str, list[Promise]]:
    """Return the promise of each candidate's child, by the key of its α table."""
    inputs = first_inputs(net, losses)
    with torch.random.fork_rng([]):
        return {
            key: [_promise(net, key, place, inputs) for place in range(len(table.shortcuts))]
            for key, table in alpha_tables_of(net).items()
        }


def child_with(net: nn.Module, key: str, place: int) -> nn.Module:
    """Return a copy of a network that selects one candidate.

    Parameters
    ----------
    net
        A network with candidates attached. It does not change.
    key, place
        The α table of the candidate, and its place in it. Of each other table the first candidate
        is selected.
    """
    child = copy.deepcopy(net)
    finalize_candidates(child, i_max=1, scores=_only(alpha_tables_of(child), key, place))
    return child


def _promise(net: nn.Module, key: str, place: int, inputs: Tensor) -> Promise:
    child = child_with(net, key, place)
    return Promise(
        jacov(_with_fresh_weights(child), inputs),
        nwot(_with_fresh_weights(child), inputs),
        float(count_for_inputs(child, [inputs[:1]])),
    )


def _only(tables: dict[str, AlphaTable], key: str, place: int) -> Numbers:
    """Return scores that select one candidate, and of each other table always the same one."""
    scores = {other: [0.0] * len(table.shortcuts) for other, table in tables.items()}
    for values in scores.values():
        values[0] = _SECOND
    scores[key][place] = _FIRST
    return scores


def _with_fresh_weights(net: nn.Module) -> nn.Module:
    """Draw the weights of a network anew, the same ones at each call; η is 1."""
    torch.manual_seed(0)
    for module in net.modules():
        reset = getattr(module, "reset_parameters", None)  # what modules of torch call theirs
        if reset is not None:
            reset()
        if isinstance(module, WeakLearner):
            nn.init.ones_(module.eta)
    return net


def first_inputs(net: nn.Module, losses: Losses) -> Tensor:
    """Return what the network is given in the first held-out batch.

    Parameters
    ----------
    net
        A network, with candidates attached or not. It does not change.
    losses
        Returns parts of the loss on held-out batches.

    Raises
    ------
    GrowthError
        If that is a text or several tensors, for which the scores of this module do not exist.
    """
    found: list[tuple[Any, ...]] = []
    handle = net.register_forward_pre_hook(lambda module, inputs: found.append(inputs))
    try:
        with evaluation_mode(net), torch.no_grad():
            next(iter(losses(net)), None)
    finally:
        handle.remove()
    values = found[0] if found else ()
    inputs = values[0] if len(values) == 1 else None
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise GrowthError(
            "the scores prior, depth, consensus and standout need a network of one input, and no"
            " text: choose another score."
        )
    return inputs[:_IMAGES].detach()


def _by_field(found: dict[str, list[Promise]]) -> Iterator[Numbers]:
    for field in range(len(Promise._fields)):
        yield {key: [promise[field] for promise in table] for key, table in found.items()}


def _consensus(net: nn.Module, scores: Iterable[Numbers]) -> Numbers:
    """Return the consensus of several scores among the candidates that compete."""
    rivals: dict[str, list[str]] = {}
    listed, tables = list(scores), alpha_tables_of(net)
    pools = {site.key: site.pool for site in sites(net)}
    for key in tables:
        rivals.setdefault(key if pools[key] is None else f"pool {pools[key]}", []).append(key)
    result: Numbers = {}
    for keys in rivals.values():
        ranks = iter(consensus([[v for key in keys for v in one[key]] for one in listed]))
        result |= {key: [next(ranks) for _ in tables[key].shortcuts] for key in keys}
    return result
