"""Petridish on spaces of NNI's cells and choices."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nni
import pytest
import torch
from nni.nas.evaluator import FunctionalEvaluator
from nni.nas.experiment import NasExperiment, NasExperimentConfig
from nni.nas.hub.pytorch import DARTS, ENAS, PNAS, AmoebaNet, NasBench101, NASNet
from nni.nas.nn.pytorch import Cell
from nni.nas.space import model_context
from nni.nas.strategy import DARTS as DartsStrategy
from nni.nas.strategy import TPE, Random, RegularizedEvolution
from nni.tools.nnictl import config_utils
from torch import Tensor, nn

from nni_petridish import Genotype
from nni_petridish.core.complexity import count_multiply_adds, count_parameters
from nni_petridish.core.grow import (
    alpha_tables,
    attach_candidates,
    can_grow,
    candidate_parameters,
    finalize_candidates,
    sites,
)
from nni_petridish.errors import ConfigError, GenotypeError, SearchError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.nni_adapter.evaluators.growth import GrowthEvaluator
from nni_petridish.nni_adapter.evaluators.task import EvaluatorTask, Metric
from nni_petridish.nni_adapter.strategy import Petridish
from nni_petridish.nni_adapter.switches import SwitchSpace
from nni_petridish.nni_adapter.user_spaces import UserSpace
from nni_petridish.nni_adapter.user_spaces.genotype import ChoiceGenotype
from nni_petridish.nni_adapter.user_spaces.sites import CellSite, NormalizedOp, ScaledOp
from nni_petridish.running.growth import load_network
from nni_petridish.search.records import Growth
from nni_petridish.search.settings import GrowthSettings
from search_spaces import RecurrentSpace, VisionSpace
from tests.support import nni_evaluators as users
from tests.support import nni_spaces as spaces

SMALL = {"width": 4, "num_cells": 3, "dataset": "cifar"}
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
GRAY = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def learn(net: nn.Module, images: Tensor, seed: int = 0) -> None:
    """Change α and all other parameters a little, as an evaluator would."""
    torch.manual_seed(seed)
    net.train()
    net(images).square().sum().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.grad = None


def grow_to_the_limit(net: nn.Module, images: Tensor, i_max: int = 3) -> list[Any]:
    """Grow until nothing is left; check that finalizing changes no prediction."""
    genotypes = []
    while can_grow(net):
        attach_candidates(net)
        learn(net, images, len(genotypes))
        with torch.no_grad():
            before = net.eval()(images)
            genotypes.append(finalize_candidates(net, i_max))
            assert torch.equal(net(images), before)
        learn(net, images)
        assert len(genotypes) < 20
    return genotypes


# The spaces of the hub.


@pytest.mark.parametrize("kind", [DARTS, NASNet, ENAS, AmoebaNet, PNAS])
def test_cells_of_the_hub_grow_node_by_node_to_members_of_the_space(kind: Any) -> None:
    torch.manual_seed(0)
    space, theirs = UserSpace(kind, (), SMALL), kind(**SMALL)
    net = space.build(space.seed())
    genotypes = grow_to_the_limit(net, IMAGES)
    assert len(genotypes) == theirs.num_nodes_per_cell
    for n, genotype in enumerate(genotypes, start=1):
        sample = json.loads(json.dumps(space.sample(genotype)))
        assert theirs.contains(sample)
        grown = {k: v for k, v in sample.items() if v != space.base[k]}
        nodes = {int(label.split("_")[1]) for label in grown}
        assert nodes == set(range(2, 2 + n)), "the nodes grow in their order"
    # The weights fit the architecture that the genotype builds, and the net is what it was.
    again = space.build(Genotype.from_json(genotypes[-1].to_json()))
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.eval()(IMAGES), net.eval()(IMAGES))
    # Its size is that of the network which NNI makes of the sample.
    frozen = theirs.freeze(sample)
    assert space.size(net) == (
        count_multiply_adds(frozen, (3, 8, 8)),
        sum(p.numel() for p in frozen.parameters()),
    )


def test_a_full_network_is_nnis_but_for_stand_ins_and_weights() -> None:
    space = UserSpace(DARTS, (), SMALL)
    net = space.build(space.seed())
    sample = space.sample(grow_to_the_limit(net, IMAGES)[-1])
    frozen = DARTS(**SMALL).freeze(sample)
    cells = [module for module in frozen.modules() if isinstance(module, Cell)]
    for site, cell in zip(sites(net), cells, strict=True):
        assert isinstance(site, CellSite)
        cell.preprocessor.load_state_dict(site.preprocessor.state_dict())
        places = site.decision.places(site.chosen())
        for learner, place in zip(site.finished(), places, strict=True):
            nn.init.ones_(learner.eta)
            nn.init.ones_(learner.merge.weight)
            for op, slot in zip(learner.ops, place.slots, strict=True):
                op.scale.fill_(1)
                cell.ops[place.node][slot].load_state_dict(op.op.state_dict())
        site.stand_ins = nn.ModuleList(nn.ModuleList([_Nothing()]) for _ in site.stand_ins)
    frozen.stem.load_state_dict(net.stem.state_dict())
    frozen.classifier.load_state_dict(net.classifier.state_dict())
    torch.testing.assert_close(net.eval()(IMAGES), frozen.eval()(IMAGES))


class _Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(())


def test_depths_and_widths_to_choose_stay_at_their_first_value_or_at_start() -> None:
    kwargs = {"width": (4, 8), "num_cells": (3, 6), "dataset": "cifar"}
    for start, channels, cells in (({}, 4, 3), ({"width": 8, "depth": 6}, 8, 6)):
        space = UserSpace(DARTS, (), kwargs, start)
        net = space.build(space.seed())
        assert net(IMAGES).shape == (4, 10)
        assert net.classifier.in_features == 4 * 4 * channels
        assert len(sites(net)) == cells


def test_attaching_changes_no_prediction_and_no_gradient_of_the_network() -> None:
    space = UserSpace(DARTS, (), SMALL)
    torch.manual_seed(1)
    net = space.build(space.seed())
    own = list(net.parameters())

    def run() -> tuple[Tensor, list[Tensor]]:
        net.zero_grad()
        logits = net.train()(IMAGES)
        logits.square().sum().backward()
        return logits.detach(), [p.grad.clone() for p in own if p.grad is not None]

    logits, gradients = run()
    attach_candidates(net)
    with_candidates, others = run()
    assert torch.equal(logits, with_candidates)
    torch.testing.assert_close(gradients, others)
    assert len(gradients) == len(others) == len(own)
    assert all(p.grad is not None for p in candidate_parameters(net))
    assert set(alpha_tables(net)) == {"normal", "reduce"}
    # Two inputs and seven operations, but for the stand-in, at the first node.
    assert {len(rows) for rows in alpha_tables(net).values()} == {13}


def test_candidates_are_normalized_and_what_is_kept_is_the_raw_operation() -> None:
    torch.manual_seed(0)
    candidate = NormalizedOp(nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(inplace=True)))
    for _ in range(200):
        value = candidate(7 * IMAGES)
    assert torch.allclose(value.mean(dim=(0, 2, 3)), torch.zeros(5), atol=1e-5)
    assert torch.allclose(value.var(dim=(0, 2, 3), correction=0), torch.ones(5), atol=1e-3)
    finished = ScaledOp(candidate)(7 * IMAGES)
    raw = candidate.op(7 * IMAGES)
    assert torch.allclose(finished / finished.sum(), raw / raw.sum(), atol=1e-6)
    variance = finished.detach().var(dim=(0, 2, 3), correction=0).mean()
    assert float(variance) == pytest.approx(1, rel=1e-3)


# A user's own spaces.


def test_choices_outside_of_cells_are_made_a_few_at_a_time() -> None:
    torch.manual_seed(0)
    space, theirs = UserSpace(spaces.Choices), spaces.Choices()
    assert space.base == {
        "layer": "skip",
        "numbered": 0,  # no parameters, and the first of its kind
        "one": [0],
        "some": [0],
        "two": [0, 1],  # two of three at a time is not forward selection: NNI's default
        "depth": 1,
        "deep0": 1,
        "deep1": 1,
        "deep2": 1,
    }
    net = space.build(space.seed())
    before = net.train()(GRAY)
    attach_candidates(net)
    assert torch.equal(net(GRAY), before), "a layer has overwritten what others read"
    learn(net, GRAY)
    tables = alpha_tables(net)
    largest = {key: abs(rows[0]["alpha"]) for key, rows in tables.items()}
    assert set(largest) == {"layer", "numbered", "one", "some", "depth", "deep0"}
    genotype = finalize_candidates(net, 2)
    best = sorted(largest, key=lambda key: -largest[key])[:2]
    assert set(genotype.choices) == set(best)
    for key in best:
        row = tables[key][0]
        assert genotype.choices[key] == (((row["source"], row["op"]),),)

    genotypes = [genotype, *grow_to_the_limit(net, GRAY, i_max=2)]
    made = [sum(map(len, genotype.choices.values())) for genotype in genotypes]
    # 2 layers, 1 input, 2 more inputs, 2 more depths, and a layer at each of the 3 depths.
    assert made == [2, 4, 6, 8, 10]
    sample = space.sample(genotypes[-1])
    assert sample["some"] == [0, 1, 2]
    assert sample["depth"] == 3
    assert sample["one"] == [1]
    assert all(space.sample(genotype)["layer"] in theirs.layer.names for genotype in genotypes)
    for genotype in genotypes:
        assert theirs.contains(space.sample(genotype))
        assert theirs.freeze(space.sample(genotype))(GRAY).shape == (4, 10)
        assert space.build(genotype)(GRAY).shape == (4, 10)
    again = space.build(genotypes[-1])
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.eval()(GRAY), net.eval()(GRAY))


def test_rivals_start_alike_and_unused_layers_are_no_part_of_the_network() -> None:
    space = UserSpace(spaces.Choices)
    net = space.build(space.seed())
    frozen = spaces.Choices().freeze(space.base)
    assert sum(p.numel() for p in net.parameters()) == count_parameters(frozen)
    attach_candidates(net)
    alphas = [row["alpha"] for rows in alpha_tables(net).values() for row in rows]
    assert alphas == [pytest.approx(1 / len(alphas))] * len(alphas)


def test_cells_of_plain_modules_grow_too() -> None:
    space = UserSpace(spaces.OwnCells, (3,), {}, {"width": 6})
    net = space.build(space.seed())
    attach_candidates(net)
    assert len(alpha_tables(net)["cell"]) == 1  # one input, two ops, one of them the stand-in
    learn(net, GRAY)
    genotype = finalize_candidates(net, 1)
    assert genotype.choices == {"cell": ((("0", "1"),),)}
    theirs = spaces.OwnCells(3)
    last = [genotype, *grow_to_the_limit(net, GRAY)][-1]
    assert theirs.contains(space.sample(last))
    assert theirs.freeze(space.sample(last))(GRAY).shape == (4, 10)
    assert space.size(net)[1] == count_parameters(theirs.freeze(space.sample(last)))


def test_choices_need_no_images() -> None:
    space = UserSpace(spaces.Vectors)
    net = space.build(space.seed())
    (genotype,) = grow_to_the_limit(net, GRAY)
    assert isinstance(space.sample(genotype)["layer"], int)
    assert space.size(net)[0] == 64 * 64 + 64 * 10


def test_what_is_fixed_does_not_grow_and_the_rest_does() -> None:
    simplest = UserSpace(DARTS, (), SMALL).base
    full = dict(simplest)
    with pytest.raises(ConfigError, match="nothing to grow in DARTS: it looks for a Cell, a Lay"):
        UserSpace(DARTS, (), SMALL, full)
    start = {"normal/op_2_0": "sep_conv_3x3", "normal/input_2_0": [0]}
    space = UserSpace(DARTS, (), SMALL, start)
    net = space.build(space.seed())
    genotypes = grow_to_the_limit(net, IMAGES)
    first, last = space.sample(genotypes[0]), space.sample(genotypes[-1])
    assert all(sample[label] == start[label] for sample in (first, last) for label in start)
    assert len(genotypes[0].choices["normal"][0]) == 1, "one operator of the node was left"
    assert len(genotypes[0].choices["reduce"][0]) == 2
    assert DARTS(**SMALL).contains(last)
    fixed = {"layer": "conv1", "depth": 2}
    assert not set(fixed) & set(UserSpace(spaces.Choices, (), {}, fixed).decisions)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"normal/op_9_0": "x"}, "fixed must have labels of the space.*got 'normal/op_9_0'"),
        ({"normal/op_2_0": "sep_conv_3x3"}, "fixed must have both or none of 'normal/op_2_0'"),
        ({"normal/op_2_0": "x", "normal/input_2_0": [0]}, "fixed must be of the space DARTS"),
    ],
)
def test_wrong_fixed_values_are_told_in_one_line(start: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        UserSpace(DARTS, (), SMALL, start)
    assert "\n" not in str(caught.value)


def test_genotypes_of_other_spaces_are_refused() -> None:
    space = UserSpace(DARTS, (), SMALL)
    for choices in (
        {"other": [[["0", "skip_connect"]]]},
        {"normal": [[["0", "conv_9x9"]]]},
        {"normal": [[["4", "skip_connect"]]]},
        {"normal": [[["1", "skip_connect"]]]},  # the stand-in says that nothing has grown
        {"normal": [[["0", "skip_connect"]] * 3]},
    ):
        with pytest.raises(GenotypeError):
            space.build(ChoiceGenotype(choices))
    for document in ({}, {"choices": 3}, {"choices": {"a": [[]]}}, {"choices": {}, "x": 1}):
        with pytest.raises(GenotypeError):
            Genotype.from_dict({"version": 1, "space": "nni", **document})


# Experiments with one line changed.

SHORT = {"seed_epochs": 1, "weak_epochs": 1, "final_epochs": 1}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run experiments that are stopped when the test ends and are not listed in the home."""
    home = str(tmp_path / "home")
    os.makedirs(home)
    monkeypatch.setattr(config_utils.Experiments.__init__, "__defaults__", (home,))
    started: list[NasExperiment] = []

    def run(space: Any, evaluator: Any, strategy: Any, config: Any = None) -> NasExperiment:
        experiment = NasExperiment(space, evaluator, strategy, config)
        experiment.config.experiment_working_directory = tmp_path / "experiments"
        started.append(experiment)
        experiment.run()
        return experiment

    yield run
    for experiment in started:
        experiment.stop()


def test_a_users_experiment_grows_exports_and_retrains_with_one_line_changed(
    tmp_path: Path, start: Any
) -> None:
    folder = tmp_path / "gallery"
    strategy = Petridish(folder, max_models=3, seed=3)
    done = start(DARTS(**SMALL), users.classification(channels=3), strategy)
    assert done.config.execution_engine.name == "sequential", "no manager was needed"
    (sample,) = done.export_top_models(1, formatter="dict")
    (net,) = done.export_top_models(1, formatter="instance")
    best = min(strategy.models(), key=lambda model: (model.error, model.multiply_adds))
    space = UserSpace(DARTS, (), SMALL)
    genotype = Genotype.from_dict(Gallery(folder).load_documents(best.id)["genotype"])
    assert sample == space.sample(genotype)
    assert net.genotype == genotype
    # The instance has the weights that were measured.
    images = torch.stack([image for image, _ in users.Digits("validation", channels=3)])
    labels = torch.tensor([label for _, label in users.Digits("validation", channels=3)])
    with torch.no_grad():
        accuracy = (net.eval()(images).argmax(1) == labels).float().mean()
    assert float(accuracy) == pytest.approx(1 - best.error)
    # As in NNI's tutorial: build anew, fit with the evaluator.
    with model_context(sample):
        final = DARTS(**SMALL)
    before = [parameter.clone() for parameter in final.parameters()]
    retrain = users.classification(epochs=2, channels=3)
    retrain.evaluate(final)
    assert not all(map(torch.equal, before, final.parameters()))
    assert 0 <= retrain.trainer.callback_metrics["val_acc"] <= 1
    documents = Gallery(folder).load_documents("g00001")
    assert documents["lineage"]["parent"] == "g00000"
    rows = documents["alphas"]["tables"]["reduce"]
    chosen = documents["genotype"]["choices"]["reduce"][0]
    assert [[row["source"], row["op"]] for row in rows[:2]] == chosen
    assert len({row["alpha"] for row in rows}) > 1, "α did not learn"


def test_a_search_ends_at_the_limits_of_the_space_and_can_be_continued(
    tmp_path: Path, start: Any
) -> None:
    evaluator = FunctionalEvaluator(users.train_by_hand)
    first = Petridish(tmp_path / "gallery", max_models=1, i_max=1, **SHORT)
    start(spaces.Vectors(), evaluator, first)
    assert [model.id for model in first.models()] == ["g00000"]
    # The gallery knows the space again: its seed is not trained twice.
    second = Petridish(tmp_path / "gallery", max_models=4, i_max=1, **SHORT)
    done = start(spaces.Vectors(), evaluator, second)
    models = second.models()
    # Each of the two other layers once: the children are full.
    assert [model.parent for model in models] == [None] + ["g00000"] * 2
    assert [model.outcome.metrics.get("full", False) for model in models] == [False] + [True] * 2
    assert all(spaces.Vectors().contains(s) for s in done.export_top_models(4, formatter="dict"))
    other = Petridish(tmp_path / "gallery", fixed={"layer": 0}, **SHORT)
    with pytest.raises(ConfigError, match="nothing to grow in Vectors"):
        start(spaces.Vectors(), evaluator, other)


def test_a_search_trains_and_exports_every_architecture_of_a_small_space_once(
    tmp_path: Path, start: Any
) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=12)
    experiment = start(spaces.Tiny(), FunctionalEvaluator(users.train_once), strategy)
    assert len(strategy.models()) == 2
    samples = experiment.export_top_models(12, formatter="dict")
    assert sorted(sample["layer"] for sample in samples) == ["conv", "skip"]


@pytest.mark.parametrize("kind", ["plain", "processed", "loose_end", "factory"])
def test_cells_of_two_inputs_grow(kind: str, tmp_path: Path, start: Any) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=3)
    space = spaces.TwoInputs(kind)
    evaluator = FunctionalEvaluator(users.two_inputs, width=space.first_width)
    start(space, evaluator, strategy)
    models = strategy.models()
    assert [model.parent for model in models][:2] == [None, "g00000"]
    # Three nodes, of one operator each in the seed as NNI counts it.
    assert models[0].multiply_adds >= 3 * 8 * 3
    weights, documents = Gallery(tmp_path / "gallery").load_model("g00001")
    net = UserSpace(spaces.TwoInputs, (kind,)).build(Genotype.from_dict(documents["genotype"]))
    net.load_state_dict(weights)
    assert UserSpace(spaces.TwoInputs, (kind,)).size(net)[0] == models[1].multiply_adds


def test_choices_that_cannot_grow_are_refused_before_anything_is_trained(
    tmp_path: Path, start: Any
) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=3)
    with pytest.raises(SearchError, match="the choice 'unused' is not used in the forward pass"):
        start(spaces.Unused(), FunctionalEvaluator(users.train_once), strategy)
    events = Gallery(tmp_path / "gallery").journal.read_all()
    assert [event["event"] for event in events] == ["ask", "fail"]  # and not tried again
    fixed = Petridish(tmp_path / "other", max_models=2, fixed={"unused": 1})
    start(spaces.Unused(), FunctionalEvaluator(users.train_once), fixed)
    assert len(fixed.models()) == 2
    with pytest.raises(ConfigError, match="found nothing to grow in NasBench101"):
        start(NasBench101(), FunctionalEvaluator(users.train_once), Petridish(tmp_path / "third"))
    with pytest.raises(ConfigError, match=r"inputs are tensors .* got dict"):
        UserSpace(spaces.Vectors).build(ChoiceGenotype())({"x": GRAY})


def test_lbfgs_trains_networks_of_channels_last(tmp_path: Path, start: Any) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=2)
    start(spaces.Tiny(), FunctionalEvaluator(users.train_by_lbfgs), strategy)
    assert all(model.outcome.metrics["gain"] > 0 for model in strategy.models())
    assert len(strategy.models()) == 2


def test_the_old_name_of_fixed_works_and_its_galleries_are_continued(
    tmp_path: Path, start: Any
) -> None:
    evaluator = FunctionalEvaluator(users.train_by_hand)
    choices = {"layer": "conv1", "depth": 2}
    with pytest.warns(DeprecationWarning, match="settled is called fixed now") as told:
        old = Petridish(tmp_path / "gallery", max_models=1, settled=choices, **SHORT)
    assert told[0].filename == __file__, "the warning names the line that has to change"
    start(spaces.Choices(), evaluator, old)
    # Galleries keep the key that earlier versions wrote.
    kept = json.loads((tmp_path / "gallery" / "gallery.json").read_text())
    assert kept["space"]["settled"] == choices
    new = Petridish(tmp_path / "gallery", max_models=2, fixed=choices, **SHORT)
    done = start(spaces.Choices(), evaluator, new)
    assert [model.parent for model in new.models()] == [None, "g00000"]
    for sample in done.export_top_models(2, formatter="dict"):
        assert sample.items() >= choices.items()
    with pytest.raises(ConfigError, match="settled must not be given with fixed"):
        Petridish(tmp_path / "gallery", fixed=choices, settled=choices)


def test_a_space_with_nothing_to_grow_is_told_in_one_line(tmp_path: Path, start: Any) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=2)
    with pytest.raises(ConfigError) as caught:
        start(spaces.OnlyWidths(), FunctionalEvaluator(users.train_by_hand), strategy)
    assert str(caught.value) == (
        "Petridish found nothing to grow in OnlyWidths: it looks for a Cell, a LayerChoice, an"
        " InputChoice of one or of any number of inputs, or a Repeat of variable depth"
        " (nni.nas.nn.pytorch) that is not fixed; the labels of the space are: width."
    )
    assert not (tmp_path / "gallery").exists()
    strategy = Petridish(tmp_path / "gallery", weak_learning="joint")
    with pytest.raises(ConfigError, match="weak_learning must be isolated for spaces of NNI's"):
        start(spaces.Vectors(), FunctionalEvaluator(users.train_by_hand), strategy)


def test_a_network_of_several_inputs_grows(tmp_path: Path, start: Any) -> None:
    calls = tmp_path / "calls"
    evaluator = FunctionalEvaluator(users.train_weighted, calls=str(calls))
    strategy = Petridish(tmp_path / "gallery", max_models=2)
    start(spaces.WeightedVectors(), evaluator, strategy)
    sizes = [model.multiply_adds for model in strategy.models()]
    assert len(sizes) == 2
    assert sizes[0] < sizes[1]
    assert calls.read_text().split() == ["called"] * 3, "seed, weak learning, and after it"


def test_growths_in_users_spaces_travel_to_trials(tmp_path: Path) -> None:
    space = UserSpace(DARTS, (), SMALL, {"normal/op_2_0": "skip_connect", "normal/input_2_0": [0]})
    gallery = Gallery.create(tmp_path / "gallery", {}, {})
    evaluators = dict.fromkeys(("seed", "weak", "final"), users.users_lightning(channels=3))
    for growth in (Growth("g00000", None, 1, 0.01, 2), Growth("g00001", "g00000", 2, 0.01, 2)):
        sent = GrowthEvaluator(
            growth, space, evaluators, str(gallery.folder), GrowthSettings(1, 1, 1), Metric()
        )
        arrived = nni.load(nni.dump(sent))
        assert arrived.space == space
        arrived.evaluate()
    net = load_network(EvaluatorTask(space, {}), gallery, "g00001")
    assert net.genotype.growths == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"strategy": "ddp_fork", "devices": 2}])
def test_workers_of_nni_grow_a_space_of_the_hub(options: Any, tmp_path: Path) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=3, **SHORT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = NasExperimentConfig("ts", "simplified", "local")
    config.trial_concurrency = 2
    config.experiment_working_directory = tmp_path / "experiments"
    evaluator = users.classification(channels=3, **options)
    done = NasExperiment(DARTS(**SMALL), evaluator, strategy, config)
    try:
        done.run(port)
        (sample,) = done.export_top_models(1, formatter="dict")
    finally:
        done.stop()
    assert len(strategy.models()) == 3
    assert DARTS(**SMALL).contains(sample)


# Our own spaces under NNI's strategies.


@pytest.mark.parametrize(
    "strategy",
    [
        Random(seed=1),
        RegularizedEvolution(population_size=2, sample_size=2, mutation_prob=0.7, seed=1),
        TPE(seed=1),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_recurrent_cells_are_searched_by_other_strategies(strategy: Any, start: Any) -> None:
    space = RecurrentSpace(vocabulary=20, embedding=4, max_nodes=4).model_space()
    config = NasExperimentConfig(execution_engine="sequential", model_format="simplified")
    config.max_trial_number = 5
    done = start(space, FunctionalEvaluator(users.count_nodes), strategy, config)
    samples = done.export_top_models(5, formatter="dict")
    assert all(space.contains(sample) for sample in samples)
    nodes = [len(space.genotype(sample).nodes) for sample in samples]
    assert nodes == sorted(nodes, reverse=True)
    assert len(nodes) == 5
    assert 1 < max(nodes) <= 4


SUMS = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=4, stages=2, merge="weighted_sum")


def test_switches_say_which_shortcuts_a_genotype_has() -> None:
    space = SwitchSpace(SUMS, max_learners=2)
    labels = space.simplify()
    # 2 inputs, then 3 with h0, 7 ops, normal and reduction cells.
    assert len(labels) == 2 * (2 + 3) * 7
    off = dict.fromkeys(labels, "off")
    assert space.genotype(off) == SUMS.seed()
    on = ("normal.h1.prev.identity", "normal.h1.h0.identity", "reduce.h0.prev.max_pool_3x3")
    genotype = space.genotype({**off, **dict.fromkeys([*on, "reduce.h1.h0.identity"], "on")})
    assert genotype.cells == {
        "normal": ((("prev", "identity"),),),  # h0 is empty: nobody can read it
        "reduce": ((("prev", "max_pool_3x3"),), (("h0", "identity"),)),
    }
    with model_context({**off, on[0]: "on"}):
        assert SwitchSpace(SUMS, max_learners=2).genotype.growths == 1
    # All off, which is NNI's default, is the seed: the switches add nothing.
    seed = SUMS.build(SUMS.seed())
    theirs = {name.replace(".cell.", "."): value for name, value in space.net.state_dict().items()}
    seed.load_state_dict({name: theirs[name] for name in seed.state_dict()})
    torch.testing.assert_close(space.eval()(GRAY), seed.eval()(GRAY))
    with pytest.raises(ConfigError, match="merge must be weighted_sum for switches"):
        SwitchSpace(VisionSpace((1, 8, 8), 10))


def test_darts_searches_our_space_by_switches(start: Any) -> None:
    space = SwitchSpace(SUMS)
    done = start(space, users.classification(), DartsStrategy())
    (sample,) = done.export_top_models(1, formatter="dict")
    genotype = SwitchSpace(SUMS).genotype(sample)
    assert set(sample) == set(SwitchSpace(SUMS).simplify())
    assert SUMS.build(genotype)(GRAY).shape == (4, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["examples/darts_space.py", "--models", "2", "--epochs", "1", "--retrain-epochs", "1"],
        ["examples/own_space.py", "--models", "3", "--epochs", "1"],
        [
            *["benchmarks/strategies.py", "--seeds", "1", "--budget", "2", "--epochs", "1"],
            *["--weak-epochs", "1", "--retrain-epochs", "1", "--strategies", "Random", "DARTS"],
        ],
    ],
    ids=lambda command: command[0],
)
def test_examples_and_benchmark_run(command: list[str], tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script, *arguments = command
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, str(root / script), *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
