"""Searches within limits of size, and searches that go by time or parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nni_petridish import SearchConfig, run_search
from nni_petridish.core import latency
from nni_petridish.core.latency import measure_latency
from nni_petridish.errors import ExhaustedError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.select import open_search, select_model
from nni_petridish.results.report.page import report_html
from nni_petridish.results.report.tables import hull_table
from nni_petridish.running.coordinator import Coordinator
from nni_petridish.running.growth import run_growth
from nni_petridish.running.sizes import smallest_child
from nni_petridish.search.records import LATENCY, Growth
from nni_petridish.search.search import Search
from nni_petridish.search.settings import GrowthSettings, Limits, SearchSettings
from search_spaces import VisionSpace
from tests.running.test_growth import digits_task, new_gallery
from tests.support.chaos import write_config

EPOCHS = {"seed_epochs": 1, "weak_epochs": 1, "final_epochs": 1}
TASK = digits_task(64)


def seed_net() -> torch.nn.Module:
    return TASK.build(TASK.seed())


def run(folder: Path, models: int, complexity: str = "multiply_adds", **limits: Any) -> Search:
    settings = SearchSettings(
        limits=Limits(max_models=models, **limits), **EPOCHS, complexity=complexity
    )
    gallery = Gallery.create(folder, {"space": "vision"}, settings.identity())
    plan = GrowthSettings(**EPOCHS, complexity=complexity)
    with Coordinator(gallery, settings) as coordinator:
        while isinstance(growth := coordinator.ask(), Growth):
            run_growth(growth, TASK, plan, gallery)
            coordinator.sync()
        return coordinator.search


def test_children_beyond_the_limit_are_skipped_or_trained(tmp_path: Path) -> None:
    small = smallest_child(TASK, seed_net(), 3, ("multiply_adds",))
    assert small is not None
    limit = small["multiply_adds"]
    free = run(tmp_path / "free", 2, max_multiply_adds=limit)
    assert free.models()[1].multiply_adds > limit  # the paper's rule
    search = run(tmp_path / "within", 3, max_multiply_adds=limit, oversize="skip")
    seed, child, *_ = search.models()
    assert seed.multiply_adds < child.multiply_adds <= limit
    assert all(record.multiply_adds <= limit for record in search.models())
    assert child.growth.within == {"multiply_adds": limit}


def test_a_limit_that_nothing_exceeds_changes_no_model(tmp_path: Path) -> None:
    free, within = (
        run(tmp_path / rule, 2, max_multiply_adds=1e12, oversize=rule) for rule in ("train", "skip")
    )
    assert [m.error for m in free.models()] == [m.error for m in within.models()]
    assert [m.multiply_adds for m in free.models()] == [m.multiply_adds for m in within.models()]


def test_a_growth_whose_children_are_all_too_large_is_given_up(tmp_path: Path) -> None:
    gallery, plan = new_gallery(tmp_path), GrowthSettings(**EPOCHS)
    run_growth(Growth("g00000", None, 1, 0.001, 3), TASK, plan, gallery)
    growth = Growth("g00001", "g00000", 2, 0.001, 3, within={"multiply_adds": 10})
    with pytest.raises(ExhaustedError, match=r"^every child is too large: [^\n]*at most 10 is"):
        run_growth(growth, TASK, plan, gallery)


def test_a_network_that_is_full_has_no_smallest_child() -> None:
    space = VisionSpace((1, 8, 8), 2, cells_per_stage=1, stages=1, filters=2, ops=["identity"])
    net = space.build(space.seed())
    before = net.state_dict()
    child = smallest_child(TASK, net, 1, ("parameters",))
    assert child is not None
    assert child["parameters"] > sum(p.numel() for p in net.parameters())
    assert net.state_dict().keys() == before.keys()  # a copy grew


def test_a_search_by_latency_measures_and_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "gallery"
    search = run(folder, 2, "latency", max_latency=1e6)
    assert all(record.outcome.metrics[LATENCY] > 0 for record in search.models())
    _, found = open_search(folder)
    assert found.complexity.name == "latency"
    assert [record.id for record in found.hull()] == [record.id for record in search.hull()]
    cheapest = found.hull()[0]
    assert select_model(found, max=cheapest.outcome.metrics[LATENCY]).id == cheapest.id
    assert "latency (ms)" in hull_table(found).splitlines()[0]
    page = report_html(found, folder)
    assert "versus latency (ms)" in page
    assert " ms.</p>" in page


def test_a_configuration_names_the_complexity(tmp_path: Path) -> None:
    path = write_config(tmp_path, 2, concurrency=1)
    document = yaml.safe_load(path.read_text())
    document["tuner"]["classArgs"]["complexity"] = "latency"
    document["tuner"]["classArgs"]["limits"]["max_latency"] = 1e6
    path.write_text(yaml.safe_dump(document))
    search = run_search(SearchConfig.from_yaml(path))
    assert search.complexity.name == "latency"
    assert all(0 < record.outcome.metrics[LATENCY] < 1e6 for record in search.models())
    _, found = open_search(tmp_path / "gallery")
    assert found.complexity.name == "latency"


def test_latency_is_measured_once_per_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_measured", {})
    net, inputs = seed_net(), [torch.zeros(1, 1, 8, 8)]
    net.train()
    first = measure_latency(net, inputs)
    assert 0 < first < math.inf
    assert measure_latency(seed_net(), inputs) == first  # other weights, the same architecture
    assert len(latency._measured) == 1
    assert net.training
