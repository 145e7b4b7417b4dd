"""The children of a parent, in the order of a simulated score."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from nni_petridish.studies.judge.scene import Scene


class Chooser:
    """Orders the children of a parent by a score as good as measured.

    The score is simulated by ρ·z + √(1−ρ²)·ε, with z the standardized tabulated accuracy of the
    children and ε normal. For a normal pair Kendall's τ is (2/π)·arcsin ρ, so ρ = sin(π·τ/2). The
    score of a child of a parent is drawn once: asking again gives the same order.

    Parameters
    ----------
    tau
        Kendall's τ of the score: 0 is a random child, 1 the best one.
    hits
        If given, the best child comes first with this probability, and else the order is random.
    within
        Whether children beyond the limit are left out. `Search` does not grow models beyond the
        limit, but a growth may exceed it.
    """

    def __init__(self, tau: float = 0.0, hits: float | None = None, within: bool = False) -> None:
        self.rho, self.hits, self.within = math.sin(math.pi * tau / 2), hits, within
        self.needs_weak_learning = bool(tau or hits)

    def order(self, scene: Scene, parent: str) -> list[tuple[str, float]]:
        """Return the children and their scores, best first."""
        rows, rng = scene.table.rows, scene.rng
        children = scene.table.children(parent)
        if self.within:
            children = [child for child in children if scene.fits(child)]
        scores = self._scores([rows[child].accuracy for child in children], rng)
        return sorted(zip(children, scores, strict=True), key=lambda pair: -pair[1])

    def _scores(self, accuracies: Sequence[float], rng: random.Random) -> list[float]:
        if self.hits is not None:
            right = rng.random() < self.hits
            best = max(accuracies, default=0.0)
            return [1.0 + (right and a == best) - rng.random() for a in accuracies]
        n = max(1, len(accuracies))
        mean = math.fsum(accuracies) / n
        deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in accuracies) / n) or 1.0
        noise = math.sqrt(1 - self.rho**2)
        return [self.rho * (a - mean) / deviation + noise * rng.gauss(0, 1) for a in accuracies]


@dataclass
class Orders:
    """The children of every parent that was asked for, those that were trained removed."""

    scene: Scene
    chooser: Chooser
    trained: set[str] = field(default_factory=set)
    _orders: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    def left(self, parent: str) -> list[tuple[str, float]]:
        """Return the untrained children and their scores, best first."""
        if parent not in self._orders:
            self._orders[parent] = self.chooser.order(self.scene, parent)
        return [pair for pair in self._orders[parent] if pair[0] not in self.trained]
