"""A comparison as a whole: the section of the configuration, and the runs that it asks for."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nni_petridish.errors import ConfigError
from nni_petridish.registry import DEFAULT_KIND, Measure, kind_of
from nni_petridish.running.config import DEFAULT_GALLERY, SearchConfig, read_experiment
from nni_petridish.search.constraints import Folder, check_value, prefix, read_mapping, resolve
from nni_petridish.studies.comparison.section import (
    PILOT_OFFSET,
    PLACE,
    WIDEN,
    CompareSettings,
    FinalSettings,
    MethodSettings,
)
from nni_petridish.studies.dotted import set_dotted
from nni_petridish.studies.runs import Result, read_result

RUNS, RESULTS = "runs", "results"
GALLERY = "gallery"
_FIXED = ("seed", "gallery", "tuning", "ablations", "compare")


@dataclass(frozen=True)
class CompareRun:
    """One method with one random seed.

    Parameters
    ----------
    name
        Name of the method.
    method
        Its settings.
    config
        The search, whose space, data, recipe and random seed all methods share.
    limit
        The largest number of multiply-adds of the model that counts.
    final
        The final training of that model; None for none.
    budget
        The unit of the budget.
    reference
        The run that sets the budget; None if this is the one.
    home
        Folder of the comparison.
    """

    name: str
    method: MethodSettings
    config: SearchConfig
    limit: float | None
    final: FinalSettings | None
    budget: str
    reference: CompareRun | None
    home: Path

    @property
    def seed(self) -> int:
        """The random seed."""
        return self.config.settings.seed

    @property
    def measure(self) -> Measure:
        """The number that the methods minimize."""
        return kind_of(self.config.space).MEASURE

    @cached_property
    def digest(self) -> str:
        """A digest of all that decides the result."""
        limits = asdict(self.config.settings.limits)
        document = {
            "method": asdict(self.method),
            "space": self.config.space,
            **self.config.identity(),
            "limits": limits,
            "limit": self.limit,
            "final": None if self.final is None else asdict(self.final),
            "budget": self.budget,
            "reference": None if self.reference is None else self.reference.digest,
        }
        text = json.dumps(document, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def file(self) -> Path:
        """File of its result."""
        return self.home / RESULTS / f"{_plain(self.name)}-seed-{self.seed}-{self.digest}.json"

    @property
    def folder(self) -> Path:
        """The folder it works in."""
        return self.home / RUNS / f"{_plain(self.name)}-seed-{self.seed}-{self.digest}"

    def is_ready(self) -> bool:
        """Return whether its budget is known."""
        return self.reference is None or self.reference.file.exists()

    def result(self) -> Result | None:
        """Return its result if it is finished."""
        return read_result(self.file)


@dataclass(frozen=True)
class Comparison:
    """A checked comparison.

    Parameters
    ----------
    section
        The settings of the comparison.
    search_space, arguments, base, experiment
        Arguments of `SearchConfig.from_parts` for the search that the methods share.
    only
        Names of the methods to run; None for all. The first one always runs: it sets the budget.
    is_pilot
        Whether the pilot's random seeds are used.
    """

    section: CompareSettings
    search_space: dict[str, Any]
    arguments: dict[str, Any]
    base: Path
    experiment: dict[str, Any]
    only: tuple[str, ...] | None = None
    is_pilot: bool = False

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Comparison:
        """Read and check a configuration file and every method in it."""
        search_space, class_args, base, experiment = read_experiment(path)
        arguments = dict(class_args)
        if "compare" not in arguments:
            raise ConfigError(f"{PLACE} is missing in {path}: the methods to compare.")
        section = CompareSettings.read(arguments.pop("compare"))
        return cls(section, read_mapping("searchSpace", search_space), arguments, base, experiment)

    def __post_init__(self) -> None:
        for name in self.section.methods:
            with prefix(f"{PLACE}.methods.{name}: "):
                self._config(name, 0)
        if (self.folder / "gallery.json").exists():
            raise ConfigError(
                f"{PLACE}.folder must be a folder for a comparison but {self.folder} is a gallery."
            )

    def change(
        self,
        *,
        only: Iterable[str] | None = None,
        repeats: int | None = None,
        folder: str | None = None,
        pilot: bool = False,
    ) -> Comparison:
        """Return the same with some of the methods, more or fewer seeds, another folder."""
        section, kept = self.section, self.only
        if only is not None:
            kept = tuple(dict.fromkeys(only))
            unknown = [name for name in kept if name not in section.methods]
            if unknown:
                known = ", ".join(section.methods)
                raise ConfigError(f"There is no method {unknown[0]!r}; there are {known}.")
        if folder is not None:
            section = replace(section, folder=folder)
        if repeats is not None:
            section = (
                replace(section, pilot=repeats) if pilot else replace(section, repeats=repeats)
            )
        return replace(self, section=section, only=kept, is_pilot=pilot or self.is_pilot)

    @property
    def measure(self) -> Measure:
        """The number that the methods minimize."""
        return kind_of({"space": DEFAULT_KIND, **self.search_space}).MEASURE

    @property
    def methods(self) -> list[str]:
        """Names of the methods to run, the reference first."""
        reference = self.section.reference
        return [n for n in self.section.methods if not self.only or n in (reference, *self.only)]

    @property
    def seeds(self) -> list[int]:
        """The random seeds."""
        first = int(self.arguments.get("seed", 0)) + (PILOT_OFFSET if self.is_pilot else 0)
        return list(range(first, first + self._count))

    @property
    def _count(self) -> int:
        return self.section.pilot if self.is_pilot else self.section.repeats

    @cached_property
    def folder(self) -> Path:
        """Folder of all runs and results."""
        if self.section.folder is not None:
            return resolve(self.section.folder, self.base)
        named = self.arguments.get("gallery", DEFAULT_GALLERY)
        check_value("gallery", named, Folder)
        gallery = resolve(named, self.base)
        return gallery.with_name(f"{gallery.name}-compare")

    def run(self, name: str, seed: int) -> CompareRun:
        """Return the run of a method with a random seed."""
        first = self.section.reference
        reference = None if name == first else self.run(first, seed)
        section = self.section
        run = CompareRun(
            name,
            section.methods[name],
            self._config(name, seed),
            section.max_multiply_adds,
            section.final_training,
            section.budget,
            reference,
            self.folder,
        )
        return replace(run, config=replace(run.config, gallery=run.folder / GALLERY))

    @cached_property
    def runs(self) -> list[CompareRun]:
        """All runs; those of one seed before those of the next, so that pairs are complete."""
        return [self.run(name, seed) for seed in self.seeds for name in self.methods]

    def _config(self, name: str, seed: int) -> SearchConfig:
        space, arguments = copy.deepcopy(self.search_space), copy.deepcopy(self.arguments)
        method = self.section.methods[name]
        for setting, value in method.set.items():
            top, _, rest = setting.partition(".")
            if top in _FIXED:
                raise ConfigError(f"{setting} cannot be changed by a method.")
            if top == "searchSpace":
                set_dotted(space, rest, value, "searchSpace.")
            else:
                set_dotted(arguments, setting, value, "")
        arguments["seed"] = seed
        arguments.setdefault("gallery", str(self.folder))  # `run` gives each its own
        config = SearchConfig.from_parts(space, arguments, self.base, self.experiment)
        if config.start is not None:
            raise ConfigError("start cannot be given: all methods start from scratch.")
        if method.kind == WIDEN:
            _check_widening(config)
        return config


def _check_widening(config: SearchConfig) -> None:
    from nni_petridish.results.retrain.preparation import check_options

    check_options(config.space, {"max_multiply_adds": "widen"})


def _plain(name: str) -> str:
    return re.sub(r"[^\w=.,+-]", "_", name)
