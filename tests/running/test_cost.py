from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.kernels.cache import make_cache_folder
from nni_petridish.registry import kind_of
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.cost import (
    Cost,
    advise_on_width,
    growth_seconds,
    measure_cost,
    step_seconds,
)
from nni_petridish.search.settings import GrowthSettings
from nni_petridish.tasks.task import Callbacks, Phase, Record
from nni_petridish.tasks.vision.retraining import size_of
from search_spaces import VisionSpace
from search_spaces.vision.size import seed_size
from tests.contracts.listed import TASKS
from tests.support.chaos import write_config
from tests.support.small_gallery import vision_gallery

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remember in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_formulas_count_what_the_networks_have() -> None:
    shapes = [(3, 32, 32), (1, 28, 28), (1, 9, 13)]
    for shape, filters, stages, stem in itertools.product(
        shapes, (1, 3, 8), (1, 3), ("plain", "imagenet")
    ):
        try:
            space = VisionSpace(
                shape, 7, cells_per_stage=2, filters=filters, stages=stages, stem=stem
            )
        except ConfigError:
            continue  # too many halvings for so small an image
        assert seed_size(space) == size_of(space, space.seed()), space


@pytest.mark.parametrize("name", ["petridish", "petridish_rnn"])
def test_the_seed_has_the_size_that_the_task_counts(name: str) -> None:
    config = SearchConfig.from_yaml(ROOT / "configs" / f"{name}.yml")
    task = config.load_task()
    found = kind_of(config.space).seed_size(config.space, config.data)
    assert found == task.size(task.build(task.seed()))


def test_a_growth_takes_its_epochs_of_either_kind() -> None:
    plan = GrowthSettings(seed_epochs=2, weak_epochs=5, final_epochs=7)
    cost = Cost(plain=1.0, weak=10.0, steps=3, bytes=0)
    assert growth_seconds(plan, cost) == (3 * 2 * 1.0, 3 * (5 * 10.0 + 7 * 1.0))


def test_a_wider_seed_is_advised_where_width_costs_little_time() -> None:
    def advice(wider: float | None) -> str:
        return advise_on_width(Cost(plain=2.0, weak=10.0, steps=3, bytes=0, wider=wider))

    assert "takes 1.3 times as long, for about four times" in advice(2.6)
    assert "takes no longer, for about four times" in advice(1.9)
    assert advice(3.0) == advice(8.0) == advice(None) == ""


def test_only_seeds_that_can_become_wider_are_timed_at_twice_the_width(tmp_path: Path) -> None:
    config = SearchConfig.from_yaml(write_config(tmp_path, models=2))
    cost = measure_cost(config)
    assert cost.wider is not None
    assert cost.wider > 0
    config = SearchConfig.from_yaml(ROOT / "configs" / "petridish_rnn.yml")
    assert measure_cost(config).wider is None


def test_check_prints_size_time_and_memory(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, models=2)
    assert main(["check", "--quick", str(path)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"Seed: [\d,]+ parameters, [\d,]+ multiply-adds\.\n$", output)
    assert not cache.exists()
    assert main(["check", str(path)]) == 0
    measured = capsys.readouterr().out
    assert measured.startswith(output.rstrip())
    assert re.search(r"about \d+ s, its first growth \d+ s .* [\d.]+ GiB\.", measured)
    assert not (tmp_path / "gallery").exists()
    # Compiled kernels lie in the same folder, where nobody else may write.
    assert make_cache_folder() == cache / "nni-petridish"
    assert make_cache_folder().stat().st_mode & 0o077 == 0
    # Asked again it is recalled, unless it is to be measured anew; a broken store does no harm.
    store = cache / "nni-petridish" / "costs.json"
    (known,) = json.loads(store.read_text()).items()
    store.write_text(json.dumps({known[0]: {**known[1], "bytes": 9 * 2**30}}))
    assert main(["check", str(path)]) == 0
    assert " 9.0 GiB" in capsys.readouterr().out
    store.write_text("{")
    assert main(["check", str(path), "--estimate"]) == 0
    assert " 9.0 GiB" not in capsys.readouterr().out


def test_a_search_that_starts_from_a_model_is_measured_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vision_gallery(tmp_path / "first")
    path = write_config(tmp_path / "second", models=2)
    document = yaml.safe_load(path.read_text())
    document["tuner"]["classArgs"]["start"] = {"from": str(tmp_path / "first" / "gallery")}
    path.write_text(yaml.safe_dump(document))
    assert main(["check", str(path)]) == 0
    assert "GiB" in capsys.readouterr().out


class TimedTask:
    """A task whose steps take as long as they are told by a clock of its own, an epoch each."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.done, self.now = seconds, 0, 0.0

    def train(self, net: nn.Module, phase: Phase, callbacks: Callbacks) -> list[Record]:
        for _ in range(phase.epochs):
            if callbacks.should_stop():
                raise Interrupted("stopped.")
            self.now += self.seconds[self.done]
            self.done += 1
        return []


def test_a_step_takes_the_median_after_the_first() -> None:
    task: Any = TimedTask([30.0, 5.0, 1.0, 20.0, 99.0])
    assert step_seconds(task, nn.Linear(1, 1), "seed", clock=lambda: task.now) == 5.0
    assert task.done == 4  # no more than it needs


@pytest.mark.parametrize("name", TASKS)
def test_the_steps_of_every_task_are_timed(name: str) -> None:
    task = TASKS[name]()
    assert 0 < step_seconds(task, task.build(task.seed()), "seed") < 5


def test_a_recalled_estimate_needs_no_torch(tmp_path: Path) -> None:
    path = write_config(tmp_path, models=2)
    assert main(["check", str(path)]) == 0
    code = (
        "import sys\n"
        "from nni_petridish.__main__ import main\n"
        f"assert main(['check', {str(path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "GiB" in done.stdout
