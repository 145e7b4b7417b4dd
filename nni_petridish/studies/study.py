"""The part that studies of many searches share: one configuration, changed for every run."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from nni_petridish.errors import ConfigError
from nni_petridish.registry import ARGUMENTS, DEFAULT_KIND, Measure, kind_of
from nni_petridish.running.config import DEFAULT_GALLERY, SearchConfig, read_experiment
from nni_petridish.search.constraints import Folder, check_value, read_mapping, resolve
from nni_petridish.search.settings import check_number
from nni_petridish.studies.dotted import set_dotted

_FIXED = ("seed", "gallery", "tuning", "ablations", "compare")
"""Settings that no run changes."""


@dataclass(frozen=True)
class Study:
    """Many searches by one configuration file.

    Parameters
    ----------
    section
        The study's own settings, ``tuner.classArgs.KEY`` of the configuration.
    search_space, arguments, base, experiment
        Arguments of `SearchConfig.from_parts` for the search that the runs change.
    """

    KEY: ClassVar[str]
    """Key of the section."""
    CONTENT: ClassVar[str]
    """Content of the section, for an error."""
    RUN: ClassVar[str]
    """Name of what a run belongs to, such as a variant."""

    section: Any
    search_space: dict[str, Any]
    arguments: dict[str, Any]
    base: Path
    experiment: dict[str, Any]

    @classmethod
    def read_section(cls, document: Any) -> Any:
        """Read and check the section of the configuration."""
        raise NotImplementedError

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check a configuration file and every run in it."""
        search_space, class_args, base, experiment = read_experiment(path)
        arguments = dict(class_args)
        if cls.KEY not in arguments:
            raise ConfigError(f"{ARGUMENTS}.{cls.KEY} is missing in {path}: {cls.CONTENT}.")
        section = cls.read_section(arguments.pop(cls.KEY))
        return cls(section, read_mapping("searchSpace", search_space), arguments, base, experiment)

    @property
    def measure(self) -> Measure:
        """The number that the searches minimize."""
        return kind_of({"space": DEFAULT_KIND, **self.search_space}).MEASURE

    @property
    def first_seed(self) -> int:
        """The random seed of the configuration."""
        seed = self.arguments.get("seed", 0)
        check_number(f"{ARGUMENTS}.seed", seed, 0, whole=True)
        return int(seed)

    @cached_property
    def folder(self) -> Path:
        """Folder of all galleries and results."""
        if self.section.folder is not None:
            return resolve(self.section.folder, self.base)
        named = self.arguments.get("gallery", DEFAULT_GALLERY)
        check_value("gallery", named, Folder)
        gallery = resolve(named, self.base)
        return gallery.with_name(f"{gallery.name}-{self.KEY}")

    def refuse_gallery(self) -> None:
        """Raise `ConfigError` if the folder is the gallery of one search."""
        if (self.folder / "gallery.json").exists():
            raise ConfigError(
                f"{ARGUMENTS}.{self.KEY}.folder must be a folder of its own but {self.folder} is a"
                " gallery."
            )

    def changed(
        self, changes: Mapping[str, Any], seed: int, others: Mapping[str, dict[str, Any]]
    ) -> SearchConfig:
        """Return the search with changes by dotted names.

        Parameters
        ----------
        changes
            The changes, such as ``recipe.lr`` or ``searchSpace.mode``.
        seed
            The random seed.
        others
            Mappings besides the search's settings that are changed in place, by the first part of
            the names that belong to them.
        """
        space, arguments = copy.deepcopy(self.search_space), copy.deepcopy(self.arguments)
        for name, value in changes.items():
            top, _, rest = name.partition(".")
            if top in _FIXED:
                raise ConfigError(f"{name} cannot be changed by a {self.RUN}.")
            if top == "searchSpace":
                set_dotted(space, rest, value, "searchSpace.")
            else:
                set_dotted(others.get(top, arguments), name, value, "")
        arguments["seed"] = seed
        arguments.setdefault("gallery", str(self.folder))  # each run gets its own
        return SearchConfig.from_parts(space, arguments, self.base, self.experiment)


def pick(only: Iterable[str], known: Iterable[str], what: str) -> tuple[str, ...]:
    """Return the names once each; raise `ConfigError` if one is not known."""
    picked, there = tuple(dict.fromkeys(only)), list(known)
    unknown = [name for name in picked if name not in there]
    if unknown:
        raise ConfigError(f"There is no {what} {unknown[0]!r}; there are {', '.join(there)}.")
    return picked


def describe_search(config: SearchConfig) -> dict[str, Any]:
    """Return all settings that decide the outcome of a search."""
    limits = asdict(config.settings.limits)
    return {"space": config.space, **config.identity(), "limits": limits}


def digest(document: Mapping[str, Any]) -> str:
    """Return eight digits that depend on all of a document."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def file_name(text: str) -> str:
    """Return a text with all but letters, digits and some signs replaced."""
    return re.sub(r"[^\w=.,+-]", "_", text)
