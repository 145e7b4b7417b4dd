"""Trace of a forward pass of any module: the order and output shapes of submodules."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import GrowthError
from search_spaces.any_model.layout import are_tokens, find_channels_last, taller
from search_spaces.any_model.outputs import features_of

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""An input of a network, a tuple of inputs, or inputs by name."""


KINDS = ("vectors", "tokens", "images")
"""The kinds of features, by the number of axes besides those of the batch and the channels."""


class FeatureShape(NamedTuple):
    """The shape of the features of one example.

    ``size`` is (height, width) for an image, (tokens,) for tokens and () for a vector.
    """

    channels: int
    size: tuple[int, ...]

    @property
    def is_tokens(self) -> bool:
        """Whether these are tokens."""
        return len(self.size) == 1

    @property
    def kind(self) -> str:
        """The name of such features, for messages."""
        return KINDS[len(self.size)]

    def __str__(self) -> str:
        if self.is_tokens:
            return f"{self.size[0]} tokens of width {self.channels}"
        return "x".join(map(str, (self.channels, *self.size)))


@dataclass(eq=False)
class Layer:
    """A submodule in a trace; ``order`` and ``output`` are those of its last call.

    ``channels_last`` is whether its images are (N, H, W, C), ``has_tokens`` whether its features
    are tokens (N, T, C).
    """

    name: str
    module: nn.Module
    calls: int = 0
    order: int = -1
    output: Any = None
    version: int = 0
    channels_last: bool = False
    has_tokens: bool = False

    @property
    def features(self) -> Tensor | None:
        """The output, or tokens that come first in it."""
        found = features_of(self.output)
        return found if self.has_tokens or found is self.output else None

    @property
    def shape(self) -> FeatureShape | None:
        """The shape of the features; None if they are neither images nor vectors nor tokens."""
        if self.features is None:
            return None
        sizes = self.features.shape[1:]
        if (len(sizes) == 2 and not self.has_tokens) or len(sizes) not in (1, 2, 3):
            return None
        is_last = self.channels_last or self.has_tokens
        channels, *size = (sizes[-1], *sizes[:-1]) if is_last else sizes
        return FeatureShape(channels, tuple(size))

    @property
    def overwritten(self) -> bool:
        """Whether the features were changed in place later in the forward pass."""
        return self.features is not None and self.features._version != self.version

    def describe_calls(self) -> str:
        """Return how often the submodule runs, for a message."""
        return f"runs {self.calls} times" if self.calls else "is not run"

    def describe_output(self) -> str:
        """Return the form of the output, for a message."""
        if not isinstance(self.output, Tensor):
            return f"a {type(self.output).__name__}"
        return f"a tensor of shape {tuple(self.output.shape)}"


def call(net: nn.Module, example: Any) -> Any:
    """Call a network with an input, a tuple of inputs, or inputs by name."""
    if isinstance(example, Mapping):
        return net(**example)
    return net(*example) if isinstance(example, tuple) else net(example)


def _batch_size(example: Any) -> int | None:
    values = example.values() if isinstance(example, Mapping) else example
    inputs = (values,) if isinstance(values, Tensor) else values
    sizes = [len(x) for x in inputs if isinstance(x, Tensor) and x.ndim]
    return sizes[0] if sizes else None


def _run(net: nn.Module, example: Any, hooks: Mapping[nn.Module, Any]) -> None:
    """Run a forward pass in eval mode with these forward hooks."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks.items()]
    try:
        with evaluation_mode(net), torch.no_grad():
            call(net, example)
    finally:
        for handle in handles:
            handle.remove()


def _outputs(net: nn.Module, example: Any) -> dict[nn.Module, Any]:
    """Return the output of every module, up to the first that does not take this example."""
    outputs: dict[nn.Module, Any] = {}

    def record(module: nn.Module, args: Any, output: Any) -> None:
        outputs[module] = output

    if example is not None:
        with contextlib.suppress(Exception):
            _run(net, example, dict.fromkeys(net.modules(), record))
    return outputs


class Trace:
    """The record of one forward pass, in eval mode.

    Parameters
    ----------
    net
        Any module. It is not changed.
    example
        An input, a tuple of inputs, or inputs by name.
    """

    def __init__(self, net: nn.Module, example: Example) -> None:
        self.net, self.example = net, example
        by_module = {module: Layer(name, module) for name, module in net.named_modules()}
        # A module that several parents share has several names.
        self._layers = {
            name: by_module[module] for name, module in net.named_modules(remove_duplicate=False)
        }
        self._ended = 0
        recorders = {module: self._recorder(layer) for module, layer in by_module.items()}
        try:
            _run(net, example, recorders)
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise GrowthError(
                f"the example does not run through {type(net).__name__}: {reason}"
            ) from error
        outputs = {module: layer.output for module, layer in by_module.items()}
        for module in find_channels_last(outputs, lambda: _outputs(net, taller(example))):
            by_module[module].channels_last = True
        batch = _batch_size(example)
        for layer in by_module.values():
            layer.has_tokens = are_tokens(layer.module, features_of(layer.output), batch)

    def _recorder(self, layer: Layer) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            layer.calls += 1
            layer.order, self._ended = self._ended, self._ended + 1
            layer.output = output
            features = features_of(output)
            layer.version = 0 if features is None else features._version

        return record

    def layer(self, role: str, name: object) -> Layer:
        """Return a submodule; raise GrowthError unless it runs once and returns features.

        ``role`` is "site" or "source", for the error message.
        """
        if not isinstance(name, str) or name not in self._layers or not name:
            raise GrowthError(self._unknown(role, name))
        layer = self._layers[name]
        if layer.calls != 1:
            times = layer.describe_calls()
            raise GrowthError(f"{role} {name!r} {times} in a forward pass: it must run once.")
        if layer.shape is None:
            raise GrowthError(
                f"{role} {name!r} must return images (N, C, H, W), tokens (N, T, C) or vectors"
                f" (N, F) but returns {layer.describe_output()}."
            )
        return layer

    @property
    def output(self) -> Any:
        """The output of the network."""
        return self._layers[""].output

    def layers(self) -> list[Layer]:
        """Return the submodules that run once, in the order in which they end."""
        found = {id(layer): layer for name, layer in self._layers.items() if name}
        once = [layer for layer in found.values() if layer.calls == 1]
        return sorted(once, key=lambda layer: layer.order)

    def submodule(self, name: str) -> Layer:
        """Return a submodule, whatever it returns and however often it runs."""
        return self._layers[name]

    def _unknown(self, role: str, name: object) -> str:
        names = [known for known in self._layers if known]
        close = difflib.get_close_matches(str(name), names, n=3)
        top = [known for known, _ in self.net.named_children()]
        hint = f"did you mean {_either(close)}?" if close else f"it has {', '.join(top)}."
        return f"{role} {name!r} is not a submodule of {type(self.net).__name__}: {hint}"


def halvings(source: FeatureShape, site: FeatureShape) -> int | None:
    """Return how often to halve a source, rounding up, to get a site's size; None if impossible."""
    if len(source.size) != len(site.size):
        return None
    if site.is_tokens:  # which are of any number, but as many in a source as in its site
        return 0 if source.size == site.size else None
    size, n = source.size, 0
    while size != site.size:
        half = tuple(-(-side // 2) for side in size)
        if half == size:
            return None
        size, n = half, n + 1
    return n


def _either(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))
