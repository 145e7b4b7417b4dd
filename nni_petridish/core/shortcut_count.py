"""I_max from the data: as many shortcuts as lower the loss on batches that they were not fitted on.

To first order, adding Σ w_i·û_i to x_k lowers the loss like least squares lowers ‖−g − Σ w_i·û_i‖²
(`nni_petridish.core.pursuit`). The weights w of the first k candidates are fitted on half of the
held-out batches, and their decrease is measured on the other half; then the halves change roles.
The sum over all α tables rises with k as long as another shortcut helps. I_max is the smallest k
that reaches 98 % of its largest value: beyond, it goes up and down by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from nni_petridish.core.alpha_table import largest_first
from nni_petridish.core.held_out import (
    Losses,
    Observation,
    Products,
    alpha_tables_of,
    no_products,
    observe,
)
from nni_petridish.core.pursuit import held_out_decreases
from nni_petridish.errors import GrowthError

_ENOUGH = 0.98
"""The share of the largest decrease that is enough."""


def count_shortcuts(
    net: nn.Module,
    losses: Losses,
    most: int,
    scores: Mapping[str, Sequence[float]] | None = None,
) -> int:
    """Return the number of shortcuts, from 1 to ``most``, that lower the loss on other batches.

    Parameters
    ----------
    net
        A network with candidates attached, in isolated weak learning. It does not change.
    losses
        Returns parts of the loss on held-out batches, at least two.
    most
        The largest number.
    scores
        The numbers by which candidates are selected; |α| by default.
    """
    tables = alpha_tables_of(net)
    halves = _halves(net, losses)
    totals = [0.0] * most
    for key, table in tables.items():
        score = table.magnitudes() if scores is None else torch.tensor(scores[key])
        order = largest_first(score)[:most]
        one, other = ((half[key].gram, half[key].correlations) for half in halves)
        for fitted, held_out in ((one, other), (other, one)):
            decreases = held_out_decreases(fitted, held_out, order)
            decreases += decreases[-1:] * (most - len(decreases))  # a table with few candidates
            totals = [total + own for total, own in zip(totals, decreases, strict=True)]
    enough = _ENOUGH * max(totals)
    return 1 + next((i for i, total in enumerate(totals) if total >= enough > 0), 0)


def _halves(net: nn.Module, losses: Losses) -> tuple[dict[str, Products], dict[str, Products]]:
    """Return the inner products on every other batch, and on the batches between."""
    first, second = (
        {key: no_products(table) for key, table in alpha_tables_of(net).items()} for _ in range(2)
    )
    seen: Counter[int] = Counter()

    def visit(one: Observation) -> None:
        half = second if seen[id(one.site)] % 2 else first
        seen[id(one.site)] += 1
        half[one.site.key].add(one.g, one.candidates)

    observe(net, losses, visit)
    if any(count < 2 for count in seen.values()) or not seen:
        raise GrowthError("I_max from the data needs at least two held-out batches.")
    return first, second
