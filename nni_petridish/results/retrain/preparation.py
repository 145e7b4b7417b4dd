"""Preparation of a retraining of a gallery's model, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import ConfigError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.saved_model import from_gallery
from nni_petridish.registry import kind_of, kinds_that_retrain_with
from nni_petridish.running.config import CONFIG_FILE, SearchConfig

if TYPE_CHECKING:
    from nni_petridish.tasks.retraining import Retraining


def prepare_retraining(
    gallery: Path,
    id: str | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> Retraining[Any, Any]:
    """Prepare the training of a gallery's model from scratch; the defaults are the paper's.

    Parameters
    ----------
    gallery, id
        The model; the most accurate one by default.
    changes
        Changes to the recipe: the search's, or that of other data.
    options
        Options of the kind's retraining: ``Kind.RETRAINING``.
    """
    model = from_gallery(gallery, id)
    check_options(model.space, {name: name for name in options})
    data_given = options.get("data") is not None
    searched = None if data_given else _data_and_recipe_of_search(gallery)
    kind = kind_of(model.space)
    training: Retraining[Any, Any] = kind.make_retraining(model, searched, options, changes or {})
    return training


def check_options(space: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless models of the space can be retrained with these options.

    Parameters
    ----------
    space
        ``space`` (the kind) and the options of the space.
    names
        The user's name of each option, for errors.
    """
    known = {field.name for field in fields(kind_of(space).RETRAINING)}
    for option, name in names.items():
        if option not in known:
            owners = " and ".join(kinds_that_retrain_with(option)) or "no kind of space"
            raise ConfigError(f"{name} is for {owners} but the space is {space['space']}.")


def _data_and_recipe_of_search(gallery: Path) -> tuple[Mapping[str, Any], Any]:
    if not (gallery / CONFIG_FILE).exists():
        raise ConfigError(
            f"{gallery} does not say which data its search used (NasExperiment's evaluator had"
            " them): name the data in a file and give it by --config."
        )
    config = SearchConfig.of_gallery(Gallery(gallery))
    return config.data, config.recipe
