"""One YAML file describes a search, for nnictl and for the in-process command alike.

It is an ordinary NNI experiment. What is Petridish's stands in two places: ``searchSpace`` (what
networks may look like) and ``tuner.classArgs`` (everything else). It is checked here as a whole,
before any data is read, without importing torch or nni.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import ConfigError, GalleryError, PetridishError
from nni_petridish.gallery.files import to_json, write_file
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.search_gallery import check_gallery, open_gallery
from nni_petridish.registry import ARGUMENTS, DEFAULT_KIND, kind_of
from nni_petridish.running.process import per_machine
from nni_petridish.search.checks import mapping, prefix, refuse_unknown, resolve
from nni_petridish.search.ranges import Range, make_chooser, split_ranges
from nni_petridish.search.records import Growth
from nni_petridish.search.search import Chooser
from nni_petridish.search.settings import Limits, Plan, SearchSettings, check_number

if TYPE_CHECKING:
    from nni_petridish.tasks.task import Task

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
_SETTINGS = tuple(f.name for f in fields(SearchSettings) if f.name != "limits")
_PLAN = tuple(f.name for f in fields(Plan))
_STUDIES = ("tuning", "ablations")
"""Sections that are passed over: the commands that use them read them."""
_OWN = ("gallery", "data", "recipe", "limits", "start", *_STUDIES)


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
        Arguments of `load_data`, or of `load_text`.
    recipe
        How networks are trained.
    settings
        How the search goes.
    plan
        How a growth goes.
    concurrency
        How many growths run at the same time.
    machines
        On how many machines they run.
    ranges
        Where λ and I_max may lie if each growth is to choose its own.
    start
        The model to start from instead of the space's seed, see `nni_petridish.running.warm_start`.
    """

    gallery: Path
    space: dict[str, Any]
    data: dict[str, Any]
    recipe: Any
    settings: SearchSettings
    plan: Plan
    concurrency: int = 1
    machines: int = 1
    ranges: dict[str, Range] = field(default_factory=dict)
    start: dict[str, Any] | None = None

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> SearchConfig:
        """Read and check a configuration file; `ConfigError` names what is wrong in one line."""
        search_space, class_args, base, experiment = read_experiment(path)
        return cls.from_parts(search_space, class_args, base, experiment)

    @classmethod
    def from_parts(
        cls, search_space: object, class_args: object, base: Path, experiment: Mapping[str, Any]
    ) -> SearchConfig:
        """Check what NNI hands to a tuner; relative folders are relative to ``base``."""
        concurrency = experiment.get("trialConcurrency", 1)
        check_number("trialConcurrency", concurrency, 1, whole=True)
        arguments = mapping(ARGUMENTS, class_args if class_args is not None else {})
        refuse_unknown(arguments, (*_OWN, *_SETTINGS, *_PLAN), f"{ARGUMENTS}.")
        space = _check_kind(mapping("searchSpace", search_space))
        kind = kind_of(space)
        data = kind.read_data(mapping(f"{ARGUMENTS}.data", arguments.get("data", {})), base)
        kind.check_space({k: v for k, v in space.items() if k != "space"}, data)
        with prefix(f"{ARGUMENTS}."):
            arguments, ranges = split_ranges(kind.with_defaults(arguments), usual_settings(space))
            settings = _read_settings(arguments)
            plan = Plan(**{name: arguments[name] for name in _PLAN if name in arguments})
        recipe = kind.read_recipe(mapping(f"{ARGUMENTS}.recipe", arguments.get("recipe", {})), data)
        gallery = _read_gallery(arguments.get("gallery"), base)
        machines = _count_machines(experiment.get("trainingService"))
        start = _read_start(arguments.get("start"), space, data, base)
        if start is None and plan.seed_epochs == 0:
            raise ConfigError(f"{ARGUMENTS}.seed_epochs must be at least 1 without a start.")
        return cls(
            gallery, space, data, recipe, settings, plan, concurrency, machines, ranges, start
        )

    def at_once(self, growth: Growth) -> int:
        """Return how many growths run on the machine of this one, itself included."""
        seeds = self.settings.seeds
        return per_machine(growth.parent is None, seeds, self.concurrency, self.machines)

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
            recipe=kind_of(data["space"]).make_recipe(data["recipe"]),
            settings=SearchSettings.from_dict(data["settings"]),
            plan=Plan(**data["plan"]),
            concurrency=data["concurrency"],
            machines=data["machines"],
            ranges={name: Range(**ends) for name, ends in data.get("ranges", {}).items()},
            start=data.get("start"),
        )

    def identity(self) -> dict[str, Any]:
        """Return what must not change while a search lasts: not limits, folders and devices."""
        recipe = {k: v for k, v in asdict(self.recipe).items() if k not in ("device", "epochs")}
        data = {k: v for k, v in self.data.items() if k not in ("root", "workers")}
        # A range takes the place of its number; without one nothing is said of ranges.
        ranges = {name: asdict(range) for name, range in self.ranges.items()}
        chosen = {**self.settings.identity(), **asdict(self.plan), **ranges}
        from nni_petridish.running.warm_start import identity_of

        return {**chosen, "data": data, "recipe": recipe, **identity_of(self.start)}

    def make_chooser(self, gallery: Gallery) -> Chooser | None:
        """Return what chooses λ and I_max of each growth; None if they are numbers."""
        return make_chooser(self.ranges, self.settings, gallery.journal.read_all)

    def load_task(self) -> Task:
        """Load the data and make the task; needs torch."""
        task: Task = kind_of(self.space).load_task(self.space, self.data, self.recipe)
        if self.start is None:
            return task
        from nni_petridish.running.warm_start import warm_task

        return warm_task(task, self.start)

    def check_gallery(self) -> None:
        """Raise unless the gallery can be made here, or is there and of this very search."""
        check_gallery(self.gallery, self.space, self.identity(), self.data)

    def open_gallery(self) -> Gallery:
        """Open the gallery, or make it, and leave the configuration there for the workers."""
        gallery = open_gallery(self.gallery, self.space, self.identity(), self.data)
        write_file(gallery.folder / CONFIG_FILE, to_json(self.to_dict()))
        return gallery

    @classmethod
    def of_gallery(cls, gallery: Gallery) -> SearchConfig:
        """Read what `open_gallery` left."""
        path = gallery.folder / CONFIG_FILE
        try:
            return cls.from_dict(json.loads(path.read_bytes()))
        except (PetridishError, OSError, ValueError, KeyError, TypeError) as error:
            raise GalleryError(f"{path} cannot be read: {error}.") from None


def read_experiment(
    path: str | os.PathLike[str],
) -> tuple[Any, dict[str, Any], Path, dict[str, Any]]:
    """Read a file and check what is NNI's in it; return the arguments of `from_parts`."""
    document = read_yaml(Path(path))
    refuse_unknown(document, _NNI_KEYS, "")
    for key in ("searchSpace", "tuner"):
        if key not in document:
            raise ConfigError(f"{key} is missing in {path}.")
    tuner = mapping("tuner", document["tuner"])
    refuse_unknown(tuner, _TUNER_KEYS, "tuner.")
    base = Path(path).parent / str(tuner.get("codeDirectory", "."))
    class_args = tuner.get("classArgs")
    arguments = mapping(ARGUMENTS, class_args if class_args is not None else {})
    return document["searchSpace"], arguments, base, document


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file whose content is a mapping."""
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
    return mapping(str(path), document)


def _read_settings(arguments: Mapping[str, Any]) -> SearchSettings:
    limits = mapping("limits", arguments.get("limits", {}))
    refuse_unknown(limits, tuple(f.name for f in fields(Limits)), "limits.")
    with prefix("limits."):
        checked = Limits(**limits)
    epochs = asdict(Plan(**{name: arguments[name] for name in _PLAN if name in arguments}))
    given = {name: arguments[name] for name in _SETTINGS if name in arguments}
    counted = {name: epochs[name] for name in ("seed_epochs", "weak_epochs", "final_epochs")}
    return SearchSettings(**{**given, **counted}, limits=checked)


def _read_start(
    options: object, space: Mapping[str, Any], data: Mapping[str, Any], base: Path
) -> dict[str, Any] | None:
    """Find the model to start from, if any, and check that it is of the search's space."""
    from nni_petridish.running.warm_start import find_start

    if options is None:
        return None
    place = f"{ARGUMENTS}.start"
    given = mapping(place, options)
    refuse_unknown(given, ("from", "model"), f"{place}.")
    path = resolve(f"{place}.from", given.get("from"), base)
    id = given.get("model")
    if id is not None and not isinstance(id, str):
        raise ConfigError(f"{place}.model must be the id of a model but got {id!r}.")
    with prefix(f"{place}: "):
        return find_start(path, id, space, data)


def usual_settings(search_space: Mapping[str, Any]) -> SearchSettings:
    """Return the settings that a search in such a space has if nothing is said of them."""
    return SearchSettings(**kind_of(_check_kind(search_space)).with_defaults({}))


def _check_kind(space: Mapping[str, Any]) -> dict[str, Any]:
    named = {"space": DEFAULT_KIND, **space}
    kind_of(named)
    return named


def _count_machines(service: object) -> int:
    """Count the machines of a training service; one that schedules by itself counts as one each."""
    if isinstance(service, list):  # NNI's hybrid mode
        return sum(_count_machines(part) for part in service)
    machines = service.get("machineList") if isinstance(service, Mapping) else None
    return max(1, len(machines)) if isinstance(machines, list) else 1


def _read_gallery(gallery: object, base: Path) -> Path:
    if gallery is None:
        raise ConfigError(f"{ARGUMENTS}.gallery is missing: the folder to keep the models in.")
    return resolve(f"{ARGUMENTS}.gallery", gallery, base)
