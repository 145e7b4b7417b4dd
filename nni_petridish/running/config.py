"""One YAML file describes a search, for nnictl and for the in-process command alike.

The file is an ordinary NNI experiment. Petridish reads two parts of it: ``searchSpace`` (the space
of networks) and ``tuner.classArgs`` (everything else). The whole file is checked here, before any
data are read, without importing torch or nni.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nni_petridish._support.reading import MAX_YAML_BYTES, parse_yaml, read_json, read_regular
from nni_petridish.core.space import Widening
from nni_petridish.errors import ConfigError, GalleryError, PetridishError
from nni_petridish.gallery.files import seal, to_json, unseal, write_file
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.search_gallery import check_gallery, open_gallery
from nni_petridish.registry import ARGUMENTS, DEFAULT_KIND, kind_of
from nni_petridish.running.process import per_machine
from nni_petridish.running.schema import check, outline, search_part
from nni_petridish.search.constraints import check_value, prefix, resolve
from nni_petridish.search.ranges import Range, make_chooser, split_ranges
from nni_petridish.search.records import Growth
from nni_petridish.search.search import Chooser
from nni_petridish.search.settings import (
    PRESETS,
    SHORTCUTS,
    GrowthSettings,
    Limits,
    SearchSettings,
)
from nni_petridish.tasks.recipes import can_hold, recipe_identity

if TYPE_CHECKING:
    from nni_petridish.tasks.task import Task

CONFIG_FILE = "config.json"
DEFAULT_GALLERY = "galleries/search"
"""The gallery of a configuration for a study that names none."""

_SETTINGS = tuple(f.name for f in fields(SearchSettings) if f.name != "limits")
_PLAN = tuple(f.name for f in fields(GrowthSettings))


@dataclass(frozen=True)
class SearchConfig:
    """A checked description of a search.

    Parameters
    ----------
    gallery
        The folder of the gallery.
    space
        ``space`` (the kind) and the options of the space, without those that the data decide.
    data
        Arguments of `load_data`, or of `load_text`.
    recipe
        The recipe that networks are trained by.
    settings
        Settings of the search.
    plan
        Settings of a growth.
    concurrency
        The number of growths that run at the same time.
    machines
        The number of machines that they run on.
    ranges
        The ranges of λ and I_max if each growth chooses its own.
    start
        The model to start from instead of the space's seed, see `nni_petridish.running.warm_start`.
    """

    gallery: Path
    space: dict[str, Any]
    data: dict[str, Any]
    recipe: Any
    settings: SearchSettings
    plan: GrowthSettings
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
        """Check the parts of a file that NNI passes to a tuner; ``base`` is that of folders."""
        named = _name_kind(search_space)
        check(
            search_part(str(named.get("space"))),
            {
                "searchSpace": search_space,
                "tuner": {"classArgs": {} if class_args is None else class_args},
                "trialConcurrency": experiment.get("trialConcurrency", 1),
            },
        )
        kind, space, given = kind_of(named), named, cast(Mapping[str, Any], class_args)
        data = kind.read_data(given.get("data", {}), base)
        kind.check_space({k: v for k, v in space.items() if k != "space"}, data)
        with prefix(f"{ARGUMENTS}."):
            with_preset = {**PRESETS.get(str(given.get("preset")), {}), **given}
            arguments, ranges = split_ranges(kind.with_defaults(with_preset), usual_settings(space))
            settings = _read_settings(arguments)
            plan = GrowthSettings(**{name: arguments[name] for name in _PLAN if name in arguments})
        recipe = kind.read_recipe(arguments.get("recipe", {}), data)
        if plan.anneal and not can_hold(type(recipe)):
            raise ConfigError(f"{ARGUMENTS}.anneal must be 0 in the space {space['space']}.")
        if plan.grow != SHORTCUTS and not issubclass(kind.SPACE, Widening):
            raise ConfigError(f"{ARGUMENTS}.grow must be shortcuts in the space {space['space']}.")
        gallery = resolve(arguments["gallery"], base)
        machines = _count_machines(experiment.get("trainingService"))
        start = _read_start(arguments.get("start"), space, data, base)
        if start is None and plan.seed_epochs == 0:
            raise ConfigError(f"{ARGUMENTS}.seed_epochs must be at least 1 without a start.")
        concurrency = experiment.get("trialConcurrency", 1)
        return cls(
            gallery, space, data, recipe, settings, plan, concurrency, machines, ranges, start
        )

    def at_once(self, growth: Growth) -> int:
        """Return the number of growths on the machine of this one, itself included."""
        seeds = self.settings.seeds
        return per_machine(growth.parent is None, seeds, self.concurrency, self.machines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; `from_dict` reads it."""
        return {**asdict(self), "gallery": str(self.gallery)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchConfig:
        """Return the configuration that `to_dict` described."""
        return cls(
            gallery=Path(data["gallery"]),
            space=dict(data["space"]),
            data=dict(data["data"]),
            recipe=kind_of(data["space"]).make_recipe(data["recipe"]),
            settings=SearchSettings.from_dict(data["settings"]),
            plan=GrowthSettings(**data["plan"]),
            concurrency=data["concurrency"],
            machines=data["machines"],
            ranges={name: Range(**ends) for name, ends in data.get("ranges", {}).items()},
            start=data.get("start"),
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings that a resumed search must share: not limits, folders, devices."""
        known = recipe_identity(self.recipe)
        recipe = {k: v for k, v in known.items() if k not in ("device", "epochs")}
        data = {k: v for k, v in self.data.items() if k not in ("root", "workers")}
        # A range takes the place of its number; without one nothing is said of ranges.
        ranges = {name: asdict(range) for name, range in self.ranges.items()}
        chosen = {**self.settings.identity(), **self.plan.to_dict(), **ranges}
        from nni_petridish.running.warm_start import identity_of

        return {**chosen, "data": data, "recipe": recipe, **identity_of(self.start)}

    def make_chooser(self, gallery: Gallery) -> Chooser | None:
        """Return the chooser of λ and I_max of each growth; None if they are numbers."""
        return make_chooser(self.ranges, self.settings, gallery.journal.read_all)

    def load_task(self) -> Task:
        """Load the data and make the task; needs torch."""
        task: Task = kind_of(self.space).load_task(self.space, self.data, self.recipe)
        if self.start is None:
            return task
        from nni_petridish.running.warm_start import warm_task

        return warm_task(task, self.start)

    def check_task(self, task: Callable[[], Task]) -> None:
        """Raise an error if the first growth would, as far as can be seen without training.

        Parameters
        ----------
        task
            Loads the task, as `load_task` does.
        """
        from nni_petridish.tasks.device import resolve_device

        resolve_device(self.recipe.device)
        loaded = task()
        loaded.build(loaded.seed())

    def check_gallery(self) -> None:
        """Raise unless the gallery can be created, or exists and belongs to this search."""
        check_gallery(self.gallery, self.space, self.identity(), self.data)

    def has_new_device(self) -> bool:
        """Return whether the gallery was last used with another device: failures may be due to it.

        Call it before `open_gallery`, which stores this configuration.
        """
        try:
            before = read_json(self.gallery / CONFIG_FILE)["recipe"]["device"]
        except (OSError, ValueError, LookupError, TypeError):
            return False
        return bool(before != self.recipe.device)

    def open_gallery(self) -> Gallery:
        """Open or create the gallery, and store the configuration there for the workers."""
        gallery = open_gallery(self.gallery, self.space, self.identity(), self.data)
        write_file(gallery.folder / CONFIG_FILE, seal(self.to_dict()))
        return gallery

    @classmethod
    def of_gallery(cls, gallery: Gallery) -> SearchConfig:
        """Read the configuration that `open_gallery` stored."""
        path = gallery.folder / CONFIG_FILE
        try:
            config = cls.from_dict(unseal(read_json(path), path))
            identity = json.loads(to_json(config.identity()))
        except OSError as error:
            raise GalleryError(f"{path} cannot be read: {error.strerror}.") from None
        except (PetridishError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise GalleryError(f"{path} cannot be read: {error}.") from None
        if different := _first_difference(gallery.settings, identity):
            raise GalleryError(f"{path} is of another search: {different} differs.")
        return config


def _first_difference(known: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return the first name with two values; an earlier version may not have known all names."""
    for name in known.keys() & found.keys():
        one, other = known[name], found[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if inner := _first_difference(one, other):
                return f"{name}.{inner}"
        elif one != other:
            return name
    return None


def read_experiment(
    path: str | os.PathLike[str],
) -> tuple[Any, dict[str, Any], Path, dict[str, Any]]:
    """Read a file and check the keys of NNI; return the arguments of `from_parts`."""
    document = read_yaml(Path(path))
    check(outline(), document)
    tuner = document["tuner"]
    base = Path(path).parent / str(tuner.get("codeDirectory", "."))
    arguments = tuner.get("classArgs")
    return document["searchSpace"], {} if arguments is None else arguments, base, document


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file whose content is a mapping."""
    import yaml

    try:
        document = parse_yaml(read_regular(path, MAX_YAML_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"{path} is not YAML{where}: {problem}.") from None
    check_value(str(path), document, dict[str, Any])
    return dict(document)


def _read_settings(arguments: Mapping[str, Any]) -> SearchSettings:
    with prefix("limits."):
        limits = Limits(**arguments.get("limits", {}))
    epochs = asdict(
        GrowthSettings(**{name: arguments[name] for name in _PLAN if name in arguments})
    )
    given = {name: arguments[name] for name in _SETTINGS if name in arguments}
    counted = {name: epochs[name] for name in ("seed_epochs", "weak_epochs", "final_epochs")}
    return SearchSettings(**{**given, **counted}, limits=limits)


def _read_start(
    options: Mapping[str, Any] | None, space: Mapping[str, Any], data: Mapping[str, Any], base: Path
) -> dict[str, Any] | None:
    """Find the model to start from, if any, and check that it is of the search's space."""
    from nni_petridish.running.warm_start import find_start

    if options is None:
        return None
    with prefix(f"{ARGUMENTS}.start: "):
        return find_start(resolve(options["from"], base), options.get("model"), space, data)


def usual_settings(search_space: Mapping[str, Any]) -> SearchSettings:
    """Return the default settings of a search in a space."""
    return SearchSettings(**kind_of(_name_kind(search_space)).with_defaults({}))


def _name_kind(space: object) -> dict[str, Any]:
    """Return the options of a space with its kind; none if they are no mapping."""
    return {"space": DEFAULT_KIND, **(space if isinstance(space, Mapping) else {})}


def _count_machines(service: object) -> int:
    """Count the machines of a training service; one that schedules by itself counts as one each."""
    if isinstance(service, list):  # NNI's hybrid mode
        return sum(_count_machines(part) for part in service)
    machines = service.get("machineList") if isinstance(service, Mapping) else None
    return max(1, len(machines)) if isinstance(machines, list) else 1
