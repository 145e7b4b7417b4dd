"""What has been chosen so far in a space of NNI: the weak learners of each cell and choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nni_petridish.core.genotype import FrozenMapping, Genotype, Learner, _as_list, _show
from nni_petridish.errors import GenotypeError


@dataclass(frozen=True)
class ChoiceGenotype(Genotype):
    """An architecture of a space made of NNI's cells and choices.

    The space itself says what the labels are; see `ForeignSpace`, which also makes NNI's sample of
    a genotype.

    Parameters
    ----------
    choices
        For each label of a cell or a choice its weak learners, in the order of growth. Labels where
        nothing has grown yet are left out.

    Examples
    --------
    >>> genotype = ChoiceGenotype().grown({"normal": (("1", "sep_conv_3x3"),)})
    >>> genotype.to_json()
    '{"version": 1, "space": "nni", "choices": {"normal": [[["1", "sep_conv_3x3"]]]}}'
    >>> Genotype.from_json(genotype.to_json()) == genotype
    True
    """

    choices: Mapping[str, Sequence[Learner]] = field(default_factory=dict)

    space: ClassVar[str] = "nni"

    def __post_init__(self) -> None:
        if not isinstance(self.choices, Mapping):
            raise GenotypeError(f"choices: must be an object but got {_show(self.choices)}.")
        checked = {
            key: _check_learners(f"choices.{key}", learners)
            for key, learners in sorted(self.choices.items())
            if learners != []
        }
        object.__setattr__(self, "choices", FrozenMapping(checked))

    def learners(self, key: str) -> Sequence[Learner]:
        """Return the weak learners of a label, none if nothing has grown there."""
        return self.choices.get(key, ())

    @property
    def growths(self) -> int:
        """How many weak learners the most grown cell or choice has."""
        return max(map(len, self.choices.values()), default=0)

    def learners_by_key(self) -> Mapping[str, Sequence[Learner]]:
        """Return the weak learners of each label where something has grown."""
        return self.choices

    def grown(self, additions: Mapping[str, Learner], merge: str | None = None) -> ChoiceGenotype:
        """Return the genotype with one more weak learner for every key in ``additions``."""
        grown = {key: (*self.learners(key), learner) for key, learner in additions.items()}
        return ChoiceGenotype({**self.choices, **grown})

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> ChoiceGenotype:
        unknown = sorted(map(str, fields.keys() - {"choices"}))
        if unknown:
            raise GenotypeError(f"{unknown[0]}: is not a key of a genotype of choices.")
        if "choices" not in fields:
            raise GenotypeError("choices: is missing.")
        return cls(fields["choices"])

    def _to_fields(self) -> dict[str, Any]:
        return {
            "choices": {
                key: [[list(shortcut) for shortcut in learner] for learner in learners]
                for key, learners in self.choices.items()
            }
        }


def _check_learners(place: str, learners: object) -> tuple[Learner, ...]:
    listed = _as_list(learners)
    if not listed or not all(_as_list(learner) for learner in listed):
        raise GenotypeError(
            f"{place}: must be a list of lists of [source, op] but got {_show(learners)}."
        )
    for learner in listed:
        for shortcut in learner:
            pair = _as_list(shortcut)
            if pair is None or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
                raise GenotypeError(f"{place}: must hold [source, op] but got {_show(shortcut)}.")
    return tuple(tuple((source, op) for source, op in learner) for learner in listed)
