from __future__ import annotations

import re
from pathlib import Path

import pytest

from nni_petridish.cli import main
from nni_petridish.config import SearchConfig
from nni_petridish.estimate import StepCost, growth_seconds, seed_size
from tests.chaos import write_config


def test_the_seed_has_the_size_that_the_task_counts(tmp_path: Path) -> None:
    config = SearchConfig.from_yaml(write_config(tmp_path, models=2))
    task = config.load_task()
    assert seed_size(config) == task.size(task.build(task.seed()))


def test_a_growth_takes_its_epochs_of_either_kind(tmp_path: Path) -> None:
    config = SearchConfig.from_yaml(write_config(tmp_path, models=2))  # 2 epochs each, batch 32
    cost = StepCost(plain=1.0, weak=10.0, bytes=0)
    assert growth_seconds(config, cost, images=100) == (3 * 2 * 1.0, 3 * (2 * 10.0 + 2 * 1.0))


def test_check_prints_size_and_if_asked_time_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, models=2)
    assert main(["check", str(path)]) == 0
    output = capsys.readouterr().out
    assert re.search(r"Seed: [\d,]+ parameters, [\d,]+ multiply-adds\.", output)
    assert main(["check", str(path), "--estimate"]) == 0
    measured = capsys.readouterr().out
    assert measured.startswith(output.rstrip())
    assert re.search(r"about \d+ s, its first growth \d+ s .* [\d.]+ GiB\.", measured)
    assert not (tmp_path / "gallery").exists()
