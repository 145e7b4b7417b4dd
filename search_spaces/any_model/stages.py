"""Stages of a network: the sites and sources of `make_growable` unless a user names others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn

from search_spaces.any_model.blocks import find_blocks
from search_spaces.any_model.trace import KINDS, Layer, Trace, halvings

_PASSIVE = (
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool2d,
    nn.MaxPool2d,
    nn.Dropout,
    nn.Dropout2d,
    nn.Flatten,
)


_VECTORS, _TOKENS, _IMAGES = range(3)
"""The number of axes of features, see `KINDS`."""


class Stages(NamedTuple):
    """The ends of stages, and why other layers are none, by name."""

    ends: list[Layer]
    skipped: dict[str, str]


def find_stages(trace: Trace) -> Stages:
    """Return the last layer of every run of layers with image outputs of the same shape.

    Layers are the children of the network and of its containers, not of blocks. A run without
    weights (pooling, norms) is not a stage, nor is a head, which makes the network's output.
    Pooling and dropout at the end of a run do not count. In a network of tokens, see
    `find_token_stages`. In a network of vectors, a run begins at every layer with weights.
    """
    images = _find(trace, _IMAGES)
    if default_sources(images.ends):
        return images
    tokens = find_token_stages(trace)
    if default_sources(tokens.ends):
        return tokens
    return images if images.ends else _find(trace, _VECTORS)


def find_token_stages(trace: Trace) -> Stages:
    """Return the blocks of a network of tokens, and the layer before the first.

    In a network without blocks, a stage begins at every layer with weights.
    """
    blocks = find_blocks(trace)
    return Stages(blocks, {}) if blocks else _find(trace, _TOKENS)


def default_sources(stages: Sequence[Layer], reach: int = 2) -> dict[str, list[str]]:
    """Return the default sites, with the sources of each: the nearest ends of stages before it.

    There are up to ``reach`` sources, two by default, like prev_prev and prev of the paper's cells.
    A stage without sources (the stem) is not a site.
    """
    result: dict[str, list[str]] = {}
    for i, site in enumerate(stages):
        fits = [source.name for source in stages[:i] if _can_read(site, source)]
        if fits:
            result[site.name] = fits[-reach:]
    return result


def without_sources(stages: Sequence[Layer], sites: Collection[str]) -> dict[str, str]:
    """Return why the stages that are not among the default sites cannot read another one."""
    return {
        stage.name: f"no earlier stage can be halved to {stage.shape}"
        if i
        else "it is the first stage: there is nothing to read"
        for i, stage in enumerate(stages)
        if stage.name not in sites
    }


def _find(trace: Trace, axes: int) -> Stages:
    skipped: dict[str, str] = {}
    chain = sorted(_chain(trace, trace.net, "", axes, skipped), key=lambda layer: layer.order)
    ends = []
    for run in _runs(chain, axes):
        while len(run) > 1 and isinstance(run[-1].module, _PASSIVE):
            skipped[run.pop().name] = "pooling and dropout do not end a stage"
        if any(_has_weights(layer.module) for layer in run):
            ends.append(run[-1])
        else:
            skipped[run[-1].name] = "it has no weights"
    for head in _heads(ends, trace.output, axis=-1 if axes == _TOKENS else 1):
        ends.remove(head)
        skipped[head.name] = "it makes the output of the network"
    return Stages(ends, skipped)


def _runs(chain: Sequence[Layer], axes: int) -> Iterator[list[Layer]]:
    """Yield the runs of layers with the same output shape, and the same layout."""
    number = 0
    runs: dict[str, object] = {}
    for layer in chain:
        number += axes != _IMAGES and _has_weights(layer.module)
        runs[layer.name] = (layer.shape, layer.channels_last, number)
    for _, run in groupby(chain, key=lambda layer: runs[layer.name]):
        yield list(run)


def _chain(
    trace: Trace, module: nn.Module, prefix: str, axes: int, skipped: dict[str, str]
) -> Iterator[Layer]:
    """Yield the layers with features of so many axes; note those where there are none within."""
    for name, child in module.named_children():
        layer = trace.submodule(prefix + name)
        shape = layer.shape if layer.calls == 1 else None
        is_wanted = shape is not None and len(shape.size) == axes
        if is_wanted:
            yield layer
        if not is_wanted or isinstance(child, nn.Sequential):
            skipped_within: dict[str, str] = {}
            within = list(_chain(trace, child, f"{prefix}{name}.", axes, skipped_within))
            yield from within
            if is_wanted or within:
                skipped.update(skipped_within)
            elif any(True for _ in child.parameters()):
                skipped[prefix + name] = _why_unwanted(layer, axes)


def _why_unwanted(layer: Layer, axes: int) -> str:
    if layer.calls != 1:
        return f"it {layer.describe_calls()} in a forward pass"
    if layer.shape is not None:
        return f"it returns {layer.shape.kind}, and stages return {KINDS[axes]}"
    return f"it returns {layer.describe_output()}"


def _heads(ends: Sequence[Layer], output: Any, axis: int) -> list[Layer]:
    """Return the heads: the last stage with as many channels as each output of the network.

    The head of a single output is the last stage of all, or none. ``axis`` is that of channels.
    """
    widths = [tensor.shape[axis] for tensor in _tensors(output) if tensor.ndim > 1]
    heads: list[Layer] = []
    for width in widths:
        left = [end for end in ends if end not in heads]
        same = [end for end in left if end.shape is not None and end.shape.channels == width]
        is_last = bool(same) and (len(widths) > 1 or same[-1] is left[-1])
        if is_last and len(left) > 1:
            heads.append(same[-1])
    return heads


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for value in output.values() for tensor in _tensors(value))
    elif isinstance(output, (tuple, list)):
        yield from (tensor for value in output for tensor in _tensors(value))


def _has_weights(module: nn.Module) -> bool:
    """Return whether a layer that is not a container has a matrix or kernel."""
    is_container = isinstance(module, nn.Sequential)
    return not is_container and any(weight.ndim > 1 for weight in module.parameters())


def _can_read(site: Layer, source: Layer) -> bool:
    assert site.shape is not None
    assert source.shape is not None
    return not source.overwritten and halvings(source.shape, site.shape) is not None
