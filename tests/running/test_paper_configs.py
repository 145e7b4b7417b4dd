"""The configurations of the paper's experiments: their numbers, and a short run of each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from nni_petridish import Gallery, Genotype
from nni_petridish.__main__ import main
from nni_petridish.running.config import SearchConfig
from nni_petridish.search.settings import GrowthSettings
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.vision.data import _SOURCES
from nni_petridish.tasks.vision.recipe import Recipe
from tests.tasks.test_data import write_cifar

ROOT = Path(__file__).parents[2]


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
    assert config.plan == GrowthSettings()  # the dataclasses have the paper's numbers as defaults
    assert config.recipe == Recipe.named("cifar10")
    assert (config.settings.l1, config.settings.i_max) == (0.001, 3)
    assert config.data["validation"] == 5000


@pytest.mark.parametrize("name", ["cifar10_cell", "cifar10_macro", "imagenet_transfer"])
def test_every_value_says_where_in_the_paper_it_stands(name: str) -> None:
    text = (ROOT / "configs" / f"{name}.yml").read_text()
    # What is left out is NNI's: names of classes and folders of code.
    own = text[text.index("searchSpace:") :] if "searchSpace:" in text else text
    lines = [line for line in own.splitlines() if not line.lstrip().startswith("#")]
    values = [line for line in lines if re.search(r":\s+[^\s#]|^\s*- ", line)]
    assert len(values) > 15
    for line in values:
        if not re.match(r"\s*(className|codeDirectory):", line):
            assert re.search(r"#\s*(\d|A\.\d|B\.\d|ours|are made)", line), line


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_a_search_by_the_papers_config_runs(tmp_path: Path, mode: str) -> None:
    """Its own space, recipe and augmentation; fewer images, epochs and models, random pixels."""
    write_cifar(tmp_path / "data", "cifar10")
    document = yaml.safe_load((ROOT / "configs" / f"cifar10_{mode}.yml").read_text())
    document["tuner"]["codeDirectory"] = "."
    arguments = document["tuner"]["classArgs"]
    arguments["data"]["validation"] = 8
    arguments |= {"seed_epochs": 1, "weak_epochs": 1, "final_epochs": 1, "gallery": "gallery"}
    arguments["limits"]["max_models"] = 2
    (tmp_path / "c.yml").write_text(yaml.safe_dump(document))
    assert main(["search", str(tmp_path / "c.yml")]) == 0
    assert main(["show", str(tmp_path / "gallery"), "--near", "60M"]) == 0


def test_the_config_for_penn_treebank_is_the_papers_and_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its numbers first; then its own recipe with a narrow cell, few words and epochs."""
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "ptb.yml", tmp_path / "configs" / "c.yml")
    (tmp_path / "data" / "ptb").mkdir(parents=True)
    for part in ("train", "valid", "test"):
        words = " ".join(f"w{i * i % 23}" for i in range(700))
        (tmp_path / "data" / "ptb" / f"ptb.{part}.txt").write_text(words)
    config = SearchConfig.from_yaml(tmp_path / "configs" / "c.yml")
    assert (config.space["embedding"], config.space["max_nodes"]) == (850, 8)
    plan = config.plan
    assert (plan.seed_epochs, plan.weak_epochs, plan.final_epochs) == (25, 25, 25)
    assert config.settings.i_max == 1
    assert config.recipe == LanguageRecipe()  # DARTS's, and batches of 64

    document = yaml.safe_load((tmp_path / "configs" / "c.yml").read_text())
    document["searchSpace"]["embedding"] = 6
    arguments = document["tuner"]["classArgs"]
    arguments |= {"seed_epochs": 1, "weak_epochs": 1, "final_epochs": 1, "gallery": "gallery"}
    arguments["limits"] = {"max_models": 3, "max_growths": 7}
    (tmp_path / "configs" / "c.yml").write_text(yaml.safe_dump(document))
    assert main(["search", str(tmp_path / "configs" / "c.yml")]) == 0
    capsys.readouterr()
    assert main(["show", str(tmp_path / "gallery"), "g00002"]) == 0
    assert "g00002" in capsys.readouterr().out
    documents = Gallery(tmp_path / "gallery").load_documents("g00002")
    growths = Genotype.from_dict(documents["genotype"]).growths
    multiply_adds = documents["metrics"]["multiply_adds"]
    # [x, h] W0, a W of each node, and the decoder over the words of the text and <eos>
    words = len({i * i % 23 for i in range(700)}) + 1
    expected = 12 * 12 + (growths + 1) * 6 * 12 + words * 6
    assert multiply_adds == expected
