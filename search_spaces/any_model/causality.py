"""Causality of networks and operations on tokens, measured by gradients.

The output of a token depends on another token if the gradient with respect to that token is not
zero. Attention that masks later tokens gives exact zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import GrowthError
from search_spaces.any_model.outputs import features_of, with_features
from search_spaces.any_model.token_ops import make_token_op
from search_spaces.any_model.token_registry import CAUSAL_TOKEN_OPS, KNOWN_TOKEN_OPS, TOKEN_OPS
from search_spaces.any_model.trace import Layer, Trace, call


class Flow(NamedTuple):
    """Flow of information between tokens: from later to earlier ones, and the other way."""

    ahead: bool
    back: bool

    @property
    def is_causal(self) -> bool:
        """Whether tokens read earlier ones and never later ones."""
        return self.back and not self.ahead


class _Seen:
    """Forward hook that keeps the features of a submodule, as a new leaf if asked."""

    def __init__(self, is_leaf: bool) -> None:
        self.is_leaf = is_leaf
        self.features: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        features = features_of(output)
        if not self.is_leaf or features is None:
            self.features = features
            return None
        self.features = features.detach().clone().requires_grad_()
        return with_features(output, self.features)


def choose_token_ops(flows: Mapping[str, Flow]) -> Sequence[str]:
    """Return the default operations for sites with these flows.

    They are causal unless every site is seen to read later tokens: one that reads no other tokens
    may have weights of zero so far.
    """
    return TOKEN_OPS if all(flow.ahead for flow in flows.values()) else CAUSAL_TOKEN_OPS


def check_causal(flows: Mapping[str, Flow], widths: Mapping[str, int], ops: Iterable[str]) -> None:
    """Raise GrowthError if an op looks ahead where the network does not."""
    token_ops = [op for op in ops if op in KNOWN_TOKEN_OPS]
    for site, flow in flows.items():
        ahead = [op for op in token_ops if flow.is_causal and looks_ahead(op, widths[site])]
        if ahead:
            raise GrowthError(
                f"site {site!r} is causal but {', '.join(ahead)} would let its tokens read later"
                f" ones: use some of {', '.join(CAUSAL_TOKEN_OPS)}."
            )


def token_flows(trace: Trace, sites: Iterable[Layer]) -> dict[str, Flow]:
    """Return the flow between tokens up to each site, by name; sites without tokens have none.

    It is measured from the first layer of the network with as many tokens.
    """
    groups: dict[object, list[Layer]] = {}
    for site in sites:
        if site.shape is not None and site.shape.is_tokens:
            groups.setdefault(site.shape.size, []).append(site)
    return {
        site.name: flow
        for size, group in groups.items()
        for site, flow in zip(group, _flows(trace, size, group), strict=True)
    }


def _flows(trace: Trace, size: object, sites: Sequence[Layer]) -> list[Flow]:
    first = next(layer for layer in trace.layers() if layer.shape and layer.shape.size == size)
    leaf, seen = _Seen(True), [_Seen(False) for _ in sites]
    hooked = zip((first, *sites), (leaf, *seen), strict=True)
    handles = [layer.module.register_forward_hook(hook) for layer, hook in hooked]
    try:
        with evaluation_mode(trace.net), torch.enable_grad():
            call(trace.net, trace.example)
            return [_flow(leaf.features, site.features) for site in seen]
    finally:
        for handle in handles:
            handle.remove()


def looks_ahead(op: str, width: int) -> bool:
    """Return whether an operation lets tokens read later ones."""
    # The random generators of the user's program must not notice.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        made = make_token_op(op, width, lambda z: None).eval()
        z = torch.randn(1, 4, width, requires_grad=True)
        return _flow(z, made(z)).ahead


def _flow(z: Tensor | None, x: Tensor | None) -> Flow:
    if z is None or x is None or not x.requires_grad or z.shape[1] < 2:
        return Flow(False, False)
    # Weights that differ: a sum over a normalized width would have no gradient.
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    early = _gradient((x * noise)[:, :-1].sum(), z)
    late = _gradient((x * noise)[:, -1].sum(), z)
    return Flow(bool(early[:, -1].any()), bool(late[:, :-1].any()))


def _gradient(y: Tensor, z: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(y, z, retain_graph=True, allow_unused=True)
    return torch.zeros_like(z) if found is None else found
