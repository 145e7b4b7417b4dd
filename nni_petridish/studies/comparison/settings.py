"""A comparison as a whole: the section of the configuration, and the runs that it asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nni_petridish.errors import ConfigError
from nni_petridish.registry import Measure, kind_of
from nni_petridish.running.config import SearchConfig
from nni_petridish.search.constraints import prefix
from nni_petridish.studies.comparison.section import (
    PILOT_OFFSET,
    PLACE,
    WIDEN,
    CompareSettings,
    FinalSettings,
    MethodSettings,
)
from nni_petridish.studies.runs import Result, read_result
from nni_petridish.studies.study import Study, describe_search, digest, file_name, pick

RUNS, RESULTS = "runs", "results"
GALLERY = "gallery"


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
        document = {
            "method": self.method.identity(),
            **describe_search(self.config),
            "limit": self.limit,
            "final": None if self.final is None else asdict(self.final),
            "budget": self.budget,
            "reference": None if self.reference is None else self.reference.digest,
        }
        return digest(document)

    @property
    def file(self) -> Path:
        """File of its result."""
        return self.home / RESULTS / f"{file_name(self.name)}-seed-{self.seed}-{self.digest}.json"

    @property
    def folder(self) -> Path:
        """The folder it works in."""
        return self.home / RUNS / f"{file_name(self.name)}-seed-{self.seed}-{self.digest}"

    def is_ready(self) -> bool:
        """Return whether its budget is known."""
        return self.reference is None or self.reference.file.exists()

    def result(self) -> Result | None:
        """Return its result if it is finished."""
        return read_result(self.file)


@dataclass(frozen=True)
class Comparison(Study):
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

    KEY, CONTENT, RUN = "compare", "the methods to compare", "method"

    section: CompareSettings
    only: tuple[str, ...] | None = None
    is_pilot: bool = False

    @classmethod
    def read_section(cls, document: Any) -> CompareSettings:
        """Read and check the section ``compare``."""
        return CompareSettings.read(document)

    def __post_init__(self) -> None:
        first = self.first_seed
        for name in self.section.methods:
            with prefix(f"{PLACE}.methods.{name}: "):
                self._config(name, first)
        self.refuse_gallery()

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
            kept = pick(only, section.methods, "method")
        if folder is not None:
            section = replace(section, folder=folder)
        if repeats is not None:
            section = (
                replace(section, pilot=repeats) if pilot else replace(section, repeats=repeats)
            )
        return replace(self, section=section, only=kept, is_pilot=pilot or self.is_pilot)

    @property
    def methods(self) -> list[str]:
        """Names of the methods to run, the reference first."""
        reference = self.section.reference
        return [n for n in self.section.methods if not self.only or n in (reference, *self.only)]

    @property
    def seeds(self) -> list[int]:
        """The random seeds."""
        first = self.first_seed + (PILOT_OFFSET if self.is_pilot else 0)
        return list(range(first, first + self._count))

    @property
    def _count(self) -> int:
        return self.section.pilot if self.is_pilot else self.section.repeats

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
        method = self.section.methods[name]
        config = self.changed(method.set, seed, {})
        if config.start is not None:
            raise ConfigError("start cannot be given: all methods start from scratch.")
        if method.kind == WIDEN:
            _check_widening(config)
        return config


def _check_widening(config: SearchConfig) -> None:
    from nni_petridish.results.retrain.preparation import check_options

    check_options(config.space, {"max_multiply_adds": "widen"})
