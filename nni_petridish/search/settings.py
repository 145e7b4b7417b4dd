"""Settings of a search and of its growths: frozen, checked, and convertible to plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from nni_petridish.core.l1 import (
    L1_SCHEDULES,
    LINE,
    SCORES,
    WEAK_LEARNING,
    WITHOUT_WEAK_LEARNING,
)
from nni_petridish.errors import ConfigError, show
from nni_petridish.search.complexity import COMPLEXITIES, MULTIPLY_ADDS
from nni_petridish.search.constraints import LARGEST, Count, OneOf, Share, allows, check_fields
from nni_petridish.search.records import LATENCY, Growth

TRAIN, SKIP = "train", "skip"
STOP, TRAIN_ON = "stop", "train_on"
SHORTCUTS, WIDTH = "shortcuts", "width"
GROWS = (SHORTCUTS, WIDTH)
MILLISECOND = "millisecond"
ComplexityName = Annotated[str, OneOf(tuple(COMPLEXITIES))]


@dataclass(frozen=True)
class Limits:
    """Limits of a search; None means no limit.

    Parameters
    ----------
    max_multiply_adds, max_parameters
        Size from which on a model is not grown any further.
    max_latency
        The same in milliseconds of a forward pass, for a search whose ``complexity`` is latency.
    oversize
        ``"train"`` (the paper's rule) trains children beyond these sizes and grows none of them;
        ``"skip"`` selects other shortcuts, and grows no model whose children are all too large.
    max_growths
        Maximum number of growths in one lineage, from the seed model on.
    max_unpaid
        Number of growths in a row, in one lineage, that brought less than training on was forecast
        to bring, after which it is not grown any further. Needs ``anneal``.
    unpaid
        The fate of such a lineage: ``"stop"``, or ``"train_on"``: its last model is trained on once
        for as long as a network after a growth, and may grow again from there.
    max_models
        Maximum number of models of the search, including seed models and running growths.
    max_epochs
        Maximum number of epochs of the search. A growth that would exceed it is not started.
    max_seconds
        Time after which no growth is started.
    max_failures
        Number of growths in a row that fail, each in both of its attempts, after which the search
        gives up.
    max_pause
        Seconds that a search waits for a disk that is full, read-only or gone before it ends.
    """

    max_multiply_adds: Annotated[float, Ge(1)] | None = None
    max_parameters: Annotated[float, Ge(1)] | None = None
    max_latency: Annotated[float, Gt(0)] | None = None
    oversize: Annotated[str, OneOf((TRAIN, SKIP))] = TRAIN
    max_growths: Annotated[int, Ge(0)] | None = None
    max_unpaid: Count | None = None
    unpaid: Annotated[str, OneOf((STOP, TRAIN_ON))] = STOP
    max_models: Count | None = None
    max_epochs: Count | None = None
    max_seconds: Annotated[float, Ge(0)] | None = None
    max_failures: Count | None = 5
    max_pause: Annotated[float, Ge(0)] | None = 86_400.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.unpaid != STOP and self.max_unpaid is None:
            raise ConfigError(f"unpaid: {self.unpaid} needs max_unpaid, which is not given.")

    def sizes(self) -> dict[str, float]:
        """Return the limits of size that are set, by the name of the complexity."""
        sizes = {name: getattr(self, f"max_{name}") for name in COMPLEXITIES}
        return {name: limit for name, limit in sizes.items() if limit is not None}


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search. The defaults are the paper's for CIFAR-10.

    Parameters
    ----------
    seed
        Random seed of the search.
    l1
        λ, the weight of Σ|α| in weak learning.
    i_max
        I_max, the number of shortcuts of a finished weak learner.
    seeds
        Number of seed models.
    tolerance
        Relative width of the band above the hull whose models can be parents too.
    limits
        Limits of the search.
    seed_epochs, weak_epochs, final_epochs
        Epochs of a seed model, of weak learning, and after finalizing. The search only counts them.
    complexity
        The quantity beside the error that the hull is made of: ``"multiply_adds"`` (the paper's),
        ``"parameters"``, or ``"latency"``, measured on the machine of the growth.
    anneal
        The share of a training in which the learning rate decays, see `GrowthSettings`.
    """

    seed: Annotated[int, Ge(0)] = 0
    l1: Annotated[float, Ge(0)] = 0.001
    i_max: Count = 3
    seeds: Count = 1
    tolerance: Share = 0.0
    limits: Limits = field(default_factory=Limits)
    seed_epochs: Annotated[int, Ge(0)] = 200
    weak_epochs: Annotated[int, Ge(0)] = 80
    final_epochs: Annotated[int, Ge(0)] = 80
    complexity: ComplexityName = MULTIPLY_ADDS
    anneal: Annotated[float, Ge(0), Lt(1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.limits.max_latency is not None and self.complexity != LATENCY:
            raise ConfigError(
                f"limits.max_latency needs complexity to be latency but got {self.complexity!r}."
            )

    def epochs_of(self, growth: Growth) -> int:
        """Return the number of epochs of a growth."""
        if growth.parent is None:
            return self.seed_epochs
        return self.final_epochs + (0 if growth.trains_on else self.weak_epochs)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without later settings that have their defaults."""
        later = {"complexity": MULTIPLY_ADDS, "anneal": 0.0}
        return {k: v for k, v in asdict(self).items() if k not in later or v != later[k]}

    def identity(self) -> dict[str, Any]:
        """Return the settings that identify a search: all but its limits, which may change."""
        return {name: value for name, value in self.to_dict().items() if name != "limits"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchSettings:
        """Build settings from plain data; missing keys keep their defaults."""
        _refuse_unknown(data, cls, "settings")
        limits = data.get("limits", {})
        if not isinstance(limits, Mapping):
            raise ConfigError(f"limits must be a mapping but got {limits!r}.")
        _refuse_unknown(limits, Limits, "limits")
        return cls(**{**data, "limits": Limits(**limits)})


@dataclass(frozen=True)
class GrowthSettings:
    """Length of each phase of a growth, and its variant. The defaults are the paper's for CIFAR-10.

    Parameters
    ----------
    seed_epochs, weak_epochs, final_epochs
        Epochs of a seed model, of weak learning, and after finalizing.
    l1_schedule
        Schedule of λ: ``"constant"``, or a ramp up to λ, ``"linear"`` or ``"cosine"``.
    weak_learning
        ``"isolated"`` or ``"joint"``.
    score
        The number by which candidates are selected: ``"alpha"`` (|α|, the paper's), ``"random"``,
        ``"prior"`` or ``"depth"``, which need no weak learning, or another of
        `nni_petridish.core.select`.
    complexity
        The quantity beside the error that the hull is made of: ``"multiply_adds"`` (the paper's),
        ``"parameters"``, or ``"latency"``, measured on the machine of the growth.
    weak_patience
        If given, weak learning ends before ``weak_epochs`` when the largest |α| have been those of
        the same candidates in so many checks in a row, 20 steps apart.
    eta
        The start of η: 0 (the paper) preserves the predictions of the parent, another number gives
        the new operations a gradient at once, ``"line"`` is the result of a line search on
        validation batches.
    eta_fade
        The share of the training after a growth, its first steps, in which the new weak learners
        fade in from 0 to η·h, with all of their gradient from the first step on: predictions are
        preserved with any start of η. 0 adds them at once. Needs an ``eta`` other than 0.
    reject
        Whether a growth is not made if that line search does not find a lower loss, by more than
        chance explains. Needs ``eta: line``.
    lr_after_growth
        The learning rate of weak learning and of the training after it, as a share of the recipe's:
        the parent was trained to the end of its schedule.
    anneal
        The share of a training, its last epochs, in which the learning rate decays. Before, it is
        that of the recipe, and children grow from the state at that point, momenta included: the
        whole life of a network is one training with one decay at its end, which is all of the last
        training if the limits forbid to grow its result. 0 (the paper) lets the rate decay over the
        whole of each training, and children grow from its end.
    grow
        What a growth adds: ``"shortcuts"`` (the paper), or ``"width"``: more filters in all layers,
        without weak learning and with the same predictions.
    widen_by
        The filters after a growth of the width, as a multiple of those before.
    weak_every
        Candidates are trained on every so many batches; the network itself is trained on all.
    weak_halving
        The share of weak learning after which, again and again, the worse half of the candidates of
        each α table leaves, by |α|; at least 2·I_max stay. 0 (the paper) trains all to the end.
    fewer_shortcuts
        Whether I_max is only the largest number of shortcuts: as many are kept as lower the loss on
        validation batches that their weights were not fitted on, to first order.
    score_per
        What the score of a candidate is divided by: nothing (the paper), or ``"millisecond"`` of a
        training step, measured on the machine of the growth.
    """

    # 0 uses a given start model without training it.
    seed_epochs: Annotated[int, Ge(0)] = 200
    weak_epochs: Annotated[int, Ge(0)] = 80
    final_epochs: Count = 80
    l1_schedule: Annotated[str, OneOf(L1_SCHEDULES)] = "constant"
    weak_learning: Annotated[str, OneOf(WEAK_LEARNING)] = "isolated"
    score: Annotated[str, OneOf(SCORES)] = "alpha"
    complexity: ComplexityName = MULTIPLY_ADDS
    weak_patience: Count | None = None
    eta: Annotated[float, Ge(0), Le(1)] | Annotated[str, OneOf((LINE,))] = 0.0
    eta_fade: Share = 0.0
    reject: bool = False
    lr_after_growth: Annotated[float, Gt(0), Le(1)] = 1.0
    anneal: Annotated[float, Ge(0), Lt(1)] = 0.0
    grow: Annotated[str, OneOf(GROWS)] = SHORTCUTS
    widen_by: Annotated[float, Gt(1), Le(16)] = 1.5
    weak_every: Count = 1
    weak_halving: Annotated[float, Ge(0), Lt(1)] = 0.0
    fewer_shortcuts: bool = False
    score_per: Annotated[str, OneOf((MILLISECOND,))] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.reject and self.eta != LINE:
            raise ConfigError(f"reject needs eta to be {LINE} but eta is {self.eta!r}.")
        if self.eta_fade and self.eta == 0:
            raise ConfigError("eta_fade needs an eta other than 0, to which new learners fade in.")
        if self.eta_fade + self.anneal > 1:
            raise ConfigError(
                f"eta_fade must end before the decay, at most 1 - anneal ({1 - self.anneal:g}), but"
                f" got {self.eta_fade}."
            )
        if self.eta != 0 and self.weak_learning != "isolated":
            raise ConfigError("eta must be 0 in joint weak learning, which finds its own.")
        if self.weak_learning != "isolated":
            isolated = {"weak_every": 1, "weak_halving": 0, "fewer_shortcuts": False}
            for name, usual in isolated.items():
                if getattr(self, name) != usual:
                    raise ConfigError(f"{name} must be {usual} in joint weak learning.")
        if self.grow == WIDTH and self.weak_epochs:
            raise ConfigError(f"weak_epochs must be 0 if grow is width but got {self.weak_epochs}.")
        needs_weak_learning = self.grow == SHORTCUTS and self.score not in WITHOUT_WEAK_LEARNING
        if needs_weak_learning and self.weak_epochs == 0:
            names = " or ".join(WITHOUT_WEAK_LEARNING)
            raise ConfigError(f"weak_epochs must be at least 1 unless score is {names} but got 0.")
        if self.score not in ("alpha", *WITHOUT_WEAK_LEARNING) and self.weak_learning != "isolated":
            raise ConfigError(
                f"weak_learning must be isolated for score {self.score} but got"
                f" {self.weak_learning!r}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without later settings that have their defaults.

        Galleries of earlier versions do not know these.
        """
        later = {f.name: f.default for f in fields(self) if f.name not in _FIRST_SETTINGS}
        return {k: v for k, v in asdict(self).items() if k not in later or v != later[k]}


_FIRST_SETTINGS = ("seed_epochs", "weak_epochs", "final_epochs", "l1_schedule", "weak_learning")
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "l1_schedule": "constant",
        "weak_learning": "isolated",
        "score": "alpha",
        "complexity": MULTIPLY_ADDS,
        "weak_patience": None,
        "eta": 0.0,
        "eta_fade": 0.0,
        "reject": False,
        "lr_after_growth": 1.0,
        "anneal": 0.0,
        "grow": SHORTCUTS,
        "weak_every": 1,
        "weak_halving": 0.0,
        "fewer_shortcuts": False,
        "score_per": None,
    },
    "fast": {"grow": WIDTH, "widen_by": 2.0, "anneal": 0.25, "weak_epochs": 0},
    "deep": {"score": "depth", "anneal": 0.34, "weak_epochs": 0},
}
"""Settings of a growth by name: those that a configuration does not give itself."""


def check_number(name: str, value: Any, minimum: float, whole: bool = False) -> None:
    """Raise a ConfigError of one line unless ``value`` is a number of at least ``minimum``."""
    kind = "a whole number" if whole else "a number"
    if isinstance(value, int) and value > LARGEST:
        raise ConfigError(f"{name} must be at most {LARGEST:g} but got {show(value)}.")
    if not allows(int if whole else float, value):
        raise ConfigError(f"{name} must be {kind} but got {show(value)}.")
    if value < minimum:
        raise ConfigError(f"{name} must be at least {minimum} but got {value!r}.")


def _refuse_unknown(data: Mapping[str, Any], kind: type, what: str) -> None:
    known = [f.name for f in fields(kind)]
    for key in data:
        if key not in known:
            allowed = ", ".join(known)
            raise ConfigError(f"Unknown key {key!r} in {what}; allowed are {allowed}.")
