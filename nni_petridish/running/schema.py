"""The schema of configuration files: pydantic models made of the dataclasses of the settings.

The constraints of a field are in the annotation of its dataclass (`search.constraints`), and its
meaning is in the docstring there. A model adds the keys of a part of the file. It only checks:
values stay as they were written, since 1 and 1.0 would make two different searches.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nni_petridish.errors import ConfigError, show
from nni_petridish.registry import Kind, kind_of
from nni_petridish.search.constraints import (
    Count,
    Folder,
    Meaning,
    OneOf,
    allows,
    annotations_of,
    complaint,
    yaml_hint,
)
from nni_petridish.search.ranges import RANGED, Range
from nni_petridish.search.settings import PRESETS, GrowthSettings, SearchSettings

Definition = tuple[Any, Any]
"""Type and default of a key, as `pydantic.create_model` takes them."""

#: The keys of an NNI 3.0 experiment; the ones that matter here are checked, the others are NNI's.
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
_NUMBER, _RANGE = "#number", "#range"


class Part(BaseModel):
    """A mapping with known keys."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            raise _error(f" must be a mapping but got {show(given)}.")
        for key, value in given.items():
            if key not in cls.model_fields:
                allowed = ", ".join(cls.model_fields)
                raise _error(
                    f".{key} is not a known key (value {show(value)}); allowed are {allowed}."
                )
        for key, field in cls.model_fields.items():
            if field.is_required() and key not in given:
                meaning = f": {field.description}" if field.description else "."
                raise _error(f".{key} is missing{meaning}")
        return given


def check(model: type[Part], given: object, place: str = "") -> None:
    """Raise a ConfigError in one line unless the value that a user wrote fits the model."""
    try:
        model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        keys = (str(key) for key in first["loc"] if key not in (_NUMBER, _RANGE))
        where = ".".join([*([place] if place else []), *keys])
        raise ConfigError(f"{where}{first['msg']}".lstrip(". ")) from None


def part(name: str, keys: Mapping[str, Definition], text: str | None = None) -> type[Part]:
    """Return the model of a mapping with these keys."""
    definitions: dict[str, Any] = dict(keys)
    return create_model(name, __base__=Part, __doc__=text or "", **definitions)


@cache
def part_of(kind: type, without: tuple[str, ...] = (), partial: bool = False) -> type[Part]:
    """Return the model of a mapping whose keys are the fields of a dataclass.

    Parameters
    ----------
    kind
        The dataclass.
    without
        Fields that the mapping does not have.
    partial
        Whether no key is required and no default is named, since they depend on something else.
    """
    keys = keys_of(kind, partial)
    text = (inspect.getdoc(kind) or "").partition("\n\n")[0]
    return part(kind.__name__, {k: v for k, v in keys.items() if k not in without}, text)


def keys_of(kind: type, partial: bool = False) -> dict[str, Definition]:
    """Return type and default of every field of a dataclass."""
    texts = field_texts(kind)
    result: dict[str, Definition] = {}
    for field in fields(kind):
        annotation = annotations_of(kind)[field.name]
        nested = isinstance(annotation, type) and is_dataclass(annotation)
        kind_of_value = part_of(annotation) if nested else value_of(annotation)
        text = texts.get(field.name)
        if partial or field.default_factory is not MISSING:
            default = Field(default_factory=lambda: None, description=text)
        elif field.default is MISSING:
            default = Field(description=text)
        else:
            default = Field(default=field.default, description=text)
        result[field.name] = (kind_of_value, default)
    return result


def value_of(annotation: Any) -> Any:
    """Return a type that checks a value against an annotation and keeps it as it is written."""

    def validate(value: object, _: object) -> object:
        if not allows(annotation, value):
            message = f" {complaint(annotation, value)}"
            raise _error(message + yaml_hint(message))
        return value

    return Annotated[annotation, WrapValidator(validate)]


@cache
def outline() -> type[Part]:
    """Return the model of a whole file in which the space and the arguments may be anything."""
    arguments = value_of(dict[str, Any] | None)
    tuner = {"className": (Any, None), "codeDirectory": (Any, "."), "classArgs": (arguments, None)}
    keys: dict[str, Definition] = dict.fromkeys(_NNI_KEYS, (Any, None))
    keys["searchSpace"] = (value_of(dict[str, Any]), ...)
    keys["tuner"] = (part("Tuner", tuner), ...)
    keys["trialConcurrency"] = (value_of(Count), Field(1, description="Growths at the same time."))
    return part("Experiment", keys, "An NNI experiment with PetridishTuner.")


@cache
def search_part(space: str) -> type[Part]:
    """Return the model of ``searchSpace`` and ``tuner.classArgs`` for a kind of space."""
    return make_search_part(space, {})


def make_search_part(space: str, sections: Mapping[str, type[Part]]) -> type[Part]:
    """Return the model of a search with the sections of further commands."""
    kind = kind_of({"space": space})
    keys = {"space": (value_of(str), Field(space)), **keys_of(kind.SPACE)}
    kept = {name: key for name, key in keys.items() if name not in kind.DECIDED_BY_DATA}
    networks = part(kind.SPACE.__name__, kept, "The networks that the search may reach.")
    arguments = part("Arguments", _arguments(kind, sections), "Settings of the search.")
    tuner = {
        "className": (Any, None),
        "codeDirectory": (value_of(str), Field(".", description="Folders are relative to it.")),
        "classArgs": (arguments, ...),
    }
    changed = {"searchSpace": (networks, ...), "tuner": (part("Tuner", tuner), ...)}
    return create_model(f"{space}_search", __base__=outline(), **changed)  # type: ignore[call-overload]


def _arguments(kind: Kind, sections: Mapping[str, type[Part]]) -> dict[str, Definition]:
    settings = {**keys_of(SearchSettings), **keys_of(GrowthSettings)}
    usual = SearchSettings(**kind.with_defaults({}))
    for name in RANGED:
        number, field = settings[name]
        default = Field(getattr(usual, name), description=field.description)
        settings[name] = (_number_or_range(number), default)
    return {
        "gallery": (value_of(Folder), Field(description="the folder to keep the models in.")),
        "data": (part_of(kind.DATA), left_out("The data set.")),
        "preset": (
            value_of(Annotated[str, OneOf(tuple(PRESETS))] | None),
            Field(None, description="The settings of a growth that are not given, by name."),
        ),
        **settings,
        "recipe": (
            part_of(kind.RECIPE, without=("epochs", "hold_epochs"), partial=True),
            left_out("Changes to the recipe of the data set."),
        ),
        "start": (_start() | None, Field(None, description="The model to start from.")),
        "tuning": (sections.get("tuning", Any), left_out("A study, for nni-petridish tune.")),
        "ablations": (
            sections.get("ablations", Any),
            left_out("Comparisons, for nni-petridish ablate."),
        ),
        "compare": (
            sections.get("compare", Any),
            left_out("Methods to compare, for nni-petridish compare."),
        ),
    }


def _start() -> Any:
    id = Annotated[str, Meaning("the id of a model")] | None
    keys = {
        "from": (value_of(Folder), Field(description="a gallery, or an exported model.")),
        "model": (value_of(id), Field(None, description="Its id; default: the most accurate.")),
    }
    return part("Start", keys)


def _number_or_range(number: Any) -> Any:
    """Return the type of λ or I_max, for which every growth may choose its own from a range."""

    def tell(value: object) -> str:
        return _RANGE if isinstance(value, Mapping) else _NUMBER

    ends = part_of(Range)
    return Annotated[
        Annotated[number, Tag(_NUMBER)] | Annotated[ends, Tag(_RANGE)], Discriminator(tell)
    ]


def left_out(text: str) -> Any:
    """Return the default of a key without one."""
    return Field(default_factory=lambda: None, description=text)


def field_texts(kind: type) -> dict[str, str]:
    """Return the texts of the sections Parameters of a dataclass and its bases, by field.

    >>> field_texts(GrowthSettings)["weak_learning"]
    '``"isolated"`` or ``"joint"``.'
    """
    result: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        doc = inspect.cleandoc(base.__doc__ or "")
        _, _, section = doc.partition("Parameters\n----------\n")
        names: list[str] = []
        for line in section.partition("\n\n")[0].splitlines():
            if line.startswith(" "):
                result |= {name: f"{result[name]} {line.strip()}".strip() for name in names}
            else:
                names = line.split(", ")
                result |= dict.fromkeys(names, "")
    return result


def _error(message: str) -> PydanticCustomError:
    return PydanticCustomError("petridish", "{message}", {"message": message})
