"""Classification of the rows of a table in a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from nni_petridish.errors import ConfigError, DataError
from nni_petridish.registry import ARGUMENTS, ERROR, Suggestion
from nni_petridish.search.constraints import (
    Count,
    Folder,
    OneOf,
    Width,
    check_fields,
    prefix,
    resolve,
)
from nni_petridish.tasks.arrays.recipe import ArrayRecipe
from nni_petridish.tasks.recipes import named_recipe
from nni_petridish.tasks.tables.table import check_table, read_table
from search_spaces.vector.space import VectorSpace

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nni_petridish.gallery.saved_model import SavedModel
    from nni_petridish.tasks.plain_network import PlainNetwork
    from nni_petridish.tasks.retraining import Retraining
    from nni_petridish.tasks.tables.inference import RowPredictor
    from nni_petridish.tasks.task import Task


@dataclass(frozen=True)
class TableOptions:
    """The table of a search, a file of comma-separated values.

    Parameters
    ----------
    name
        The form of the file.
    root
        The file.
    target
        The column of the class to predict; by default the last one.
    drop
        The columns to leave out, such as names and numbers of the rows.
    validation
        Training rows to set aside for validation. A sixth of all rows is the test set: a search
        never looks at it.
    seed
        Orders the rows before they are set aside.
    """

    name: Annotated[str, OneOf(("csv",))] = "csv"
    root: Folder | None = None
    target: str | None = None
    drop: Sequence[str] | None = None
    validation: Count | None = None
    seed: Annotated[int, Ge(0)] | None = None


@dataclass(frozen=True)
class TableRecipe(ArrayRecipe):
    """The recipe of a training on a table.

    Parameters
    ----------
    device
        The networks are small: they train on the CPU.
    """

    device: Annotated[str, OneOf(("cpu",))] = "cpu"


@dataclass(frozen=True)
class TableRetrainingOptions:
    """A retraining of a found network.

    Parameters
    ----------
    width
        The width of every cell; by default the search's.
    epochs
        Epochs of the training; by default the recipe's.
    seed
        The first random seed.
    """

    width: Width | None = None
    epochs: Count | None = None
    seed: Annotated[int, Ge(0)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


MEASURE = ERROR
TUNED_RANGES = {"l1": (1e-5, 0.1), "i_max": (1, 4)}
L1_GROUPS = (1e-5, 1e-3, 1e-1)
SPACE = VectorSpace
DATA = TableOptions
RECIPE = TableRecipe
RETRAINING = TableRetrainingOptions
SEARCH_ONLY_DATA = ("validation",)
DECIDED_BY_DATA = ("num_features", "num_outputs")
_PLACE = f"{ARGUMENTS}.data"


def read_data(
    data: Mapping[str, Any], base: Path, *, for_retraining: bool = False
) -> dict[str, Any]:
    """Return the options of the table; raise unless it can be read."""
    from nni_petridish.tasks.tables.splits import split_sizes

    place = "data" if for_retraining else _PLACE
    result = {"name": TableOptions.name, **data}
    if result.get("root") is not None:
        result["root"] = str(resolve(result["root"], base))
    with prefix(f"{place}: "):
        check_table(result.get("root"))
        table = read_table(result)
    with prefix(f"{place}."):
        split_sizes(len(table.labels), result.get("validation"))
    return result


def suggest(source: str, root: str | None) -> Suggestion | None:
    """Suggest settings for a file of comma-separated values."""
    from nni_petridish.tasks.tables.suggestion import suggest_for_table

    return suggest_for_table(source)


def check_space(options: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Check the options of `VectorSpace`."""
    with prefix("searchSpace."):
        VectorSpace(1, 2, **options)


def full_space(options: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the space; features and classes are not looked for."""
    known = {key: value for key, value in options.items() if key != "space"}
    known = {"num_features": 1, "num_outputs": 2, **known}
    return {"space": "vector", **VectorSpace(**known).describe()}


def describe_space(space: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the space; features and classes, if not given, are the table's."""
    full = dict(space)
    if "num_features" not in full:
        full |= _sizes(data)
    return {"space": "vector", **make_space(full).describe()}


def make_space(space: Mapping[str, Any]) -> VectorSpace:
    """Return the space that is described by plain data."""
    return VectorSpace(**{key: value for key, value in space.items() if key != "space"})


def space_of_weights(
    space: Mapping[str, Any], data: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the space with the numbers of features and classes."""
    if "num_features" in space:
        return dict(space)
    features = weights["stem.0.weight"].shape[1]
    outputs = weights["head.weight"].shape[0]
    return {**space, "num_features": features, "num_outputs": outputs}


def seed_size(space: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[int, int]:
    """Return (multiply-adds of a row, parameters) of the seed."""
    described = make_space({**space, **_sizes(data)})
    features, outputs, width = described.num_features, described.num_outputs, described.width
    multiply_adds = features * width + described.num_cells * width * width + width * outputs
    return multiply_adds, multiply_adds + 2 * width * (described.num_cells + 1) + outputs


def with_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as they are: the general defaults serve."""
    return dict(arguments)


def read_recipe(
    options: Mapping[str, Any], data: Mapping[str, Any], *, for_retraining: bool = False
) -> TableRecipe:
    """Return the recipe with changes."""
    with prefix("recipe." if for_retraining else f"{ARGUMENTS}.recipe."):
        return named_recipe(TableRecipe, {str(data["name"]): {}}, str(data["name"]), options)


def make_recipe(values: Mapping[str, Any]) -> TableRecipe:
    """Return the recipe with these values."""
    return TableRecipe(**values)


def load_task(space: Mapping[str, Any], data: Mapping[str, Any], recipe: TableRecipe) -> Task:
    """Read the table and make the task."""
    from nni_petridish.tasks.tables.task import load_rows, make_task

    return make_task(make_space({**space, **_sizes(data)}), load_rows(data), recipe)


def plain_network(
    net: nn.Module, space: Mapping[str, Any], facts: Mapping[str, Any], pixels: bool | None
) -> PlainNetwork:
    """Return a classifier that takes raw features (default), or standardized ones."""
    from nni_petridish.tasks.tables.inference import row_classifier

    return row_classifier(net, space, facts, pixels is not False)


def make_predictor(
    net: nn.Module, space: Mapping[str, Any], facts: Mapping[str, Any]
) -> RowPredictor:
    """Return a function that predicts the classes of rows."""
    from nni_petridish.tasks.tables.inference import RowPredictor

    return RowPredictor(net, facts)


def data_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns, normalization and classes; nothing if the table is not at hand."""
    from nni_petridish.tasks.tables.task import load_rows

    try:
        return load_rows(data).facts
    except (DataError, OSError):
        return {}


def check_retraining(space: Mapping[str, Any], cells_per_stage: int) -> None:
    """Raise `ConfigError`: the number of cells is the search's."""
    raise ConfigError("cells_per_stage is for vision but the space is vector.")


def make_retraining(
    model: SavedModel,
    searched: tuple[Mapping[str, Any], TableRecipe] | None,
    options: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> Retraining[Any, Any]:
    """Prepare the retraining of a model."""
    from nni_petridish.tasks.tables.retraining import make_retraining

    return make_retraining(model, searched, TableRetrainingOptions(**options), changes)


def _sizes(data: Mapping[str, Any]) -> dict[str, int]:
    with prefix(f"{_PLACE}: "):
        table = read_table(data)
    return {"num_features": table.num_features, "num_outputs": len(table.classes)}
