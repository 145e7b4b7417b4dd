"""Trace of a forward pass of any module: the order, output shapes and stages of submodules."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import GrowthError


class FeatureShape(NamedTuple):
    """The shape of one image, ``size`` = (height, width), or of one vector, ``size`` = ()."""

    channels: int
    size: tuple[int, ...]

    def __str__(self) -> str:
        return "x".join(map(str, (self.channels, *self.size)))


@dataclass
class Layer:
    """A submodule in a trace; ``order`` and ``output`` are those of its last call."""

    name: str
    module: nn.Module
    calls: int = 0
    order: int = -1
    output: Any = None
    version: int = 0

    @property
    def shape(self) -> FeatureShape | None:
        """The shape of the output; None if it is neither images nor vectors."""
        if not isinstance(self.output, Tensor) or self.output.ndim not in (2, 4):
            return None
        _, channels, *size = self.output.shape
        return FeatureShape(channels, tuple(size))

    @property
    def overwritten(self) -> bool:
        """Whether the output was changed in place later in the forward pass."""
        return bool(self.output._version != self.version)


class Trace:
    """The record of one forward pass, in eval mode.

    Parameters
    ----------
    net
        Any module. It is not changed.
    example
        An input, or a tuple of inputs.
    """

    def __init__(self, net: nn.Module, example: Tensor | tuple[Any, ...]) -> None:
        self.net = net
        by_module = {module: Layer(name, module) for name, module in net.named_modules()}
        # A module that several parents share has several names.
        self._layers = {
            name: by_module[module] for name, module in net.named_modules(remove_duplicate=False)
        }
        self._ended = 0
        handles = [
            module.register_forward_hook(self._recorder(layer))
            for module, layer in by_module.items()
        ]
        try:
            with evaluation_mode(net), torch.no_grad():
                net(*example) if isinstance(example, tuple) else net(example)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise GrowthError(
                f"the example does not run through {type(net).__name__}: {reason}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()

    def _recorder(self, layer: Layer) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            layer.calls += 1
            layer.order, self._ended = self._ended, self._ended + 1
            layer.output = output
            layer.version = output._version if isinstance(output, Tensor) else 0

        return record

    def layer(self, role: str, name: object) -> Layer:
        """Return a submodule; raise GrowthError unless it runs once and returns images or vectors.

        ``role`` is "site" or "source", for the error message.
        """
        if not isinstance(name, str) or name not in self._layers or not name:
            raise GrowthError(self._unknown(role, name))
        layer = self._layers[name]
        if layer.calls != 1:
            times = "is not run" if not layer.calls else f"runs {layer.calls} times"
            raise GrowthError(f"{role} {name!r} {times} in a forward pass: it must run once.")
        if layer.shape is None:
            got = (
                f"a tensor of shape {tuple(layer.output.shape)}"
                if isinstance(layer.output, Tensor)
                else f"a {type(layer.output).__name__}"
            )
            raise GrowthError(
                f"{role} {name!r} must return images (N, C, H, W) or vectors (N, F) but returns"
                f" {got}."
            )
        return layer

    def stages(self) -> list[Layer]:
        """Return the last layer of every run of layers with image outputs of the same shape.

        Layers are the children of the network and of its containers, not of blocks. A run without
        weights (pooling, norms) is not a stage, nor is the head, which makes the network's output.
        Pooling and dropout at the end of a run do not count. In a network without images, a run
        begins at every layer with weights.
        """
        found = self._stages(images=True)
        return found or self._stages(images=False)

    def _stages(self, images: bool) -> list[Layer]:
        chain = sorted(self._chain(self.net, "", images), key=lambda layer: layer.order)
        number = 0
        runs: dict[str, object] = {}
        for layer in chain:
            number += not images and _has_weights(layer.module)
            runs[layer.name] = (layer.shape, number)
        result = []
        for _, run in groupby(chain, key=lambda layer: runs[layer.name]):
            stage = list(run)
            while len(stage) > 1 and isinstance(stage[-1].module, _PASSIVE):
                stage.pop()
            if any(_has_weights(layer.module) for layer in stage):
                result.append(stage[-1])
        return result[:-1] if len(result) > 1 and self._is_head(result[-1]) else result

    def _is_head(self, last: Layer) -> bool:
        """Return whether the last stage has the channels of the network's output."""
        output = self._layers[""].output
        channels = output.shape[1] if isinstance(output, Tensor) and output.ndim > 1 else None
        assert last.shape is not None
        return bool(last.shape.channels == channels)

    def _chain(self, module: nn.Module, prefix: str, images: bool) -> Iterator[Layer]:
        for name, child in module.named_children():
            layer = self._layers[prefix + name]
            shape = layer.shape if layer.calls == 1 else None
            is_wanted = shape is not None and (shape.size != ()) == images
            if is_wanted:
                yield layer
            if not is_wanted or isinstance(child, nn.Sequential):
                yield from self._chain(child, f"{prefix}{name}.", images)

    def _unknown(self, role: str, name: object) -> str:
        names = [known for known in self._layers if known]
        close = difflib.get_close_matches(str(name), names, n=3)
        top = [known for known, _ in self.net.named_children()]
        hint = f"did you mean {_either(close)}?" if close else f"it has {', '.join(top)}."
        return f"{role} {name!r} is not a submodule of {type(self.net).__name__}: {hint}"


_PASSIVE = (
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool2d,
    nn.MaxPool2d,
    nn.Dropout,
    nn.Dropout2d,
    nn.Flatten,
)


def _has_weights(module: nn.Module) -> bool:
    """Return whether a layer that is not a container has a matrix or kernel."""
    is_container = isinstance(module, nn.Sequential)
    return not is_container and any(weight.ndim > 1 for weight in module.parameters())


def halvings(source: FeatureShape, site: FeatureShape) -> int | None:
    """Return how often to halve a source, rounding up, to get a site's size; None if impossible."""
    if len(source.size) != len(site.size):
        return None
    size, n = source.size, 0
    while size != site.size:
        half = tuple(-(-side // 2) for side in size)
        if half == size:
            return None
        size, n = half, n + 1
    return n


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


def _can_read(site: Layer, source: Layer) -> bool:
    assert site.shape is not None
    assert source.shape is not None
    return not source.overwritten and halvings(source.shape, site.shape) is not None


def _either(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))
