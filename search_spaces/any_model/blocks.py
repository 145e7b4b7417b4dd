"""Blocks of a network of tokens, such as the layers of a transformer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from search_spaces.any_model.trace import Layer, Trace


def find_blocks(trace: Trace) -> list[Layer]:
    """Return the blocks that return tokens, after the layer whose output enters the first one.

    Blocks are the elements of an `nn.ModuleList` or `nn.Sequential` that all have parts and return
    tokens. If blocks hold further blocks, the inner ones count. A network without such a list has
    no blocks.
    """
    elements = {
        layer.name: layer
        for name, module in trace.net.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for layer in _elements(trace, name, module)
    }
    inner = [
        layer
        for name, layer in elements.items()
        if not any(other.startswith(f"{name}.") for other in elements)
    ]
    blocks = sorted(inner, key=lambda layer: layer.order)
    return [*_entry(trace, blocks), *blocks]


def _elements(trace: Trace, name: str, stack: nn.ModuleList | nn.Sequential) -> list[Layer]:
    prefix = f"{name}." if name else ""
    layers = [trace.submodule(prefix + child) for child, _ in stack.named_children()]
    are_blocks = all(
        layer.calls == 1 and layer.has_tokens and any(True for _ in layer.module.children())
        for layer in layers
    )
    return layers if are_blocks else []


def _entry(trace: Trace, blocks: Sequence[Layer]) -> list[Layer]:
    """Return the last layer before the first block, outside of it, with tokens like its own."""
    if not blocks:
        return []
    first = blocks[0]
    fits = [
        layer
        for layer in trace.layers()
        if layer.order < first.order
        and layer.shape == first.shape
        and not layer.name.startswith(f"{first.name}.")
    ]
    return fits[-1:]
