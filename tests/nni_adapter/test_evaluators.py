"""NNI's evaluators as users set them up: regression, and Lightning in several processes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nni
import pytest
import torch
from nni.nas.experiment import NasExperiment
from nni.nas.hub.pytorch import DARTS
from nni.nas.space import model_context
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import EMAWeightAveraging
from torch import nn

from nni_petridish.core.grow import attach_candidates, finalize_candidates
from nni_petridish.errors import ConfigError, GrowthError, TrainingError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.nni_adapter.compat.patches import trial_channel
from nni_petridish.nni_adapter.evaluators.lengths import run_evaluator
from nni_petridish.nni_adapter.metrics import Listener
from nni_petridish.nni_adapter.strategy import Petridish
from nni_petridish.nni_adapter.user_spaces import UserSpace
from search_spaces import VisionSpace
from tests.support import nni_evaluators as users
from tests.support import nni_spaces as spaces

TWO = {"strategy": "ddp_fork", "devices": 2}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Run experiments in this process; they are stopped when the test ends."""
    started: list[NasExperiment] = []

    def run(space: Any, evaluator: Any, strategy: Any) -> NasExperiment:
        experiment = NasExperiment(space, evaluator, strategy)
        experiment.config.experiment_working_directory = tmp_path / "experiments"
        started.append(experiment)
        experiment.run()
        return experiment

    yield run
    for experiment in started:
        experiment.stop()


def mean_squared_error(net: nn.Module) -> float:
    data = users.Diabetes("validation")
    with torch.no_grad():
        return float((net.eval()(data.rows) - data.targets).square().mean())


def accuracy(net: nn.Module, channels: int = 1) -> float:
    images, labels = zip(*users.Digits("validation", channels=channels), strict=True)
    with torch.no_grad():
        guesses = net.eval()(torch.stack(images)).argmax(1)
    return float((guesses == torch.stack(labels)).float().mean())


def test_regression_grows_a_users_own_space_towards_small_errors(
    tmp_path: Path, start: Any
) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=3, i_max=2, seed=2)
    done = start(spaces.Tabular(), users.diabetes(epochs=4), strategy)
    models = {model.id: model for model in strategy.models()}
    assert len(models) == 3
    nets = done.export_top_models(3, formatter="instance")
    samples = done.export_top_models(3, formatter="dict")
    # What is exported first has the smallest squared error, and it is the one that was measured.
    measured = [mean_squared_error(net) for net in nets]
    assert measured == sorted(measured)
    assert measured == pytest.approx(sorted(m.error for m in models.values()), rel=1e-5)
    assert max(measured) > 1, "no error is an accuracy"
    # The hull falls from the cheapest to the one of the smallest error, and only its members grow.
    hull = strategy.hull()
    assert [model.error for model in hull] == sorted((m.error for m in hull), reverse=True)
    assert hull[-1].error == min(model.error for model in models.values())
    # Growth is by weak learning, and its result is a member of the space that Regression retrains.
    tables = Gallery(tmp_path / "gallery").load_documents("g00001")["alphas"]["tables"]
    assert set(tables) == {"cell", "layer", "inputs"}
    assert len({round(row["alpha"], 6) for row in tables["cell"]}) > 1, "α did not learn"
    with model_context(samples[0]):
        final = spaces.Tabular()
    before = mean_squared_error(final)
    users.diabetes(epochs=4).evaluate(final)
    assert mean_squared_error(final) < before


def test_processes_that_would_each_search_are_refused_before_anything_is_trained(
    tmp_path: Path, start: Any
) -> None:
    one_more = users.classification(strategy="ddp", devices=2)
    folder = tmp_path / "gallery"
    for phase, strategy, evaluator in (
        ("seed", Petridish(folder), one_more),
        ("weak", Petridish(folder, weak_evaluator=one_more), users.classification()),
    ):
        with pytest.raises(ConfigError) as caught:
            start(spaces.Vectors(), evaluator, strategy)
        assert str(caught.value) == (
            f"the {phase} evaluator must not train with strategy='ddp' in 2 processes, since each"
            " of them would run the whole search: use strategy='ddp_fork' (or 'ddp_spawn') on one"
            " machine, or a device for each of NNI's workers (trial_gpu_number)."
        )
    assert not folder.exists()
    # In a single process the same strategy does no harm.
    alone = Petridish(folder, max_models=1)
    start(spaces.Vectors(), users.classification(strategy="ddp", devices=1), alone)
    assert len(alone.models()) == 1
    # But it leaves its process group behind, with which others would wait forever.
    try:
        with pytest.raises(TrainingError, match="part of a process group already"):
            run_evaluator(users.classification(**TWO), nn.Identity(), 1)
    finally:
        torch.distributed.destroy_process_group()


def test_networks_of_nnis_cells_can_be_sent_to_other_processes() -> None:
    space = UserSpace(DARTS, (), {"width": 4, "num_cells": 3, "dataset": "cifar"})
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    net = space.build(space.seed())
    attach_candidates(net, l1=0.5)
    sent = pickle.loads(pickle.dumps(net))
    for one in (net, sent):
        one.eval()(images).square().sum().backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if name.endswith("alpha")}
    for name, gradient in gradients.items():
        # L1 included: its hook travels along.
        torch.testing.assert_close(sent.get_parameter(name).grad, gradient)
    finalize_candidates(sent)
    with pytest.raises(GrowthError, match="cannot grow once it was pickled"):
        attach_candidates(sent)
    attach_candidates(copy.deepcopy(space.build(space.seed())))


@pytest.mark.parametrize(
    "kind", ["choices", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("own", "hub"))]
)
def test_a_search_whose_evaluator_trains_in_two_processes(
    kind: str, tmp_path: Path, start: Any
) -> None:
    channels = 3 if kind == "hub" else 1
    space = {
        "own": lambda: VisionSpace((1, 8, 8), 10, 1, filters=4, stages=2).model_space(),
        "hub": lambda: DARTS(width=4, num_cells=3, dataset="cifar"),
        "choices": spaces.Choices,
    }[kind]()
    strategy = Petridish(tmp_path / "gallery", max_models=2, seed=1)
    evaluator = users.classification(epochs=15, channels=channels, **TWO)
    done = start(space, evaluator, strategy)
    best, other = strategy.list_models()
    # The weights are those of both processes: each trained on half of the images, and the error
    # is that of the whole validation set, of which each had half.
    for model in (best, other):
        net = model.executable_model()
        assert accuracy(net, channels) == pytest.approx(model.metric, abs=1e-6)
    assert accuracy(done.export_top_models(1, formatter="instance")[0], channels) > 0.2
    documents = Gallery(tmp_path / "gallery").load_documents("g00001")
    assert [record["epoch"] for record in documents["history"]["weak"]] == list(range(1, 16))
    tables = documents["alphas"]["tables"].values()
    assert any(len({row["alpha"] for row in rows}) > 1 for rows in tables), "α did not come back"


@pytest.mark.parametrize(
    "strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)]
)
def test_two_processes_train_what_one_does_on_twice_the_batch(strategy: str) -> None:
    """Without batch norms and candidates, two halves of all data are one large batch."""

    def trained(**options: Any) -> tuple[dict[str, torch.Tensor], list[Any], Any]:
        torch.manual_seed(0)
        space = UserSpace(spaces.Tabular)
        net = space.build(space.seed())
        reports: list[Any] = []
        listener = Listener(reports.append)
        evaluator = users.diabetes(**options, batch_size=300 // options.get("devices", 1))
        with trial_channel(listener):
            assert run_evaluator(evaluator, net, 5) == 5
        return net.state_dict(), reports, listener.last

    weights, reports, last = trained()
    others, other_reports, other_last = trained(strategy=strategy, devices=2)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=1e-5, msg=name)
    assert other_reports == pytest.approx(reports, rel=1e-3)
    assert other_last == pytest.approx(last, rel=1e-3)
    assert len(reports) == 5


class ReportThreads(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        nni.report_intermediate_result(torch.get_num_threads())


def test_a_forked_process_computes_with_one_thread() -> None:
    """With more it waits forever for OpenMP's, if this process has used them."""
    before, reports = torch.get_num_threads(), []
    space = UserSpace(spaces.Tabular)
    try:
        torch.set_num_threads(2)
        with trial_channel(Listener(reports.append)):
            evaluator = users.diabetes(callbacks=[ReportThreads()], **TWO)
            run_evaluator(evaluator, space.build(space.seed()), 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert reports[0] == 1


def test_what_goes_wrong_in_another_process_is_told_in_one_line() -> None:
    net = nn.Linear(3, 1)  # the data have ten columns
    with trial_channel(Listener(lambda value: None)), pytest.raises(TrainingError) as caught:
        run_evaluator(users.diabetes(num_sanity_val_steps=0, **TWO), net, 1)
    assert "shapes cannot be multiplied" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"precision": "64-true"}, {"precision": "bf16-true"}, {}])
def test_spaces_of_nni_grow_in_every_precision_and_with_averaged_weights(
    options: dict[str, Any], tmp_path: Path, start: Any
) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=2)
    callbacks = [] if options else [EMAWeightAveraging(decay=0.9)]
    start(spaces.Tiny(), users.classification(callbacks=callbacks, **options), strategy)
    models = strategy.models()
    assert [model.parent for model in models] == [None, "g00000"]
    # Averaging must not change what the network remembers of its inputs: 8x8 pixels.
    assert models[0].multiply_adds == 9 * 4 * 64 + 4 * 10
