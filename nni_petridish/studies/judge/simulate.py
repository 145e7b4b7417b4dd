"""Simulate search policies on a truth table, many times: regret after so many trainings.

Each training is seen through one of its repetitions in the table, as a search would see it. The
best model is selected by what was seen. Its regret is what its mean accuracy lacks to the best mean
accuracy within the limit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nni_petridish.studies.judge.policies import policies
from nni_petridish.studies.judge.scene import NamedPolicy, Policy, Scene, Training
from nni_petridish.studies.judge.tables import TruthTable

TRAININGS = (10, 20, 50)
CLOCKS = (10, 20)
WEAK_COST = 2 / 3
"""Weak learning over the training after it: it takes 40 % of a growth."""


@dataclass(frozen=True)
class Simulated:
    """The searches of one policy within one limit.

    Parameters
    ----------
    policy, limit
        Name of the policy, and the limit on multiply-adds.
    reference
        Name of the policy that it changes; None if it stands alone.
    regrets
        For each number of trainings, the regret of every repetition in points.
    clock_regrets
        The same for equal time: for each n, when the time that n trainings of networks at the limit
        take is over. Time goes with multiply-adds, and weak learning counts.
    """

    policy: str
    limit: int
    reference: str | None
    regrets: Mapping[int, tuple[float, ...]]
    clock_regrets: Mapping[int, tuple[float, ...]]


def simulate(
    table: TruthTable,
    *,
    repetitions: int = 300,
    seed: int = 0,
    named: Mapping[str, NamedPolicy] | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> list[Simulated]:
    """Simulate policies within every limit of a table.

    Parameters
    ----------
    table
        The table.
    repetitions
        Number of searches of each policy; a slow one may have fewer.
    seed
        Random seed; every repetition of every policy has its own generator.
    named
        The policies by name; by default all of `policies`.
    tell
        Called with a line for each simulated policy: its mean regret after every number of
        `TRAININGS`.
    """
    found = []
    for limit in table.limits:
        for name, one in (policies() if named is None else named).items():
            paths = [
                _run(one.policy, table, limit, random.Random(f"{seed}:{name}:{i}"))
                for i in range(min(repetitions, one.repetitions or repetitions))
            ]
            found.append(_measure(table, limit, name, one.reference, paths))
            regrets = found[-1].regrets
            means = ", ".join(f"{sum(r) / len(r):.2f}" for r in regrets.values())
            tell(f"{limit / 1e6:g}M  {name}: regret {means}")
    return found


Path = list[tuple[Training, float]]
"""The trainings, and the accuracies that were seen."""


def _run(policy: Policy, table: TruthTable, limit: int, rng: random.Random) -> Path:
    budget = max(TRAININGS)
    trainings = policy(Scene(table, limit, budget, rng))
    path: Path = []
    try:
        training = next(trainings)
        while len(path) < budget:
            accuracy = rng.choice(table.rows[training.code].accuracies)
            path.append((training, accuracy))
            training = trainings.send(accuracy)
    except StopIteration:
        pass
    return path


def _measure(
    table: TruthTable, limit: int, name: str, reference: str | None, paths: Sequence[Path]
) -> Simulated:
    best = table.best_within(limit)

    def regrets(parts: Sequence[Path]) -> tuple[float, ...]:
        return tuple(best - _selected(table, part, limit) for part in parts)

    return Simulated(
        name,
        limit,
        reference,
        {n: regrets([path[:n] for path in paths]) for n in TRAININGS},
        {n: regrets([_until(table, path, n * limit) for path in paths]) for n in CLOCKS},
    )


def _until(table: TruthTable, path: Path, time: float) -> Path:
    """Return the trainings that are finished in this time; the first one always is."""
    part: Path = []
    for training, accuracy in path:
        time -= table.rows[training.code].multiply_adds * (1 + WEAK_COST * training.weak)
        if part and time < 0:
            break
        part.append((training, accuracy))
    return part


def _selected(table: TruthTable, path: Path, limit: int) -> float:
    """Return the mean accuracy of the network within the limit that was seen to be the best."""
    within = [pair for pair in path if table.rows[pair[0].code].multiply_adds <= limit]
    training, _ = max(within, key=lambda pair: pair[1])
    return table.rows[training.code].accuracy
