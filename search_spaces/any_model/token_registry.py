"""The registry of unary operations on tokens, by name, readable without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from search_spaces.op_registry import OpRegistry

if TYPE_CHECKING:
    from torch import nn

TokenOpMaker: TypeAlias = "Callable[[int], nn.Module]"
"""A function of the width that makes the module of an operation."""

TOKEN_OPS = (
    "mlp_1x",
    "mlp_4x",
    "attention_1h",
    "attention_4h",
    "sep_conv_3",
    "sep_conv_7",
    "identity",
)
"""The default operations on tokens."""
CAUSAL_TOKEN_OPS = (
    "mlp_1x",
    "mlp_4x",
    "causal_attention_1h",
    "causal_attention_4h",
    "causal_sep_conv_3",
    "causal_sep_conv_7",
    "identity",
)
"""The default operations on tokens that must not see later ones."""

KNOWN_TOKEN_OPS: OpRegistry[TokenOpMaker] = OpRegistry(
    tuple(dict.fromkeys((*TOKEN_OPS, "mlp_2x", *CAUSAL_TOKEN_OPS)))
)
"""The names of all operations on tokens."""


def register_token_op(name: str) -> Callable[[TokenOpMaker], TokenOpMaker]:
    """Register an operation on tokens under this name, for `nni_petridish.make_growable`.

    The decorated function takes the width and returns a module that maps tokens (N, T, width) to
    the same shape, for any T. A module that lets a token read others derives from `TokenMixer`,
    whose ``forward`` takes the padding mask too. The output is normalized token by token, so that
    |α| is comparable across candidates: the module need not do it.

    Parameters
    ----------
    name
        The name of the operation, a unique identifier.

    Examples
    --------
    ::

        @register_token_op("bottleneck")
        def bottleneck(width: int) -> nn.Module:
            narrow, wide = nn.Linear(width, 8), nn.Linear(8, width)
            return nn.Sequential(nn.LayerNorm(width), narrow, nn.GELU(), wide)

        make_growable(net, example, ops=["bottleneck", "identity"])
    """
    return KNOWN_TOKEN_OPS.register(name)
