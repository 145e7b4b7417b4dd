from __future__ import annotations

import argparse
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nni_petridish import attach_candidates, sites
from nni_petridish.core import zero_cost
from nni_petridish.core.select import gain_score
from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.studies.judge.cli import _run_scores
from nni_petridish.studies.judge.judgement import Judgement
from nni_petridish.studies.judge.report import write_scores_report
from nni_petridish.studies.judge.scores import (
    CANDIDATE_SCORES,
    CHILD_SCORES,
    COMPOSITE_SCORES,
    Evidence,
    Facts,
)
from nni_petridish.studies.judge.settings import JudgeSettings, Parent
from nni_petridish.studies.judge.tables import Row
from nni_petridish.studies.judge.work import judge_scores
from nni_petridish.tasks.task import Callbacks, Progress
from nni_petridish.tasks.vision.data import DataSet
from nni_petridish.tasks.vision.splits import TensorSplit, pixel_statistics
from search_spaces.tables.macro import MacroGenotype, MacroSpace
from tests.studies.test_judge_tables import small_table
from tests.support.terminal import on_terminal


def space() -> MacroSpace:
    return MacroSpace((3, 8, 8), 4, stages=(1, 2), filters=4, features=8)


def data() -> DataSet:
    def split(n: int, seed: int) -> TensorSplit:
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=generator)
        raw = raw.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(4, (n,), generator=generator)
        return TensorSplit(raw, labels, *pixel_statistics(raw))

    return DataSet("made", (3, 8, 8), 4, split(40, 0), split(20, 1), split(20, 2))


SETTINGS = JudgeSettings(
    parents=(1, 1),
    short_steps=2,
    short_grown_steps=2,
    long_steps=4,
    long_grown_steps=3,
    checkpoints=(1, 3),
    batch_size=8,
    held_out=15,
)


def judgement(folder: Path, settings: JudgeSettings = SETTINGS) -> Judgement:
    return Judgement(small_table(), space(), data(), settings, folder)


def test_parents_are_judged_once_and_alike(tmp_path: Path) -> None:
    told: list[Parent] = []
    judge_scores(judgement(tmp_path), on_parent=lambda run, result: told.append(run.parent))
    assert len(told) == 4
    file = tmp_path / "results" / f"{told[3].name}.json"
    before = json.loads(file.read_bytes())
    table = small_table()
    assert sorted(before["children"]) == sorted(table.children(told[3].code))
    assert set(before["scores"]["3"]) == set(CANDIDATE_SCORES)
    assert set(before["fresh"]) == set(CHILD_SCORES)
    assert [len(codes) for codes in before["tables"].values()] == [2, 2]
    file.unlink()
    (tmp_path / "parents" / f"{told[3].name}.safetensors").write_bytes(b"damaged")
    told.clear()
    judge_scores(judgement(tmp_path), on_parent=lambda run, result: told.append(run.parent))
    assert [parent.name for parent in told] == [file.stem]
    after = json.loads(file.read_bytes())
    assert after["scores"] == before["scores"]
    text = write_scores_report(tmp_path, table)
    assert "4 parents of 2 architectures" in text
    assert "| alpha | short |" in text
    assert (tmp_path / "scores.svg").stat().st_size > 1000
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 1 + 4 * (
        2 * (9 + 4) + 5 + 3 + 2
    )


def test_a_stopped_judgement_keeps_nothing_half(tmp_path: Path) -> None:
    asked = iter([False] * 5)
    judge_scores(judgement(tmp_path), stop=lambda: next(asked, True))
    assert not list((tmp_path / "results").glob("*.json"))
    assert list((tmp_path / "parents").glob("*.safetensors"))  # the finished trainings are kept


@pytest.mark.parametrize("phase", ["weak", "children"])
def test_a_judgement_stops_while_it_scores(tmp_path: Path, phase: str) -> None:
    work, reached = judgement(tmp_path), threading.Event()

    def on_progress(now: str, progress: Progress) -> None:
        if now == phase and (now == "children" or progress.done == work.settings.checkpoints[0]):
            reached.set()

    callbacks = Callbacks(should_stop=reached.is_set, on_progress=on_progress)
    work.prepare()
    with pytest.raises(Interrupted, match="scoring was stopped"):
        work.judge(work.parents[0], callbacks)
    assert len(list((tmp_path / "children").glob("*.json"))) == (phase == "children")


def test_a_folder_has_one_set_of_settings(tmp_path: Path) -> None:
    judgement(tmp_path).prepare()
    judgement(tmp_path).prepare()
    other = JudgeSettings(**{**SETTINGS.to_dict(), "lr": 0.5})
    with pytest.raises(ConfigError, match=r"was begun with lr=0\.025 but got 0\.5; choose another"):
        judgement(tmp_path, other).prepare()


def test_a_grown_parent_starts_with_the_function_of_its_own() -> None:
    torch.manual_seed(0)
    parent = space().build(MacroGenotype("100"))
    images = torch.randn(8, 3, 8, 8)
    parent(images)  # running statistics that are not the initial ones
    grown = space().build_grown(parent, MacroGenotype("102"))
    assert torch.equal(grown.eval()(images), parent.eval()(images))
    replaced = space().build_grown(space().build(MacroGenotype("000")), MacroGenotype("200"))
    assert replaced.layers[0].block.last_norm().weight.min() == 1  # nothing to add to


def test_scores_of_candidates_share_one_pass() -> None:
    torch.manual_seed(0)
    net = attach_candidates(space().build(MacroGenotype("000")))
    images, labels = torch.randn(8, 3, 8, 8), torch.randint(4, (8,))
    calls = []

    def losses(net: nn.Module) -> list[torch.Tensor]:
        calls.append(1)
        return [F.cross_entropy(net(images), labels, reduction="sum")]

    evidence = Evidence(net, losses)
    scores = {name: score for name, score in CANDIDATE_SCORES.items() if name != "line"}
    found = {name: score(evidence) for name, score in scores.items()}
    assert len(calls) == 3  # for all inner products, the regressions, and the norm of gradients
    assert found["gain"] == gain_score(net, losses)
    assert found["alpha"] == {f"layer_{i}": [pytest.approx(1 / 6)] * 2 for i in range(3)}
    for values in found.values():
        assert all(value >= 0 for row in values.values() for value in row)
    assert all(value <= 1 for row in found["cosine"].values() for value in row)
    # Independently, by a backward pass that reaches the first candidate's weights.
    net.eval().zero_grad()
    losses(net)[0].backward()
    op = sites(net)[0].weak_learner.ops[0]
    squares = sum(float(p.grad.square().sum()) for p in op.parameters())
    assert found["gradient"]["layer_0"][0] == pytest.approx(squares**0.5, rel=1e-4)


def two_linear() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))


def test_snip_and_grasp_by_hand() -> None:
    net, images, labels = two_linear(), torch.randn(5, 1, 2, 2), torch.tensor([0, 1, 0, 1, 1])
    weights = [net[1].weight, net[2].weight]

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(F.cross_entropy(net(images), labels), weights))

    at = gradients()
    expected = sum(float((w.detach() * g).abs().sum()) for w, g in zip(weights, at, strict=True))
    assert zero_cost.snip(net, images, labels) == pytest.approx(expected, rel=1e-5)
    # H g by a finite difference along g.
    found = zero_cost.grasp(net, images, labels)
    before = [w.detach().clone() for w in weights]
    ends = []
    for sign in (1, -1):
        for w, b, g in zip(weights, before, at, strict=True):
            w.data = b + sign * 1e-2 * g
        ends.append(gradients())
    hessian = [(a - b) / 2e-2 for a, b in zip(*ends, strict=True)]
    expected = -sum(float((w * h).sum()) for w, h in zip(before, hessian, strict=True))
    assert found == pytest.approx(expected, rel=1e-2)


def test_synflow_by_hand() -> None:
    net, images = two_linear(), torch.randn(2, 1, 2, 2)
    flow = float(
        (net[2].weight.abs() @ net[1].weight.abs()).sum().detach()
    )  # R, linear in each layer
    assert zero_cost.synflow(net, images, torch.zeros(2)) == pytest.approx(2 * flow, rel=1e-5)


def test_nwot_and_jacov_prefer_networks_that_tell_images_apart() -> None:
    torch.manual_seed(0)
    images = torch.randn(6, 1, 2, 2)
    wide, narrow = (
        nn.Sequential(nn.Flatten(), nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
        for width in (64, 2)
    )
    for score in (zero_cost.nwot, zero_cost.jacov):
        assert score(wide, images, torch.zeros(6)) > score(narrow, images, torch.zeros(6))


def test_the_display_has_parents_and_steps_and_ctrl_c_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = replace(SETTINGS, parents=(1,), short_steps=100_000)
    options = argparse.Namespace(quiet=False, verbose=True, jobs=1)
    work = judgement(tmp_path, many)
    work.prepare()
    with on_terminal(monkeypatch, until=" left") as terminal:
        assert _run_scores(work, options)
    shown = terminal.text()
    assert f"scores on {work.table.name} · 0/2 parents · " in shown
    assert re.search(r"000-short-0  train 000  ━+  step \d+/100000  .* left", shown)
    assert re.search(r"000-short-0 train 000, step \d+/100000, ", shown)
    assert len(work.left()) == 2


def test_several_processes_share_the_parents(tmp_path: Path) -> None:
    judge_scores(judgement(tmp_path / "two"), jobs=2)
    judge_scores(judgement(tmp_path / "one"))
    files = sorted((tmp_path / "one" / "results").glob("*.json"))
    assert len(files) == 4
    for file in files:
        alone = json.loads(file.read_bytes())
        shared = json.loads((tmp_path / "two" / "results" / file.name).read_bytes())
        assert shared["children"] == alone["children"]
        for step, scores in alone["scores"].items():
            for name, values in scores.items():  # up to the number of threads
                assert shared["scores"][step][name] == pytest.approx(values, rel=1e-3, abs=1e-6)


def test_composite_scores_agree_with_what_all_their_parts_say() -> None:
    children, keys = ["a", "b", "c", "d"], ["x", "x", "y", "y"]
    rising = dict(zip(children, [1.0, 2.0, 3.0, 4.0], strict=True))
    rows = {c: Row((90.0,), int(1e6 * v), 10) for c, v in rising.items()}
    scores, fresh = {"alpha": rising, "residual_gain": rising}, {"jacov": rising, "nwot": rising}
    facts = Facts(children, keys, scores, fresh, rows)
    for score in COMPOSITE_SCORES.values():
        found = score(facts)
        assert sorted(found) == found
        assert len(set(found)) == 4
    # A lucky start of one candidate moves its table up, but not above all other evidence.
    lucky = {**rising, "a": 1000.0}
    facts = Facts(children, keys, {"alpha": lucky, "residual_gain": rising}, fresh, rows)
    assert COMPOSITE_SCORES["pooled_consensus"](facts)[3] == 17.0
    assert max(COMPOSITE_SCORES["pooled_consensus"](facts)) == 17.0
    assert COMPOSITE_SCORES["prior"](facts) == [3.0, 6.0, 9.0, 12.0]
