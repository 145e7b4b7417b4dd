from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from torch import nn

from nni_petridish.__main__ import main
from nni_petridish.core.genotype import Genotype
from nni_petridish.core.selection import architecture
from nni_petridish.errors import ConfigError, GalleryError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.results.commands import finish_search
from nni_petridish.running import coordinator
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.runner import run_search
from nni_petridish.search.search import Limits, Search
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record, Task
from nni_petridish.tasks.vision.task import VisionTask
from tests.running.test_growth import same_models
from tests.support.chaos import check_gallery, finished_models, write_config


class HopelessTask(VisionTask):
    """A task whose growths fail; its seed model does not."""

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        if phase.name == "weak":
            raise RuntimeError("no luck")
        return super().train(net, phase, callbacks)


class Hopeless(SearchConfig):
    """A search whose growths fail."""

    def load_task(self) -> Task:
        task = super().load_task()
        assert isinstance(task, VisionTask)
        return HopelessTask(task.space, task.data, task.recipe)


ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


def command(path: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "nni_petridish", "search", str(path), *options]


def test_a_search_ends_as_configured_and_its_journal_replays(tmp_path: Path) -> None:
    path = write_config(tmp_path, models=4)
    config = SearchConfig.from_yaml(path)
    seen: list[int] = []
    search = run_search(config, on_change=lambda s: seen.append(len(s.models())))
    assert seen == [0, 1, 2, 3, 4]
    check_gallery(config, 4)
    replayed = Search.replay(config.settings, Gallery(config.gallery).journal.read_all())
    assert replayed.state() == search.state()


@pytest.mark.parametrize(("i_max", "models"), [(2, 7), ({"low": 1, "high": 2}, 11)])
def test_a_search_of_a_small_space_ends_when_every_architecture_is_trained_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], i_max: int | dict[str, int], models: int
) -> None:
    path = write_config(tmp_path, models=12)
    document = yaml.safe_load(path.read_text())
    document["searchSpace"] |= {"stages": 1, "ops": ["identity", "avg_pool_3x3"]}
    document["tuner"]["classArgs"] |= {
        "i_max": i_max,
        "limits": {"max_models": 12, "max_growths": 1},
    }
    path.write_text(yaml.safe_dump(document))
    assert main(["search", str(path)]) == 0
    text = capsys.readouterr()
    why = "no model on the hull may grow further (max_growths=1, the space has no more)"
    assert [line for line in text.out.splitlines() if "done" in line] == [
        f"The search is done: {why}."
    ]
    assert text.err == ""
    gallery = Gallery(SearchConfig.from_yaml(path).gallery)
    ids = [event["id"] for event in gallery.journal.read_all() if event["event"] == "model"]
    trained = {
        architecture(Genotype.from_dict(gallery.load_documents(id)["genotype"])) for id in ids
    }
    # The seed, and two shortcuts (or one, with the range) of two inputs x two operations.
    assert len(trained) == len(ids) == models
    assert main(["search", str(path), "--resume", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith(f"The search is done: {why}.\n")


def test_a_search_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = SearchConfig.from_yaml(write_config(tmp_path / "whole", models=3))
    run_search(whole)
    config = SearchConfig.from_yaml(write_config(tmp_path / "halting", models=3))
    for stop_after in (1, 2, 2, 3):
        epochs: list[str] = []
        callbacks = Callbacks(
            on_epoch=lambda phase, record, epochs=epochs: epochs.append(phase),
            should_stop=lambda epochs=epochs, n=stop_after: len(epochs) >= n,
        )
        run_search(config, resume=True, callbacks=callbacks)
    run_search(config, resume=True)
    check_gallery(config, 3)
    documents = [
        [Gallery(c.gallery).load_documents(id)["genotype"] for id in ("g00001", "g00002")]
        for c in (whole, config)
    ]
    assert documents[0] == documents[1]


def test_a_search_whose_growths_all_fail_gives_up_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "FIRST_PAUSE", 0.02)
    path = write_config(tmp_path, models=3)
    config = SearchConfig.from_yaml(path)
    began = time.monotonic()
    search = run_search(Hopeless(**vars(config)))
    # Two attempts each of five growths, with growing pauses after the second failure.
    attempts = [e["attempt"] for e in Gallery(config.gallery).journal.read_all() if "reason" in e]
    assert attempts == [1, 2] * 5
    assert time.monotonic() - began > sum(0.02 * 2**k for k in range(7))
    assert finish_search(search, config.gallery) == 1
    text = capsys.readouterr()
    assert "The search gave up: 5 growths in a row failed" in text.err
    assert "with: RuntimeError: no luck" in text.err
    # Mended, it finds what it would have found without the failures.
    assert main(["search", str(path), "--retry-failed"]) == 0
    assert "Trying again: g00001, g00002, g00003, g00004, g00005." in capsys.readouterr().out
    whole = SearchConfig.from_yaml(write_config(tmp_path / "whole", models=3))
    run_search(whole)
    for id in ("g00001", "g00002"):
        assert same_models(Gallery(config.gallery), Gallery(whole.gallery), id)


def test_another_device_tries_again_what_failed(tmp_path: Path) -> None:
    config = SearchConfig.from_yaml(write_config(tmp_path, models=2))
    on_cpu = replace(config, recipe=replace(config.recipe, device="cpu"))
    limits = Limits(max_models=2, max_failures=1)
    few = replace(on_cpu, settings=replace(config.settings, limits=limits))
    assert run_search(Hopeless(**vars(few))).gave_up()
    assert run_search(few, resume=True).gave_up()
    search = run_search(config, resume=True)  # device: auto
    assert search.gave_up() is None
    assert len(search.models()) == 2


def test_a_device_that_is_missing_leaves_no_gallery(tmp_path: Path) -> None:
    config = SearchConfig.from_yaml(write_config(tmp_path, models=2))
    wrong = replace(config, recipe=replace(config.recipe, device="cuda"))
    with pytest.raises(ConfigError, match="got 'cuda'"):
        run_search(wrong)
    assert not config.gallery.exists()


@pytest.mark.parametrize("changes", [{"recipe": {"batch_size": 1}}, {"data": {"limit": 1}}])
def test_batches_of_one_image_on_maps_of_one_pixel_leave_no_gallery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, dict[str, int]]
) -> None:
    path = write_config(tmp_path, models=2)
    document = yaml.safe_load(path.read_text())
    document["searchSpace"]["stages"] = 4  # 8x8, 4x4, 2x2, 1x1
    for name, options in changes.items():
        document["tuner"]["classArgs"].setdefault(name, {}).update(options)
    path.write_text(yaml.safe_dump(document))
    assert main(["search", str(path)]) == 2
    assert "a batch must have at least 2 images" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["config.yml"]


def test_a_gallery_with_models_is_not_continued_by_accident(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, models=1)
    config = SearchConfig.from_yaml(path)
    run_search(config)
    with pytest.raises(GalleryError, match="add --resume"):
        run_search(config)
    assert main(["search", str(path)]) == 2
    assert "add --resume" in capsys.readouterr().err
    assert main(["search", str(path), "--resume"]) == 0
    assert "g00000" in capsys.readouterr().out
    assert main(["show", str(config.gallery)]) == 0
    assert "g00000" in capsys.readouterr().out
    assert (config.gallery / "report.html").read_text().count("g00000") >= 2
    assert main(["show", str(tmp_path)]) == 2


def test_two_searches_on_one_gallery_are_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, models=50)
    first = subprocess.Popen(command(path), env=ENVIRONMENT, stdout=subprocess.PIPE)
    try:
        assert first.stdout is not None
        first.stdout.readline()  # it has begun
        second = subprocess.run(
            command(path, "--resume"), env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert second.returncode == 2
        assert f"process {first.pid}" in second.stderr
        assert second.stderr.count("\n") == 1
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly_with_the_hull_so_far(tmp_path: Path, number: int) -> None:
    path = write_config(tmp_path, models=50)
    config = SearchConfig.from_yaml(path)
    process = subprocess.Popen(
        command(path), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while len(finished_models(config)) < 1:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "g00000" in output
    assert f"nni-petridish search {path} --resume" in errors
    assert "Traceback" not in errors
    events = Gallery(config.gallery).journal.read_all()
    assert not Search.replay(config.settings, events).running()


def test_a_search_in_which_everything_fails_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, models=3)
    text = path.read_text().replace("lr: 0.05", "lr: 1.0e+12")
    path.write_text(text)
    assert main(["search", str(path)]) == 1
    output = capsys.readouterr().out
    assert "g00000 was given up: the loss is not finite" in output


def kill_and_resume(folder: Path, kills: int, models: int) -> None:
    rng = random.Random(kills)
    path = write_config(folder, models)
    config = SearchConfig.from_yaml(path)
    known: dict[str, float] = {}
    for _ in range(kills):
        process = subprocess.Popen(
            command(path, "--resume"),
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(rng.uniform(1, 8))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        now = finished_models(config)
        assert known.items() <= now.items()
        known = now
    assert main(["search", str(path), "--resume"]) == 0
    check_gallery(config, models)


@pytest.mark.slow  # tests/contracts/test_kills.py kills every front
def test_kill_9_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=4, models=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_25_times_loses_nothing(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=25, models=12)
