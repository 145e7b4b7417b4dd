"""Reliability of the forecasts that judge growths: what would training on have brought?

    python benchmarks/forecast.py CONFIG [--repeats 10] [--seed 2000] [--epochs 12 2 8]
        [--anneal 0.25]

With ``anneal`` a growth is said to pay unless the loss of the grown network is above what the
parent's learning curve forecasts for training on as long, by more than a standard error
(`nni_petridish.running.payment`). Here the parent is really trained on for that time, at the same
learning rate, so that forecast and verdict can be compared with what came. Each random seed is a
seed model, one growth of it and one training on, with the settings of a configuration's search.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from dataclasses import replace
from typing import NamedTuple

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("config", help="a configuration, such as configs/growth_mnist1d.yml")
parser.add_argument("--repeats", type=int, default=10, help="random seeds")
parser.add_argument("--seed", type=int, default=2000, help="the first one")
parser.add_argument(
    "--epochs",
    type=int,
    nargs=3,
    default=[12, 2, 8],
    metavar=("SEED", "WEAK", "FINAL"),
    help="of the seed model, of weak learning and after it",
)
parser.add_argument("--anneal", type=float, default=0.25, help="share of a training that decays")
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from nni_petridish.gallery.gallery import Gallery  # noqa: E402
from nni_petridish.running.config import SearchConfig  # noqa: E402
from nni_petridish.running.growth import load_network, run_growth  # noqa: E402
from nni_petridish.running.process import keep_freed_memory  # noqa: E402
from nni_petridish.running.trunk import load_trunk  # noqa: E402
from nni_petridish.search.records import PAYMENT, PAYS, Growth  # noqa: E402
from nni_petridish.tasks.task import Phase, Task  # noqa: E402

SEED, CHILD = "g00000", "g00001"


class Trial(NamedTuple):
    """Losses on the validation set, all at the full learning rate."""

    forecast: float
    """Of training on, by the learning curve of the seed."""
    error: float
    """Its standard error."""
    came: float
    """The loss after training on for that time."""
    grown: float
    """The loss of the grown network, after the same time."""
    said_to_pay: bool

    @property
    def pays(self) -> bool:
        """Whether the grown network is ahead."""
        return self.grown <= self.came

    @property
    def deviation(self) -> float:
        """The distance of that loss from its forecast, in standard errors."""
        return (self.came - self.forecast) / self.error


def try_growth(config: SearchConfig, task: Task, seed: int) -> Trial:
    """Train a seed model, grow it, and train it on for the time that the growth took."""
    seed_epochs, weak_epochs, final_epochs = arguments.epochs
    lengths = {
        "seed_epochs": seed_epochs,
        "weak_epochs": weak_epochs,
        "final_epochs": final_epochs,
        "anneal": arguments.anneal,
    }
    plan = replace(config.plan, **lengths)
    l1, i_max = config.settings.l1, config.settings.i_max
    with tempfile.TemporaryDirectory() as folder:
        gallery = Gallery.create(folder, config.space, {})
        begun = run_growth(Growth(SEED, None, 2 * seed, l1, i_max), task, plan, gallery)
        grown = run_growth(Growth(CHILD, SEED, 2 * seed + 1, l1, i_max), task, plan, gallery)
        verdict = grown.metrics[PAYMENT]
        age = begun.metrics[PAYMENT]["age"]
        history = gallery.load_documents(SEED)["history"]["seed"]
        held = seed_epochs - math.ceil(seed_epochs * arguments.anneal)
        epochs = max(1, round((verdict["age"] - age) * held / age))
        net = load_network(task, gallery, SEED)
        load_trunk(gallery, SEED, net)
        on = task.train(net, Phase("final", epochs, seed, f"seed {seed} on", hold_epochs=epochs))
    print(
        f"seed {seed}: loss {history[held - 1]['validation_loss']:.3f}, {epochs} epochs on"
        f" {on[-1]['validation_loss']:.3f}, forecast {verdict['training_on']:.3f}"
        f" ± {verdict['error']:.3f}, grown {verdict['loss']:.3f}",
        flush=True,
    )
    came = on[-1]["validation_loss"]
    return Trial(verdict["training_on"], verdict["error"], came, verdict["loss"], verdict[PAYS])


def main() -> None:
    """Print the trials and how reliable the forecasts were."""
    keep_freed_memory()
    config = SearchConfig.from_yaml(arguments.config)
    task = config.load_task()
    trials = [try_growth(config, task, arguments.seed + i) for i in range(arguments.repeats)]
    off = [abs(trial.deviation) for trial in trials]
    logs = [math.log(trial.came / trial.forecast) for trial in trials]
    yes, no = ([t for t in trials if t.said_to_pay is said] for said in (True, False))
    print(
        f"\ntraining on against its forecast: {100 * statistics.fmean(logs):+.0f} % on average;"
        f" within 1 standard error {sum(o <= 1 for o in off)} of {len(off)}, within 2"
        f" {sum(o <= 2 for o in off)}"
        f"\nsaid to pay: {len(yes)}, of which {sum(t.pays for t in yes)} did;"
        f" said not to pay: {len(no)}, of which {sum(t.pays for t in no)} did"
    )


if __name__ == "__main__":
    main()
