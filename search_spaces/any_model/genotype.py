"""Architectures grown on a user's own module: the weak learners of each site."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nni_petridish.core.genotype import (
    FrozenMapping,
    Learner,
    LearnersGenotype,
    as_list,
    check_learners,
    check_merge,
    show,
)
from nni_petridish.errors import GenotypeError
from search_spaces.any_model.token_registry import KNOWN_TOKEN_OPS
from search_spaces.vision.op_registry import KNOWN_OPS

#: The eligible operations on vectors: a linear layer with this activation, or the identity.
VECTOR_OPS = ("relu", "tanh", "identity")


@dataclass(frozen=True)
class ModelGenotype(LearnersGenotype):
    """An architecture grown on an ordinary module, see `nni_petridish.make_growable`.

    The module itself is not described: to build the network again, create the module first.

    Parameters
    ----------
    sources
        The names of the submodules that each site may read, by the name of the site.
    ops
        The eligible operations.
    learners
        The weak learners of each site in the order of growth, by the name of the site.
    merge
        op_merge of all weak learners: ``"concat_project"`` or ``"weighted_sum"``. Written to JSON
        only if it is not the default.

    Examples
    --------
    >>> from nni_petridish import Genotype
    >>> genotype = ModelGenotype.seed({"layer2": ["layer1"]}, ["identity"])
    >>> grown = genotype.grown({"layer2": (("layer1", "identity"),)})
    >>> grown.learners["layer2"]
    ((('layer1', 'identity'),),)
    >>> Genotype.from_json(grown.to_json()) == grown
    True
    """

    sources: Mapping[str, Sequence[str]]
    ops: Sequence[str]
    learners: Mapping[str, Sequence[Learner]]
    merge: str = "concat_project"

    space: ClassVar[str] = "model"
    table: ClassVar[str] = "learners"
    key_noun: ClassVar[str] = "site"

    def __post_init__(self) -> None:
        check_merge(self.merge)
        ops = _check_ops(self.ops)
        sources = _check_sources(self.sources)
        if not isinstance(self.learners, Mapping) or list(self.learners) != list(sources):
            raise GenotypeError(
                f"learners: must have the sites {', '.join(sources)} for keys but got"
                f" {show(self.learners)}."
            )
        learners = {
            site: check_learners(f"learners.{site}", self.learners[site], sources[site], ops)
            for site in sources
        }
        object.__setattr__(self, "ops", ops)
        object.__setattr__(self, "sources", FrozenMapping(sources))
        object.__setattr__(self, "learners", FrozenMapping(learners))

    @classmethod
    def seed(
        cls,
        sources: Mapping[str, Sequence[str]],
        ops: Sequence[str],
        merge: str = "concat_project",
    ) -> ModelGenotype:
        """Return the genotype of a module without weak learners."""
        return cls(sources, ops, dict.fromkeys(sources, ()), merge)


def _check_ops(ops: object) -> tuple[str, ...]:
    listed = as_list(ops)
    known = all(op in VECTOR_OPS or op in KNOWN_OPS or op in KNOWN_TOKEN_OPS for op in listed or ())
    if not listed or not known or len(set(listed)) < len(listed):
        allowed = ", ".join(dict.fromkeys((*KNOWN_OPS, *VECTOR_OPS, *KNOWN_TOKEN_OPS)))
        raise GenotypeError(f"ops: must be some of {allowed}, each once, but got {show(ops)}.")
    return tuple(listed)


def _check_sources(sources: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(sources, Mapping) or not sources:
        raise GenotypeError(
            f"sources: must have the sources of at least one site but got {show(sources)}."
        )
    return {site: _check_names(f"sources.{site}", names) for site, names in sources.items()}


def _check_names(place: str, names: object) -> tuple[str, ...]:
    listed = as_list(names)
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise GenotypeError(f"{place}: must be a list of submodules but got {show(names)}.")
    for name in listed:
        if re.fullmatch(r"h\d+", name):
            raise GenotypeError(
                f"{place}: {name} is the name of a weak learner's output, so it cannot be a source."
            )
    if len(set(listed)) < len(listed):
        raise GenotypeError(f"{place}: must name each submodule once but got {show(names)}.")
    return tuple(listed)
