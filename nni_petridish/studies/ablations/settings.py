"""Ablations as a whole: the section of the configuration, and the runs that it asks for."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nni_petridish.errors import ConfigError
from nni_petridish.registry import Measure, kind_of
from nni_petridish.running.config import SearchConfig
from nni_petridish.search.constraints import prefix
from nni_petridish.studies.ablations.section import (
    JUDGMENT,
    PLACE,
    AblationSettings,
    Changes,
    RetrainingSettings,
    Table,
)
from nni_petridish.studies.runs import read_result
from nni_petridish.studies.study import Study, describe_search, digest, file_name, pick

SEARCHES, RESULTS = "searches", "results"


@dataclass(frozen=True)
class AblationRun:
    """One search, and the retraining of its best model.

    Variants with the same changes share their runs; WS and CP-end, which differ in the retraining
    alone, share their searches.

    Parameters
    ----------
    name
        The changes of the variant, readable.
    config
        The search.
    limit
        The largest number of multiply-adds of the model that counts.
    retraining
        The retraining of the model that counts; None if its validation error is all.
    results
        Folder of the results of all runs.
    """

    name: str
    config: SearchConfig
    limit: float | None
    retraining: RetrainingSettings | None
    results: Path

    @property
    def seed(self) -> int:
        """The random seed of the search and of the retraining."""
        return self.config.settings.seed

    @property
    def measure(self) -> Measure:
        """The number that the search minimizes."""
        return kind_of(self.config.space).MEASURE

    @cached_property
    def file(self) -> Path:
        """File of its result; its name depends on all that decides the result."""
        retraining = None if self.retraining is None else asdict(self.retraining)
        depends = {**describe_search(self.config), "limit": self.limit, "final": retraining}
        return self.results / f"{self.name}-seed-{self.seed}-{digest(depends)}.json"

    @property
    def folder(self) -> Path:
        """The gallery, the folder it works in."""
        return self.config.gallery

    def is_ready(self) -> bool:
        """Return True: it depends on no other run."""
        return True

    def result(self) -> dict[str, Any] | None:
        """Return its result if it is finished."""
        return read_result(self.file)


@dataclass(frozen=True)
class Ablations(Study):
    """Checked ablations.

    Parameters
    ----------
    section
        The settings of the comparisons.
    search_space, arguments, base, experiment
        Arguments of `SearchConfig.from_parts` for the search that the variants change.
    only
        Names of the tables to make; None for all. Folders are named as if all were made.
    """

    KEY, CONTENT, RUN = "ablations", "the comparisons to make", "variant"

    section: AblationSettings
    only: tuple[str, ...] | None = None
    _names: dict[str, str] = field(init=False, repr=False, compare=False)

    @classmethod
    def read_section(cls, document: Any) -> AblationSettings:
        """Read and check the section ``ablations``."""
        return AblationSettings.read(document)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", self._name_searches())
        self.refuse_gallery()

    def change(
        self,
        *,
        only: Iterable[str] | None = None,
        repeats: int | None = None,
        folder: str | None = None,
    ) -> Ablations:
        """Return the same with some of the tables, more or fewer searches, another folder."""
        changed = self
        if only is not None:
            changed = replace(changed, only=pick(only, self.section.tables, "table"))
        if repeats is not None:
            changed = replace(changed, section=replace(self.section, repeats=repeats))
        if folder is not None:
            changed = replace(changed, section=replace(changed.section, folder=folder))
        return changed

    @property
    def tables(self) -> list[Table]:
        """The comparisons to make."""
        return [self.section.tables[name] for name in self.only or self.section.tables]

    def run(self, table: Table, variant: str, repeat: int) -> AblationRun:
        """Return one run of a variant."""
        config, limit, retraining = self._change(table.variants[variant], repeat)
        name = self._names[_key(config)]
        config = replace(
            config, gallery=self.folder / SEARCHES / name / f"seed-{config.settings.seed}"
        )
        return AblationRun(name, config, limit, retraining, self.folder / RESULTS)

    @cached_property
    def runs(self) -> list[AblationRun]:
        """All distinct runs; the first repeat of every variant comes before any second one.

        This keeps the tables balanced when the work is interrupted.
        """
        found: dict[Path, AblationRun] = {}
        for repeat in range(self.section.repeats):
            for table in self.tables:
                for variant in table.variants:
                    run = self.run(table, variant, repeat)
                    found.setdefault(run.file, run)
        return list(found.values())

    def _name_searches(self) -> dict[str, str]:
        """Return the names of the distinct searches by `_key`; check every variant."""
        names: dict[str, str] = {}
        for table in self.section.tables.values():
            for variant, changes in table.variants.items():
                with prefix(f"{PLACE}.tables.{table.name}.variants.{variant}: "):
                    config, _, _ = self._change(changes, 0)
                names.setdefault(_key(config), _name(changes))
        return names

    def _change(
        self, changes: Changes, repeat: int
    ) -> tuple[SearchConfig, float | None, RetrainingSettings | None]:
        judged: dict[str, Any] = {"max_multiply_adds": self.section.max_multiply_adds}
        if self.section.final is not None:
            judged["final"] = copy.deepcopy(self.section.final)
        elif unused := [name for name in changes if name.partition(".")[0] == "final"]:
            raise ConfigError(f"{unused[0]} changes nothing: {PLACE}.final is not given.")
        config = self.changed(changes, self.first_seed + repeat, dict.fromkeys(JUDGMENT, judged))
        given = judged.get("final")
        retraining = None if given is None else RetrainingSettings.read(given)
        if retraining is not None:
            _check_retraining(config, retraining)
        return config, judged["max_multiply_adds"], retraining


def _check_retraining(config: SearchConfig, retraining: RetrainingSettings) -> None:
    """Raise `ConfigError` if the models of the search cannot be retrained with these settings."""
    with prefix("final."):
        kind_of(config.space).check_retraining(config.space, retraining.cells_per_stage)
    with prefix("final.recipe."):
        replace(config.recipe, **retraining.recipe)


def _name(changes: Changes) -> str:
    searched = {n: v for n, v in changes.items() if n.partition(".")[0] not in JUDGMENT}
    parts = [f"{name.removeprefix('searchSpace.')}={value}" for name, value in searched.items()]
    return file_name(",".join(parts)) or "default"


def _key(config: SearchConfig) -> str:
    """Return a key of a search that its random seed does not change."""
    return digest({**describe_search(config), "seed": None})
