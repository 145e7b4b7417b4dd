"""Sites on the submodules of any module, reached by forward hooks.

Hooks, unlike wrappers, preserve the names and types of submodules and the keys of the state dict.
The outputs of sources are stored for the duration of one forward pass of the network.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from nni_petridish.core.named_modules import NamedModules
from nni_petridish.core.site import Site
from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.errors import GrowthError
from search_spaces.any_model.genotype import VECTOR_OPS
from search_spaces.any_model.outputs import features_of, with_features
from search_spaces.any_model.padding import Padding, PaddingArguments
from search_spaces.any_model.token_ops import ConcatProjectTokens, make_token_op, project_tokens
from search_spaces.any_model.token_registry import KNOWN_TOKEN_OPS
from search_spaces.any_model.trace import FeatureShape, halvings
from search_spaces.any_model.vector_ops import ConcatProjectVector, make_vector_op, project_vector
from search_spaces.vision.op_registry import KNOWN_OPS
from search_spaces.vision.ops import ConcatProject, FactorizedReduce, make_op, project


class ForwardValues(threading.local):
    """Outputs of the sources in each running forward pass of this thread.

    A copied or unpickled object starts without forward passes.
    """

    def __init__(self) -> None:
        self.passes: list[dict[str, Tensor]] = []
        self.padding: list[Padding] = []

    def begin(self, net: nn.Module, args: Any) -> None:
        """Begin a forward pass; a pre-hook of the network."""
        self.passes.append({})
        self.padding.append(Padding())

    def end(self, net: nn.Module, args: Any, output: Any) -> None:
        """End a forward pass and release its outputs; a hook of the network, run on errors too."""
        self.passes.pop()
        self.padding.pop()

    def mask_of(self, tokens: Tensor) -> Tensor | None:
        """Return the mask of tokens, (N, T), true for real ones; None if there is no padding."""
        return self.padding[-1].mask_of(tokens) if self.padding else None

    def __reduce__(self) -> tuple[type[ForwardValues], tuple[()]]:
        return ForwardValues, ()


class SourceHook:
    """Forward hook of a source; ``channels_last`` if it returns images (N, H, W, C)."""

    def __init__(self, name: str, values: ForwardValues, channels_last: bool = False) -> None:
        self.name, self.values, self.channels_last = name, values, channels_last

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Store the features, which include the weak learners of a source that is a site."""
        if self.values.passes:
            self.values.passes[-1][self.name] = _channels_first(output, self.channels_last)


class PaddingHook:
    """Forward pre-hook of a network with sites on tokens."""

    def __init__(self, net: nn.Module, values: ForwardValues) -> None:
        self.arguments, self.values = PaddingArguments.of(net), values

    def __call__(self, net: nn.Module, args: Any, kwargs: Any) -> None:
        """Store what the arguments say about padding."""
        self.values.padding[-1] = self.arguments.read(args, kwargs)


def _channels_first(output: Any, channels_last: bool) -> Tensor:
    """Return features; images as (N, C, H, W), (N, H, W, C) in memory being fastest for our ops."""
    features = features_of(output)
    assert features is not None
    return features.permute(0, 3, 1, 2) if channels_last else features


def known_ops(shape: FeatureShape) -> Sequence[str]:
    """Return the names of all operations on features of this shape."""
    return (VECTOR_OPS, KNOWN_TOKEN_OPS, KNOWN_OPS)[len(shape.size)]


class ModelSite(Site):
    """The output x_k of a submodule, as a site.

    Parameters
    ----------
    name
        The name of the submodule, and the key of the α table: every site has its own table
        (macro-search).
    shape
        The shape of x_k.
    sources
        The output shapes of the submodules that the site may read, by name.
    op_names
        The eligible operations. Those that apply to x_k, images, tokens or vectors, are used.
    values
        The outputs of the sources during a forward pass.
    last_reads
        The sources that no later site reads.

    Attributes
    ----------
    channels_last
        Whether the submodule returns images (N, H, W, C).
    """

    channels_last = False

    def __init__(
        self,
        name: str,
        shape: FeatureShape,
        sources: Mapping[str, FeatureShape],
        op_names: Sequence[str],
        values: ForwardValues,
        last_reads: Collection[str],
    ) -> None:
        known = known_ops(shape)
        own_ops = [op for op in op_names if op in known]
        if not own_ops:
            raise GrowthError(
                f"ops must have at least one of {', '.join(known)} for site {name!r} but got"
                f" {', '.join(op_names)}."
            )
        super().__init__(name, tuple(sources), own_ops)
        self.shape, self.source_shapes = shape, dict(sources)
        self.values, self.last_reads = values, tuple(last_reads)
        # An empty tensor that moves with the network, as device and dtype for new modules.
        self.register_buffer("place", torch.empty(0), persistent=False)

    def make_adapter(self, source: str) -> nn.Module | None:
        """Make a projection to x_k's width that halves the resolution as often as needed."""
        raw, width = self.source_shapes[source], self.shape.channels
        times = halvings(raw, self.shape)
        assert times is not None
        if times:
            early = [FactorizedReduce(raw.channels, raw.channels) for _ in range(times - 1)]
            return nn.Sequential(*early, FactorizedReduce(raw.channels, width))
        if raw.channels == width:
            return None
        if raw.is_tokens:
            return project_tokens(raw.channels, width)
        return project(raw.channels, width) if raw.size else project_vector(raw.channels, width)

    def make_op(self, source: str, op: str) -> nn.Module:
        """Make a candidate op; adapted sources have x_k's shape."""
        width = self.shape.channels
        if self.shape.is_tokens:
            return make_token_op(op, width, self.values.mask_of)
        return make_op(op, width) if self.shape.size else make_vector_op(op, width)

    def make_merge(self, merge: str, weights: Sequence[float] | None, n: int) -> nn.Module:
        """Make op_merge: concatenation and projection (the paper's choice), or a weighted sum."""
        if merge == "concat_project":
            concat_project = (ConcatProjectVector, ConcatProjectTokens, ConcatProject)
            return concat_project[len(self.shape.size)](self.shape.channels, n, weights)
        return super().make_merge(merge, weights, n)

    def forward(self, x_k: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return x_k, boosted by its weak learners."""
        boosted = self.boost(x_k, self.adapt(inputs))
        if self.weak_learner is None or not torch.is_grad_enabled():
            return boosted
        # Later modules may change the output in place, which a view from an autograd function
        # does not allow.
        return boosted.clone()

    def boost_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Replace the output by the boosted x_k; a forward hook of the submodule."""
        seen = self.values.passes[-1] if self.values.passes else {}
        boosted = self._boosted(output, self._read(seen)) if self._has_grown() else None
        for source in self.last_reads:
            seen.pop(source, None)
        return boosted

    def _boosted(self, output: Any, inputs: Mapping[str, Tensor]) -> Any:
        boosted: Tensor = self(_channels_first(output, self.channels_last), inputs)
        return with_features(output, boosted.permute(0, 2, 3, 1) if self.channels_last else boosted)

    def _has_grown(self) -> bool:
        return len(self.learners) > 0 or self.weak_learner is not None

    def _read(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for source in self._wanted():
            if source not in seen:
                raise GrowthError(
                    f"{self.key!r} needs the output of {source!r}, which has not run: call the"
                    " whole network, not a part of it."
                )
        return {source: seen[source] for source in self._wanted()}

    def _wanted(self) -> Sequence[str]:
        if self.weak_learner is not None:
            return self.sources
        learners = [cast(WeakLearner, learner) for learner in self.learners]
        read = {source for learner in learners for source, _ in learner.shortcuts}
        return [source for source in self.sources if source in read]

    def extra_repr(self) -> str:
        """Show the shape and the sources."""
        return f"{self.shape}, sources={', '.join(self.sources)}"


class ModelSites(NamedModules):
    """The sites of a network by the names of their submodules.

    Its forward pass is the identity, because a `torch.nn.Sequential` runs all its children.
    """

    def forward(self, x: Any) -> Any:
        """Return x."""
        return x
