"""The complexity that the hull goes by, and the limits of size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nni_petridish.errors import ConfigError, SearchError
from nni_petridish.search.records import LATENCY, SMALLEST_CHILD, Done, Growth, Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import GrowthSettings, Limits, SearchSettings

#: (error, multiply-adds, parameters, milliseconds) of a seed and two children.
MODELS = [(0.3, 100, 30, 3.0), (0.2, 300, 20, 2.0), (0.1, 200, 40, 1.0)]
HULLS = {
    "multiply_adds": ["g00000", "g00002"],
    "parameters": ["g00001", "g00002"],
    "latency": ["g00002"],
}


def a_search(complexity: str = "multiply_adds", **limits: Any) -> Search:
    return Search(SearchSettings(complexity=complexity, limits=Limits(**limits)))


def tell(search: Search, error: float, size: int, parameters: int, ms: float, **more: Any) -> None:
    growth = search.ask()
    assert isinstance(growth, Growth)
    search.tell(Outcome(growth.id, error, size, parameters, metrics={LATENCY: ms, **more}))


@pytest.mark.parametrize("complexity", HULLS)
def test_the_hull_goes_by_the_complexity(complexity: str) -> None:
    search = a_search(complexity)
    for model in MODELS:
        tell(search, *model)
    assert [record.id for record in search.hull()] == HULLS[complexity]
    search.quarantine("g00002")  # the hull is made anew
    assert "g00002" not in [record.id for record in search.hull()]


def test_a_model_without_a_latency_is_not_on_a_hull_of_latencies() -> None:
    search = a_search("latency")
    growth = search.ask()
    assert isinstance(growth, Growth)
    search.tell(Outcome(growth.id, 0.3, 100, 10))
    assert search.hull() == []
    assert len(search.models()) == 1


@pytest.mark.parametrize(
    ("limits", "may_grow"),
    [({"max_latency": 3.0}, False), ({"max_latency": 3.1}, True), ({"max_parameters": 30}, False)],
)
def test_models_at_a_limit_do_not_grow(limits: dict[str, float], may_grow: bool) -> None:
    search = a_search("latency", **limits)
    tell(search, *MODELS[0])
    assert isinstance(search.ask(), Growth if may_grow else Done)


def test_no_growth_is_handed_out_whose_children_are_all_too_large() -> None:
    child = {SMALLEST_CHILD: {"multiply_adds": 150}}
    for oversize, limit, may_grow in (
        ("train", 120, True),
        ("skip", 120, False),
        ("skip", 150, True),
    ):
        search = a_search(max_multiply_adds=limit, oversize=oversize)
        tell(search, *MODELS[0], **child)
        growth = search.ask()
        assert isinstance(growth, Growth) == may_grow
        if isinstance(growth, Growth):
            assert growth.within == (None if oversize == "train" else {"multiply_adds": limit})
            assert Growth.from_dict(json.loads(json.dumps(growth.to_dict()))) == growth


def test_a_growth_without_a_limit_is_written_as_ever() -> None:
    growth = a_search().ask()
    assert isinstance(growth, Growth)
    assert list(growth.to_dict()) == ["id", "parent", "seed", "l1", "i_max", "attempt"]
    with pytest.raises(SearchError, match=r"^within of g00000 must hold numbers"):
        Growth.from_dict({**growth.to_dict(), "within": {"multiply_adds": "many"}})


def test_the_default_is_not_written_and_others_identify_a_search() -> None:
    for settings in (SearchSettings(), GrowthSettings()):
        assert "complexity" not in settings.to_dict()
    other = SearchSettings(complexity="latency")
    assert other.identity()["complexity"] == "latency"
    assert SearchSettings.from_dict(other.to_dict()) == other


def test_wrong_settings_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^limits\.max_latency needs complexity to be latency"):
        a_search(max_latency=1.0)
    with pytest.raises(ConfigError, match=r"^complexity must be one of multiply_adds, parameters"):
        a_search("flops")
    with pytest.raises(ConfigError, match=r"^oversize must be one of train, skip but got 'drop'"):
        a_search(oversize="drop")
