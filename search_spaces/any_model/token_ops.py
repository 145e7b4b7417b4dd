"""The operations on tokens (N, T, width).

Each candidate ends in a layer norm without parameters: zero mean and variance 1 over the width of
every token, so that |α| is comparable. Unlike a batch norm, it mixes neither tokens nor examples:
padding does not enter, nothing flows from later tokens to earlier ones, and training and evaluation
compute the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from search_spaces.any_model.token_registry import KNOWN_TOKEN_OPS, TokenOpMaker, register_token_op
from search_spaces.any_model.vector_ops import ConcatProjectVector

MaskReader = Callable[[Tensor], Tensor | None]
"""A function that returns the mask of tokens in the current forward pass."""


class TokenMixer(nn.Module, ABC):
    """A module on tokens that lets a token read others."""

    @abstractmethod
    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return tokens of the same shape, (N, T, width).

        ``mask`` (N, T) is true where a token is real and false where it is padding, which no other
        token may read. It is None if there is no padding.
        """


class TokenOp(nn.Module):
    """A candidate op on tokens: a module and the norm at its end.

    Parameters
    ----------
    body
        A `TokenMixer`, or a module that treats every token alone.
    width
        The width of tokens.
    mask_of
        Returns the mask for `TokenMixer`.
    """

    def __init__(self, body: nn.Module, width: int, mask_of: MaskReader) -> None:
        super().__init__()
        self.body = body
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mask_of = mask_of

    def forward(self, z: Tensor) -> Tensor:
        """Return the normalized output."""
        if isinstance(self.body, TokenMixer):
            return self.norm(self.body(z, self.mask_of(z)))
        return self.norm(self.body(z))


def make_token_op(name: str, width: int, mask_of: MaskReader) -> TokenOp:
    """Make an op on tokens of this width."""
    return TokenOp(KNOWN_TOKEN_OPS.maker(name)(width), width, mask_of)


def project_tokens(width_in: int, width_out: int) -> nn.Sequential:
    """Make a linear layer and layer norm that bring a source to the width of a site."""
    return nn.Sequential(nn.Linear(width_in, width_out, bias=False), nn.LayerNorm(width_out))


class ConcatProjectTokens(ConcatProjectVector):
    """op_merge = proj(concat(...)), proj being a linear layer and a layer norm."""

    norm_type = nn.LayerNorm


class Attention(TokenMixer):
    """Layer norm, multi-head attention, projection.

    Parameters
    ----------
    width
        The width of tokens; heads have ``width // heads``, at least 1.
    heads
        The number of heads.
    causal
        Whether a token reads only itself and earlier ones.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        inner = heads * max(width // heads, 1)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * inner)
        self.project = nn.Linear(inner, width)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return what every token reads of the real tokens."""
        split = self.qkv(self.norm(tokens)).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        allowed = None if mask is None else self._allowed(mask)
        is_causal = self.causal and mask is None
        read = F.scaled_dot_product_attention(query, key, value, allowed, is_causal=is_causal)
        return self.project(read.transpose(1, 2).flatten(2))

    def _allowed(self, mask: Tensor) -> Tensor:
        """Return (N, 1, T, T): whether a token may read another."""
        allowed = mask[:, None, None, :]
        positions = torch.arange(mask.shape[1], device=mask.device)
        if self.causal:
            allowed = allowed & (positions[:, None] >= positions)
        # A softmax over nothing, as for padding on the left, would be NaN.
        return allowed | (positions[:, None] == positions)

    def extra_repr(self) -> str:
        """Show the heads."""
        return f"heads={self.heads}, causal={self.causal}"


class SeparableConv(TokenMixer):
    """Layer norm, depthwise convolution over tokens, GELU, linear layer.

    Parameters
    ----------
    width
        The width of tokens.
    kernel
        The number of tokens that the convolution covers; odd.
    causal
        Whether the covered tokens end at the token itself instead of being centered on it.
    """

    def __init__(self, width: int, kernel: int, causal: bool) -> None:
        super().__init__()
        self.reach = (kernel - 1, 0) if causal else (kernel // 2, kernel // 2)
        self.norm = nn.LayerNorm(width)
        self.depthwise = nn.Conv1d(width, width, kernel, groups=width)
        self.pointwise = nn.Linear(width, width)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return the convolution, with zeros before the first, after the last and for padding."""
        z = self.norm(tokens)
        if mask is not None:
            z = z * mask[..., None].to(z.dtype)
        near = self.depthwise(F.pad(z.transpose(1, 2), self.reach)).transpose(1, 2)
        return self.pointwise(F.gelu(near))

    def extra_repr(self) -> str:
        """Show the tokens before and after that are read."""
        return f"reach={self.reach}"


def _mlp(expansion: int) -> TokenOpMaker:
    def make(width: int) -> nn.Module:
        inner = expansion * width
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)
        )

    return make


def _attention(heads: int, causal: bool) -> TokenOpMaker:
    return lambda width: Attention(width, heads, causal)


def _separable(kernel: int, causal: bool) -> TokenOpMaker:
    return lambda width: SeparableConv(width, kernel, causal)


@register_token_op("identity")
def _identity(width: int) -> nn.Module:
    return nn.Identity()


for _expansion in (1, 2, 4):
    register_token_op(f"mlp_{_expansion}x")(_mlp(_expansion))
for _prefix, _causal in (("", False), ("causal_", True)):
    for _heads in (1, 4):
        register_token_op(f"{_prefix}attention_{_heads}h")(_attention(_heads, _causal))
    for _kernel in (3, 7):
        register_token_op(f"{_prefix}sep_conv_{_kernel}")(_separable(_kernel, _causal))
