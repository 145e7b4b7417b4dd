"""Growth of any model: weak learners on the submodules of an ordinary module."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import sites as find_sites
from nni_petridish.errors import GenotypeError, GrowthError
from search_spaces.any_model.causality import check_causal, choose_token_ops, token_flows
from search_spaces.any_model.genotype import VECTOR_OPS, ModelGenotype
from search_spaces.any_model.site import (
    ForwardValues,
    ModelSite,
    ModelSites,
    PaddingHook,
    SourceHook,
)
from search_spaces.any_model.stages import (
    default_sources,
    find_stages,
    find_token_stages,
    without_sources,
)
from search_spaces.any_model.trace import Example, Layer, Trace, halvings
from search_spaces.vision.op_registry import VISION_OPS

Net = TypeVar("Net", bound=nn.Module)
CONTAINER = "petridish"
"""The attribute of the network that holds its sites."""
SKIPPED = "skipped_sites"
"""The attribute of the network that holds the layers that are not default sites, with reasons."""

logger = logging.getLogger(__name__)


def make_growable(
    module: Net,
    example: Example,
    *,
    sites: Sequence[str] | None = None,
    sources: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    ops: Sequence[str] | None = None,
    merge: str = "concat_project",
    genotype: Genotype | None = None,
) -> Net:
    """Make an ordinary module, such as a trained model of torchvision, growable, in place.

    `nni_petridish.attach_candidates` and `nni_petridish.finalize_candidates` then work on it. Its
    class, the names of its submodules and its predictions do not change. Its state dict keeps its
    keys; those of weak learners are added under ``petridish.``.

    Parameters
    ----------
    module
        Any module. The submodules used as sites and sources must run once in a forward pass and
        return images, (N, C, H, W) or (N, H, W, C) as in Swin, tokens (N, T, C), as a tensor or as
        the first of several values, or vectors (N, F).
    example
        An input, a tuple of inputs, or inputs by name, of any batch size. It is used for one
        forward pass in eval mode to find the order and the output shapes of the submodules, and for
        another one to see whether tokens read later ones.
    sites
        The names of the submodules whose outputs are the layers x_k. By default, the ends of
        stages: the last layer of each run of layers with the same output shape, except the first
        run, which has nothing to read. In a network of tokens, all blocks.
    sources
        In(x_k): the names of the submodules that sites may read, as one list for all sites (a site
        reads those that run before it), or as a mapping from each site to its own list. By default,
        the two nearest ends of stages before the site. Sources of another width are projected,
        larger ones are halved.
    ops
        The eligible operations. By default, all of `VISION_OPS` for images, ``relu``, ``tanh`` and
        ``identity`` for vectors, and `TOKEN_OPS` for tokens, or `CAUSAL_TOKEN_OPS` in a network
        whose tokens do not read later ones.
    merge
        op_merge: ``"concat_project"`` or ``"weighted_sum"``.
    genotype
        The genotype of a grown network to build again. It determines all options above. The weak
        learners start with fresh weights; load the state dict next.

    Returns
    -------
    Net
        The same module, with the attributes ``genotype`` and ``skipped_sites``: the layers that are
        not among the default sites, each with the reason.

    Examples
    --------
    >>> import torch
    >>> from nni_petridish import attach_candidates, finalize_candidates, make_growable
    >>> from torchvision.models import resnet18
    >>> image = torch.zeros(1, 3, 32, 32)
    >>> net = make_growable(resnet18(num_classes=10), image, ops=["sep_conv_3x3", "identity"])
    >>> dict(net.genotype.sources)["layer3"]
    ('layer1', 'layer2')
    >>> net = attach_candidates(net)  # then train with any loop
    >>> grown = finalize_candidates(net, i_max=2)  # then train on
    >>> again = make_growable(resnet18(num_classes=10), image, genotype=grown)
    >>> again.load_state_dict(net.state_dict())
    <All keys matched successfully>
    """
    _check_module(module)
    trace = Trace(module, example)
    skipped: dict[str, str] = {}
    if genotype is None:
        chosen, skipped = _choose_sources(trace, sites, sources)
        chosen_ops = _choose_ops(trace, chosen) if ops is None else ops
        genotype = ModelGenotype.seed(chosen, chosen_ops, merge)
    elif not isinstance(genotype, ModelGenotype):
        raise GenotypeError(f"space: must be model but got {genotype.space!r}.")
    elif (sites, sources, ops) != (None, None, None):
        raise GrowthError("sites, sources and ops must not be given with a genotype: it has them.")
    layers = _check_layers(trace, genotype)
    _check_causality(trace, genotype, layers)
    _add_sites(module, genotype, layers)
    for name, value in (("genotype", genotype), (SKIPPED, skipped)):
        setattr(module, name, value)
    for name, reason in skipped.items():
        logger.info("%s is not a site: %s.", name, reason)
    return module


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise GrowthError(f"module must be a torch.nn.Module but got {type(module).__name__}.")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise GrowthError("module must not be wrapped yet: make it growable, then wrap it.")
    name = type(module).__name__
    if find_sites(module):
        raise GrowthError(f"{name} can grow already: it has sites.")
    for taken in (CONTAINER, "genotype", SKIPPED):
        if hasattr(module, taken):
            raise GrowthError(f"{name} has an attribute {taken!r}, which is needed to grow it.")


def _choose_sources(
    trace: Trace,
    sites: Sequence[str] | None,
    sources: Sequence[str] | Mapping[str, Sequence[str]] | None,
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the sources of every site, as given by the user or found in the trace.

    The second result has the layers that are not among the default sites, with reasons.
    """
    for name, value in (("sites", sites), ("sources", sources)):
        if isinstance(value, str) or (value is not None and len(value) == 0):
            raise GrowthError(f"{name} must be names of submodules, in a list, but got {value!r}.")
    if sites is None and isinstance(sources, Mapping):
        sites = list(sources)
    stages, skipped = find_stages(trace)
    if sites is None:
        sites = list(default_sources(stages))
        if not sites:
            raise GrowthError(_nothing_found(trace, stages))
        skipped.update(without_sources(stages, sites))
    else:
        skipped = {}
    layers = sorted((trace.layer("site", site) for site in sites), key=lambda layer: layer.order)
    if isinstance(sources, Mapping):
        _check_sites_of(sources, sites)
        return {layer.name: list(sources[layer.name]) for layer in layers}, skipped
    if sources is not None:
        named = [trace.layer("source", source) for source in sources]
        return _those_before(layers, named), skipped
    of_tokens = find_token_stages(trace).ends if any(map(_is_tokens, layers)) else []
    return {
        layer.name: _nearest(layer, of_tokens if _is_tokens(layer) else stages) for layer in layers
    }, skipped


def _is_tokens(layer: Layer) -> bool:
    return layer.shape is not None and layer.shape.is_tokens


def _check_sites_of(sources: Mapping[str, Sequence[str]], sites: Sequence[str]) -> None:
    for site in {**dict.fromkeys(sites), **dict.fromkeys(sources)}:
        if site not in sources or site not in sites or isinstance(sources[site], str):
            raise GrowthError(
                f"sources must have a list for each of the sites {', '.join(sites)} but got"
                f" {dict(sources)!r}."
            )


def _those_before(sites: Sequence[Layer], sources: Sequence[Layer]) -> dict[str, list[str]]:
    chosen = {
        site.name: [source.name for source in sources if source.order < site.order]
        for site in sites
    }
    for site, found in chosen.items():
        if not found:
            names = ", ".join(source.name for source in sources)
            raise GrowthError(f"site {site!r} has no source: none of {names} runs before it.")
    for source in sources:
        if not any(source.name in found for found in chosen.values()):
            raise GrowthError(f"source {source.name!r} runs after every site: no site can read it.")
    return chosen


def _nearest(site: Layer, stages: Sequence[Layer]) -> list[str]:
    before = [stage for stage in stages if stage.order < site.order]
    found = default_sources([*before, site]).get(site.name)
    if not found:
        raise GrowthError(
            f"site {site.name!r} ({site.shape}) has no stage before it that it could read: name"
            " its sources."
        )
    return found


def _nothing_found(trace: Trace, stages: Sequence[Layer]) -> str:
    ends = ", ".join(f"{stage.name} ({stage.shape})" for stage in stages) or "none"
    return (
        f"{type(trace.net).__name__} has no stage that could read an earlier one (ends of stages:"
        f" {ends}): name sites and sources."
    )


def _choose_ops(trace: Trace, sites: Iterable[str]) -> Sequence[str]:
    """Return the default operations on the features of all sites."""
    layers = [trace.layer("site", site) for site in sites]
    axes = {len(cast(Any, layer.shape).size) for layer in layers}
    tokens = choose_token_ops(token_flows(trace, layers)) if 1 in axes else ()
    of_axes = {2: VISION_OPS, 0: VECTOR_OPS, 1: tokens}
    return tuple(dict.fromkeys(op for n, ops in of_axes.items() if n in axes for op in ops))


def _check_causality(trace: Trace, genotype: ModelGenotype, layers: Mapping[str, Layer]) -> None:
    sites = [layers[name] for name in genotype.sources]
    widths = {site.name: cast(Any, site.shape).channels for site in sites}
    check_causal(token_flows(trace, sites), widths, genotype.ops)


def _check_layers(trace: Trace, genotype: ModelGenotype) -> dict[str, Layer]:
    """Return all sites and sources by name, after checking that sites can read their sources."""
    layers: dict[str, Layer] = {}
    for name, names in genotype.sources.items():
        site = layers[name] = trace.layer("site", name)
        for source_name in names:
            source = layers.setdefault(source_name, trace.layer("source", source_name))
            if source.order >= site.order:
                raise GrowthError(f"source {source_name!r} must run before site {name!r}.")
            if source.overwritten:
                raise GrowthError(
                    f"source {source_name!r}: its output is changed in place by what follows, such"
                    " as a ReLU(inplace=True): name that instead."
                )
            _check_sizes(source, site)
    return layers


def _check_sizes(source: Layer, site: Layer) -> None:
    assert source.shape is not None
    assert site.shape is not None
    if halvings(source.shape, site.shape) is None:
        why = (
            "the numbers of tokens differ"
            if source.shape.is_tokens and site.shape.is_tokens
            else "halving, rounding up, never gives that size"
            if len(source.shape.size) == len(site.shape.size)
            else f"one returns {source.shape.kind} and the other {site.shape.kind}"
        )
        raise GrowthError(
            f"source {source.name!r} ({source.shape}) does not fit site {site.name!r}"
            f" ({site.shape}): {why}."
        )


def _add_sites(module: nn.Module, genotype: ModelGenotype, layers: Mapping[str, Layer]) -> None:
    values = ForwardValues()
    container = ModelSites()
    # The last site to read each source: after it, the output of the source is released.
    last_reader = {source: site for site, names in genotype.sources.items() for source in names}
    for name, names in genotype.sources.items():
        shapes = {source: cast(Any, layers[source].shape) for source in names}
        last = [source for source, reader in last_reader.items() if reader == name]
        shape = cast(Any, layers[name].shape)
        site = ModelSite(name, shape, shapes, genotype.ops, values, last)
        site.channels_last = layers[name].channels_last
        for learner in genotype.learners[name]:
            site.add_learner(learner, genotype.merge)
        output = cast(Tensor, layers[name].features)
        site.to(device=output.device, dtype=output.dtype).to(memory_format=torch.channels_last)
        container[name] = site
        layers[name].module.register_forward_hook(site.boost_output)
    for source in last_reader:
        # After the hooks above, so that a site reads the boosted output of another site.
        layers[source].module.register_forward_hook(
            SourceHook(source, values, layers[source].channels_last)
        )
    if any(layers[name].has_tokens for name in genotype.sources):
        hook = PaddingHook(module, values)
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(values.begin, prepend=True)
    module.register_forward_hook(values.end, always_call=True)
    module.add_module(CONTAINER, container.train(module.training))
