"""What has grown on a model of the user's own: the weak learners of each of its sites."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nni_petridish.core.genotype import (
    MERGES,
    VISION_OPS,
    FrozenMapping,
    Genotype,
    Learner,
    _as_list,
    _check_learners,
    _one_of,
    _show,
)
from nni_petridish.errors import GenotypeError

#: The eligible operations on vectors: a linear layer with that activation, or none at all.
VECTOR_OPS = ("relu", "tanh", "identity")
#: All operations that a learner of such a model can have.
MODEL_OPS = (*VISION_OPS, *(op for op in VECTOR_OPS if op not in VISION_OPS))
_FIELDS = ("sources", "ops", "learners")


@dataclass(frozen=True)
class ModelGenotype(Genotype):
    """What has grown on an ordinary module, see `nni_petridish.make_growable`.

    The module itself is not described: whoever builds the network again makes it first.

    Parameters
    ----------
    sources
        For each site, a submodule by its name, the submodules that it may read.
    ops
        The eligible operations.
    learners
        For each site its weak learners, in the order of growth.
    merge
        op_merge of all weak learners: ``"concat_project"`` or ``"weighted_sum"``. Written to JSON
        only where it is not the default.

    Examples
    --------
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

    def __post_init__(self) -> None:
        if self.merge not in MERGES:
            raise GenotypeError(f"merge: must be {_one_of(MERGES)} but got {_show(self.merge)}.")
        ops = _check_ops(self.ops)
        sources = _check_sources(self.sources)
        if not isinstance(self.learners, Mapping) or list(self.learners) != list(sources):
            raise GenotypeError(
                f"learners: must have the sites {', '.join(sources)} for keys but got"
                f" {_show(self.learners)}."
            )
        learners = {
            site: _check_learners(f"learners.{site}", self.learners[site], sources[site], ops)
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
        """Return the genotype of a module on which nothing has grown yet."""
        return cls(sources, ops, dict.fromkeys(sources, ()), merge)

    @property
    def growths(self) -> int:
        """How many weak learners the most grown site has."""
        return max(len(learners) for learners in self.learners.values())

    def learners_by_key(self) -> Mapping[str, Sequence[Learner]]:
        """Return the weak learners of each site."""
        return self.learners

    def grown(self, additions: Mapping[str, Learner], merge: str | None = None) -> ModelGenotype:
        """Return the genotype with one more weak learner for every site in ``additions``."""
        merge = merge or self.merge
        if self.growths and merge != self.merge:
            raise GenotypeError(f"merge: is {self.merge!r} in the parent but got {merge!r}.")
        for key in additions:
            if key not in self.learners:
                known = ", ".join(self.learners)
                raise GenotypeError(f"learners: has no site {key!r}; there are {known}.")
        learners = {
            site: (*before, *([additions[site]] if site in additions else []))
            for site, before in self.learners.items()
        }
        return ModelGenotype(self.sources, self.ops, learners, merge)

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> ModelGenotype:
        for name in _FIELDS:
            if name not in fields:
                raise GenotypeError(f"{name}: is missing.")
        unknown = sorted(map(str, fields.keys() - {*_FIELDS, "merge"}))
        if unknown:
            raise GenotypeError(f"{unknown[0]}: is not a key of a model genotype.")
        return cls(**{"merge": MERGES[0], **fields})

    def _to_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "sources": {site: list(names) for site, names in self.sources.items()},
            "ops": list(self.ops),
            "learners": {
                site: [[list(shortcut) for shortcut in learner] for learner in learners]
                for site, learners in self.learners.items()
            },
        }
        if self.merge != MERGES[0]:
            fields["merge"] = self.merge
        return fields


def _check_ops(ops: object) -> tuple[str, ...]:
    listed = _as_list(ops)
    if not listed or not all(op in MODEL_OPS for op in listed) or len(set(listed)) < len(listed):
        allowed = ", ".join(MODEL_OPS)
        raise GenotypeError(f"ops: must be some of {allowed}, each once, but got {_show(ops)}.")
    return tuple(listed)


def _check_sources(sources: object) -> dict[str, tuple[str, ...]]:
    if not isinstance(sources, Mapping) or not sources:
        raise GenotypeError(
            f"sources: must have the sources of at least one site but got {_show(sources)}."
        )
    return {site: _check_names(f"sources.{site}", names) for site, names in sources.items()}


def _check_names(place: str, names: object) -> tuple[str, ...]:
    listed = _as_list(names)
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise GenotypeError(f"{place}: must be a list of submodules but got {_show(names)}.")
    for name in listed:
        if re.fullmatch(r"h\d+", name):
            raise GenotypeError(
                f"{place}: {name} is the name of a weak learner's output, so it cannot be a source."
            )
    if len(set(listed)) < len(listed):
        raise GenotypeError(f"{place}: must name each submodule once but got {_show(names)}.")
    return tuple(listed)
