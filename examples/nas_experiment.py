"""Petridish in an NNI experiment: an unchanged evaluator and one line for the strategy.

``python examples/nas_experiment.py`` searches in this process, in about a minute;
``--workers 2`` uses NNI's training service and web UI.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small networks more threads are slower

import nni
from nni.nas.evaluator.pytorch import Classification, DataLoader
from nni.nas.experiment import NasExperiment, NasExperimentConfig

from nni_petridish.strategy import Petridish
from nni_petridish.tasks.vision.data import load_data
from search_spaces import VisionSpace


@nni.trace  # lets NNI send the call to trials, which load the data themselves
def digits(part: str) -> object:
    """Return a part of scikit-learn's digits."""
    return getattr(load_data("digits"), part)


def make_evaluator() -> Classification:
    """Return an ordinary evaluator of NNI."""
    return Classification(
        num_classes=10,
        learning_rate=0.01,
        train_dataloaders=DataLoader(digits("train"), batch_size=32, shuffle=True),
        val_dataloaders=DataLoader(digits("validation"), batch_size=100),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )


def make_config(workers: int) -> NasExperimentConfig:
    """Return a configuration: this process for one worker, NNI's local service for several."""
    if workers == 1:
        return NasExperimentConfig(execution_engine="sequential", model_format="simplified")
    config = NasExperimentConfig("ts", "simplified", "local")
    config.trial_concurrency = workers
    return config


def main() -> None:
    """Search, then show the hull and the best network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gallery", default="gallery-nas-experiment")
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()

    space = VisionSpace((1, 8, 8), num_classes=10, cells_per_stage=1, filters=4, stages=2)
    strategy = Petridish(
        options.gallery, max_models=options.models, seed_epochs=3, weak_epochs=1, final_epochs=3
    )
    experiment = NasExperiment(
        space.model_space(), make_evaluator(), strategy, make_config(options.workers)
    )
    experiment.run(options.port)

    print("  id      multiply-adds  parameters  error")
    for model in strategy.hull():
        print(f"  {model.id}  {model.multiply_adds:13d}  {model.parameters:10d}  {model.error:.3f}")
    (sample,) = experiment.export_top_models(1, formatter="dict")
    (network,) = experiment.export_top_models(1, formatter="instance")
    print(f"  normal cell of the best model: {sample['normal']}")
    print(f"  {type(network).__name__} with its trained weights; all models: {strategy.folder}")
    experiment.stop()


if __name__ == "__main__":
    main()
