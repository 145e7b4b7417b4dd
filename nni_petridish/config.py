"""One YAML file describes a search, for nnictl and for the in-process command alike.

It is an ordinary NNI experiment. What is Petridish's stands in two places: ``searchSpace`` (what
networks may look like) and ``tuner.classArgs`` (everything else). It is checked here as a whole,
before any data is read, without importing torch or nni.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from nni_petridish.atomic import to_json, write_file
from nni_petridish.data import check_data, describe
from nni_petridish.errors import ConfigError, GalleryError, PetridishError
from nni_petridish.gallery import Gallery
from nni_petridish.plan import Plan
from nni_petridish.recipe import Recipe
from nni_petridish.records import Limits, SearchSettings, check_number

SPACES = ("vision",)
CONFIG_FILE = "config.json"

#: The keys of an NNI 3.0 experiment; the ones that matter here are read, the others are NNI's.
_NNI_KEYS = (
    "experimentName",
    "searchSpace",
    "trialCommand",
    "trialCodeDirectory",
    "trialConcurrency",
    "trialGpuNumber",
    "maxExperimentDuration",
    "maxTrialNumber",
    "maxTrialDuration",
    "nniManagerIp",
    "debug",
    "logLevel",
    "experimentWorkingDirectory",
    "tunerGpuIndices",
    "tuner",
    "trainingService",
    "sharedStorage",
)
_TUNER_KEYS = ("className", "codeDirectory", "classArgs")
_ARGUMENTS = "tuner.classArgs"
_SETTINGS = tuple(f.name for f in fields(SearchSettings) if f.name != "limits")
_PLAN = tuple(f.name for f in fields(Plan))
_OWN = ("gallery", "data", "recipe", "limits")


@dataclass(frozen=True)
class SearchConfig:
    """A checked description of a search.

    Parameters
    ----------
    gallery
        The folder of the gallery.
    space
        ``space`` (the kind) and the options of the space, without what the data decide.
    data
        Arguments of `load_data`.
    recipe
        How networks are trained.
    settings
        How the search goes.
    plan
        How a growth goes.
    concurrency
        How many growths run at the same time on one machine.
    """

    gallery: Path
    space: dict[str, Any]
    data: dict[str, Any]
    recipe: Recipe
    settings: SearchSettings
    plan: Plan
    concurrency: int = 1

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> SearchConfig:
        """Read and check a configuration file; `ConfigError` names what is wrong in one line."""
        document = _read_yaml(Path(path))
        _refuse_unknown(document, _NNI_KEYS, "")
        for key in ("searchSpace", "tuner"):
            if key not in document:
                raise ConfigError(f"{key} is missing in {path}.")
        tuner = _mapping("tuner", document["tuner"])
        _refuse_unknown(tuner, _TUNER_KEYS, "tuner.")
        base = Path(path).parent / str(tuner.get("codeDirectory", "."))
        concurrency = document.get("trialConcurrency", 1)
        with _prefix(""):
            check_number("trialConcurrency", concurrency, 1, whole=True)
        return cls.from_parts(document["searchSpace"], tuner.get("classArgs"), base, concurrency)

    @classmethod
    def from_parts(
        cls, search_space: object, class_args: object, base: Path, concurrency: int = 1
    ) -> SearchConfig:
        """Check what NNI hands to a tuner; relative folders are relative to ``base``."""
        arguments = _mapping(_ARGUMENTS, class_args if class_args is not None else {})
        _refuse_unknown(arguments, (*_OWN, *_SETTINGS, *_PLAN), f"{_ARGUMENTS}.")
        space = _check_kind(_mapping("searchSpace", search_space))
        data = _read_data(_mapping(f"{_ARGUMENTS}.data", arguments.get("data", {})), base)
        _check_space(space, data)
        with _prefix(f"{_ARGUMENTS}."):
            settings = _read_settings(arguments)
            plan = Plan(**{name: arguments[name] for name in _PLAN if name in arguments})
        recipe = _read_recipe(arguments.get("recipe", {}), data)
        gallery = _read_gallery(arguments.get("gallery"), base)
        return cls(gallery, space, data, recipe, settings, plan, concurrency)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; `from_dict` reads it."""
        return {**asdict(self), "gallery": str(self.gallery)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchConfig:
        """Read what `to_dict` wrote."""
        return cls(
            gallery=Path(data["gallery"]),
            space=dict(data["space"]),
            data=dict(data["data"]),
            recipe=Recipe(**data["recipe"]),
            settings=SearchSettings.from_dict(data["settings"]),
            plan=Plan(**data["plan"]),
            concurrency=data["concurrency"],
        )

    def identity(self) -> dict[str, Any]:
        """Return what must not change while a search lasts: not limits, folders and devices."""
        recipe = {k: v for k, v in asdict(self.recipe).items() if k not in ("device", "epochs")}
        data = {k: v for k, v in self.data.items() if k not in ("root", "workers")}
        return {**self.settings.identity(), **asdict(self.plan), "data": data, "recipe": recipe}

    def check_gallery(self) -> None:
        """Raise unless the gallery can be made here, or is there and of this very search."""
        Gallery.check(self.gallery, self.space, self.identity())

    def open_gallery(self) -> Gallery:
        """Open the gallery, or make it, and leave the configuration there for the workers."""
        gallery = Gallery.create(self.gallery, self.space, self.identity())
        write_file(gallery.folder / CONFIG_FILE, to_json(self.to_dict()))
        return gallery

    @classmethod
    def of_gallery(cls, gallery: Gallery) -> SearchConfig:
        """Read what `open_gallery` left."""
        path = gallery.folder / CONFIG_FILE
        try:
            return cls.from_dict(json.loads(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GalleryError(f"{path} cannot be read: {error}.") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"{path} is not YAML{where}: {problem}.") from None
    return _mapping(str(path), document)


def _read_settings(arguments: Mapping[str, Any]) -> SearchSettings:
    limits = _mapping("limits", arguments.get("limits", {}))
    _refuse_unknown(limits, tuple(f.name for f in fields(Limits)), "limits.")
    with _prefix("limits."):
        checked = Limits(**limits)
    epochs = asdict(Plan(**{name: arguments[name] for name in _PLAN if name in arguments}))
    given = {name: arguments[name] for name in _SETTINGS if name in arguments}
    counted = {name: epochs[name] for name in ("seed_epochs", "weak_epochs", "final_epochs")}
    return SearchSettings(**{**given, **counted}, limits=checked)


def _check_kind(space: dict[str, Any]) -> dict[str, Any]:
    kind = space.get("space", "vision")
    if kind not in SPACES:
        raise ConfigError(f"searchSpace.space must be one of {', '.join(SPACES)} but got {kind!r}.")
    return {"space": kind, **{key: value for key, value in space.items() if key != "space"}}


def _check_space(space: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    from search_spaces import VisionSpace

    decided_by_data = ("image_shape", "num_classes")
    known = tuple(f.name for f in fields(VisionSpace) if f.name not in decided_by_data)
    options = {key: value for key, value in space.items() if key != "space"}
    _refuse_unknown(options, known, "searchSpace.")
    for key in ("ops",):
        if key in options and not isinstance(options[key], list):
            raise ConfigError(f"searchSpace.{key} must be a list but got {options[key]!r}.")
    with _prefix(f"{_ARGUMENTS}.data: "):
        image_shape, num_classes = describe(
            data["name"], data.get("root"), data.get("image_size", 224)
        )
    with _prefix("searchSpace."):
        VisionSpace(image_shape, num_classes, **options)


def _read_data(data: dict[str, Any], base: Path) -> dict[str, Any]:
    place = f"{_ARGUMENTS}.data"
    _refuse_unknown(
        data, ("name", "root", "validation", "limit", "seed", "image_size", "workers"), f"{place}."
    )
    result = {"name": "digits", **data}
    for key in ("validation", "limit", "seed", "image_size", "workers"):
        if result.get(key) is not None:
            least = 1 if key in ("validation", "limit", "image_size") else 0
            with _prefix(f"{place}."):
                check_number(key, result[key], least, whole=True)
    if result.get("root") is not None:
        result["root"] = str(_resolve(f"{place}.root", result["root"], base))
    with _prefix(f"{place}: "):
        check_data(result["name"], result.get("root"))
    if result["name"] == "image_folder" and not result.get("validation"):
        raise ConfigError(f"{place}.validation must be at least 1: a search needs validation.")
    return result


def _read_recipe(recipe: object, data: Mapping[str, Any]) -> Recipe:
    place = f"{_ARGUMENTS}.recipe"
    options = _mapping(place, recipe)
    known = tuple(f.name for f in fields(Recipe) if f.name != "epochs")
    _refuse_unknown(options, known, f"{place}.")
    with _prefix(f"{place}."):
        result = Recipe.named(data["name"], **options)
        shape = describe(data["name"], data.get("root"), data.get("image_size", 224)).image_shape
        result.check_image(shape)
    return result


def _read_gallery(gallery: object, base: Path) -> Path:
    if gallery is None:
        raise ConfigError(f"{_ARGUMENTS}.gallery is missing: the folder to keep the models in.")
    return _resolve(f"{_ARGUMENTS}.gallery", gallery, base)


def _resolve(place: str, folder: object, base: Path) -> Path:
    if not isinstance(folder, str) or not folder.strip():
        raise ConfigError(f"{place} must be the name of a folder but got {folder!r}.")
    return Path(os.path.abspath(base / Path(folder).expanduser()))


def _mapping(place: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} must be a mapping but got {value!r}.")
    return dict(value)


def _refuse_unknown(found: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    for key in found:
        if key not in known:
            allowed = ", ".join(known)
            raise ConfigError(
                f"{prefix}{key} is not a known key (value {found[key]!r}); allowed are {allowed}."
            )


@contextmanager
def _prefix(place: str) -> Iterator[None]:
    """Put the place before the message of whatever a part complains about."""
    try:
        yield
    except GalleryError:
        raise
    except PetridishError as error:
        raise ConfigError(f"{place}{error}{_hint(str(error))}") from None
    except TypeError as error:
        raise ConfigError(f"{place.rstrip('.: ')}: {error}.") from None


def _hint(message: str) -> str:
    """Explain YAML's most common surprise: ``1e-3`` is text, ``1.0e-3`` a number."""
    value = message.rsplit("but got ", 1)[-1].rstrip(".")
    try:
        number = float(value[1:-1]) if value[:1] == "'" else None
    except ValueError:
        number = None
    return "" if number is None else f" YAML reads this as text: write {number!r}."
