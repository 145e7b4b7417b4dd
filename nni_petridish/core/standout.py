"""Selection by |α| where it is sure, by the consensus of several scores where it is not.

α gathers the correlation of a candidate with the gradient. Where the network lacks what one
candidate provides, that α leaves the others far behind. Where it does not, identities and poolings
of the same layer lead together: they repeat what the layer has, and so each other, and need no
training, so that a short weak learning favors them. docs/results/growth.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from nni_petridish.core.held_out import Losses, alpha_tables_of
from nni_petridish.core.untrained import Numbers, consensus_score

RATIO = 1.5
"""The least |α| that stands out, as a multiple of that of the pack."""
PACK = 3
"""The place whose |α| is that of the pack: at most two stand out."""


def standout_score(net: nn.Module, losses: Losses) -> Numbers:
    """Return the consensus of several scores, with the candidates whose |α| stands out on top.

    Parameters
    ----------
    net
        A network with candidates attached, in isolated weak learning. It does not change.
    losses
        Returns parts of the loss on held-out batches.
    """
    scores = consensus_score(net, losses)
    top = max(score for table in scores.values() for score in table)
    for key, table in alpha_tables_of(net).items():
        ratios = ratios_to_pack(table.magnitudes().tolist())
        scores[key] = [
            top + ratio if ratio >= RATIO else score
            for ratio, score in zip(ratios, scores[key], strict=True)
        ]
    return scores


def ratios_to_pack(magnitudes: Sequence[float]) -> list[float]:
    """Return |α| of each candidate of a table as a multiple of the third largest.

    Examples
    --------
    >>> ratios_to_pack([0.5, 3.0, 0.25, 1.0])
    [1.0, 6.0, 0.5, 2.0]
    >>> ratios_to_pack([3.0, 1.0])  # too few for a pack
    [0.0, 0.0]
    """
    pack = sorted(magnitudes, reverse=True)[PACK - 1] if len(magnitudes) >= PACK else 0.0
    return [size / pack if pack > 0 else 0.0 for size in magnitudes]
