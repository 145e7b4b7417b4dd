"""A search through the strategy: its arguments, and its state once the space is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import ConfigError, GalleryError
from nni_petridish.gallery.description import find_differences
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.search_gallery import open_gallery
from nni_petridish.nni_adapter.evaluators.fingerprint import Plain, describe, fingerprint
from nni_petridish.nni_adapter.evaluators.lengths import check_evaluator, own_epochs
from nni_petridish.nni_adapter.evaluators.task import Metric
from nni_petridish.nni_adapter.space import NamedSpace, growable_space, to_sample
from nni_petridish.nni_adapter.user_spaces import UserSpace
from nni_petridish.registry import kind_of
from nni_petridish.running.config import usual_settings
from nni_petridish.running.warm_start import find_start, identity_of, read_start
from nni_petridish.search.ranges import Range, make_chooser, split_ranges
from nni_petridish.search.records import plain
from nni_petridish.search.search import Chooser
from nni_petridish.search.settings import GrowthSettings, Limits, SearchSettings, check_number


@dataclass(frozen=True)
class StrategySettings:
    """The arguments of `Petridish`, checked before an experiment starts anything.

    Parameters
    ----------
    folder
        Folder of the gallery.
    search
        Arguments of `SearchSettings`, as far as they are given; λ and I_max may be ranges.
    limits
        Limits of the search.
    variants
        ``l1_schedule``, ``weak_learning`` and ``score``.
    epochs, evaluators
        Epochs and evaluator of each phase; None for those of the experiment.
    metric
        The metric of the search among the evaluators' reports.
    chooser
        Chooses λ and I_max of each growth.
    fixed
        Labels and values that do not grow.
    start, start_model
        The gallery or file, and the model in it, to start from.
    allow_changed_evaluator
        Whether models that were trained with other evaluators or data are accepted.
    """

    folder: Path
    search: Mapping[str, Any]
    limits: Limits
    variants: Mapping[str, Any]
    epochs: Mapping[str, int | None]
    evaluators: Mapping[str, Any]
    metric: Metric
    chooser: Chooser | None = None
    fixed: Mapping[str, Any] | None = None
    start: Path | None = None
    start_model: str | None = None
    allow_changed_evaluator: bool = False

    def __post_init__(self) -> None:
        numbers, ranges = split_ranges(self.search)
        if ranges and self.chooser is not None:
            names = " and ".join(ranges)
            raise ConfigError(f"{names} must not be a range where a chooser is given.")
        if self.fixed is not None and not isinstance(self.fixed, Mapping):
            raise ConfigError(f"fixed must be labels and their values but got {self.fixed!r}.")
        SearchSettings(**numbers, limits=self.limits, complexity=self.variants["complexity"])
        for phase, epochs in self.epochs.items():
            if epochs is not None:
                check_number(f"{phase}_epochs", epochs, 1, whole=True)
        GrowthSettings(**self.variants)


class PreparedSearch:
    """A search whose space and evaluators are known, with its gallery.

    Parameters
    ----------
    strategy
        The arguments of the strategy.
    model_space
        The model space that NNI passes to the strategy, with the evaluator of the experiment.

    Attributes
    ----------
    space
        The space.
    evaluators
        The evaluator of each phase.
    plan, settings
        The settings of every growth and of the search.
    start, seed
        The model to start from, if any, and the architecture of the seed model.
    gallery
        The gallery.
    chooser
        Chooses λ and I_max of each growth; None if they are numbers.
    """

    def __init__(self, strategy: StrategySettings, model_space: Any) -> None:
        self.space = growable_space(model_space, strategy.fixed)
        search, ranges = _with_defaults(strategy, self.space)
        self.evaluators = {
            phase: model_space.evaluator if evaluator is None else evaluator
            for phase, evaluator in strategy.evaluators.items()
        }
        for phase, evaluator in self.evaluators.items():
            check_evaluator(phase, evaluator, strategy.epochs[phase])
        epochs: dict[str, Any] = {
            f"{phase}_epochs": strategy.epochs[phase] or own_epochs(evaluator)
            for phase, evaluator in self.evaluators.items()
        }
        self.plan = GrowthSettings(**epochs, **strategy.variants)
        complexity = self.plan.complexity
        self.settings = SearchSettings(
            **search, limits=strategy.limits, **epochs, complexity=complexity
        )
        # As in `SearchConfig.identity`, a range replaces its number.
        ranged = {name: asdict(range) for name, range in ranges.items()}
        described = {"space": self.space.name, **self.space.describe()}
        self.start: dict[str, Any] | None = None
        self.seed: Genotype = self.space.seed()
        if strategy.start is not None:
            self.start = find_start(strategy.start, strategy.start_model, described)
            self.seed = read_start(self.start).genotype
        self.gallery = open_gallery(
            strategy.folder,
            described,
            {
                **self.settings.identity(),
                **{k: v for k, v in self.plan.to_dict().items() if k in strategy.variants},
                **ranged,
                **identity_of(self.start),
                **_evaluator_identity(strategy, self.evaluators),
            },
        )
        chooser = make_chooser(ranges, self.settings, self.gallery.journal.read_all)
        self.chooser = chooser or strategy.chooser

    def sample(self, id: str | None) -> dict[str, Any]:
        """Return the sample of a model of the gallery, or of the seed for None."""
        return to_sample(self.space, self.seed if id is None else self.genotype(id))

    def genotype(self, id: str) -> Genotype:
        """Return the genotype of a model of the gallery."""
        return Genotype.from_dict(self.gallery.load_documents(id).get("genotype"))


def _evaluator_identity(strategy: StrategySettings, evaluators: Mapping[str, Any]) -> Plain:
    """Return the fingerprint of the evaluators for the gallery, or refuse another one there.

    Raises
    ------
    GalleryError
        If the models of the gallery were trained with other evaluators or data.
    """
    metric = {"name": strategy.metric.name, "optimize": strategy.metric.optimize}
    made = fingerprint(evaluators)
    wanted = {**made, "metric": {**metric, "error": describe(strategy.metric.error)}}
    try:
        gallery = Gallery(strategy.folder)
    except GalleryError:  # there is none yet, or open_gallery says what is wrong with it
        return {"evaluator": wanted}
    known = gallery.settings
    if "evaluator" not in known:  # of an earlier version
        return {}
    lines = find_differences(known["evaluator"], plain(wanted), "evaluator")
    if lines and not gallery.model_ids():
        gallery.change_settings(evaluator=wanted)
        return {"evaluator": wanted}
    if lines and not strategy.allow_changed_evaluator:
        raise GalleryError(
            f"The models in {strategy.folder} were trained otherwise: {'; '.join(lines)}. Choose"
            " another gallery, or accept them by allow_changed_evaluator=True."
        )
    return {"evaluator": known["evaluator"]}


def _with_defaults(
    strategy: StrategySettings, space: NamedSpace
) -> tuple[dict[str, Any], dict[str, Range]]:
    """Return the settings of the search in a space, and the ranges among them."""
    if isinstance(space, UserSpace):
        _check_user_space(strategy)
        return split_ranges(strategy.search)
    described = {"space": space.name}
    arguments = kind_of(described).with_defaults(strategy.search)
    return split_ranges(arguments, usual_settings(described))


def _check_user_space(strategy: StrategySettings) -> None:
    weak_learning = strategy.variants["weak_learning"]
    if weak_learning != "isolated":
        raise ConfigError(
            "weak_learning must be isolated for spaces of NNI's cells and choices but got"
            f" {weak_learning!r}."
        )
    if strategy.start is not None:
        raise ConfigError(
            "start must not be given for spaces of NNI's cells and choices, which start from what"
            f" fixed says, but got {str(strategy.start)!r}."
        )
