"""Architectures of a user's space: the weak learners of each cell and choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from nni_petridish.core.genotype import FrozenMapping, Learner, LearnersGenotype, as_list, show
from nni_petridish.errors import GenotypeError


@dataclass(frozen=True)
class ChoiceGenotype(LearnersGenotype):
    """An architecture of a space made of NNI's cells and choices.

    The labels are those of the space, see `UserSpace`, which also converts a genotype to NNI's
    sample.

    Parameters
    ----------
    choices
        The weak learners of each label of a cell or choice, in the order of growth. Labels where
        nothing has grown are left out.

    Examples
    --------
    >>> from nni_petridish import Genotype
    >>> genotype = ChoiceGenotype().grown({"normal": (("1", "sep_conv_3x3"),)})
    >>> genotype.to_json()
    '{"version": 1, "space": "nni", "choices": {"normal": [[["1", "sep_conv_3x3"]]]}}'
    >>> Genotype.from_json(genotype.to_json()) == genotype
    True
    """

    choices: Mapping[str, Sequence[Learner]] = field(default_factory=dict)

    space: ClassVar[str] = "nni"
    table: ClassVar[str] = "choices"
    noun: ClassVar[str] = "genotype of choices"

    def __post_init__(self) -> None:
        if not isinstance(self.choices, Mapping):
            raise GenotypeError(f"choices: must be an object but got {show(self.choices)}.")
        checked = {
            key: _check_learners(f"choices.{key}", learners)
            for key, learners in sorted(self.choices.items())
            if learners != []
        }
        object.__setattr__(self, "choices", FrozenMapping(checked))

    def learners(self, key: str) -> Sequence[Learner]:
        """Return the weak learners of a label, none if nothing has grown there."""
        return self.choices.get(key, ())

    def _check_key(self, key: str) -> None:
        """Accept any label; the space checks it."""


def _check_learners(place: str, learners: object) -> tuple[Learner, ...]:
    listed = as_list(learners)
    if not listed or not all(as_list(learner) for learner in listed):
        raise GenotypeError(
            f"{place}: must be a list of lists of [source, op] but got {show(learners)}."
        )
    for learner in listed:
        for shortcut in learner:
            pair = as_list(shortcut)
            if pair is None or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
                raise GenotypeError(f"{place}: must hold [source, op] but got {show(shortcut)}.")
    return tuple(tuple((source, op) for source, op in learner) for learner in listed)
