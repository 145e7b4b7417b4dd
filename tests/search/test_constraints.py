from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from annotated_types import Ge, Gt, Le, MinLen

from nni_petridish.errors import ConfigError
from nni_petridish.search.constraints import (
    Count,
    Infinite,
    OneOf,
    Share,
    check_fields,
    check_value,
)

Names = Annotated[Sequence[Annotated[str, OneOf(("a", "b"))]], MinLen(1)]


@pytest.mark.parametrize(
    ("annotation", "allowed", "refused", "words"),
    [
        (Count, [1, 10**18], [0, 10**400, 1.0, True, "1", None], "a whole number of at least 1"),
        (Share, [0, 0.5], [1, -0.1, math.nan, math.inf, False], r"a number in \[0, 1\)"),
        (Annotated[float, Gt(0)], [1e-9, 1], [0, math.inf, "1"], "a number above 0"),
        (Annotated[float, Gt(0), Infinite()], [math.inf], [math.nan, -math.inf], "above 0"),
        (Annotated[float, Le(2)] | None, [None, 2], [3], "a number of at most 2"),
        (bool, [True], [1, None], "true or false"),
        (str, ["x"], ["", " ", 1], "a text"),
        (Names, [["a"], ("b", "a")], [[], ["c"], "a", None], "a list, each item one of a, b"),
        (dict[str, Any], [{}], [[], None], "a mapping"),
        (Annotated[int, Ge(2)] | str, [2, "x"], [1, 2.5], "at least 2 or a text"),
        (Any, [None, 3], [], ""),
    ],
)
def test_an_annotation_allows_and_names_its_values(
    annotation: Any, allowed: list[Any], refused: list[Any], words: str
) -> None:
    for value in allowed:
        check_value("x", value, annotation)
    for value in refused:
        with pytest.raises(ConfigError, match=f"^x must be .*{words},? but got "):
            check_value("x", value, annotation)


def test_a_dataclass_is_held_to_its_annotations() -> None:
    @dataclass(frozen=True)
    class Settings:
        filters: Count = 8
        mode: Annotated[str, OneOf(("cell", "macro"))] = "cell"

        def __post_init__(self) -> None:
            check_fields(self)

    assert Settings(4).filters == 4
    with pytest.raises(ConfigError, match=r"^mode must be one of cell, macro but got 'meso'\.$"):
        Settings(mode="meso")
