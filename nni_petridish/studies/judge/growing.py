"""Policies that grow: rules for the parent, and for the child by its score.

The paper's policy asks a real `Search` for the parent, so the rule that is simulated is the rule
that runs.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from nni_petridish.search.hull import choose_parent, lower_hull
from nni_petridish.search.records import FULL, Growth, Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import Limits, SearchSettings
from nni_petridish.studies.judge.children import Chooser, Orders
from nni_petridish.studies.judge.scene import IDLE, Policy, Scene, Training, Trainings


def paper(chooser: Chooser, tolerance: float = 0.0) -> Policy:
    """Return the paper's policy: a parent on the hull with 1/(n+1), a child by its score.

    The parent is chosen by `Search` itself.

    Parameters
    ----------
    chooser
        The score of children.
    tolerance
        Relative width of the band above the hull whose models are parents too.
    """

    def run(scene: Scene) -> Trainings:
        seed, limits = scene.rng.randrange(2**31), Limits(max_multiply_adds=scene.limit)
        search = Search(SearchSettings(seed=seed, tolerance=tolerance, limits=limits))
        orders, codes, idle = Orders(scene, chooser), dict[str, str](), 0
        while idle < IDLE and isinstance(growth := search.ask(), Growth):
            if growth.parent is None:
                code = scene.table.seed
            else:
                left = orders.left(codes[growth.parent])
                if not left:  # all children were trained, some from other parents
                    search.fail(growth.id, "no child is left")
                    idle += 1
                    continue
                code = left[0][0]
            idle = 0
            weak = growth.parent is not None and chooser.needs_weak_learning
            accuracy = yield Training(code, weak)
            orders.trained.add(code)
            codes[growth.id] = code
            search.tell(_outcome(scene, growth.id, code, accuracy, full=not orders.left(code)))

    return run


def _outcome(scene: Scene, id: str, code: str, accuracy: float, full: bool) -> Outcome:
    row = scene.table.rows[code]
    return Outcome(
        id, 100 - accuracy, row.multiply_adds, row.parameters, metrics={FULL: True} if full else {}
    )


@dataclass
class Grown:
    """The models that a growing policy has trained, with accuracies and numbers of growths."""

    scene: Scene
    orders: Orders
    accuracies: dict[str, float] = field(default_factory=dict)
    growths: Counter[str] = field(default_factory=Counter)

    def parents(self) -> list[str]:
        """Return the models below the limit with an untrained child."""
        rows, limit = self.scene.table.rows, self.scene.limit
        return [
            code
            for code in self.accuracies
            if rows[code].multiply_adds < limit and self.orders.left(code)
        ]


ChooseParent = Callable[[Grown], str]


def growing(chooser: Chooser, choose: ChooseParent, children: int = 1) -> Policy:
    """Return a policy with another rule for the parent.

    Parameters
    ----------
    chooser
        The score of children.
    choose
        Returns the code of the parent to grow.
    children
        Number of children to train after one weak learning, in the order of their scores.
    """

    def run(scene: Scene) -> Trainings:
        grown = Grown(scene, Orders(scene, chooser))
        yield from _train(grown, scene.table.seed)
        while grown.parents():
            parent = choose(grown)
            grown.growths[parent] += 1
            weak = chooser.needs_weak_learning
            for code, _ in grown.orders.left(parent)[:children]:
                yield from _train(grown, code, weak)
                weak = False  # one weak learning for all of them

    return run


def _train(grown: Grown, code: str, weak: bool = False) -> Trainings:
    grown.accuracies[code] = yield Training(code, weak)
    grown.orders.trained.add(code)


def by_hull(grown: Grown) -> str:
    """Choose as the paper does, among the models that have a child left."""
    rows, codes = grown.scene.table.rows, list(grown.accuracies)
    points = [(rows[code].multiply_adds, -grown.accuracies[code]) for code in codes]
    on_hull = [codes[i] for i in reversed(lower_hull(points))]
    parents = grown.parents()
    able = [code for code in on_hull if code in parents]
    return choose_parent(able or parents, grown.growths, grown.scene.rng)


def by_accuracy(grown: Grown) -> str:
    """Choose the most accurate model that has a child left."""
    return max(grown.parents(), key=lambda code: grown.accuracies[code])


def by_upper_confidence(width: float, weight: float) -> ChooseParent:
    """Return an upper-confidence rule with the score of the next child as a prior.

    The value of a parent is its accuracy, plus ``weight`` times the standardized score of its best
    untrained child and ``width`` times √(ln N/(1+n)), both in units of the spread of all
    accuracies so far.
    """

    def choose(grown: Grown) -> str:
        known = list(grown.accuracies.values())
        spread = statistics.pstdev(known) or 1.0
        total = math.log(1 + len(known))

        def value(code: str) -> float:
            prior = grown.orders.left(code)[0][1]
            bonus = math.sqrt(total / (1 + grown.growths[code]))
            return grown.accuracies[code] + spread * (weight * prior + width * bonus)

        return max(grown.parents(), key=value)

    return choose
