from __future__ import annotations

from pathlib import Path

import pytest

from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError, GalleryError
from nni_petridish.gallery.select import open_search, parse_count, select_model
from nni_petridish.search.events import model_event
from nni_petridish.search.records import Growth, Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import SearchSettings
from tests.support.small_gallery import MODELS, recurrent_gallery, vision_gallery


def a_search() -> Search:
    events = [
        model_event(Growth(id, parent, 0, 0.001, 3), Outcome(id, error, size, 1))
        for id, (parent, error, size) in MODELS.items()
    ]
    return Search.replay(SearchSettings(), events)


@pytest.mark.parametrize(
    ("near", "expected"),
    [(1, "g00000"), (15e6, "g00001"), (26e6, "g00001"), (45e6, "g00003"), (1e12, "g00003")],
)
def test_near_is_the_hull_model_of_the_smallest_distance(near: float, expected: str) -> None:
    # 15M is as far from 10M as from 20M: the more accurate one. 26M would be g00002, off the hull.
    assert select_model(a_search(), near=near).id == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(10e6, "g00000"), (59e6, "g00001"), (60e6, "g00003")]
)
def test_max_is_the_most_accurate_of_those_within_the_limit(limit: float, expected: str) -> None:
    search = a_search()
    assert select_model(search, max=limit).id == expected
    allowed = [record for record in search.hull() if record.multiply_adds <= limit]
    assert select_model(search, max=limit).error == min(record.error for record in allowed)


def test_best_is_the_default_and_an_id_may_be_off_the_hull() -> None:
    assert select_model(a_search()).id == select_model(a_search(), best=True).id == "g00003"
    assert select_model(a_search(), "g00002").id == "g00002"


def test_what_cannot_be_selected_is_said_in_one_line() -> None:
    search = a_search()
    for arguments, message in (
        ({"model": "g00009"}, r"no model 'g00009'; there are g00000, .*g00003"),
        ({"max": 9e6}, r"cheapest model, g00000, has 10,000,000"),
    ):
        with pytest.raises(GalleryError, match=message):
            select_model(search, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Only one of"):
        select_model(search, "g00000", best=True)
    with pytest.raises(GalleryError, match="finished yet"):
        select_model(Search(SearchSettings()))


@pytest.mark.parametrize("text", ["", "M", "60 apples", "-3", "0", "nan", "6e7x"])
def test_a_count_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 60M"):
        parse_count(text)


def test_galleries_of_every_front_open(tmp_path: Path) -> None:
    for make, name in ((vision_gallery, "v"), (recurrent_gallery, "r")):
        _, search = open_search(make(tmp_path / name).folder)
        assert [record.id for record in search.hull()] == ["g00000", "g00001", "g00003"]


def test_the_command_shows_the_selected_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = vision_gallery(tmp_path).folder
    assert main(["show", str(folder), "--near", "22M"]) == 0
    title, row, *_ = capsys.readouterr().out.splitlines()
    assert title.split()[0] == "model"
    assert row.split()[:3] == ["g00001", "g00000", "1"]
    assert not (folder / "report.html").exists()
    assert main(["show", str(folder), "g00077"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
