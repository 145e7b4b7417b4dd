"""A study as a whole: the section of the configuration, and the search that each setting makes."""

from __future__ import annotations

import copy
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nni_petridish.errors import ConfigError
from nni_petridish.registry import DEFAULT_KIND, Measure, measure_of
from nni_petridish.running.config import (
    DEFAULT_GALLERY,
    SearchConfig,
    read_experiment,
    usual_settings,
)
from nni_petridish.search.constraints import read_mapping, resolve
from nni_petridish.search.ranges import RANGED
from nni_petridish.search.settings import GrowthSettings, SearchSettings
from nni_petridish.studies.dotted import get_dotted, set_dotted
from nni_petridish.studies.tuning.section import PLACE, TuningSettings, Values

_FIXED = ("seed", "limits")
_TUNABLE = {f.name for kind in (SearchSettings, GrowthSettings) for f in fields(kind)} - set(_FIXED)


@dataclass(frozen=True)
class Tuning:
    """A checked study.

    Parameters
    ----------
    section
        Settings of the study.
    search_space, arguments, base, experiment
        Arguments of `SearchConfig.from_parts`.
    """

    section: TuningSettings
    search_space: dict[str, Any]
    arguments: dict[str, Any]
    base: Path
    experiment: dict[str, Any]

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Tuning:
        """Read and check a configuration file and the limits of every range in it."""
        search_space, class_args, base, experiment = read_experiment(path)
        arguments = dict(class_args)
        space = read_mapping("searchSpace", search_space)
        section = TuningSettings.read(arguments.pop("tuning", {}), space.get("space", DEFAULT_KIND))
        return cls(section, space, arguments, base, experiment)

    def __post_init__(self) -> None:
        default = self.config(self.default())
        for name, dimension in self.section.space.items():
            top, _, rest = name.partition(".")
            if top not in _TUNABLE and not (top == "recipe" and rest):
                raise ConfigError(
                    f"{PLACE}.space.{name} cannot be tuned; what can are"
                    f" {', '.join(sorted(_TUNABLE))} and recipe.NAME."
                )
            for value in dimension.corners():
                self.config({**self.default(), name: value})
        if self.folder == default.gallery:
            raise ConfigError(f"{PLACE}.folder must not be the gallery of the search itself.")
        if (self.folder / "gallery.json").exists():
            raise ConfigError(
                f"{PLACE}.folder must be a folder for a study but {self.folder} is a gallery."
            )

    def change(self, **changes: Any) -> Tuning:
        """Return the study with changed settings; None leaves a setting as it is."""
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(self, section=replace(self.section, **given)) if given else self

    @property
    def folder(self) -> Path:
        """Folder of the galleries of the study, and of its database by default."""
        given = self.section.folder
        if given is not None:
            return resolve(given, self.base)
        gallery = resolve(self.arguments.get("gallery", DEFAULT_GALLERY), self.base)
        return gallery.with_name(f"{gallery.name}-tuning")

    @property
    def measure(self) -> Measure:
        """The number that its searches minimize."""
        return measure_of({"space": DEFAULT_KIND, **self.search_space})

    @property
    def storage(self) -> str:
        """URL of the study's storage."""
        return self.section.storage or f"sqlite:///{self.folder / 'study.db'}"

    def config(self, values: Values, gallery: Path | None = None, repeat: int = 0) -> SearchConfig:
        """Return the search of a setting."""
        arguments = copy.deepcopy(self.arguments)
        for name, value in values.items():
            set_dotted(arguments, name, value, f"{PLACE}.space.")
        arguments["seed"] = arguments.get("seed", 0) + repeat if repeat else arguments.get("seed")
        if arguments["seed"] is None:
            del arguments["seed"]
        if gallery is not None:
            arguments["gallery"] = str(gallery)
        return SearchConfig.from_parts(self.search_space, arguments, self.base, self.experiment)

    def default(self) -> Values:
        """Return the default λ and I_max (the paper's, for images) and the configuration's values.

        Values outside the study's space are left out.
        """
        usual = usual_settings(self.search_space)
        found = {
            name: getattr(usual, name) if name in RANGED else get_dotted(self.arguments, name)
            for name in self.section.space
        }
        return {n: value for n, value in found.items() if self.section.space[n].holds(value)}

    def identity(self) -> dict[str, Any]:
        """Return the settings that all trials of a study share."""
        section = self.section
        some = {name: dimension.corners()[0] for name, dimension in section.space.items()}
        config = self.config(some)
        return {
            "space": {name: dimension.to_dict() for name, dimension in section.space.items()},
            "repeats": section.repeats,
            "max_multiply_adds": section.max_multiply_adds,
            "multi_objective": section.multi_objective,
            "searchSpace": config.space,
            "search": {**config.identity(), "limits": asdict(config.settings.limits)},
        }
