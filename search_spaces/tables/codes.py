"""Architectures written as codes, one digit for each place, as tables have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import nn

from nni_petridish.core.genotype import Genotype, Learner
from nni_petridish.errors import GenotypeError

SOURCE = "prev"
"""The only input of a place."""


@dataclass(frozen=True)
class CodeGenotype(Genotype):
    """An architecture with one digit for each place.

    A place with one of the `empty` digits can grow an operation, which puts its digit there.

    Parameters
    ----------
    code
        The digits.
    """

    code: str

    table: ClassVar[str] = "code"
    empty: ClassVar[str]
    """The digits of places without an operation."""
    digits: ClassVar[Mapping[str, str]]
    """The digit of each operation by its name."""

    def __post_init__(self) -> None:
        known = sorted({*self.empty, *self.digits.values()})
        if not isinstance(self.code, str) or not self.code or set(self.code) - set(known):
            raise GenotypeError(
                f"code: must be digits from {known[0]} to {known[-1]} but got {self.code!r}."
            )

    @classmethod
    def key(cls, place: int) -> str:
        """Return the key of the α table of a place."""
        return f"{cls.key_noun}_{place}"

    @classmethod
    def op(cls, digit: str) -> str | None:
        """Return the name of the operation with this digit; None for an empty place."""
        return next((name for name, own in cls.digits.items() if own == digit), None)

    def learners_by_key(self) -> Mapping[str, Sequence[Learner]]:
        """Return the operation of each place as a weak learner; none where it is empty."""
        ops = map(self.op, self.code)
        return {
            self.key(place): () if op is None else (((SOURCE, op),),)
            for place, op in enumerate(ops)
        }

    def _with_learners(self, learners: Mapping[str, Sequence[Learner]], merge: str | None) -> Self:
        pairs = zip(self.code, learners.items(), strict=True)
        return type(self)("".join(self._digit(digit, *item) for digit, item in pairs))

    def _digit(self, before: str, key: str, learners: Sequence[Learner]) -> str:
        if not learners:
            return before
        if len(learners) > 1 or len(learners[0]) > 1 or learners[0][0][1] not in self.digits:
            raise GenotypeError(f"code: {key} must have one operation but got {learners!r}.")
        return self.digits[learners[0][0][1]]

    def of_length(self, places: int) -> Self:
        """Return the genotype if it has so many places, else raise `GenotypeError`."""
        if len(self.code) != places:
            raise GenotypeError(f"code: must have {places} digits but got {self.code!r}.")
        return self


def inherit(net: nn.Module, parent: nn.Module) -> set[str]:
    """Copy the weights that a network has in common with its parent; return the other names."""
    old, own = parent.state_dict(), net.state_dict()
    net.load_state_dict({name: old.get(name, value) for name, value in own.items()})
    return own.keys() - old.keys()
