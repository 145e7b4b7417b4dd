"""Search policies that read a truth table: a training is a look into the table.

A policy is a generator. It yields the code of the architecture to train next and is sent the
validation accuracy that one training of it has. The policies that grow ask a real `Search` for the
parent, so the rule that is simulated is the rule that runs.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nni_petridish.search.hull import choose_parent, lower_hull
from nni_petridish.search.records import FULL, Growth, Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import Limits, SearchSettings
from nni_petridish.studies.judge.tables import TruthTable

PAPER = "paper"
"""The name of the paper's policy, as `Search` runs it."""
WITHIN = "within limit"
"""The name of the paper's policy without children beyond the limit."""
_IDLE = 200
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
        while idle < _IDLE and isinstance(growth := search.ask(), Growth):
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
    """What a growing policy knows: every trained model, its accuracy and its growths."""

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


def random_search(scene: Scene) -> Trainings:
    """Train architectures drawn from all within the limit, none twice."""
    for code in _shuffled(scene):
        yield Training(code)


def regularized_evolution(population: int = 10, sample: int = 3) -> Policy:
    """Return regularized evolution (Real et al. 2019): the oldest dies, one digit mutates."""

    def run(scene: Scene) -> Trainings:
        alive: deque[tuple[float, str]] = deque()
        for code in _shuffled(scene)[:population]:
            alive.append(((yield Training(code)), code))
        while True:
            rivals = scene.rng.sample(list(alive), min(sample, len(alive)))
            code = scene.rng.choice(_neighbors(scene, max(rivals)[1]))
            alive.append(((yield Training(code)), code))
            alive.popleft()

    return run


def local_search(scene: Scene) -> Trainings:
    """Climb: train neighbors in random order, move to a better one; restart on a hilltop."""
    known: dict[str, float] = {}
    for start in _shuffled(scene):
        if start not in known:
            known[start] = yield Training(start)
        here, moved = start, True
        while moved:
            moved = False
            around = _neighbors(scene, here)
            scene.rng.shuffle(around)
            for code in around:
                if code not in known:
                    known[code] = yield Training(code)
                if known[code] > known[here]:
                    here, moved = code, True
                    break


def tpe(scene: Scene) -> Trainings:
    """Let Optuna's TPE propose digits; one beyond the limit counts as 0 % and as no training."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=scene.rng.randrange(2**31))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    digits = ["".join(sorted({code[i] for code in scene.table.rows})) for i in _places(scene)]
    refused = 0
    while refused < _IDLE:
        trial = study.ask()
        code = "".join(trial.suggest_categorical(f"d{i}", digits[i]) for i in _places(scene))
        if not scene.fits(code):
            study.tell(trial, 0.0)
            refused += 1
            continue
        refused = 0
        study.tell(trial, (yield Training(code)))


def _shuffled(scene: Scene) -> list[str]:
    """Return all architectures within the limit in random order."""
    codes = [code for code in scene.table.rows if scene.fits(code)]
    scene.rng.shuffle(codes)
    return codes


def _places(scene: Scene) -> range:
    return range(len(scene.table.seed))


def _neighbors(scene: Scene, code: str) -> list[str]:
    """Return the architectures within the limit that differ in one digit."""
    digits = sorted({digit for other in scene.table.rows for digit in other[:1]})
    found = [
        code[:i] + digit + code[i + 1 :]
        for i in range(len(code))
        for digit in digits
        if digit != code[i]
    ]
    return [other for other in found if scene.fits(other)]


def policies(taus: Sequence[float] = (0.3, 0.5, 0.7, 0.9)) -> dict[str, NamedPolicy]:
    """Return all policies by name; ``taus`` are the qualities of the score of children."""
    found = {
        "random search": NamedPolicy(random_search),
        "evolution": NamedPolicy(regularized_evolution()),
        "local search": NamedPolicy(local_search),
        "TPE": NamedPolicy(tpe, repetitions=60),
    }
    plain: dict[str, dict[str, Any]] = {
        "random child": {},
        "right half of the time": {"hits": 0.5},
        "best child": {"tau": 1.0},
    }
    for score, options in plain.items():
        found[f"{PAPER}, {score}"] = NamedPolicy(paper(Chooser(**options)))
        found[f"{WITHIN}, {score}"] = NamedPolicy(
            paper(Chooser(**options, within=True)), f"{PAPER}, {score}"
        )
    for tau in taus:
        score = f"τ {tau:g}"
        for base, chooser in ((PAPER, Chooser(tau)), (WITHIN, Chooser(tau, within=True))):
            name, before = f"{base}, {score}", None if base == PAPER else f"{PAPER}, {score}"
            rule = by_upper_confidence(width=0.5, weight=0.5)
            found[name] = NamedPolicy(paper(chooser), before)
            for change, policy in {
                "tolerance 2.5 %": paper(chooser, tolerance=0.025),
                "two children": growing(chooser, by_hull, children=2),
                "three children": growing(chooser, by_hull, children=3),
                "most accurate": growing(chooser, by_accuracy),
                "upper confidence": growing(chooser, rule),
            }.items():
                found[f"{base}, {change}, {score}"] = NamedPolicy(policy, name)
    return found
