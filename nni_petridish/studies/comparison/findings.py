"""Numbers of a comparison: every measure of every method, by random seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nni_petridish.registry import Measure
from nni_petridish.studies.comparison import measures
from nni_petridish.studies.comparison.settings import Comparison
from nni_petridish.studies.comparison.statistics import Paired, detectable, holm, paired

Result = dict[str, Any]
UNITS = {"processor_time": "seconds", "multiply_adds": "operations"}
"""The key of a budget's unit in a result."""


@dataclass(frozen=True)
class Findings:
    """Results of a comparison.

    Parameters
    ----------
    comparison
        The comparison.
    results
        The results of the finished runs, by method and random seed.
    """

    comparison: Comparison
    results: Mapping[str, Mapping[int, Result]]

    @classmethod
    def of(cls, comparison: Comparison) -> Findings:
        """Read the results of the finished runs."""
        found: dict[str, dict[int, Result]] = {name: {} for name in comparison.methods}
        for run in comparison.runs:
            result = run.result()
            if result is not None:
                found[run.name][run.seed] = result
        return cls(comparison, found)

    @property
    def measure(self) -> Measure:
        """The number that the methods minimize."""
        return self.comparison.measure

    @property
    def limit(self) -> float | None:
        """The largest number of multiply-adds of a model that counts."""
        return self.comparison.section.max_multiply_adds

    @property
    def reference(self) -> str:
        """The method that the others are compared with."""
        return self.comparison.section.reference

    @property
    def unit(self) -> str:
        """The key of the budget's unit."""
        return UNITS[self.comparison.section.budget]

    @property
    def other_unit(self) -> str:
        """The key of the unit of the second view."""
        return next(unit for unit in UNITS.values() if unit != self.unit)

    def values(self, method: str, quantity: str) -> dict[int, float]:
        """Return a quantity of `QUANTITIES` by random seed."""
        compute = QUANTITIES[quantity].compute
        found = {seed: compute(self, method, seed) for seed in self.results[method]}
        return {seed: value for seed, value in found.items() if value is not None}

    def curve(self, method: str, seed: int, unit: str, *, epochs: bool = False) -> measures.Curve:
        """Return an any-time curve, with a point after every epoch if asked for."""
        return measures.curve(self.results[method][seed], unit, self.limit, epochs=epochs)

    def budget(self, seed: int, unit: str) -> float | None:
        """Return the compute of the reference run of a seed."""
        result = self.results[self.reference].get(seed)
        return None if result is None else float(result[unit])

    def tests(self, quantity: str) -> dict[str, tuple[Paired, float]]:
        """Return the comparison of every method with the reference, and its corrected p value."""
        own = self.values(self.reference, quantity)
        found = {
            method: result
            for method in self.comparison.methods
            if method != self.reference
            and self.comparison.section.methods[method].share == 1  # the compute is equal
            and (result := paired(self.values(method, quantity), own)) is not None
        }
        corrected = holm([result.t_test for result in found.values()])
        return {m: (r, p) for (m, r), p in zip(found.items(), corrected, strict=True)}

    def power(self, quantity: str, n: int) -> dict[str, tuple[float, float, float]]:
        """Return for every method what n pairs can show, if these are the results of a pilot.

        Returns
        -------
        dict
            The standard deviation of the differences to the reference, and the smallest difference
            that is found with probability 0.8 at the level 0.05, and at this level divided by
            the number of comparisons.
        """
        tests = self.tests(quantity)
        found = {}
        for method, (result, _) in tests.items():
            if result.n > 1:
                deviation = result.error * math.sqrt(result.n)
                strict = detectable(deviation, n, 0.05 / len(tests))
                found[method] = (deviation, detectable(deviation, n), strict)
        return found


@dataclass(frozen=True)
class Quantity:
    """A compared number of a run.

    Parameters
    ----------
    title
        Its title; ``{error}`` stands for the name of the measure.
    compute
        Its value for a method and a random seed; None if it has none.
    lower_is_better
        Whether lower is better.
    """

    title: str
    compute: Callable[[Findings, str, int], float | None]
    lower_is_better: bool = True


def _final(found: Findings, method: str, seed: int) -> float | None:
    final = found.results[method][seed]["final"]
    return found.measure.scale * final["test_error"] if final else None


def _test(found: Findings, method: str, seed: int) -> float:
    return found.measure.scale * float(found.results[method][seed]["test_error"])


def _validation(found: Findings, method: str, seed: int) -> float:
    return found.measure.scale * float(found.results[method][seed]["best"]["error"])


def _area(found: Findings, method: str, seed: int) -> float | None:
    return _area_over(found, method, seed, found.unit)


def _other_area(found: Findings, method: str, seed: int) -> float | None:
    return _area_over(found, method, seed, found.other_unit)


def _area_over(found: Findings, method: str, seed: int, unit: str) -> float | None:
    end = found.budget(seed, unit)
    points = found.curve(method, seed, unit)
    return None if end is None else found.measure.scale * measures.area(points, end)


def _at_other(found: Findings, method: str, seed: int) -> float | None:
    end = found.budget(seed, found.other_unit)
    points = found.curve(method, seed, found.other_unit)
    # A little above, since the reference's own last model lies at its end.
    at = None if end is None else measures.error_at(points, end * (1 + 1e-9))
    return None if at is None else found.measure.scale * at


def _hypervolume(found: Findings, method: str, seed: int) -> float:
    return 100 * measures.hypervolume(found.results[method][seed], found.limit)


def _reach(found: Findings, method: str, seed: int) -> float | None:
    """Return the share of the budget after which the baseline's last error is reached."""
    baseline = found.comparison.section.baseline
    budget = found.budget(seed, found.unit)
    if baseline is None or budget is None or seed not in found.results.get(baseline, {}):
        return None
    target = found.curve(baseline, seed, found.unit)[-1][1]
    return measures.compute_to(found.curve(method, seed, found.unit), target) / budget


QUANTITIES: dict[str, Quantity] = {
    "final": Quantity("test {error} after final training", _final),
    "test": Quantity("test {error} as found", _test),
    "validation": Quantity("validation {error}", _validation),
    "area": Quantity("mean of the any-time curve", _area),
    "other_area": Quantity("mean of the any-time curve in the second view", _other_area),
    "at_other": Quantity("validation {error} in the second view", _at_other),
    "hypervolume": Quantity("hypervolume (%)", _hypervolume, lower_is_better=False),
    "reach": Quantity("share of the budget to reach the baseline", _reach),
}
"""The compared numbers by name; the first one that all have is the primary one."""


def primary(found: Findings) -> str:
    """Return the quantity that decides: the test error after final training, if there is one."""
    return "final" if found.comparison.section.final is not None else "test"


def median_or_never(values: list[float]) -> float:
    """Return the median, infinite if most never reach."""
    return statistics.median(values) if values else math.inf
