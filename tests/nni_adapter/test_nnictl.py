"""The search through nnictl: real manager, real trials."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml
from nni.tools.nnictl import command_utils

from nni_petridish.__main__ import main
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.nni_adapter import nnictl as launch
from nni_petridish.nni_adapter.compat.nnictl import call
from nni_petridish.nni_adapter.nnictl import (
    Experiment,
    NniError,
    SilentError,
    _signals_deferred,
    free_port,
    nnictl,
)
from nni_petridish.nni_adapter.warm import link
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.runner import run_search
from nni_petridish.search.search import Search
from tests.support import chaos
from tests.support.small_gallery import vision_gallery


def genotypes(config: SearchConfig) -> dict[str, object]:
    gallery = Gallery(config.gallery)
    return {id: gallery.load_documents(id)["genotype"] for id in gallery.model_ids()}


def wait_for(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.2)


@pytest.mark.slow
def test_nnictl_and_the_process_alone_find_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = SearchConfig.from_yaml(chaos.write_config(tmp_path / "alone", 3, concurrency=1))
    run_search(alone)
    path = chaos.write_config(tmp_path / "nni", 3, concurrency=1)
    capfd.readouterr()
    assert main(["run", str(path)]) == 0
    output, errors = capfd.readouterr()
    config = SearchConfig.from_yaml(path)
    chaos.check_gallery(config, 3)
    assert genotypes(config) == genotypes(alone)
    assert "Web UI: http://127.0.0.1:" in output
    assert "3 of at most 3 models" in output
    assert "The search is done: max_models=3 is reached." in output
    assert str(config.gallery / "report.html") in output
    assert "Traceback" not in errors
    assert "Warning" not in errors
    experiment = output.split("(experiment ")[1].split(")")[0]
    assert not any(chaos.processes(experiment).values())
    assert main(["run", str(path), "--resume"]) == 0  # nothing is left to do, so NNI is not started
    again, _ = capfd.readouterr()
    assert "Web UI" not in again
    assert "The search is done: max_models=3 is reached." in again
    assert str(config.gallery / "report.html") in again


def test_the_trials_of_a_search_import_torch_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = chaos.write_config(tmp_path, 2, concurrency=1)
    document = yaml.safe_load(path.read_text())
    document["trialCommand"] = "python -X importtime -m nni_petridish.trial"
    path.write_text(yaml.safe_dump(document))
    assert main(["run", str(path)]) == 0
    experiment = capfd.readouterr().out.split("(experiment ")[1].split(")")[0]
    folder = Path.home() / "nni-experiments" / experiment
    logs = [file.read_text() for file in folder.rglob("trial.stderr")]
    assert len(logs) == 2
    assert all("nni_petridish.nni_adapter.warm.client" in log for log in logs)
    assert not any("torch.nn" in log for log in logs)
    assert not (folder / link.FILE).exists()  # the process that has imported it has ended


def test_a_gallery_in_use_is_refused_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gallery = vision_gallery(tmp_path)
    path = str(tmp_path / "config.yml")
    code = (
        "import sys, time; from nni_petridish.gallery.gallery import Gallery;"
        "lock = Gallery(sys.argv[1]).lock_coordinator(); print(flush=True); time.sleep(100)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(gallery.folder)], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        for command in ("run", "search"):
            began = time.monotonic()
            assert main([command, path, "--resume"]) == 2
            assert time.monotonic() - began < 20  # it was 67 s
            output, errors = capfd.readouterr()
            assert output == ""
            assert f"process {other.pid} on " in errors
            assert errors.count("\n") == 1
    finally:
        other.kill()
        other.wait()


def test_nnictl_that_cannot_start_says_why(tmp_path: Path) -> None:
    path = chaos.write_config(tmp_path, 3)
    path.write_text(path.read_text().replace("platform: local", "platform: moon"))
    with pytest.raises(NniError, match="nnictl create failed"), Experiment(path, free_port()):
        pass


def test_processes_are_ended_without_the_program_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_utils, "call", call)
    monkeypatch.setenv("PATH", "")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    threading.Thread(target=process.wait).start()  # no zombie is left, which would seem alive
    command_utils.kill_command(process.pid, timeout=10)
    assert process.wait(10) == -signal.SIGTERM
    command_utils.kill_command(process.pid, timeout=10)  # it is gone


def test_a_tuner_that_cannot_start_says_why(tmp_path: Path) -> None:
    path = chaos.write_config(tmp_path, 3)
    path.write_text(path.read_text().replace("i_max: 3", "i_max: 0"))
    with Experiment(path, free_port()) as experiment:

        def complaint() -> str:
            try:
                experiment.status()
            except NniError as error:
                return str(error)
            return ""

        wait_for(complaint, 60)
        assert "tuner.classArgs.i_max must be a whole number of at least 1 but got 0" in complaint()


def test_the_manager_is_off_the_network_and_comes_back_so(tmp_path: Path) -> None:
    path = chaos.write_config(tmp_path, 3)
    with Experiment(path, free_port()) as experiment:
        for is_back in (False, True):
            if is_back:
                chaos.resume(experiment)
            (manager,) = chaos.processes(experiment.id)["manager"]
            listening = [c.laddr for c in manager.net_connections() if c.status == "LISTEN"]
            assert listening == [("127.0.0.1", experiment.port)]


def test_an_experiment_with_nothing_to_do_is_done_and_silence_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision_gallery(tmp_path)  # as many models as its limit
    config = SearchConfig.from_yaml(tmp_path / "config.yml")
    search = Search(config.settings)
    with Experiment(tmp_path / "config.yml", free_port()) as experiment:
        wait_for(lambda: chaos.is_done(experiment), 60)
        monkeypatch.setattr(launch, "ANSWER_SECONDS", 0.5)
        (manager,) = chaos.processes(experiment.id)["manager"]
        manager.suspend()
        with monkeypatch.context() as patience:
            patience.setattr(launch, "SILENCE_SECONDS", 0)
            with pytest.raises(SilentError):
                launch._follow(experiment, config, search, print, 0.1)
        threading.Timer(1.5, manager.resume).start()
        launch._follow(experiment, config, search, print, 0.1)
    assert len(search.models()) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_deferred_and_then_count_again(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with _signals_deferred() as arrived:
        for _ in range(2):
            os.kill(os.getpid(), number)
    assert arrived == [number, number]
    assert signal.getsignal(number) is before


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["create", "nni_petridish.trial"])
def test_a_run_that_is_terminated_leaves_no_process(tmp_path: Path, stage: str) -> None:
    path = chaos.write_config(tmp_path, 50)
    command = [sys.executable, "-m", "nni_petridish", "run", str(path)]
    marked = {**os.environ, "STARTED_BY": str(path)}  # which manager, tuner and trials inherit
    process = subprocess.Popen(command, env=marked)
    wait_for(lambda: any(stage in command for command in commands_of(path)), 120)
    deadline = time.monotonic() + 90
    while process.poll() is None:  # more signals come while the experiment is being stopped
        assert time.monotonic() < deadline, "it does not end"
        process.terminate()
        time.sleep(0.3)
    assert not commands_of(path)


def commands_of(path: Path) -> list[list[str]]:
    """Return the command lines of all processes that the run of a configuration has started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STARTED_BY") == str(path):
                found.append(process.cmdline())
    return found


@pytest.mark.slow
def test_nnictl_stop_ends_trials_within_seconds_and_resume_goes_on(tmp_path: Path) -> None:
    path = chaos.write_config(tmp_path, 5)
    config = SearchConfig.from_yaml(path)
    with Experiment(path, free_port()) as experiment:
        wait_for(lambda: len(chaos.finished_models(config)) >= 1, 120)
        wait_for(lambda: chaos.processes(experiment.id)["trial"], 60)
        trials = chaos.processes(experiment.id)["trial"]
        nnictl("stop", experiment.id)
        _, left = psutil.wait_procs(trials, timeout=8)
        assert not left
        known = chaos.finished_models(config)
        chaos.resume(experiment)
        wait_for(lambda: chaos.is_done(experiment), 200)
    assert known.items() <= chaos.finished_models(config).items()
    chaos.check_gallery(config, 5)


@pytest.mark.slow
def test_a_trial_killed_goes_on_from_its_last_epoch(tmp_path: Path) -> None:
    path = chaos.write_config(tmp_path, 2, concurrency=1)
    path.write_text(path.read_text().replace("seed_epochs: 2", "seed_epochs: 40"))
    config = SearchConfig.from_yaml(path)
    checkpoint = config.gallery / "work" / "g00000-1" / "seed" / "checkpoint.safetensors"
    with Experiment(path, free_port()) as experiment:
        wait_for(checkpoint.exists, 120)
        assert chaos.kill(experiment.id, "trial")
        wait_for(lambda: chaos.is_done(experiment), 250)
    chaos.check_gallery(config, 2)
    events = Gallery(config.gallery).journal.read_all()
    assert [e["attempt"] for e in events if e["event"] == "release"] == [1]
    search = Search.replay(config.settings, events)
    assert next(m for m in search.models() if m.id == "g00000").growth.attempt == 1
