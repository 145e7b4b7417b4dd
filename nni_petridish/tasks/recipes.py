"""Recipes of training: frozen dataclasses that differ by data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from nni_petridish.errors import ConfigError
from nni_petridish.search.constraints import prefix

Recipe = TypeVar("Recipe")


def named_recipe(
    recipe: type[Recipe],
    differences: Mapping[str, Mapping[str, Any]],
    name: str,
    changes: Mapping[str, Any],
) -> Recipe:
    """Return the recipe of a data set.

    Parameters
    ----------
    recipe
        The dataclass, whose defaults are the general recipe.
    differences
        The values that differ from it, by name of the data set.
    name
        The data set.
    changes
        Values that go before those of the data set.
    """
    if name not in differences:
        raise ConfigError(f"a recipe must be one of {', '.join(differences)} but got {name!r}.")
    _refuse_unknown(recipe, changes)
    return recipe(**{**differences[name], **changes})


def changed_recipe(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values; errors name the place, ``recipe``."""
    _refuse_unknown(type(recipe), changes)
    with prefix("recipe."):
        return replace(recipe, **changes)  # type: ignore[type-var]


def scaled_recipe(recipe: Recipe, factor: float) -> Recipe:
    """Return a recipe with all its learning rates scaled."""
    if factor == 1:
        return recipe
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe)}  # type: ignore[arg-type]
    rates = {name: factor * values[name] for name in _RATES if name in values}
    return replace(recipe, **rates)  # type: ignore[type-var]


def held_recipe(recipe: Recipe, epochs: int) -> Recipe:
    """Return a recipe whose learning rate stays at its start for so many epochs."""
    if not epochs:
        return recipe
    if not can_hold(type(recipe)):
        raise ConfigError("anneal needs a recipe of images, whose learning rate decays.")
    return replace(recipe, hold_epochs=epochs)  # type: ignore[type-var]


def can_hold(recipe: type) -> bool:
    """Return whether the learning rate of a kind of recipe can stay at its start for a while."""
    return any(field.name == _HOLD for field in fields(recipe))


def recipe_identity(recipe: Any) -> dict[str, Any]:
    """Return a recipe as plain data, as earlier versions knew it if it has nothing new."""
    return {k: v for k, v in asdict(recipe).items() if k not in (_HOLD, _AVERAGE) or v}


def plain_recipe(recipe: Recipe) -> Recipe:
    """Return a recipe without averaged weights: weak learning selects by the last α."""
    averages = any(field.name == _AVERAGE for field in fields(recipe))  # type: ignore[arg-type]
    return replace(recipe, average=0.0) if averages else recipe  # type: ignore[type-var]


_HOLD, _AVERAGE = "hold_epochs", "average"
_RATES = ("lr", "lr_min", "scalar_lr")


def _refuse_unknown(recipe: Any, changes: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(recipe)]
    for name in changes:
        if name not in known:
            raise ConfigError(f"a recipe has {', '.join(known)} but got {name!r}.")
