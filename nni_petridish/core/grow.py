"""Algorithms 1 and 2 on any growable network.

One growth is

    attach_candidates(net, l1=0.001)              # Algorithm 1
    ...                                           # train as always, with any loop
    genotype = finalize_candidates(net, i_max=3)  # Algorithm 2
    ...                                           # train on

Both change the module tree in place and preserve all predictions. Both add parameters, so create a
new optimizer after each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NotRequired, Protocol, TypedDict, TypeGuard, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from nni_petridish.core.alpha_table import AlphaTable, Schedule, largest_first
from nni_petridish.core.genotype import MERGES, Genotype, Learner
from nni_petridish.core.l1 import WEAK_LEARNING, check_l1
from nni_petridish.core.selection import architecture, next_best
from nni_petridish.core.site import Site, sites
from nni_petridish.core.weak_learner import Candidates, WeakLearner
from nni_petridish.errors import ExhaustedError, GrowthError
from nni_petridish.kernels.waiting import watch_the_machine

Net = TypeVar("Net", bound=nn.Module)


@runtime_checkable
class Growable(Protocol):
    """A network that can grow: it has `Site` modules and the genotype of its architecture."""

    genotype: Genotype


class AlphaRow(TypedDict):
    """One candidate in the diary of a growth.

    ``left`` is the number of steps after which it left, if it did (`Halving`). Its α is that of
    this moment.
    """

    source: str
    op: str
    alpha: float
    left: NotRequired[int]


def attach_candidates(
    net: Net,
    l1: float | Schedule = 0.001,
    *,
    weak_learning: str = "isolated",
    keys: Collection[str] | None = None,
) -> Net:
    """Attach all candidate shortcuts to a network's sites (Algorithm 1), in place.

    Any training loop of the network then trains the candidates too. The predictions and the
    gradients of the network's own parameters do not change. Weight decay of the optimizer acts on α
    as on every parameter; put `nni_petridish.core.candidate_parameters` into a group without it if
    L1 alone shall decide.

    Parameters
    ----------
    net
        A growable network, with `Site` modules and a ``genotype``.
    l1
        λ, the weight of the L1 term on α (Eq. 6); or a schedule, a function from the number of
        backward passes to λ, such as `L1Schedule`.
    weak_learning
        ``"isolated"`` (the paper's algorithm) or ``"joint"`` (its ablation: no stop-gradient, and
        a parameter that starts at 0 instead of stop-forward).
    keys
        The keys of the α tables to attach. By default, all that have candidates left.

    Returns
    -------
    Net
        The same network.
    """
    if weak_learning not in WEAK_LEARNING:
        allowed = ", ".join(WEAK_LEARNING)
        raise GrowthError(f"weak_learning must be one of {allowed} but got {weak_learning!r}.")
    if not callable(l1):
        check_l1(l1)
    genotype_of(net)
    if has_candidates(net):
        raise GrowthError("candidates are attached already: finalize or detach them first.")
    groups = _by_key(net, keys)
    shortcuts = {key: _common_shortcuts(key, group) for key, group in groups.items()}
    pools = _pools(net)
    for key, group in groups.items():
        competitors = sum(len(shortcuts.get(other, ())) for other in pools.get(key, [key]))
        table = AlphaTable(shortcuts[key], l1, competitors)
        for site in group:
            _like(site, _attach(site, table, weak_learning))
    watch_the_machine()
    return net


def finalize_candidates(
    net: nn.Module,
    i_max: int = 3,
    *,
    merge: str | None = None,
    keys: Collection[str] | None = None,
    scores: Mapping[str, Sequence[float]] | None = None,
    taken: Iterable[Genotype] = (),
) -> Genotype:
    """Turn the candidates with the largest |α| into finished weak learners (Algorithm 2), in place.

    The selected ops keep their weights and statistics, op_merge starts as the learned weighted sum,
    and η starts at 0, so that no prediction changes. All other candidates are dropped.

    Parameters
    ----------
    net
        A network with candidates attached.
    i_max
        I_max: the number of shortcuts that each weak learner merges, over all (input, op) pairs; a
        site may have room for fewer. Of tables that compete (`Site.pool`), I_max are finalized.
    merge
        ``"concat_project"`` or ``"weighted_sum"``. By default, that of the network's genotype.
    keys
        The keys of the α tables to finalize; the candidates of the others are dropped. All by
        default.
    scores
        Numbers to select by in place of |α|, such as `nni_petridish.core.select.gain_score`
        returns: one for each candidate in the order of its table, by key.
    taken
        Architectures that were grown from the same parent before. If the selection leads to one of
        them, the next best is made.

    Returns
    -------
    Genotype
        The grown architecture, also at ``net.genotype``.
    """
    if isinstance(i_max, bool) or not isinstance(i_max, int) or i_max < 1:
        raise GrowthError(f"i_max must be a whole number of at least 1 but got {i_max!r}.")
    if merge is not None and merge not in MERGES:
        raise GrowthError(f"merge must be one of {', '.join(MERGES)} but got {merge!r}.")
    tables = _tables(net)
    if not tables:
        raise GrowthError("no candidates are attached: call attach_candidates first.")
    _check_finite(tables)
    wanted = {key: tables[key] for key in _known_keys(tables, keys)}
    numbers = _scores(wanted, scores)
    chosen = _choose(net, wanted, i_max, numbers)
    known = {architecture(genotype) for genotype in taken}

    def grown(selection: dict[str, list[int]]) -> Genotype:
        additions: dict[str, Learner] = {
            key: tuple(tables[key].shortcuts[i] for i in indices)
            for key, indices in selection.items()
        }
        return genotype_of(net).grown(additions, merge)

    if known:
        chosen = _next_best(net, chosen, i_max, numbers, lambda s: architecture(grown(s)) in known)
    genotype = grown(chosen)
    for site in sites(net):
        if site.weak_learner is not None and site.key in chosen:
            _like(site, _finalize(site, chosen[site.key], genotype.merge))
        site.weak_learner = None
    setattr(net, "genotype", genotype)  # noqa: B010 - nn.Module declares no such attribute
    return genotype


def detach_candidates(net: Net) -> Net:
    """Drop all candidates without selecting any."""
    for site in sites(net):
        site.weak_learner = None
    return net


def can_grow(net: nn.Module) -> bool:
    """Return whether the network has candidates left to attach."""
    return any(site.eligible_shortcuts() for site in sites(net))


def has_candidates(net: nn.Module) -> bool:
    """Return whether candidates are attached anywhere in the network."""
    return any(site.weak_learner is not None for site in sites(net))


def extra_loss(net: nn.Module) -> Tensor:
    """Return ℓ_extra = λ Σ|α| over the α tables (Algorithm 1, line 9), each table once.

    There is no need to add it to the loss: a hook of each table adds its gradient. If it is added,
    for instance to a scaled loss, it replaces that gradient and never doubles it.
    """
    losses = [table.extra_loss() for table in _tables(net).values()]
    return torch.stack(losses).sum() if losses else torch.zeros(())


def candidate_parameters(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all attached candidates, α included."""
    unique = {
        id(parameter): parameter
        for site in sites(net)
        if site.weak_learner is not None
        for parameter in site.weak_learner.parameters()
    }
    return list(unique.values())


def alpha_tables(
    net: nn.Module, scores: Mapping[str, Sequence[float]] | None = None
) -> dict[str, list[AlphaRow]]:
    """Return every α table as plain data, with its candidates in the order of selection.

    Parameters
    ----------
    net
        A network with candidates attached.
    scores
        The numbers to select by, see `finalize_candidates`; |α| by default.
    """
    tables = _tables(net)
    order = {key: largest_first(score) for key, score in _scores(tables, scores).items()}
    return {key: [_alpha_row(table, i) for i in order[key]] for key, table in tables.items()}


def _alpha_row(table: AlphaTable, i: int) -> AlphaRow:
    source, op = table.shortcuts[i]
    row = AlphaRow(source=source, op=op, alpha=float(table.alpha.detach()[i]))
    if table.halving is not None and (left := int(table.halving.left_after[i])) >= 0:
        row["alpha"], row["left"] = float(table.halving.left_alpha[i]), left
    return row


def _attach(site: Site, table: AlphaTable, weak_learning: str) -> Candidates:
    ops = [site.make_op(source, op) for source, op in table.shortcuts]
    missing = [source for source in site.sources if source not in site.adapters]
    made = {source: site.make_adapter(source) for source in missing}
    adapters = {source: adapter for source, adapter in made.items() if adapter is not None}
    site.weak_learner = site.candidates_type(table, ops, adapters, weak_learning)
    return site.weak_learner


def _finalize(site: Site, indices: Sequence[int], merge: str) -> WeakLearner:
    candidates = site.weak_learner
    assert candidates is not None
    shortcuts = [candidates.table.shortcuts[i] for i in indices]
    weights = [float(candidates.table.alpha.detach()[i]) for i in indices]
    for source, _ in shortcuts:
        if source in candidates.adapters:
            site.adapters[source] = candidates.adapters[source]
    learner = WeakLearner(
        shortcuts,
        [site.finish_op(candidates.ops[i]) for i in indices],
        site.make_merge(merge, weights, len(indices)),
        # Joint weak learning has already added x_c, scaled by this.
        eta=0.0 if candidates.scale is None else float(candidates.scale.detach()),
    )
    site.learners.append(learner)
    return learner


def _like(site: Site, new: nn.Module) -> None:
    """Give new modules the device, precision, layout and mode of the network."""
    added = {id(tensor) for tensor in chain(new.parameters(), new.buffers())}
    tensors = chain(site.parameters(), site.buffers())
    own = next((tensor for tensor in tensors if id(tensor) not in added), None)
    if own is not None:
        new.to(device=own.device, dtype=own.dtype)
    lay_out(new)
    new.train(site.training)


def lay_out(net: nn.Module) -> None:
    """Lay out the weights in channels_last, unless some have more than four dimensions."""
    if all(parameter.ndim < 5 for parameter in net.parameters()):
        net.to(memory_format=torch.channels_last)


def _tables(net: nn.Module) -> dict[str, AlphaTable]:
    return {site.key: site.weak_learner.table for site in sites(net) if site.weak_learner}


def _by_key(net: nn.Module, keys: Collection[str] | None) -> dict[str, list[Site]]:
    groups: dict[str, list[Site]] = {}
    for site in sites(net):
        groups.setdefault(site.key, []).append(site)
    if not groups:
        raise GrowthError(f"{type(net).__name__} cannot grow: it has no module of type Site.")
    if keys is None:
        left = {key: group for key, group in groups.items() if group[0].eligible_shortcuts()}
        groups = left or groups
    return {key: groups[key] for key in _known_keys(groups, keys)}


def _pools(net: nn.Module) -> dict[str, list[str]]:
    """Return all keys in the pool of every table that competes, its own included."""
    members: dict[str, list[str]] = {}
    pool_of = {site.key: site.pool for site in sites(net) if site.pool is not None}
    for key, pool in pool_of.items():
        members.setdefault(pool, []).append(key)
    return {key: members[pool] for key, pool in pool_of.items()}


def _scores(
    tables: dict[str, AlphaTable], scores: Mapping[str, Sequence[float]] | None
) -> dict[str, Tensor]:
    """Return the score of every candidate: |α| unless others are given."""
    if scores is None:
        return {key: table.magnitudes() for key, table in tables.items()}
    for key, table in tables.items():
        if len(scores.get(key, ())) != len(table.shortcuts):
            raise GrowthError(
                f"scores must have {len(table.shortcuts)} numbers for {key!r} but got"
                f" {len(scores.get(key, ()))}."
            )
        if not all(map(math.isfinite, scores[key])):
            raise GrowthError(f"scores of {key!r} must be finite but got {list(scores[key])}.")
    return {key: torch.tensor(scores[key], dtype=torch.float64) for key in tables}


def _choose(
    net: nn.Module, tables: dict[str, AlphaTable], i_max: int, scores: dict[str, Tensor]
) -> dict[str, list[int]]:
    """Return the indices of the candidates to keep, by key of the α table."""
    room = {site.key: site.room() for site in sites(net)}
    chosen = {}
    for key in tables:
        most = room[key]
        chosen[key] = largest_first(scores[key])[: i_max if most is None else min(i_max, most)]
    for pool in _pools(net).values():
        rivals = [key for key in pool if key in chosen]
        largest = {key: float(scores[key][chosen[key][0]]) for key in rivals}
        for key in sorted(rivals, key=lambda key: -largest[key])[i_max:]:
            del chosen[key]
    return chosen


def _next_best(
    net: nn.Module,
    best: dict[str, list[int]],
    i_max: int,
    scores: dict[str, Tensor],
    is_taken: Callable[[dict[str, list[int]]], bool],
) -> dict[str, list[int]]:
    """Return the best selection that was not made before; raise if there is none."""
    room = {site.key: site.room() for site in sites(net)}
    pools = {tuple(pool) for pool in _pools(net).values()}
    sizes = [
        {key: min(i_max, room[key] or i_max) for key in pool if key in scores} for pool in pools
    ]
    found = next_best(best, scores, sizes, is_taken)
    if found is None:
        raise ExhaustedError("every architecture that this growth can select was grown before.")
    return found


def _known_keys(known: Collection[str], keys: Collection[str] | None) -> list[str]:
    for key in keys or ():
        if key not in known:
            raise GrowthError(f"keys must be among {', '.join(known)} but got {key!r}.")
    return [key for key in known if keys is None or key in keys]


def _common_shortcuts(key: str, group: list[Site]) -> list[tuple[str, str]]:
    shortcuts = group[0].eligible_shortcuts()
    if not shortcuts:
        raise GrowthError(f"{key!r} cannot grow any further: it has no candidates left.")
    if any(site.eligible_shortcuts() != shortcuts for site in group):
        raise GrowthError(f"the sites of {key!r} differ in their candidates: cannot share one α.")
    return shortcuts


def _check_finite(tables: dict[str, AlphaTable]) -> None:
    for key, table in tables.items():
        for shortcut, alpha in zip(table.shortcuts, table.alpha.tolist(), strict=True):
            if not math.isfinite(alpha):
                name = "{1}({0})".format(*shortcut)
                raise GrowthError(f"weak learning diverged: α of {name} in {key!r} is {alpha}.")


def genotype_of(net: nn.Module) -> Genotype:
    """Return the genotype of a growable network; raise `GrowthError` if it has none."""
    if _is_growable(net):
        return net.genotype
    # DistributedDataParallel and its like. Runtime-checkable protocols do not see submodules from
    # Python 3.12 on.
    is_wrapped = _is_growable(dict(net.named_children()).get("module"))
    hint = ": grow its .module, then wrap that anew" if is_wrapped else ""
    raise GrowthError(f"{type(net).__name__} cannot grow: it has no genotype{hint}.")


def _is_growable(net: object) -> TypeGuard[Growable]:
    # The attribute of a user's own module may be something else.
    return isinstance(net, Growable) and isinstance(net.genotype, Genotype)
