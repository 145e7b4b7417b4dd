"""Ablations as a whole: the section of the configuration, and the runs that it asks for."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nni_petridish.errors import ConfigError, GalleryError
from nni_petridish.registry import DEFAULT_KIND, Measure, kind_of
from nni_petridish.running.config import DEFAULT_GALLERY, SearchConfig, read_experiment
from nni_petridish.search.constraints import Folder, check_value, prefix, read_mapping, resolve
from nni_petridish.studies.ablations.section import (
    JUDGEMENT,
    PLACE,
    AblationSettings,
    Changes,
    Final,
    Table,
)
from nni_petridish.studies.dotted import set_dotted

SEARCHES, RESULTS = "searches", "results"
_FIXED = ("seed", "gallery", "tuning", "ablations")


@dataclass(frozen=True)
class Run:
    """One search, and the final training of what it found.

    Variants that change the same share their runs; WS and CP-end, which differ in the final
    training alone, share their searches.

    Parameters
    ----------
    name
        What it changes, for people.
    config
        The search.
    limit
        Of multiply-adds, for the model that counts.
    final
        The final training.
    results
        Folder of the results of all runs.
    """

    name: str
    config: SearchConfig
    limit: float | None
    final: Final | None
    results: Path

    @property
    def seed(self) -> int:
        """Of the search and of the final training."""
        return self.config.settings.seed

    @property
    def measure(self) -> Measure:
        """The number that the search minimizes."""
        return kind_of(self.config.space).MEASURE

    @cached_property
    def file(self) -> Path:
        """File of its result; another one if anything that it depends on changes."""
        final = None if self.final is None else asdict(self.final)
        depends = {**_describe(self.config), "limit": self.limit, "final": final}
        return self.results / f"{self.name}-seed-{self.seed}-{_digest(depends)}.json"

    def result(self) -> dict[str, Any] | None:
        """Return its result if it is finished."""
        try:
            return dict(json.loads(self.file.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise GalleryError(f"{self.file} cannot be read: {error}.") from None


@dataclass(frozen=True)
class Ablations:
    """Checked ablations.

    Parameters
    ----------
    section
        What is compared.
    search_space, arguments, base, experiment
        What `SearchConfig.from_parts` takes: the search that all variants are changes of.
    only
        Names of the tables to make; None for all. The others still count for the names of folders.
    """

    section: AblationSettings
    search_space: dict[str, Any]
    arguments: dict[str, Any]
    base: Path
    experiment: dict[str, Any]
    only: tuple[str, ...] | None = None
    _names: dict[str, str] = field(init=False, repr=False, compare=False)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Ablations:
        """Read and check a configuration file, with everything that the variants change."""
        search_space, class_args, base, experiment = read_experiment(path)
        arguments = dict(class_args)
        if "ablations" not in arguments:
            raise ConfigError(f"{PLACE} is missing in {path}: the comparisons to make.")
        section = AblationSettings.read(arguments.pop("ablations"))
        return cls(section, read_mapping("searchSpace", search_space), arguments, base, experiment)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", self._name_searches())
        if (self.folder / "gallery.json").exists():
            raise ConfigError(
                f"{PLACE}.folder must be a folder for ablations but {self.folder} is a gallery."
            )

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
            unknown = [name for name in only if name not in self.section.tables]
            if unknown:
                known = ", ".join(self.section.tables)
                raise ConfigError(f"There is no table {unknown[0]!r}; there are {known}.")
            changed = replace(changed, only=tuple(dict.fromkeys(only)))
        if repeats is not None:
            changed = replace(changed, section=replace(self.section, repeats=repeats))
        if folder is not None:
            changed = replace(changed, section=replace(changed.section, folder=folder))
        return changed

    @property
    def measure(self) -> Measure:
        """The number by which the variants are compared."""
        return kind_of({"space": DEFAULT_KIND, **self.search_space}).MEASURE

    @property
    def tables(self) -> list[Table]:
        """The comparisons to make."""
        return [self.section.tables[name] for name in self.only or self.section.tables]

    @cached_property
    def folder(self) -> Path:
        """Folder of all galleries and results."""
        if self.section.folder is not None:
            return resolve(self.section.folder, self.base)
        named = self.arguments.get("gallery", DEFAULT_GALLERY)
        check_value("gallery", named, Folder)
        gallery = resolve(named, self.base)
        return gallery.with_name(f"{gallery.name}-ablations")

    def run(self, table: Table, variant: str, repeat: int) -> Run:
        """Return one run of a variant."""
        config, limit, final = self._change(table.variants[variant], repeat)
        name = self._names[_key(config)]
        config = replace(
            config, gallery=self.folder / SEARCHES / name / f"seed-{config.settings.seed}"
        )
        return Run(name, config, limit, final, self.folder / RESULTS)

    @cached_property
    def runs(self) -> list[Run]:
        """All runs, each once, every variant's first repeat before any second one.

        So the tables are balanced whenever the work is interrupted.
        """
        found: dict[Path, Run] = {}
        for repeat in range(self.section.repeats):
            for table in self.tables:
                for variant in table.variants:
                    run = self.run(table, variant, repeat)
                    found.setdefault(run.file, run)
        return list(found.values())

    def _name_searches(self) -> dict[str, str]:
        """Return names of the distinct searches by `_key`; makes, and so checks, every variant."""
        names: dict[str, str] = {}
        for table in self.section.tables.values():
            for variant, changes in table.variants.items():
                with prefix(f"{PLACE}.tables.{table.name}.variants.{variant}: "):
                    config, _, _ = self._change(changes, 0)
                names.setdefault(_key(config), _name(changes))
        return names

    def _change(
        self, changes: Changes, repeat: int
    ) -> tuple[SearchConfig, float | None, Final | None]:
        space, arguments = copy.deepcopy(self.search_space), copy.deepcopy(self.arguments)
        judged: dict[str, Any] = {"max_multiply_adds": self.section.max_multiply_adds}
        if self.section.final is not None:
            judged["final"] = copy.deepcopy(self.section.final)
        for name, value in changes.items():
            top, _, rest = name.partition(".")
            if top in _FIXED:
                raise ConfigError(f"{name} cannot be changed by a variant.")
            if top == "final" and self.section.final is None:
                raise ConfigError(f"{name} changes nothing: {PLACE}.final is not given.")
            if top == "searchSpace":
                set_dotted(space, rest, value, "searchSpace.")
            else:
                set_dotted(judged if top in JUDGEMENT else arguments, name, value, "")
        arguments["seed"] = arguments.get("seed", 0) + repeat
        arguments.setdefault("gallery", str(self.folder))  # `run` gives each its own
        config = SearchConfig.from_parts(space, arguments, self.base, self.experiment)
        final = Final.read(judged["final"]) if judged.get("final") is not None else None
        if final is not None:
            _check_final(config, final)
        return config, judged["max_multiply_adds"], final


def _check_final(config: SearchConfig, final: Final) -> None:
    """Raise if what the search may find cannot be trained like that in the end."""
    with prefix("final."):
        kind_of(config.space).check_retraining(config.space, final.cells_per_stage)
    with prefix("final.recipe."):
        replace(config.recipe, **final.recipe)


def _name(changes: Changes) -> str:
    searched = {n: v for n, v in changes.items() if n.partition(".")[0] not in JUDGEMENT}
    parts = [f"{name.removeprefix('searchSpace.')}={value}" for name, value in searched.items()]
    return re.sub(r"[^\w=.,+-]", "_", ",".join(parts)) or "default"


def _describe(config: SearchConfig) -> dict[str, Any]:
    """Return what decides a search's outcome."""
    limits = asdict(config.settings.limits)
    return {"space": config.space, **config.identity(), "limits": limits}


def _key(config: SearchConfig) -> str:
    """Return what tells searches apart, but for their random seeds."""
    return _digest({**_describe(config), "seed": None})


def _digest(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
