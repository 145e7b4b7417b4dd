"""Training in several processes, on CPUs through gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import nni_petridish
from nni_petridish.errors import ConfigError
from nni_petridish.nni_adapter.nnictl import free_port
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.vision.data import load_data
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.splits import steps_per_epoch
from nni_petridish.tasks.vision.training import fit
from tests.support.small_gallery import vision_gallery
from tests.tasks.test_data import write_folder

ROOT = Path(__file__).parents[2]


def plain_fit(folder: Path, epochs: int = 2) -> dict[str, float]:
    """Train a network without batch norm, whose gradient is a mean over images and nothing else."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    recipe = Recipe.named("digits", epochs=epochs, cutout=2, flip=True, lr=0.1, device="cpu")
    data = load_data("digits", limit=200)
    history = fit(net, data.train, recipe, seed=3, checkpoint=folder / "checkpoint")
    torch.save(net.state_dict(), folder / f"net-{os.environ.get('RANK', 'alone')}.pt")
    return dict(history.records[-1])


def in_processes(count: int, code: str) -> None:
    """Run code in as many processes as torchrun would start, with its variables."""
    common = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    assert [process.wait(240) for process in processes] == [0] * count


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    in_processes(
        2,
        "import json, pathlib\n"
        "from nni_petridish.tasks.distributed import joined_world\n"
        "from tests.tasks.test_torchrun import plain_fit\n"
        f"folder = pathlib.Path({str(tmp_path / 'two')!r})\n"
        "with joined_world('cpu') as world:\n"
        "    record = plain_fit(folder)\n"
        "    if world.is_main:\n"
        "        (folder / 'record').write_text(json.dumps(record))\n",
    )
    alone = plain_fit(tmp_path / "one")
    together = json.loads((tmp_path / "two" / "record").read_text())
    for name in ("loss", "error", "lr", "epoch"):
        assert together[name] == pytest.approx(alone[name], rel=1e-4)
    nets = {
        path.stem: torch.load(path)
        for name in ("one", "two")
        for path in tmp_path.glob(f"{name}/*.pt")
    }
    assert sorted(nets) == ["net-0", "net-1", "net-alone"]
    for name, tensor in nets["net-alone"].items():
        assert torch.equal(nets["net-0"][name], nets["net-1"][name])
        torch.testing.assert_close(nets["net-0"][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_the_parts_of_a_batch_are_the_batch(tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        write_folder(tmp_path)
        split = load_data("image_folder", tmp_path, image_size=8, workers=0).train
    else:
        split = load_data("digits", limit=50).train
    whole = [labels for _, labels in split.batches(8, torch.Generator().manual_seed(1))]
    parts = [
        [y for _, y in split.batches(8, torch.Generator().manual_seed(1), World(rank, 4))]
        for rank in range(4)
    ]
    assert len(whole) == steps_per_epoch(len(split), 8)
    for labels, *shares in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(shares), labels)


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiple of the number of processes \(4\) but got 30"):
        World(0, 4).share(30)


@pytest.mark.slow
def test_torchrun_trains_a_model_and_goes_on_after_kill_9(tmp_path: Path) -> None:
    gallery = vision_gallery(tmp_path).folder

    def start(out: str) -> subprocess.Popen[str]:
        arguments = ["--nproc-per-node", "2", "--master-port", str(free_port())]
        arguments += ["--master-addr", "127.0.0.1", "-m", "nni_petridish", "train"]
        arguments += [str(gallery), "--best", "--cells", "1", "--filters", "4", "--epochs", "6"]
        arguments += ["--repetitions", "2", "--set", "device=cpu", "--out", str(tmp_path / out)]
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    straight = start("a")
    printed, _ = straight.communicate(timeout=240)
    assert straight.returncode == 0
    assert printed.count("run 0") == 1  # the first process alone speaks
    assert "(2 runs)" in printed

    killed = start("b")
    checkpoint = tmp_path / "b" / "run-0" / "checkpoint" / "checkpoint.safetensors"
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    agent = psutil.Process(killed.pid)
    for process in [*agent.children(recursive=True), agent]:  # each is the leader of its own group
        os.kill(process.pid, signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "b" / "run-0" / "result.json").exists()
    resumed = start("b")
    again, _ = resumed.communicate(timeout=240)
    assert resumed.returncode == 0
    assert again.splitlines()[-1] == printed.splitlines()[-1]
    for run in ("run-0", "run-1"):
        one, other = (
            nni_petridish.load_model(tmp_path / name / run / "model.safetensors").state_dict()
            for name in "ab"
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
