"""The configurations of the paper's experiments, whose data are not at hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nni_petridish.config import SearchConfig
from nni_petridish.data import _SOURCES
from nni_petridish.plan import Plan
from nni_petridish.recipe import Recipe

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_the_cifar_configs_are_the_papers_defaults(tmp_path: Path, mode: str) -> None:
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs" / f"cifar10_{mode}.yml", tmp_path / "configs" / "c.yml")
    source = _SOURCES["cifar10"]
    (tmp_path / "data" / source.folder).mkdir(parents=True)
    for name in source.files:
        (tmp_path / "data" / source.folder / name).touch()
    config = SearchConfig.from_yaml(tmp_path / "configs" / "c.yml")
    assert config.space["mode"] == mode
    assert (config.space["cells_per_stage"], config.space["filters"]) == (3, 16)
    assert config.plan == Plan()  # the dataclasses have the paper's numbers as defaults
    assert config.recipe == Recipe.named("cifar10")
    assert (config.settings.l1, config.settings.i_max) == (0.001, 3)
    assert config.data["validation"] == 5000
