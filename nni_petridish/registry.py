"""The kinds of problems: one line for each, and the contract of a kind."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from nni_petridish.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

ARGUMENTS = "tuner.classArgs"
"""Place of the arguments of a search in a configuration."""


@dataclass(frozen=True)
class Problem:
    """The modules of one kind of problem, by dotted name; they are loaded when they are needed.

    Parameters
    ----------
    genotype
        The module that defines the family of genotypes.
    kind
        The module that implements `Kind`; None if no configuration can name this kind.
    """

    genotype: str
    kind: str | None = None


_PROBLEMS = {
    "vision": Problem("search_spaces.vision.genotype", "nni_petridish.tasks.vision.kind"),
    "recurrent": Problem("search_spaces.recurrent.genotype", "nni_petridish.tasks.language.kind"),
    "model": Problem("search_spaces.any_model.genotype"),
    "nni": Problem("nni_petridish.nni_adapter.user_spaces.genotype"),
    "linear": Problem("search_spaces.linear"),
    "vector": Problem("search_spaces.vector.genotype", "nni_petridish.tasks.tables.kind"),
}
DEFAULT_KIND = "vision"
"""The kind of a configuration that names none."""


def register_kind(name: str, *, genotype: str, kind: str | None = None) -> None:
    """Add a kind of problem.

    Parameters
    ----------
    name
        The value of ``space`` in its genotypes and configurations; a name that is taken raises
        `ConfigError`.
    genotype, kind
        Its modules, see `Problem`.
    """
    problem = Problem(genotype, kind)
    if _PROBLEMS.setdefault(name, problem) != problem:
        raise ConfigError(f"there is a kind of problem named {name!r} already.")


def genotype_homes() -> dict[str, str]:
    """Return the module of each family of genotypes."""
    return {name: problem.genotype for name, problem in _PROBLEMS.items()}


def kind_names() -> list[str]:
    """Return the names of the kinds that a configuration can name."""
    return [name for name, problem in _PROBLEMS.items() if problem.kind is not None]


@dataclass(frozen=True)
class Measure:
    """Name and form of the ``error`` of a model.

    Parameters
    ----------
    name
        The field's word for it.
    is_share
        Whether it lies between 0 and 1 and is shown in percent.
    """

    name: str
    is_share: bool

    @property
    def unit(self) -> str:
        """The unit of its shown form, for the end of a label; empty for a plain number."""
        return " (%)" if self.is_share else ""

    @property
    def scale(self) -> float:
        """The factor between the number and its shown form."""
        return 100.0 if self.is_share else 1.0

    def text(self, value: float) -> str:
        """Return a value in its shown form.

        >>> ERROR.text(0.0367), PERPLEXITY.text(56.51), ERROR.text(float("nan"))
        ('3.67 %', '56.51', 'not finite')
        """
        if not math.isfinite(value):
            return "not finite"
        return f"{100 * value:.2f} %" if self.is_share else f"{value:.4g}"


ERROR = Measure("error", is_share=True)
PERPLEXITY = Measure("perplexity", is_share=False)


@dataclass(frozen=True)
class Suggestion:
    """Settings of a first search that fit some data.

    Parameters
    ----------
    found
        The data in words.
    notes
        Further lines for the user.
    space, data, settings, recipe
        ``searchSpace``, and ``data``, ``recipe`` and other keys of ``tuner.classArgs``.
    """

    found: str
    notes: tuple[str, ...]
    space: Mapping[str, Any]
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    recipe: Mapping[str, Any]


class Kind(Protocol):
    """A module that knows one kind of space.

    Only `load_task`, `data_facts`, `plain_network`, `make_predictor` and `make_retraining` may
    import torch.
    """

    MEASURE: Measure
    """The number that a search of this kind minimizes."""
    TUNED_RANGES: Mapping[str, tuple[float, float]]
    """The ends of the ranges that a study tries by default, both included, by setting."""
    L1_GROUPS: tuple[float, ...]
    """The values of λ that the settings of a study are grouped by."""
    SPACE: type
    """The dataclass of the space's options."""
    DATA: type
    """The dataclass of the options of the data; ``name`` has a default."""
    RECIPE: type
    """The dataclass of the recipe."""
    RETRAINING: type
    """The dataclass of the options of a retraining.

    They are None by default; ``data`` is among them if a model may move to other data.
    """
    SEARCH_ONLY_DATA: tuple[str, ...]
    """The options of the data that a retraining does not have."""
    DECIDED_BY_DATA: tuple[str, ...]
    """The options of the space that a configuration does not name."""

    def read_data(
        self, data: Mapping[str, Any], base: Path, *, for_retraining: bool = False
    ) -> dict[str, Any]:
        """Check that the data are there, without loading; folders are relative to ``base``."""
        ...

    def suggest(self, source: str, root: str | None) -> Suggestion | None:
        """Look at data and return settings that fit them; None if they are not of this kind.

        Parameters
        ----------
        source
            A file, a folder, or the name of a data set.
        root
            The folder of a data set that is named.
        """
        ...

    def check_space(self, options: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """Check that the options of the space fit the data."""
        ...

    def full_space(self, options: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``space`` and all options of the space without looking at the data."""
        ...

    def describe_space(self, space: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``space`` and all options; those that are not given are read off the data."""
        ...

    def make_space(self, space: Mapping[str, Any]) -> Any:
        """Return the space that is described by plain data."""
        ...

    def space_of_weights(
        self, space: Mapping[str, Any], data: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the space with the options that the data decided, read off a model's weights.

        `KeyError` names the weight that is missing.
        """
        ...

    def seed_size(self, space: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[int, int]:
        """Return (multiply-adds, parameters) of the seed."""
        ...

    def with_defaults(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a search with this kind's defaults of λ and I_max."""
        ...

    def read_recipe(
        self, options: Mapping[str, Any], data: Mapping[str, Any], *, for_retraining: bool = False
    ) -> Any:
        """Check the changes to the recipe of the data and return it, a dataclass."""
        ...

    def make_recipe(self, values: Mapping[str, Any]) -> Any:
        """Return the recipe with these values."""
        ...

    def load_task(self, space: Mapping[str, Any], data: Mapping[str, Any], recipe: Any) -> Any:
        """Load the data and make the task, a `nni_petridish.tasks.task.Task`."""
        ...

    def data_facts(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts of the data that a `SavedModel` keeps; none if no data are at hand."""
        ...

    def make_predictor(self, net: Any, space: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
        """Return a function that predicts from raw inputs, as users have them.

        Parameters
        ----------
        net
            The network.
        space
            All options of its space.
        facts
            The facts of its `SavedModel`.
        """
        ...

    def plain_network(
        self, net: Any, space: Mapping[str, Any], facts: Mapping[str, Any], pixels: bool | None
    ) -> Any:
        """Return a network as a `nni_petridish.tasks.plain_network.PlainNetwork`.

        Parameters
        ----------
        net
            The network, in eval mode.
        space
            All options of its space.
        facts
            The facts of its `SavedModel`.
        pixels
            Whether it takes raw pixels and normalizes them itself; None is the kind's default.
        """
        ...

    def check_retraining(self, space: Mapping[str, Any], cells_per_stage: int) -> None:
        """Raise `ConfigError` unless models of the space can get so many cells per stage."""
        ...

    def make_retraining(
        self,
        model: Any,
        searched: tuple[Mapping[str, Any], Any] | None,
        options: Mapping[str, Any],
        changes: Mapping[str, Any],
    ) -> Any:
        """Prepare a training from scratch, a `nni_petridish.tasks.retraining.Retraining`.

        Parameters
        ----------
        model
            The `SavedModel` that a search found.
        searched
            Data and recipe of the search; None if its gallery does not know them.
        options
            Some of the options of `RETRAINING`.
        changes
            Changes to the recipe.
        """
        ...


def kind_of(space: Mapping[str, Any]) -> Kind:
    """Return the kind of a space that is described by plain data."""
    name, known = space.get("space"), kind_names()
    if name not in known:
        raise ConfigError(f"searchSpace.space must be one of {', '.join(known)} but got {name!r}.")
    home = _PROBLEMS[name].kind
    return cast(Kind, importlib.import_module(str(home)))


def kinds_that_retrain_with(option: str) -> list[str]:
    """Return the names of the kinds whose retraining has an option of this name."""
    kinds = {name: kind_of({"space": name}) for name in kind_names()}
    return [
        name
        for name, kind in kinds.items()
        if any(field.name == option for field in fields(kind.RETRAINING))
    ]


def measure_of(space: Mapping[str, Any]) -> Measure:
    """Return the measure of a space; the error for spaces without a kind, such as NNI's."""
    return kind_of(space).MEASURE if space.get("space") in kind_names() else ERROR


_NOTEBOOK = "nni_petridish.results.report.notebook"


def notebook_html(folder: Path) -> str:
    """Return the report of a gallery as an element of a notebook.

    The report is on a higher floor than the gallery that shows it, so it is found by name, as the
    kinds are.
    """
    return str(importlib.import_module(_NOTEBOOK).notebook_html(folder))
