"""Kills and stops of trials, tuner and manager of NNI, and what must hold afterwards.

By hand: ``python -m tests.support.chaos --kills 100 FOLDER``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from nni_petridish.gallery.gallery import Gallery
from nni_petridish.nni_adapter.nnictl import Experiment, NniError, free_port, nnictl
from nni_petridish.running.config import SearchConfig
from nni_petridish.search.search import Search

ROOT = Path(__file__).parents[2]
VICTIMS = ("trial", "tuner", "manager", "all")


def write_config(folder: Path, models: int, concurrency: int = 2, seed: int = 0) -> Path:
    """Write the example, made as small as possible."""
    document = yaml.safe_load((ROOT / "configs" / "petridish.yml").read_text())
    document["trialConcurrency"] = concurrency
    document["tuner"]["codeDirectory"] = "."
    document["searchSpace"] |= {"filters": 3, "stages": 2, "ops": ["sep_conv_3x3", "identity"]}
    document["tuner"]["classArgs"] |= {
        "data": {"name": "digits", "limit": 96},
        "gallery": "gallery",
        "seed": seed,
        "seed_epochs": 2,
        "weak_epochs": 2,
        "final_epochs": 2,
        "limits": {"max_models": models, "max_growths": 3},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(document))
    return path


def processes(experiment: str) -> dict[str, list[psutil.Process]]:
    """Return the processes of an experiment by kind."""
    found: dict[str, list[psutil.Process]] = {"trial": [], "tuner": [], "manager": []}
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if f"--experiment-id {experiment}" in command and "nni_node" in command:
                found["manager"].append(process)
            elif (
                "nni_petridish.trial" in command
                and "python" in process.name()
                and process.environ().get("NNI_EXP_ID") == experiment
            ):
                found["trial"].append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    for manager in found["manager"]:
        try:
            found["tuner"] += [
                child
                for child in manager.children(recursive=True)
                if "python" in child.name() and "--exp_params" in child.cmdline()
            ]
        except psutil.NoSuchProcess:
            continue
    return found


def kill(experiment: str, victim: str) -> bool:
    """Kill -9 a process of a kind, or all of them; return whether there was any."""
    found = processes(experiment)
    chosen = found[victim][:1] if victim != "all" else [p for kind in found.values() for p in kind]
    for process in chosen:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return bool(chosen)


def stop(experiment: str, victim: str, seconds: float) -> None:
    """Stop the processes of a kind for a while."""
    stopped = processes(experiment)[victim]
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    time.sleep(seconds)
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def is_done(experiment: Experiment) -> bool:
    """Return whether NNI calls the experiment done; not if its manager is gone or broken."""
    try:
        return experiment.status() == "DONE"
    except (NniError, OSError, ValueError):
        return False


def resume(experiment: Experiment) -> None:
    """Resume an experiment, whatever is left of it."""
    for _ in range(5):
        nnictl("stop", experiment.id)
        for kind in processes(experiment.id).values():
            psutil.wait_procs(kind, timeout=10)
        experiment.port = free_port()
        experiment.resume()
        try:
            experiment.status()
            return
        except (NniError, OSError, ValueError):
            time.sleep(2)
    raise AssertionError("the experiment does not come back")


def wait_for_progress(config: SearchConfig, seconds: float) -> None:
    """Wait until something is written into the gallery: an epoch, a model, an event."""

    def written() -> dict[Path, float]:
        files = [*config.gallery.glob("work/*/*/*"), config.gallery / "journal.jsonl"]
        return {file: file.stat().st_mtime for file in files if file.exists()}

    before, deadline = written(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            if written() != before:
                return
        except FileNotFoundError:  # a finished growth took its checkpoints along
            return


def finished_models(config: SearchConfig) -> dict[str, float]:
    """Return the finished models and their errors."""
    return {record.id: record.error for record in replayed(config).models()}


def running_growths(config: SearchConfig) -> list[str]:
    """Return the ids of the growths that are under way."""
    return [growth.id for growth in replayed(config).running()]


def replayed(config: SearchConfig) -> Search:
    """Return the state of a search, which may not have a gallery yet."""
    if not (config.gallery / "gallery.json").exists():
        return Search(config.settings)
    return Search.replay(config.settings, Gallery(config.gallery).journal.read_all())


def chaos(path: Path, kills: int, seed: int, seconds: float) -> dict[str, int]:
    """Run one search to its end while killing and stopping its processes.

    Parameters
    ----------
    path
        The configuration file.
    kills
        The largest number of kills.
    seed
        Decides who is killed when.
    seconds
        The longest time.

    Returns
    -------
    dict
        Number of kills of each kind.
    """
    rng = random.Random(seed)
    config = SearchConfig.from_yaml(path)
    models = config.settings.limits.max_models
    assert models is not None
    count = dict.fromkeys(VICTIMS, 0)
    known: dict[str, float] = {}
    without_worker: set[str] = set()
    deadline = time.monotonic() + seconds
    with Experiment(path, free_port()) as experiment:
        while not is_done(experiment):
            assert time.monotonic() < deadline, f"not done in time, {count} killed"
            wait_for_progress(config, 40)  # else nothing would ever be finished
            time.sleep(rng.uniform(0, 4))
            if rng.random() < 0.3:
                stop(experiment.id, rng.choice(VICTIMS[:3]), rng.uniform(0.1, 3))
            if sum(count.values()) < kills and len(finished_models(config)) < models:
                victim = rng.choice(VICTIMS)
                running = set(running_growths(config))
                # The same growth would fail if its worker were lost a second time.
                if victim == "trial" and running & without_worker:
                    continue
                if kill(experiment.id, victim):
                    count[victim] += 1
                    without_worker |= running
                    if victim != "trial":
                        without_worker = set()
                        time.sleep(rng.uniform(0, 3))
                        resume(experiment)
            now = finished_models(config)
            for id, error in known.items():
                assert now.get(id) == error, f"{id} was lost"
            known = now
    check_gallery(config, models)
    return count


def check_gallery(config: SearchConfig, models: int) -> None:
    """Assert that a finished search is whole."""
    gallery = Gallery(config.gallery)
    events = gallery.journal.read_all()
    search = Search.replay(config.settings, events)
    ids = [record.id for record in search.models()]
    assert len(ids) == models
    assert sorted(ids) == gallery.model_ids()
    for id in ids:
        weights, documents = gallery.load_model(id)
        assert weights
        assert documents["metrics"]["error"] == next(
            record.error for record in search.models() if record.id == id
        )
    asked = [
        (e["growth"]["parent"], e["growth"]["seed"], e["id"]) for e in events if e["event"] == "ask"
    ]
    assert len({(parent, seed) for parent, seed, _ in asked}) == len(set(asked))
    assert not search.running()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--models", type=int, default=10)
    options = parser.parse_args()
    total = dict.fromkeys(VICTIMS, 0)
    seed = 0
    while sum(total.values()) < options.kills:
        left = options.kills - sum(total.values())
        path = write_config(options.folder / str(seed), options.models, seed=seed)
        count = chaos(path, left, seed, 3600)
        total = {kind: total[kind] + count[kind] for kind in VICTIMS}
        print(f"search {seed} is whole; killed so far: {total}", flush=True)
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
