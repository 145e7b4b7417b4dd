from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from scipy.stats import kendalltau

from nni_petridish.__main__ import main
from nni_petridish.studies.judge.children import Chooser
from nni_petridish.studies.judge.growing import by_accuracy, by_hull, growing, paper
from nni_petridish.studies.judge.policies import policies
from nni_petridish.studies.judge.scene import NamedPolicy, Policy, Scene, Training
from nni_petridish.studies.judge.simulate import WEAK_COST, _until, simulate
from tests.studies.test_judge_tables import small_table
from tests.support.terminal import on_terminal


def trained(policy: Policy, limit: int = 60, budget: int = 20, seed: int = 0) -> list[Training]:
    table = small_table()
    run = policy(Scene(table, limit, budget, random.Random(seed)))
    found = [next(run)]
    try:
        while len(found) < budget:
            found.append(run.send(table.rows[found[-1].code].accuracy))
    except StopIteration:
        pass
    return found


@pytest.mark.parametrize("name", policies((0.5,)))
def test_policies_train_architectures_of_the_table(name: str) -> None:
    table, policy = small_table(), policies((0.5,))[name].policy
    codes = [training.code for training in trained(policy)]
    assert set(codes) <= set(table.rows)
    if "paper" not in name:  # as in a search, a growth of the paper's policy may exceed the limit
        assert all(table.rows[code].multiply_adds <= 60 for code in codes)
    if name not in ("evolution", "TPE"):  # which may train an architecture again
        assert len(codes) == len(set(codes))


@pytest.mark.parametrize("name", ["paper, τ 0.5", "within limit, upper confidence, τ 0.5"])
def test_growing_policies_add_to_a_trained_parent(name: str) -> None:
    table = small_table()
    codes = [training.code for training in trained(policies((0.5,))[name].policy)]
    assert codes[0] == table.seed
    for i, code in enumerate(codes[1:], start=1):
        assert any(code in table.children(before) for before in codes[:i])


def test_the_best_child_comes_first_with_tau_1() -> None:
    assert trained(paper(Chooser(1.0)), limit=1000)[1].code == "002"
    assert trained(growing(Chooser(1.0), by_accuracy))[1].code == "002"


def test_the_simulated_score_has_the_wanted_tau() -> None:
    table, rng = small_table(4), random.Random(0)
    accuracies = [row.accuracy for row in table.rows.values()]
    for tau in (0.0, 0.4, 0.8):
        found = [
            kendalltau(Chooser(tau)._scores(accuracies, rng), accuracies).statistic
            for _ in range(50)
        ]
        assert math.fsum(found) / len(found) == pytest.approx(tau, abs=0.04)


def test_one_weak_learning_serves_several_children() -> None:
    found = trained(growing(Chooser(0.5), by_hull, children=3), budget=7)
    assert [training.weak for training in found] == [False, *[True, False, False] * 2]
    assert not any(training.weak for training in trained(paper(Chooser())))


def test_time_counts_multiply_adds_and_weak_learning() -> None:
    table = small_table()
    path = [(Training("000"), 50.0), (Training("001", weak=True), 53.0), (Training("010"), 52.0)]
    assert len(_until(table, path, 10 + 20 * (1 + WEAK_COST))) == 2
    assert len(_until(table, path, 10 + 20 * (1 + WEAK_COST) - 1)) == 1
    assert len(_until(table, path, 0)) == 1


def test_simulations_repeat_and_good_choices_pay() -> None:
    named = {
        name: NamedPolicy(paper(Chooser(tau)))
        for name, tau in (("random child", 0.0), ("best child", 1.0))
    }
    first, again = (simulate(small_table(4), repetitions=5, named=named) for _ in range(2))
    assert first == again
    mean = {(one.policy, one.limit): sum(one.regrets[10]) / 5 for one in first}
    for limit in (40, 60):
        assert 0 <= mean["best child", limit] < mean["random child", limit]


def write_macro_file(folder: Path) -> Path:
    """Write a table in the form of NAS-Bench-Macro's."""
    rows = {
        "".join(code): {"test_acc": [50.0 + sum(map(int, code))], "params": 1, "flops": 10**7}
        for code in itertools.product("012", repeat=8)
    }
    (folder / "macro.json").write_text(json.dumps(rows))
    return folder / "macro.json"


def test_the_command_writes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_macro_file(tmp_path), tmp_path / "out"
    options = ["--file", str(file), "--out", str(out), "--repetitions", "1"]
    assert main(["judge", "policies", *options, "--taus", "0.5,2"]) == 2
    assert "--taus must be numbers from -1 to 1 but got '0.5,2'" in capsys.readouterr().err
    options += ["--taus", "0.6"]
    assert main(["judge", "policies", *options]) == 0
    assert "Within 40M multiply-adds" in capsys.readouterr().out
    assert "| TPE | " in (out / "policies.md").read_text()
    assert (out / "policies.csv").read_text().startswith("policy,limit,clock,n,regret")


def test_on_a_terminal_policies_fit_its_width_and_leave_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_macro_file(tmp_path)
    options = ["--file", str(file), "--out", str(tmp_path / "out"), "--repetitions", "3"]
    with on_terminal(monkeypatch, until="never shown", columns=80) as terminal:
        assert main(["judge", "policies", *options, "--taus", "0.5"]) == 0
    printed = terminal.text().replace("\r", "\n").splitlines()
    shown = [line.rstrip() for line in printed if str(tmp_path) not in line]
    assert all(len(line) <= 80 for line in shown)
    assert not any(line.startswith("|") for line in shown)
    header = ["policy", "10", "20", "50", "time", "10", "time", "20"]
    assert any(line.split() == header for line in shown)
    assert not any(line.endswith(" policies") for line in shown)  # the lines tell, the head counts


def test_policies_that_are_stopped_say_that_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--file", str(write_macro_file(tmp_path)), "--out", str(tmp_path / "out")]
    with on_terminal(monkeypatch, until="regret") as terminal:
        assert main(["judge", "policies", *options, "--repetitions", "1000"]) == 130
    assert "Stopped: nothing is kept; fewer --repetitions take less time." in terminal.text()
    assert not (tmp_path / "out" / "policies.md").exists()
