"""Settings of judging the scores of candidates: fixed before the first parent is trained."""

from __future__ import annotations

import random
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt

from nni_petridish.errors import ConfigError
from nni_petridish.search.constraints import Count, check_fields
from nni_petridish.studies.judge.tables import TruthTable

LENGTHS = ("short", "long")


@dataclass(frozen=True)
class Parent:
    """One parent: an architecture, the length of its training, and a repetition.

    Parameters
    ----------
    code
        Code of the architecture.
    length
        ``"short"`` or ``"long"``.
    repetition
        Repetitions of one architecture differ in their random seed.
    """

    code: str
    length: str
    repetition: int = 0

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.code}-{self.length}-{self.repetition}"

    def random_seed(self, phase: str) -> int:
        """Return the random seed of a phase of its training."""
        return zlib.crc32(f"{self.name}:{phase}".encode())


@dataclass(frozen=True)
class JudgeSettings:
    """Settings of judging scores on a table.

    Parameters
    ----------
    parents
        The number of parents after 0, 1, 2, ... growths. If a depth has fewer architectures, they
        are repeated with other random seeds.
    short_steps, long_steps
        Training steps of the seed network, in short and in long trainings.
    short_grown_steps, long_grown_steps
        Training steps after each growth.
    checkpoints
        Steps of weak learning after which the scores are computed.
    batch_size, lr, weight_decay, clip
        Of all trainings. The learning rate of a parent decays to 0 in cosine decay; in weak
        learning it is constant, so that a checkpoint does not depend on those after it.
    l1
        λ in weak learning.
    held_out
        Number of validation images that scores are computed on.
    seed
        Random seed of the choice of parents.
    """

    parents: tuple[int, ...] = (2, 16, 14)
    short_steps: Count = 800
    short_grown_steps: Count = 800
    long_steps: Count = 5000
    long_grown_steps: Count = 2500
    checkpoints: tuple[int, ...] = (50, 100, 200, 300)
    batch_size: Count = 32
    lr: Annotated[float, Gt(0)] = 0.025
    weight_decay: Annotated[float, Ge(0)] = 2e-4
    clip: Annotated[float, Gt(0)] = 5.0
    l1: Annotated[float, Ge(0)] = 0.001
    held_out: Count = 600
    seed: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        for name in ("parents", "checkpoints"):
            values = tuple(getattr(self, name))
            if not values or any(type(v) is not int or v < 0 for v in values):
                raise ConfigError(f"{name} must be whole numbers but got {values!r}.")
            object.__setattr__(self, name, values)
        if list(self.checkpoints) != sorted(set(self.checkpoints)) or not self.checkpoints[0]:
            raise ConfigError(f"checkpoints must increase from 1 but got {self.checkpoints!r}.")
        check_fields(self)

    def steps(self, length: str, depth: int) -> int:
        """Return the training steps of the seed network (depth 0), or after a growth."""
        if length == "short":
            return self.short_grown_steps if depth else self.short_steps
        return self.long_grown_steps if depth else self.long_steps

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data = asdict(self)
        return {key: list(v) if isinstance(v, tuple) else v for key, v in data.items()}


def choose_parents(table: TruthTable, settings: JudgeSettings) -> list[Parent]:
    """Return all parents, mixed so that a part of them is a fair sample.

    Depths alternate, and each architecture is judged after its short and its long training.
    """
    by_depth = []
    for depth, number in enumerate(settings.parents):
        codes = table.at_depth(depth)
        random.Random(f"{settings.seed}:{depth}").shuffle(codes)
        if number and not codes:
            raise ConfigError(f"parents: {table.name} has no architectures after {depth} growths.")
        by_depth.append([(codes[i % len(codes)], i // len(codes)) for i in range(number)])
    mixed = sorted(
        ((i + 0.5) / len(chosen), depth, one)
        for depth, chosen in enumerate(by_depth)
        for i, one in enumerate(chosen)
    )
    return [Parent(code, length, n) for _, _, (code, n) in mixed for length in LENGTHS]


def ancestor(table: TruthTable, parent: Parent) -> Parent | None:
    """Return the parent's own parent, one addition less; None for the seed network.

    The addition to undo is drawn at random, the same for short and long trainings.
    """
    grown = [i for i, (a, b) in enumerate(zip(parent.code, table.seed, strict=True)) if a != b]
    if not grown:
        return None
    place = random.Random(f"{parent.code}:{parent.repetition}").choice(grown)
    code = parent.code[:place] + table.seed[place] + parent.code[place + 1 :]
    return Parent(code, parent.length, parent.repetition)


def results_file(folder: Path, parent: Parent) -> Path:
    """Return the file of a parent's result."""
    return folder / "results" / f"{parent.name}.json"
