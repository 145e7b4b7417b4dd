"""The problem of a simulated search, and what a policy is.

A policy is a generator. It yields the architecture to train next and is sent the validation
accuracy that one training of it has in a truth table.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

from nni_petridish.studies.judge.tables import TruthTable

IDLE = 200
"""Proposals in a row that lead to no training, after which a policy gives up."""


class Training(NamedTuple):
    """A training that a policy asks for.

    Parameters
    ----------
    code
        The architecture.
    weak
        Whether weak learning comes before it.
    """

    code: str
    weak: bool = False


Trainings = Generator[Training, float, None]
"""Yields trainings, is sent accuracies in percent."""


@dataclass(frozen=True)
class Scene:
    """The problem of one simulated search.

    Parameters
    ----------
    table
        The table.
    limit
        Largest multiply-adds of an architecture that counts.
    budget
        Number of trainings.
    rng
        The random generator of this repetition.
    """

    table: TruthTable
    limit: int
    budget: int
    rng: random.Random

    def fits(self, code: str) -> bool:
        """Return whether an architecture is within the limit."""
        return self.table.rows[code].multiply_adds <= self.limit


Policy = Callable[[Scene], Trainings]


@dataclass(frozen=True)
class NamedPolicy:
    """A policy to simulate.

    Parameters
    ----------
    policy
        The policy.
    reference
        Name of the policy that it changes, which it is compared with.
    repetitions
        Largest number of repetitions, for a policy that takes long.
    """

    policy: Policy
    reference: str | None = None
    repetitions: int | None = None
