"""Our spaces as NNI model spaces, so that every NNI strategy can search in them.

A sample has one entry for each α table: its weak learners, each a list of ``[source, op]``. Random
search, evolution and Petridish use the same samples, and `GrowableModelSpace.genotype` converts any
of them to a genotype.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from nni.mutable import LabeledMutable, SampleMissingError, SampleValidationError
from torch import nn

from nni_petridish.core.genotype import Genotype, Learner, Shortcut
from nni_petridish.core.grow import sites
from nni_petridish.core.space import Space
from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.errors import ConfigError, GenotypeError, PetridishError
from nni_petridish.nni_adapter.compat.nas import ModelSpace
from nni_petridish.nni_adapter.user_spaces import UserSpace
from nni_petridish.search.settings import check_number

__all__ = ["GrowableModelSpace", "LearnersChoice", "NamedSpace", "growable_space", "model_space"]

Sample = dict[str, Any]
_LEGACY_VALUES = 64


class NamedSpace(Space, Protocol):
    """A space that a strategy can search: hashable, with the name of its kind of problem."""

    name: str

    def __hash__(self) -> int: ...


class LearnersChoice(LabeledMutable):
    """The weak learners of one α table, as lists of lists of ``[source, op]``.

    Any number of weak learners is valid. Random samples and grids have a bounded number, since they
    would be infinite otherwise.

    Parameters
    ----------
    space
        The space.
    key
        Key of the α table; also the label.
    max_learners, max_shortcuts
        Largest number of weak learners, and of shortcuts of each, in random samples and grids.
    """

    def __init__(self, space: NamedSpace, key: str, max_learners: int = 3, max_shortcuts: int = 3):
        self.label = key
        self.space = space
        self.max_learners = max_learners
        self.max_shortcuts = max_shortcuts

    def extra_repr(self) -> str:
        """Show the label and the bounds."""
        return f"{self.label!r}, at most {self.max_learners} x {self.max_shortcuts} at random"

    def grown(self, learners: Sequence[Any]) -> Genotype:
        """Return the seed grown by weak learners of this α table only."""
        genotype = self.space.seed()
        for learner in learners:
            shortcuts: Learner = tuple((source, op) for source, op in learner)
            genotype = genotype.grown({self.label: shortcuts})
        return self.space.check(genotype)

    def check_contains(self, sample: Sample) -> SampleValidationError | None:
        """Return the error of a sample, None if it is valid."""
        if self.label not in sample:
            return SampleMissingError(self.label, list(sample))
        try:
            self.grown(sample[self.label])
        except (PetridishError, TypeError, ValueError) as error:
            return SampleValidationError(f"{self.label}: {error}")
        return None

    def freeze(self, sample: Sample) -> list[Any]:
        """Return the weak learners of a sample."""
        self.validate(sample)
        return list(sample[self.label])

    def default(self, memo: Sample | None = None) -> list[Any]:
        """Return no weak learners, as the seed has."""
        return self._remember(memo, [])

    def random(
        self, memo: Sample | None = None, random_state: np.random.RandomState | None = None
    ) -> list[Any]:
        """Draw the number of weak learners, then for each its number of shortcuts and those."""
        if memo is not None and self.label in memo:
            return self.freeze(memo)
        rng = random_state or np.random.RandomState()
        learners: list[Any] = []
        for _ in range(rng.randint(self.max_learners + 1)):
            eligible = _eligible(self.space, self.label, len(learners))
            if not eligible:  # the space's own limit is reached
                break
            count = 1 + rng.randint(min(self.max_shortcuts, len(eligible)))
            chosen = rng.permutation(len(eligible))[:count]
            learners.append([list(eligible[i]) for i in chosen])
        return self._remember(memo, learners)

    def grid(self, memo: Sample | None = None, granularity: int | None = None) -> Iterator[Any]:
        """Yield all values within the bounds, those of few weak learners first.

        The granularity is the largest total number of shortcuts.
        """
        if memo is not None and self.label in memo:
            yield self.freeze(memo)
            return
        memo = {} if memo is None else memo
        everything = self.max_learners * self.max_shortcuts
        shortcuts = everything if granularity is None else min(granularity, everything)
        for length in range(min(self.max_learners, shortcuts) + 1):
            for learners in self._all(length, [], shortcuts):
                memo[self.label] = learners
                yield learners
        del memo[self.label]

    def as_legacy_dict(self) -> dict[str, Any]:
        """Describe the choice for the web UI and for tuners that know finite choices only.

        They get the seed and random values, which are the same every time.
        """
        rng = np.random.RandomState(0)
        values: list[Any] = [[]]
        for _ in range(_LEGACY_VALUES):
            learners = self.random(random_state=rng)
            if learners not in values:
                values.append(learners)
        return {"_type": "choice", "_value": values}

    def _remember(self, memo: Sample | None, learners: list[Any]) -> list[Any]:
        if memo is None:
            return learners
        memo.setdefault(self.label, learners)
        return self.freeze(memo)

    def _all(self, length: int, learners: list[Any], shortcuts: int) -> Iterator[list[Any]]:
        if length == len(learners):
            yield learners
            return
        eligible = _eligible(self.space, self.label, len(learners))
        # Each of the remaining weak learners needs a shortcut too.
        most = min(self.max_shortcuts, len(eligible), shortcuts - (length - len(learners) - 1))
        for count in range(1, most + 1):
            for chosen in itertools.combinations(eligible, count):
                grown = [*learners, [list(pair) for pair in chosen]]
                yield from self._all(length, grown, shortcuts - count)


class GrowableModelSpace(ModelSpace):
    """A space that can grow, for ``NasExperiment(model_space, evaluator, strategy)``.

    `model_space` and `VisionSpace.model_space` return one. ``freeze(sample)`` builds the network of
    a sample with fresh weights.

    Parameters
    ----------
    space
        The space.
    max_learners, max_shortcuts
        Bounds of the samples that other strategies draw; Petridish does not use them.
    """

    def __init__(self, space: NamedSpace, max_learners: int = 3, max_shortcuts: int = 3) -> None:
        super().__init__()
        check_number("max_learners", max_learners, 1, whole=True)
        check_number("max_shortcuts", max_shortcuts, 1, whole=True)
        self.space = space
        for key in _shortcuts(space, space.seed()):
            self.add_mutable(LearnersChoice(space, key, max_learners, max_shortcuts))

    @classmethod
    def create_fixed_module(
        cls, sample: Sample, space: NamedSpace, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Build the network of a sample; NNI calls this in a trial."""
        return space.build(sample_to_genotype(space, sample))

    def freeze(self, sample: Sample) -> nn.Module:
        """Build the network of a sample."""
        self.validate(sample)
        return self.space.build(self.genotype(sample))

    def genotype(self, sample: Sample) -> Genotype:
        """Return the genotype of a sample, as ``export_top_models(formatter="dict")`` has it."""
        return sample_to_genotype(self.space, sample)

    def sample(self, genotype: Genotype) -> Sample:
        """Return the sample of a genotype."""
        return genotype_to_sample(self.space, genotype)

    def extra_repr(self) -> str:
        """Show the space."""
        return repr(self.space)


def model_space(
    space: NamedSpace, max_learners: int = 3, max_shortcuts: int = 3
) -> GrowableModelSpace:
    """Wrap a space for NNI.

    Examples
    --------
    >>> from search_spaces import VisionSpace
    >>> space = model_space(VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=4, stages=2))
    >>> space.genotype({"normal": [[["prev", "identity"]]], "reduce": []}).growths
    1
    """
    return GrowableModelSpace(space, max_learners=max_learners, max_shortcuts=max_shortcuts)


def growable_space(executable: Any, fixed: Mapping[str, Any] | None = None) -> NamedSpace:
    """Return the space of the model space that NNI passes to a strategy.

    Parameters
    ----------
    executable
        The model space, in NNI's format simplified or raw.
    fixed
        Labels and values that do not grow, for spaces of NNI's cells and choices.

    Raises
    ------
    ConfigError
        If the space cannot grow.
    """
    # NNI's formats differ: "raw" has the space itself, "simplified" a recipe to make it.
    model: Any = getattr(executable, "model_space", None) or getattr(executable, "model", None)
    found = getattr(model, "trace_symbol", None)
    if not (isinstance(found, type) and issubclass(found, ModelSpace)):
        raise ConfigError(
            "Petridish needs a model space of nni.nas.nn.pytorch, in NNI's format simplified or"
            f" raw, but got {executable!r}."
        )
    args, kwargs = tuple(model.trace_args), dict(model.trace_kwargs)
    if not issubclass(found, GrowableModelSpace):
        return UserSpace(found, args, kwargs, dict(fixed or {}))
    if fixed:
        raise ConfigError(
            f"fixed is for spaces of NNI's cells and choices only, not for {found.__name__}."
        )
    space: NamedSpace = kwargs.get("space") or args[0]
    return space


def sample_to_genotype(space: NamedSpace, sample: Mapping[str, Any]) -> Genotype:
    """Grow the seed by all weak learners of a sample."""
    genotype = space.seed()
    for key in _shortcuts(space, genotype):
        for learner in sample[key]:
            genotype = genotype.grown({key: tuple((source, op) for source, op in learner)})
    return space.check(genotype)


def genotype_to_sample(space: NamedSpace, genotype: Genotype) -> Sample:
    """Return the sample that describes a genotype."""
    sample: Sample = {}
    for site in sites(_outline(space, genotype)):
        finished = [learner for learner in site.learners if isinstance(learner, WeakLearner)]
        sample[site.key] = [[list(pair) for pair in learner.shortcuts] for learner in finished]
    if sample_to_genotype(space, sample) != genotype:
        raise GenotypeError(f"this genotype is not the seed with weak learners: {genotype!r}.")
    return sample


def to_sample(space: NamedSpace, genotype: Genotype) -> Sample:
    """Return the sample of a genotype of any space that can grow."""
    if isinstance(space, UserSpace):
        return space.sample(genotype)
    return genotype_to_sample(space, genotype)


@functools.lru_cache(maxsize=1024)
def _eligible(space: NamedSpace, key: str, count: int) -> list[Shortcut]:
    """Return the candidates of an α table that has a number of weak learners, whichever."""
    genotype = space.seed()
    for _ in range(count):
        genotype = genotype.grown({key: tuple(_shortcuts(space, genotype)[key][:1])})
    return _shortcuts(space, genotype)[key]


@functools.lru_cache(maxsize=1024)
def _shortcuts(space: NamedSpace, genotype: Genotype) -> dict[str, list[Shortcut]]:
    """Return the candidate shortcuts of every α table."""
    return {site.key: site.eligible_shortcuts() for site in sites(_outline(space, genotype))}


def _outline(space: NamedSpace, genotype: Genotype) -> nn.Module:
    with torch.device("meta"):  # only the structure of the modules is needed
        return space.build(genotype)
