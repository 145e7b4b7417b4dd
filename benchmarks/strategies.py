"""Petridish and NNI's own strategies on the same space, with the same evaluator and budget.

Each strategy may train for the same number of epochs in all, candidates and supernets included; the
seconds it took are shown beside them, since an epoch of weak learning or of a supernet costs more
than one of a plain network. The architecture that did best on the validation images is then trained
from scratch, for all alike, and only then are the test images looked at.

    python benchmarks/strategies.py                      # digits: a few minutes
    python benchmarks/strategies.py --data fashion_mnist --root FOLDER --cells 2 --filters 8
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.utils.data import TensorDataset

from nni_petridish.core.genotype import Genotype
from nni_petridish.nni_adapter.evaluators.lengths import seeded
from nni_petridish.nni_adapter.strategy import Petridish
from nni_petridish.nni_adapter.switches import SwitchSpace
from nni_petridish.tasks.vision.data import load_data
from search_spaces import VisionSpace

# After ours, which know how to import NNI's NAS without its warnings.
import nni.nas.strategy as theirs  # isort: skip
from nni.nas.evaluator import FunctionalEvaluator  # isort: skip
from nni.nas.evaluator.pytorch import Classification, DataLoader  # isort: skip
from nni.nas.experiment import NasExperiment, NasExperimentConfig  # isort: skip

STRATEGIES = ("Petridish", "Random", "RegularizedEvolution", "TPE", "DARTS")


class Data(NamedTuple):
    """Data that all strategies train on; only `run` looks at the test images, in the end."""

    image_shape: tuple[int, ...]
    num_classes: int
    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset


def load(name: str, root: str | None) -> Data:
    data = load_data(name, root=root) if root else load_data(name)
    # To normalize images one by one would take longer than training.
    parts = [list(getattr(data, part)) for part in ("train", "validation", "test")]
    tensors = [
        TensorDataset(torch.stack([x for x, _ in part]), torch.tensor([int(y) for _, y in part]))
        for part in parts
    ]
    return Data(tuple(data.image_shape), data.num_classes, *tensors)


def make_evaluator(data: Data, epochs: int) -> Any:
    return Classification(
        num_classes=data.num_classes,
        learning_rate=0.01,
        train_dataloaders=DataLoader(data.train, batch_size=64, shuffle=True),
        val_dataloaders=DataLoader(data.validation, batch_size=200),
        max_epochs=epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )


def error(net: torch.nn.Module, images: Any) -> float:
    net.eval()
    with torch.no_grad():
        hits = [net(x).argmax(1) == y for x, y in DataLoader(images, batch_size=200)]
    return 1 - float(torch.cat(hits).float().mean())


def search(name: str, options: argparse.Namespace, data: Data, seed: int) -> tuple[Any, int]:
    """Return the best genotype that a strategy finds, and how many models it has trained."""
    space = make_space(options, data)
    epochs, budget = options.epochs, options.budget

    def train(net: torch.nn.Module, epochs: int) -> None:
        make_evaluator(data, epochs).evaluate(net)  # a new one each time: none can fit twice

    form = "raw" if name == "DARTS" else "simplified"
    config = NasExperimentConfig(execution_engine="sequential", model_format=form)
    evaluator, model_space = FunctionalEvaluator(train, epochs=epochs), space.model_space()
    with tempfile.TemporaryDirectory() as folder:
        config.experiment_working_directory = folder
        if name == "Petridish":
            strategy: Any = Petridish(
                Path(folder) / "gallery",
                seed=seed,
                max_epochs=budget,
                seed_epochs=epochs,
                weak_epochs=options.weak_epochs,
                final_epochs=epochs - options.weak_epochs,
            )
        elif name == "DARTS":
            evaluator, strategy = make_evaluator(data, budget), theirs.DARTS()
            model_space = SwitchSpace(space)
        else:
            kinds: dict[str, dict[str, Any]] = {
                "RegularizedEvolution": {"population_size": 4, "sample_size": 2},
                "TPE": {"optimize_mode": "maximize"},  # it minimizes by default
            }
            strategy = getattr(theirs, name)(seed=seed, **kinds.get(name, {}))
            config.max_trial_number = budget // epochs
        experiment = NasExperiment(model_space, evaluator, strategy, config)
        try:
            experiment.run()
            (sample,) = experiment.export_top_models(1, formatter="dict")
            count = 1 if name == "DARTS" else len(list(strategy.list_models(sort=False)))
        finally:
            experiment.stop()
    return model_space.genotype(sample), count


def make_space(options: argparse.Namespace, data: Data) -> VisionSpace:
    return VisionSpace(
        data.image_shape,
        data.num_classes,
        cells_per_stage=options.cells,
        filters=options.filters,
        stages=2,
        merge="weighted_sum",
    )


def retrain(options: argparse.Namespace, data: Data, genotype: Genotype) -> torch.nn.Module:
    net = make_space(options, data).build(genotype)
    make_evaluator(data, options.retrain_epochs).evaluate(net)
    return net


def run(name: str, options: argparse.Namespace, data: Data, seed: int) -> dict[str, float]:
    with seeded(seed):
        began = time.perf_counter()
        genotype, count = search(name, options, data, seed)
        seconds = time.perf_counter() - began
    with seeded(seed):
        net = retrain(options, data, genotype)
    return {
        "models": count,
        "seconds": seconds,
        "parameters": sum(p.numel() for p in net.parameters()),
        "validation": error(net, data.validation),
        "test": error(net, data.test),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_RAW)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--root")
    parser.add_argument("--budget", type=int, default=12, help="epochs of a search in all")
    parser.add_argument("--epochs", type=int, default=3, help="of one model")
    parser.add_argument("--weak-epochs", type=int, default=1, help="of these, of weak learning")
    parser.add_argument("--retrain-epochs", type=int, default=8)
    parser.add_argument("--cells", type=int, default=1)
    parser.add_argument("--filters", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    options = parser.parse_args()
    data = load(options.data, options.root)

    columns = ("models", "seconds", "parameters", "validation", "test")
    print(f"{'strategy':22}{'seed':>5}" + "".join(f"{column:>12}" for column in columns))
    for name in options.strategies:
        rows = []
        for seed in range(options.seeds):
            rows.append(run(name, options, data, seed))
            _show(name, str(seed), rows[-1])
        if len(rows) > 1:
            medians = {c: statistics.median(row[c] for row in rows) for c in columns}
            _show(name, "med", medians)


def _show(name: str, seed: str, row: dict[str, float]) -> None:
    cells = (
        f"{row['models']:12.0f}{row['seconds']:12.1f}{row['parameters']:12.0f}"
        f"{row['validation']:12.3f}{row['test']:12.3f}"
    )
    print(f"{name:22}{seed:>5}{cells}", flush=True)


_RAW = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
