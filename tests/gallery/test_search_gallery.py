from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nni_petridish.errors import GalleryError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.search_gallery import check_gallery, describe_space, open_gallery
from nni_petridish.running.config import SearchConfig
from search_spaces import RecurrentSpace, VisionSpace

DIGITS = {"name": "digits"}
PYDOC = {"name": "pydoc", "vocabulary": 50}
#: As a configuration names it, the data, and the space itself.
SPACES: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
    ({"space": "vision", "filters": 3}, DIGITS, VisionSpace((1, 8, 8), 10, filters=3)),
    ({"space": "recurrent", "embedding": 6}, PYDOC, RecurrentSpace(50, embedding=6)),
]
each_space = pytest.mark.parametrize(
    ("named", "data", "space"), SPACES, ids=[named["space"] for named, _, _ in SPACES]
)


@each_space
def test_fronts_describe_the_same_space_alike(
    tmp_path: Path, named: dict[str, Any], data: dict[str, Any], space: Any
) -> None:
    described = {"space": space.name, **space.describe()}  # as the strategy has it
    assert describe_space(named, data) == describe_space(described, {}) == described
    written = open_gallery(tmp_path / "gallery", named, {}, data).space
    assert type(space)(**{k: v for k, v in written.items() if k != "space"}) == space


@each_space
def test_galleries_of_either_front_are_opened_as_they_are(
    tmp_path: Path, named: dict[str, Any], data: dict[str, Any], space: Any
) -> None:
    earlier = {"named": named, "described": {"space": space.name, **space.describe()}}
    for form, description in earlier.items():
        folder = tmp_path / form
        Gallery.create(folder, description, {})
        before = (folder / "gallery.json").read_bytes()
        check_gallery(folder, named, {}, data)
        assert open_gallery(folder, named, {}, data).space == description
        assert open_gallery(folder, earlier["described"], {}, data).space == description
        assert (folder / "gallery.json").read_bytes() == before


@each_space
def test_a_gallery_of_another_space_is_refused(
    tmp_path: Path, named: dict[str, Any], data: dict[str, Any], space: Any
) -> None:
    name, value = next((k, v) for k, v in named.items() if k != "space")
    for form, description in enumerate((named, describe_space(named, data))):
        folder = tmp_path / str(form)
        Gallery.create(folder, {**description, name: value + 1}, {})
        with pytest.raises(GalleryError, match=rf"space\.{name} is {value + 1} there but {value}"):
            open_gallery(folder, named, {}, data)
    Gallery.create(tmp_path / "unknown", {**named, "width": 2}, {})
    with pytest.raises(GalleryError, match=r"space\.width is 2 there but None here"):
        open_gallery(tmp_path / "unknown", named, {}, data)


@each_space
def test_a_gallery_whose_data_are_unknown_is_refused_in_one_line(
    tmp_path: Path, named: dict[str, Any], data: dict[str, Any], space: Any
) -> None:
    Gallery.create(tmp_path / "gallery", named, {"data": data})
    with pytest.raises(GalleryError, match="is of another search"):
        open_gallery(tmp_path / "gallery", {"space": space.name, **space.describe()}, {})


def test_a_configuration_writes_the_whole_space(tmp_path: Path) -> None:
    config = SearchConfig.from_parts({"filters": 3}, {"gallery": "gallery"}, tmp_path, {})
    config.open_gallery()
    written = json.loads((tmp_path / "gallery" / "gallery.json").read_bytes())["space"]
    assert written == {"space": "vision", **VisionSpace((1, 8, 8), 10, filters=3).describe()}
