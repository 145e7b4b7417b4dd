"""Growth of any model: weak learners on the submodules of an ordinary module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import sites as find_sites
from nni_petridish.errors import GenotypeError, GrowthError
from search_spaces.any_model.genotype import MODEL_OPS, VECTOR_OPS, ModelGenotype
from search_spaces.any_model.site import ForwardValues, ModelSite, ModelSites, SourceHook
from search_spaces.any_model.trace import Layer, Trace, default_sources, halvings
from search_spaces.vision.op_registry import VISION_OPS

Net = TypeVar("Net", bound=nn.Module)
CONTAINER = "petridish"
"""The attribute of the network that holds its sites."""


def make_growable(
    module: Net,
    example: Tensor | tuple[Any, ...],
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
        return images (N, C, H, W) or vectors (N, F).
    example
        An input, or a tuple of inputs, of any batch size. It is used for one forward pass in eval
        mode to find the order and the output shapes of the submodules.
    sites
        The names of the submodules whose outputs are the layers x_k. By default, the ends of
        stages: the last layer of each run of layers with the same output shape, except the first
        run, which has nothing to read.
    sources
        In(x_k): the names of the submodules that sites may read, as one list for all sites (a site
        reads those that run before it), or as a mapping from each site to its own list. By default,
        the two nearest ends of stages before the site. Sources of another width are projected,
        larger ones are halved.
    ops
        The eligible operations. By default, all of `VISION_OPS` for images, and ``relu``, ``tanh``
        and ``identity`` for vectors.
    merge
        op_merge: ``"concat_project"`` or ``"weighted_sum"``.
    genotype
        The genotype of a grown network to build again. It determines all options above. The weak
        learners start with fresh weights; load the state dict next.

    Returns
    -------
    Net
        The same module, with ``genotype`` as an attribute.

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
    if genotype is None:
        chosen = _choose_sources(trace, sites, sources)
        genotype = ModelGenotype.seed(chosen, _choose_ops(trace, chosen, ops), merge)
    elif not isinstance(genotype, ModelGenotype):
        raise GenotypeError(f"space: must be model but got {genotype.space!r}.")
    elif (sites, sources, ops) != (None, None, None):
        raise GrowthError("sites, sources and ops must not be given with a genotype: it has them.")
    layers = _check_layers(trace, genotype)
    _add_sites(module, genotype, layers)
    setattr(module, "genotype", genotype)  # noqa: B010 - nn.Module declares no such attribute
    return module


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise GrowthError(f"module must be a torch.nn.Module but got {type(module).__name__}.")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise GrowthError("module must not be wrapped yet: make it growable, then wrap it.")
    name = type(module).__name__
    if find_sites(module):
        raise GrowthError(f"{name} can grow already: it has sites.")
    for taken in (CONTAINER, "genotype"):
        if hasattr(module, taken):
            raise GrowthError(f"{name} has an attribute {taken!r}, which is needed to grow it.")


def _choose_sources(
    trace: Trace,
    sites: Sequence[str] | None,
    sources: Sequence[str] | Mapping[str, Sequence[str]] | None,
) -> dict[str, list[str]]:
    """Return the sources of every site, as given by the user or found in the trace."""
    for name, value in (("sites", sites), ("sources", sources)):
        if isinstance(value, str) or (value is not None and len(value) == 0):
            raise GrowthError(f"{name} must be names of submodules, in a list, but got {value!r}.")
    if sites is None and isinstance(sources, Mapping):
        sites = list(sources)
    stages = trace.stages()
    if sites is None:
        sites = list(default_sources(stages))
        if not sites:
            raise GrowthError(_nothing_found(trace, stages))
    layers = sorted((trace.layer("site", site) for site in sites), key=lambda layer: layer.order)
    if isinstance(sources, Mapping):
        _check_sites_of(sources, sites)
        return {layer.name: list(sources[layer.name]) for layer in layers}
    if sources is not None:
        return _those_before(layers, [trace.layer("source", source) for source in sources])
    return {layer.name: _nearest(layer, stages) for layer in layers}


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
        f"{type(trace.net).__name__} has no stage that could read an earlier one (ends of stages"
        f" with images: {ends}): name sites and sources."
    )


def _choose_ops(
    trace: Trace, sources: Mapping[str, Sequence[str]], ops: Sequence[str] | None
) -> Sequence[str]:
    if ops is not None:
        return ops
    kinds = {len(cast(Any, trace.layer("site", site).shape).size) for site in sources}
    if len(kinds) == 2:
        return MODEL_OPS
    return VECTOR_OPS if kinds == {0} else VISION_OPS


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
            "halving, rounding up, never gives that size"
            if len(source.shape.size) == len(site.shape.size)
            else "one returns images and the other vectors"
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
        for learner in genotype.learners[name]:
            site.add_learner(learner, genotype.merge)
        output = layers[name].output
        site.to(device=output.device, dtype=output.dtype).to(memory_format=torch.channels_last)
        container[name] = site
        layers[name].module.register_forward_hook(site.boost_output)
    for source in last_reader:
        # After the hooks above, so that a site reads the boosted output of another site.
        layers[source].module.register_forward_hook(SourceHook(source, values))
    module.register_forward_pre_hook(values.begin, prepend=True)
    module.register_forward_hook(values.end, always_call=True)
    module.add_module(CONTAINER, container.train(module.training))
