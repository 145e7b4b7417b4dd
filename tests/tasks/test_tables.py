"""Searches on tables of comma-separated values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nni_petridish
from nni_petridish.__main__ import main
from nni_petridish.errors import DataError, Interrupted, PetridishError
from nni_petridish.registry import kind_of
from nni_petridish.running.config import SearchConfig
from nni_petridish.tasks.tables.kind import TableRecipe, load_task, read_data, seed_size
from nni_petridish.tasks.tables.splits import split_sizes
from nni_petridish.tasks.tables.table import Column, read_table
from nni_petridish.tasks.tables.task import load_rows
from nni_petridish.tasks.task import Callbacks, Phase

CONFIG = """
experimentName: a table
trialCommand: python -m nni_petridish.trial
trialCodeDirectory: .
trialConcurrency: 1
trainingService: {{platform: local}}
searchSpace: {{space: vector, width: 8, num_cells: 1}}
tuner:
  className: nni_petridish.tuner.PetridishTuner
  codeDirectory: .
  classArgs:
    gallery: gallery
    data: {{name: csv, root: {file}, target: species, drop: [id]}}
    seed_epochs: 3
    weak_epochs: 2
    final_epochs: 3
    i_max: 1
    limits: {{max_models: 3}}
    recipe: {{batch_size: 16}}
"""


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """Return a table that the color and two numbers decide; some cells are missing."""
    rng = np.random.default_rng(0)
    lines = ["id,length,width,color,species"]
    for i in range(240):
        kind = i % 3
        length, width = rng.normal([2.0 * kind, -1.0 * kind], 0.3)
        color = "white" if kind == 0 else "blue"
        shown = "" if i % 40 == 7 else f"{length:.3f}"
        lines.append(f"n{i},{shown},{width:.3f},{color},{('setosa', 'iris', 'virginica')[kind]}")
    path = tmp_path / "flowers.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def options(path: Path, **more: Any) -> dict[str, Any]:
    return {"name": "csv", "root": str(path), "target": "species", "drop": ["id"], **more}


def test_a_table_is_read_as_numbers_and_texts(flowers: Path) -> None:
    table = read_table(options(flowers))
    assert table.columns == (Column("length"), Column("width"), Column("color", ("blue", "white")))
    assert table.classes == ("iris", "setosa", "virginica")
    assert table.features.shape == (240, 4)
    assert np.isnan(table.features[7, 0])
    assert table.features[0, 2:].tolist() == [0.0, 1.0]
    assert table.classes[table.labels[0]] == "setosa"


def test_parts_are_disjoint_complete_and_standardized(flowers: Path) -> None:
    rows = load_rows(options(flowers, validation=50))
    parts = [rows.training, rows.validation, rows.testing]
    assert [len(part) for part in parts] == [150, 50, 40]
    seen = {tuple(row.tolist()) for part in parts for row in part.inputs}
    assert len(seen) == 240
    training = rows.training.inputs[:, 1]
    torch.testing.assert_close(training.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(training.std(correction=0), torch.tensor(1.0), atol=1e-5, rtol=0)
    assert set(rows.training.inputs[:, 3].tolist()) == {0.0, 1.0}
    other = load_rows(options(flowers, validation=50, seed=1))
    assert torch.equal(other.testing.targets, rows.testing.targets)
    assert not torch.equal(other.training.targets, rows.training.targets)
    assert split_sizes(240, 0) == (200, 0)


def test_the_size_of_the_seed_is_known_without_building_it(flowers: Path) -> None:
    data, space = read_data(options(flowers), flowers.parent), {"width": 8, "num_cells": 2}
    task: Any = load_task({"space": "vector", **space}, data, TableRecipe())
    net = task.build(task.seed())
    assert seed_size(space, data) == task.size(net)


def test_from_a_table_to_an_exported_model(
    flowers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(flowers.parent)
    Path("table.yml").write_text(CONFIG.format(file=flowers.name))
    assert main(["search", "table.yml", "--quiet"]) == 0
    assert main(["show", "gallery", "g00000"]) == 0
    assert "rows of 3 columns; classes iris, setosa, virginica" in capsys.readouterr().out
    net: Any = nni_petridish.load_model("gallery")
    row = {"length": 0.1, "width": "0.05", "color": "white"}
    assert net.predict([row, [3.9, -2.1, "blue"]], names=True) == ["setosa", "virginica"]
    assert len(net.predict([{**row, "length": None}])) == 1
    config = SearchConfig.from_yaml("table.yml")
    rows = load_rows(config.data)
    table = read_table(config.data)
    raw = [[cell if cell == cell else "" for cell in x[:2]] for x in table.features.tolist()]
    cells = [[*x, "white" if f[3] else "blue"] for x, f in zip(raw, table.features, strict=True)]
    predicted = net.predict(cells)
    standard = (torch.from_numpy(table.features) - _stat(rows, "mean")) / _stat(rows, "std")
    with torch.no_grad():
        expected = net(standard.nan_to_num().float()).argmax(1)
    assert torch.equal(predicted, expected)
    assert float((predicted != torch.from_numpy(table.labels)).double().mean()) < 0.1
    assert main(["export", "gallery", "--format", "torch_export", "--out", "net.pt2"]) == 0
    exported = torch.export.load("net.pt2").module()
    features = torch.from_numpy(np.nan_to_num(table.features)).float()
    with torch.no_grad():
        logits = net(((features - _stat(rows, "mean")) / _stat(rows, "std")).float())
    torch.testing.assert_close(exported(features), logits, atol=1e-4, rtol=1e-4)
    arguments = ["train", "gallery", "g00001", "--width", "12", "--epochs", "2", "--quiet"]
    assert main([*arguments, "--set", "batch_size=16"]) == 0
    assert Path("gallery/final/g00001-W12-2epochs/run-0/model.safetensors").is_file()


@pytest.mark.parametrize("front", ["search", pytest.param("run", marks=pytest.mark.slow)])
def test_the_configuration_of_init_leads_from_a_table_to_an_exported_model(
    flowers: Path, front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(flowers.parent)
    assert main(["init", flowers.name]) == 0
    text = Path("petridish.yml").read_text()
    assert "space: vector" in text
    assert "name: csv" in text
    Path("petridish.yml").write_text(text.replace("max_models: 8", "max_models: 2"))
    assert main(["check", "petridish.yml", "--quick"]) == 0
    assert main([front, "petridish.yml", "--quiet"]) == 0
    arguments = ["export", "galleries/flowers", "--best", "--out", "best.safetensors"]
    assert main(arguments) == 0
    net: Any = nni_petridish.load_model("best.safetensors")
    rows = [
        dict(zip(("id", "length", "width", "color"), row.split(",")[:4], strict=True))
        for row in flowers.read_text().splitlines()[1:]
    ]
    kinds = [row.split(",")[4] for row in flowers.read_text().splitlines()[1:]]
    right = sum(a == b for a, b in zip(net.predict(rows, names=True), kinds, strict=True))
    assert right > 0.9 * len(rows)


def _stat(rows: Any, key: str) -> torch.Tensor:
    return torch.tensor(rows.facts["normalisation"][key], dtype=torch.float64)


def test_a_search_that_is_stopped_ends_with_the_same_models(flowers: Path) -> None:
    data = read_data(options(flowers), flowers.parent)
    recipe = TableRecipe(batch_size=16)
    task: Any = load_task({"space": "vector", "width": 8}, data, recipe)
    assert kind_of({"space": "vector"}).MEASURE.name == "error"
    torch.manual_seed(0)
    whole = task.build(task.seed())
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    checkpoint = flowers.parent / "checkpoint"
    records = task.train(whole, Phase("seed", epochs=4))
    assert all("validation_error" in record for record in records)  # NNI is told after each epoch
    stopped = task.build(task.seed())
    stopped.load_state_dict(state)
    asked = iter([False] * 15)
    with pytest.raises(Interrupted):
        task.train(
            stopped,
            Phase("seed", epochs=4, checkpoint=checkpoint),
            Callbacks(should_stop=lambda: next(asked, True)),
        )
    again = task.build(task.seed())
    task.train(again, Phase("seed", epochs=4, checkpoint=checkpoint))
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("text", "more", "problem"),
    [
        ("", {}, "is empty"),
        ("a,species\n1,x\n", {}, "at least 12 rows but has 1"),
        ("a,a\n" + "1,x\n" * 20, {}, "the name 'a' stands for two columns"),
        ("a,species\n" + "1,x\n" * 20 + "1\n", {}, "row 21 must have 2 cells"),
        ("a,species\n" + "1,x\n" * 20, {}, "must have 2 to 100 classes but has 1"),
        ("a,species\n" + "1,x\n2,\n" * 20, {}, "must have a class in each row"),
        ("species\n" + "x\ny\n" * 20, {}, "must have a column beside 'species'"),
        ("a,species\n" + "1,x\n2,y\n" * 20, {"target": "b"}, "target must be one of a, species"),
        ("a,species\n" + "1,x\n2,y\n" * 20, {"drop": ["c"]}, "drop must be one of a, species"),
        (
            "a,species\n" + "\n".join(f"t{i},{i % 2}" for i in range(30)),
            {},
            "column 'a' must have at most 20 different texts but has 30: leave it out with drop",
        ),
        (
            "a,species\n" + "\n".join(f"{i},{i / 7}" for i in range(120)),
            {},
            "GrowingRegressor predicts numbers",
        ),
        ("a,species\n" + "1,x\n2,y\n" * 20, {"validation": 40}, "validation must leave at least 2"),
    ],
)
def test_a_table_that_cannot_be_used_is_one_line(
    tmp_path: Path, text: str, more: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(PetridishError, match=problem) as caught:
        read_data({"name": "csv", "root": str(path), "target": None, **more}, tmp_path)
    assert "\n" not in str(caught.value)


def test_forms_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "numbers.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + "".join(f"{i}\tNA\t{i % 3}\n" for i in range(30)).encode())
    table = read_table({"root": str(path)})
    assert [column.name for column in table.columns] == ["column_1", "column_2"]
    assert table.classes == ("0", "1", "2")
    assert math.isnan(table.features[0, 1])
    rows = load_rows({"root": str(path)})
    assert rows.training.inputs[:, 1].tolist() == [0.0] * len(rows.training)
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(DataError, match="must be text in UTF-8"):
        read_table({"root": str(path)})


def test_rows_that_do_not_fit_are_one_line(flowers: Path) -> None:
    data = read_data(options(flowers), flowers.parent)
    task: Any = load_task({"space": "vector", "width": 8}, data, TableRecipe())
    kind = kind_of({"space": "vector"})
    predict = kind.make_predictor(task.build(task.seed()), task.space.describe(), task.facts)
    for rows, problem in (
        ([{"length": 1}], "row 0 must have the column 'width'"),
        ([[1, 2]], "row 0 must have 3 cells"),
        ([["long", 2, "blue"]], "column 'length' must be a number but got 'long'"),
        ({"length": 1}, "rows must be a list of rows"),
        (5, "rows must be a list of rows"),
    ):
        with pytest.raises(DataError, match=problem):
            predict(rows)
    assert predict([]).shape == (0,)
