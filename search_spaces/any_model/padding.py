"""Padding among the tokens of a forward pass, read from the arguments of the network."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from nni_petridish.errors import GrowthError

_MASKS = {
    "attention_mask": True,
    "key_padding_mask": False,
    "padding_mask": False,
    "src_key_padding_mask": False,
}
"""The names of arguments with a mask, and whether it is true for real tokens or for padding."""
_CACHE = "past_key_values"


class Padding(NamedTuple):
    """Facts about the tokens of a forward pass.

    ``mask`` is the argument ``name`` of the network, None if it is not given. ``continued`` is
    whether earlier tokens are in a cache.
    """

    name: str = ""
    mask: Any = None
    continued: bool = False

    def mask_of(self, tokens: Tensor) -> Tensor | None:
        """Return (N, T), true for real tokens; None if there is no mask."""
        if self.continued:
            raise GrowthError(
                "weak learners on tokens cannot read earlier tokens from a cache: call the network"
                " with use_cache=False."
            )
        if self.mask is None:
            return None
        shape = tuple(self.mask.shape) if isinstance(self.mask, Tensor) else ()
        if shape != tuple(tokens.shape[:2]):
            raise GrowthError(
                f"{self.name} must have the shape (batch, tokens) = {tuple(tokens.shape[:2])} for a"
                f" network that grows on tokens but got {shape or type(self.mask).__name__}."
            )
        return self.mask != 0 if _MASKS[self.name] else self.mask == 0


class PaddingArguments(NamedTuple):
    """The arguments of a network's forward pass with a mask and a cache, by name and position."""

    mask: tuple[str, int] | None
    cache: tuple[str, int] | None

    @classmethod
    def of(cls, net: nn.Module) -> PaddingArguments:
        """Return the arguments of a network.

        The mask is ``attention_mask`` as in Hugging Face's models, not zero for real tokens, or
        ``key_padding_mask``, ``padding_mask`` or ``src_key_padding_mask`` as in PyTorch's, true for
        padding.
        """
        names = list(inspect.signature(net.forward).parameters)
        masks = [(name, names.index(name)) for name in _MASKS if name in names]
        cache = (_CACHE, names.index(_CACHE)) if _CACHE in names else None
        return cls(masks[0] if masks else None, cache)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Padding:
        """Return what the arguments of a forward pass say."""
        name = self.mask[0] if self.mask else ""
        cache = _read(self.cache, args, kwargs)
        is_continued = cache is not None and bool(
            len(cache) > 0 if isinstance(cache, (tuple, list)) else cache.get_seq_length() > 0
        )
        return Padding(name, _read(self.mask, args, kwargs), is_continued)


def _read(
    argument: tuple[str, int] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if argument is None:
        return None
    name, position = argument
    return kwargs[name] if name in kwargs else args[position] if position < len(args) else None
