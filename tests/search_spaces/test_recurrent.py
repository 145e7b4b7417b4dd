from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish import (
    Genotype,
    alpha_tables,
    attach_candidates,
    count_parameters,
    detach_candidates,
    finalize_candidates,
    sites,
)
from nni_petridish.core import candidate_parameters
from nni_petridish.errors import ConfigError, GenotypeError, GrowthError
from nni_petridish.kernels.switch import plain_ops
from search_spaces import RecurrentSpace
from search_spaces.recurrent.genotype import ACTIVATIONS, RecurrentGenotype
from search_spaces.recurrent.network import RecurrentNetwork, as_images

DARTS_V1 = (
    "DARTS_V1 = Genotype(recurrent=[('relu', 0), ('relu', 1), ('tanh', 2), ('relu', 3),"
    " ('relu', 4), ('identity', 1), ('relu', 5), ('relu', 1)], concat=range(1, 9))"
)
DARTS_V2 = (
    "DARTS_V2 = Genotype(recurrent=[('sigmoid', 0), ('relu', 1), ('relu', 1), ('identity', 1),"
    " ('tanh', 2), ('sigmoid', 5), ('tanh', 3), ('relu', 5)], concat=range(1, 9))"
)
ENAS = (
    "ENAS = Genotype(recurrent=[('tanh', 0), ('tanh', 1), ('relu', 1), ('tanh', 3), ('tanh', 3),"
    " ('relu', 3), ('relu', 4), ('relu', 7), ('relu', 8), ('relu', 8), ('relu', 8)],"
    " concat=[2, 5, 6, 9, 10, 11])"
)
CELLS = {
    "seed": [("relu", 0)],
    "chain": [("relu", 0), ("tanh", 1), ("sigmoid", 2)],
    "fan": [("relu", 0), ("tanh", 0), ("identity", 0), ("sigmoid", 1), ("relu", 1)],
    "darts": RecurrentGenotype.from_darts(DARTS_V2).nodes,
}
F_OF = {"sigmoid": torch.sigmoid, "relu": torch.relu, "tanh": torch.tanh, "identity": lambda x: x}
STEPS, BATCH, WORDS = 6, 5, 23


def small_net(nodes: list = CELLS["seed"], seed: int = 0, **options: int) -> RecurrentNetwork:
    torch.manual_seed(seed)
    space = RecurrentSpace(WORDS, **{"embedding": 7, "hidden": 7, **options})
    net = space.build(RecurrentGenotype(nodes))
    with torch.no_grad():  # larger than ±0.04, so that nonlinearities matter
        for parameter in net.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.5)
    return net.double()


def tokens(seed: int = 0, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(WORDS, (steps + 1, BATCH), generator=generator)
    return text[:-1], text[1:]


def loss_of(net: nn.Module, seed: int = 0, state: Tensor | None = None) -> Tensor:
    text, targets = tokens(seed)
    logits, _ = net(text, state)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(net: nn.Module, steps: int = 4, lr: float = 0.3, texts: int = 4) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step % texts).backward()
        optimizer.step()


def predictions(net: nn.Module) -> Tensor:
    net.eval()
    with torch.no_grad():
        return net(tokens(9)[0])[0]


def gradients(net: nn.Module) -> dict[str, Tensor]:
    net.train()
    net.zero_grad()
    loss_of(net).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def darts_cell(
    net: RecurrentNetwork,
    x: Tensor,
    h: Tensor,
    shares: Tensor,
    mask: Tensor | float = 1.0,
    between: list[Tensor] | None = None,
) -> Tensor:
    """DARTS's cell, computed step by step from its formulas."""
    hidden = h.shape[1]
    weights = [net.cell.first.weight, *(learner.ops[0].weight for learner in net.cell.learners)]
    outputs = []
    for x_t in x:
        both = torch.cat([x_t, h * mask], 1) @ net.cell.weight
        states = [h + torch.sigmoid(both[:, :hidden]) * (torch.tanh(both[:, hidden:]) - h)]
        for (name, j), weight in zip(net.genotype.nodes, weights, strict=True):
            c = torch.sigmoid(states[j] * mask @ weight[:, :hidden])
            a = F_OF[name](states[j] * mask @ weight[:, hidden:])
            states.append(states[j] + c * (a - states[j]))
        h = sum(share * s for share, s in zip(shares, states[1:], strict=True))
        if between is not None:
            h = h + 0.0
            h.requires_grad_() if not h.requires_grad else h.retain_grad()
            between.append(h)
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_from_scratch_is_dartss_cell(name: str) -> None:
    net = small_net(CELLS[name])
    x, h = torch.randn(STEPS, BATCH, 7).double(), torch.randn(BATCH, 7).double()
    n = len(CELLS[name])
    expected = darts_cell(net, x, h, torch.full((n,), 1 / n).double())
    torch.testing.assert_close(net.cell(x, h), expected)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_through_time_are_autograds(name: str, with_mask: bool) -> None:
    net = small_net(CELLS[name])
    for learner in net.cell.learners:
        learner.eta.data.normal_()
    x = torch.randn(STEPS, BATCH, 7).double().requires_grad_()
    h = torch.randn(BATCH, 7).double().requires_grad_()
    mask = torch.rand(BATCH, 7).round().double() * 2 if with_mask else None
    weight = torch.randn(STEPS, BATCH, 7).double()
    wanted = [x, h, *net.cell.parameters()]
    found = torch.autograd.grad((net.cell(x, h, mask) * weight).sum(), wanted)
    slow = darts_cell(net, x, h, net.cell.average(), 1.0 if mask is None else mask)
    expected = torch.autograd.grad((slow * weight).sum(), wanted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_survive_gradcheck_and_a_second_backward() -> None:
    net = small_net(CELLS["fan"])
    x = torch.randn(2, 2, 7).double().requires_grad_()
    h = torch.randn(2, 7).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, h: net.cell(x, h), (x, h))
    loss = net.cell(x, h).square().sum()
    first = torch.autograd.grad(loss, [x, h], retain_graph=True)
    second = torch.autograd.grad(loss, [x, h])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def backward_after_a_weight_changed() -> None:
    net = small_net()
    loss = loss_of(net)
    with torch.no_grad():
        net.cell.first.weight.add_(1)
    loss.backward()


def test_a_weight_changed_before_the_backward_pass_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward_after_a_weight_changed()


def test_a_changed_weight_is_noticed_by_optimized_python_too() -> None:
    program = f"import {__name__} as tests; tests.backward_after_a_weight_changed()"
    found = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True)
    assert "modified by an inplace operation" in found.stderr


@pytest.mark.parametrize("weak_learning", ["isolated", "joint"])
@pytest.mark.parametrize("name", ["seed", "chain", "fan"])
def test_attaching_changes_no_prediction_and_no_gradient(name: str, weak_learning: str) -> None:
    net = small_net(CELLS[name])
    net.set_dropout(hidden=0.3, inputs=0.2, cell_inputs=0.5, outputs=0.4, words=0.1)
    before = predictions(net)
    torch.manual_seed(3)
    own = gradients(net)
    attach_candidates(net, weak_learning=weak_learning)
    assert (predictions(net) - before).abs().max() < 1e-6
    torch.manual_seed(3)
    with_candidates = gradients(net)
    tolerance = 0 if weak_learning == "isolated" else 1e-12
    for parameter, gradient in own.items():
        torch.testing.assert_close(
            with_candidates[parameter], gradient, rtol=0, atol=tolerance, msg=parameter
        )


@pytest.mark.parametrize("name", ["seed", "chain", "fan"])
def test_finalising_changes_no_prediction_and_training_then_does(name: str) -> None:
    net = small_net(CELLS[name])
    attach_candidates(net)
    train(net)
    before = predictions(net)
    genotype = finalize_candidates(net, i_max=1)
    assert (predictions(net) - before).abs().max() < 1e-6
    assert genotype.growths == len(CELLS[name])
    assert list(genotype.nodes) == net.cell.nodes()
    train(net)
    learner = net.cell.learners[-1]
    assert learner.eta.item() != 0.0
    trained = predictions(net)
    with torch.no_grad():
        learner.eta.zero_()
    assert (predictions(net) - trained).abs().max() > 1e-6


def test_shares_of_the_nodes_always_add_up_to_one() -> None:
    net = small_net(CELLS["chain"])
    torch.testing.assert_close(net.cell.average(), torch.full((3,), 1 / 3).double())
    attach_candidates(net)
    train(net)
    finalize_candidates(net, i_max=1)
    assert net.cell.average()[-1].item() == 0.0
    train(net)
    assert net.cell.average().sum().item() == pytest.approx(1.0)
    assert len(set(net.cell.average().tolist())) == 4


@pytest.mark.parametrize("name", ["seed", "fan"])
def test_candidate_gradients_are_those_of_the_inner_product(name: str) -> None:
    """Compute Eq. 7 explicitly, through all later steps: first ∇_{h(t)} L, then ⟨∇, x_c⟩."""
    l1 = 0.37
    net = small_net(CELLS[name])
    net.train()
    text, targets = tokens()
    x, h = F.embedding(text, net.embedding), net.initial_state(BATCH)
    layers: list[Tensor] = []
    outputs = darts_cell(net, x, h, net.cell.average(), between=layers)
    F.cross_entropy(net.decode(outputs).flatten(0, 1), targets.flatten()).backward()
    nabla = torch.stack([layer.grad for layer in layers])

    attach_candidates(net, l1)
    weak = net.cell.weak_learner
    with torch.no_grad():
        weak.table.alpha.normal_()
    inputs: dict[str, Tensor] = {}
    handle = weak.register_forward_pre_hook(lambda m, args: inputs.update(args[1]))
    found = gradients(net)
    handle.remove()
    x_c = sum(
        weak.table.alpha[i] * op(inputs[source].detach().view_as(nabla))
        for i, ((source, _), op) in enumerate(zip(weak.table.shortcuts, weak.ops, strict=True))
    )
    names = {id(p): n for n, p in net.named_parameters()}
    weak.table.l1 = 0.0  # Eq. 7 does not include the L1 term
    parameters = candidate_parameters(net)
    assert len(parameters) == 1 + 4 * (len(CELLS[name]) + 1)
    inner = (nabla * x_c).sum()
    for parameter, expected in zip(parameters, torch.autograd.grad(inner, parameters), strict=True):
        if parameter is weak.table.alpha:
            expected = expected + l1 * parameter.detach().sign()
        torch.testing.assert_close(found[names[id(parameter)]], expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["seed", "fan"])
def test_skipped_norms_change_nothing_with_dropout_either(name: str) -> None:
    """Candidate gradients and running statistics do not depend on the path."""
    found = []
    for context in (nullcontext, plain_ops):
        net = small_net(CELLS[name])
        torch.manual_seed(0)
        attach_candidates(net)
        net.train()
        net.set_dropout(hidden=0.4, outputs=0.3)
        with context():
            torch.manual_seed(1)
            result = gradients(net)
        statistics = {n: b.clone() for n, b in net.named_buffers() if "running" in n}
        assert any("weak_learner" in key for key in result)
        assert statistics
        found.append((result, statistics))
    torch.testing.assert_close(*found)


def test_candidates_are_normalised_over_all_steps() -> None:
    net = small_net()
    attach_candidates(net)
    states = {s: torch.randn(STEPS, BATCH, 7).double() * 3 + 1 for s in ("s0", "s1")}
    images = {name: as_images(state) for name, state in states.items()}
    for op, z in net.cell.weak_learner.ops_with_inputs(images):
        flat = op(z).detach().flatten(1)
        torch.testing.assert_close(flat.mean(0), torch.zeros(7).double())
        assert (flat.var(0, correction=0) - 1).abs().max() < 1e-2


def test_joint_weak_learning_disturbs_its_parent_and_isolated_does_not() -> None:
    own = small_net()
    joint = attach_candidates(copy.deepcopy(own), weak_learning="joint")
    isolated = attach_candidates(copy.deepcopy(own))
    for net in (own, joint, isolated):
        train(net)
    assert torch.equal(own.cell.weight, isolated.cell.weight)
    assert not torch.equal(own.cell.weight, joint.cell.weight)
    scale = joint.cell.weak_learner.scale.item()
    finalize_candidates(joint, i_max=1)
    assert scale != 0.0
    assert joint.cell.learners[0].eta.item() == pytest.approx(scale)


def test_every_earlier_node_and_activation_is_a_candidate_and_none_is_not() -> None:
    net = small_net(CELLS["chain"])
    attach_candidates(net)
    assert net.cell.weak_learner.table.shortcuts == tuple(
        itertools.product(["s0", "s1", "s2", "s3"], ACTIVATIONS)
    )
    assert "none" not in ACTIVATIONS


def test_selection_is_by_absolute_alpha_and_keeps_the_weights() -> None:
    net = small_net(CELLS["chain"])
    attach_candidates(net)
    train(net)
    weak = net.cell.weak_learner
    index = weak.table.shortcuts.index(("s2", "identity"))
    with torch.no_grad():
        weak.table.alpha[index] = -5.0
    kept = weak.ops[index].node.weight.detach().clone()
    assert alpha_tables(net)["cell"][0]["source"] == "s2"
    assert finalize_candidates(net, i_max=1).nodes[-1] == ("identity", 2)
    assert torch.equal(net.cell.learners[-1].ops[0].weight, kept)
    assert not any("norm" in name for name in net.state_dict())


def test_a_grown_network_is_rebuilt_from_genotype_and_weights() -> None:
    net = small_net()
    for _ in range(3):
        attach_candidates(net)
        train(net)
        finalize_candidates(net, i_max=1)
        train(net)
    genotype = Genotype.from_json(net.genotype.to_json())
    twin = RecurrentSpace(WORDS, 7).build(genotype).double()
    twin.load_state_dict(net.state_dict())
    assert torch.equal(predictions(twin), predictions(net))


def test_a_cell_grows_to_eight_nodes_and_no_further() -> None:
    net = small_net()
    for _ in range(7):
        finalize_candidates(attach_candidates(net), i_max=1)
    assert len(net.genotype.nodes) == 8
    before = list(net.state_dict())
    with pytest.raises(GrowthError, match="cannot grow any further"):
        attach_candidates(net)
    assert list(net.state_dict()) == before


def test_a_growth_adds_one_node() -> None:
    net = attach_candidates(small_net())
    with pytest.raises(GenotypeError, match="i_max must be 1 but got 3"):
        finalize_candidates(net, i_max=3)
    assert len(sites(net)[0].learners) == 0
    finalize_candidates(net, i_max=1)


def test_detaching_restores_the_network() -> None:
    net = small_net(CELLS["chain"])
    names = list(net.state_dict())
    assert list(detach_candidates(attach_candidates(net)).state_dict()) == names


def test_eight_nodes_at_850_and_10000_words_are_23_million_parameters() -> None:
    with torch.device("meta"):
        net = RecurrentSpace(10_000, 850).build(RecurrentGenotype.from_darts(DARTS_V1))
    assert round(count_parameters(net) / 1e6) == 23
    assert count_parameters(net) == 8_500_000 + 10_000 + 2_890_000 + 8 * 1_445_000 + 7


@pytest.mark.parametrize("hidden", [7, 11])
def test_multiply_adds_of_a_word_are_those_of_its_matrix_products(hidden: int) -> None:
    net = small_net(CELLS["fan"], hidden=hidden)
    nodes, embedding = 5, 7
    expected = (embedding + hidden) * 2 * hidden + nodes * hidden * 2 * hidden + embedding * WORDS
    assert net.multiply_adds() == expected + (embedding * hidden if hidden != embedding else 0)
    attach_candidates(net)
    assert net.multiply_adds() == expected + (embedding * hidden if hidden != embedding else 0)


def test_the_state_carries_on() -> None:
    net = small_net(CELLS["fan"]).eval()
    text, _ = tokens(steps=8)
    whole, last = net(text)
    first, state = net(text[:3])
    second, after = net(text[3:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(after, last)
    assert not state.requires_grad


def test_dropout_is_locked_in_time_and_off_in_evaluation() -> None:
    net = small_net()
    net.set_dropout(outputs=0.5)
    outputs, dropped = net.features(tokens()[0])
    zero = dropped == 0
    assert torch.equal(zero, zero[:1].expand_as(zero))
    assert 0 < zero[0].sum() < zero[0].numel()
    torch.testing.assert_close(dropped[~zero], 2 * outputs[~zero])
    net.eval()
    outputs, dropped = net.features(tokens()[0])
    assert torch.equal(outputs, dropped)


def test_word_dropout_drops_a_word_wherever_it_stands() -> None:
    net = small_net()
    net.set_dropout(words=0.5)
    seen: list[Tensor] = []
    net.cell.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    text, _ = tokens(steps=30)
    net(text)
    gone = (seen[0] == 0).all(-1)
    by_word = {int(w): set(gone[text == w].tolist()) for w in text.unique()}
    assert all(len(fates) == 1 for fates in by_word.values())
    assert {True} in by_word.values()
    assert {False} in by_word.values()


def test_the_final_model_averages_plainly() -> None:
    space = RecurrentSpace(WORDS, 7)
    net = space.build(RecurrentGenotype(CELLS["darts"]), for_retraining=True)
    train(net)
    torch.testing.assert_close(net.cell.average(), torch.full((8,), 1 / 8))


def test_json_form_is_the_documented_one_and_finds_its_family() -> None:
    genotype = RecurrentGenotype([("relu", 0), ("tanh", 1)])
    assert json.loads(genotype.to_json()) == {
        "version": 1,
        "space": "recurrent",
        "nodes": [["relu", 0], ["tanh", 1]],
    }
    again = Genotype.from_json(genotype.to_json())
    assert type(again) is RecurrentGenotype
    assert again == genotype
    assert hash(again) == hash(genotype)


@pytest.mark.parametrize("text", [DARTS_V1, DARTS_V2])
def test_published_cells_of_darts_round_trip_build_and_train(text: str) -> None:
    genotype = RecurrentGenotype.from_darts(text)
    assert f"= {genotype.to_darts()}" in text.replace("\n", "")
    assert len(genotype.nodes) == 8
    net = small_net(list(genotype.nodes))
    before = loss_of(net).item()
    train(net, steps=20, lr=0.5, texts=1)
    assert loss_of(net).item() < before - 0.1


def average_of_nodes(net: RecurrentNetwork, x: Tensor, h: Tensor) -> Tensor:
    """Return h(t) of one step after another, from the definition of DARTS's cell."""
    genotype, cell = net.genotype, net.cell
    weights = [cell.first.weight, *(learner.ops[0].weight for learner in cell.learners)]
    outputs = []
    for step in x:
        c, a = (torch.cat([step, h], -1) @ cell.weight).chunk(2, -1)
        states = [h + torch.sigmoid(c) * (torch.tanh(a) - h)]
        for (activation, source), weight in zip(genotype.nodes, weights, strict=True):
            c, a = (states[source] @ weight).chunk(2, -1)
            z = states[source]
            states.append(z + torch.sigmoid(c) * (F_OF[activation](a) - z))
        h = torch.stack([states[i] for i in genotype.averaged]).mean(0)
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("nodes", "concat"),
    [
        (RecurrentGenotype.from_darts(ENAS).nodes, [2, 5, 6, 9, 10, 11]),
        (CELLS["fan"], [1, 3]),
        (CELLS["fan"], [2]),
        (CELLS["fan"], range(1, 6)),
    ],
    ids=["ENAS", "with the first", "one", "all"],
)
def test_a_cell_averages_the_nodes_of_its_concat(nodes: list, concat: list) -> None:
    torch.manual_seed(0)
    net = RecurrentSpace(WORDS, 7, max_nodes=12).build(RecurrentGenotype(nodes, concat)).double()
    x, h = torch.randn(STEPS, BATCH, 7).double(), torch.randn(BATCH, 7).double()
    expected = average_of_nodes(net, x, h)
    torch.testing.assert_close(net.cell(x, h), expected)
    attach_candidates(net, weak_learning="joint", l1=0.0)
    torch.testing.assert_close(net.cell(x, h), expected)  # step by step
    detach_candidates(net)
    train(net, steps=3)
    outside = set(range(1, len(nodes) + 1)) - set(concat)
    assert [net.cell.average().tolist()[i - 1] for i in sorted(outside)] == [0.0] * len(outside)
    torch.testing.assert_close(net.cell.average().sum(), torch.ones(()).double())


def test_enas_round_trips_and_a_new_node_joins_its_average() -> None:
    genotype = RecurrentGenotype.from_darts(ENAS)
    assert genotype.to_darts() == ENAS.partition(" = ")[2]
    assert json.loads(genotype.to_json())["concat"] == [2, 5, 6, 9, 10, 11]
    assert Genotype.from_json(genotype.to_json()) == genotype
    assert RecurrentGenotype(genotype.nodes, range(1, 12)) == RecurrentGenotype(genotype.nodes)
    net = RecurrentSpace(WORDS, 7, max_nodes=12).build(genotype)
    before = loss_of(net).item()
    attach_candidates(net)
    loss_of(net).backward()
    grown = finalize_candidates(net, 1)
    assert grown.concat == (2, 5, 6, 9, 10, 11, 12)
    assert loss_of(net).item() == pytest.approx(before, abs=1e-6)
    again = RecurrentSpace(WORDS, 7, max_nodes=12).build(grown)
    again.load_state_dict(net.state_dict())
    assert loss_of(again).item() == pytest.approx(before, abs=1e-6)


BAD_NODES = {
    "empty": ([], "nodes: must be a list of at least one"),
    "text": ("relu", "nodes: must be a list"),
    "none": ([["none", 0]], r"nodes\[0\]: activation must be .* \(no connection is no node\)"),
    "forward": ([["relu", 0], ["tanh", 2]], r"nodes\[1\]: predecessor must be .* 0 to 1 but got 2"),
    "negative": ([["relu", -1]], r"nodes\[0\]: predecessor"),
    "true": ([["relu", 0], ["relu", True]], r"nodes\[1\]: predecessor .* got True"),
    "triple": ([["relu", 0, 1]], r"nodes\[0\]: must be \[activation, predecessor\]"),
}


@pytest.mark.parametrize("name", BAD_NODES)
def test_bad_nodes_are_named(name: str) -> None:
    nodes, problem = BAD_NODES[name]
    text = json.dumps({"version": 1, "space": "recurrent", "nodes": nodes})
    with pytest.raises(GenotypeError, match=problem):
        Genotype.from_json(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import os", "DARTS's form must be"),
        ("Genotype(recurrent=open('x'), concat=[1])", "DARTS's form must be"),
        ("Genotype(recurrent=[('relu', 0)])", "concat: is missing"),
        (
            "Genotype(recurrent=[('relu', 0)], concat=[2])",
            "concat: must be some of the nodes, 1 to 1",
        ),
        ("Genotype(recurrent=[('relu', 0)], concat=[])", "concat: must be some of the nodes"),
        ("Genotype(recurrent=[('relu', 0)], concat=[1, 1])", "concat: must name each node once"),
        ("Genotype(recurrent=[('relu', 0)], concat=[True])", "concat: must be some of the nodes"),
        ("Genotype(recurrent=[('relu', 0)], concat=[1], more=1)", "more: is not a field"),
        ("Genotype(recurrent=[('relu', 0)], concat=range(1, 10**9))", "DARTS's form must be"),
        ("Genotype(recurrent=[('none', 0)], concat=[1])", "no connection"),
        ("Genotype(", "DARTS's form must be"),
    ],
)
def test_what_is_no_darts_cell_is_refused(text: str, problem: str) -> None:
    with pytest.raises(GenotypeError, match=problem):
        RecurrentGenotype.from_darts(text)


def test_other_keys_and_spaces_are_refused() -> None:
    with pytest.raises(GenotypeError, match="mode: is not a key"):
        Genotype.from_dict({"version": 1, "space": "recurrent", "nodes": [["relu", 0]], "mode": 1})
    with pytest.raises(GenotypeError, match="nodes: is missing"):
        Genotype.from_dict({"version": 1, "space": "recurrent"})
    vision = Genotype.from_dict(
        {"version": 1, "space": "vision", "mode": "cell", "cells": {"normal": [], "reduce": []}}
    )
    with pytest.raises(GenotypeError, match="space: must be recurrent but got 'vision'"):
        RecurrentSpace(WORDS, 7).build(vision)
    with pytest.raises(GenotypeError, match="at most 2 but got 3"):
        RecurrentSpace(WORDS, 7, max_nodes=2).build(RecurrentGenotype(CELLS["chain"]))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"vocabulary": 0}, "vocabulary must be a whole number of at least 1 but got 0"),
        ({"hidden": 1.5}, "hidden must be"),
        ({"max_nodes": True}, "max_nodes must be"),
        ({"ops": ["none"]}, "ops must be among"),
        ({"ops": ["gelu"]}, "ops must be a list"),
    ],
)
def test_bad_settings_of_a_space_are_named(options: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RecurrentSpace(**{"vocabulary": WORDS, "embedding": 7, **options})


def test_a_space_is_described_by_plain_data() -> None:
    space = RecurrentSpace(WORDS, 7, ops=["tanh", "none"], max_nodes=3)
    assert RecurrentSpace(**json.loads(json.dumps(space.describe()))) == space
    assert space.activations() == ["tanh"]


def test_bad_dropout_is_named() -> None:
    net = small_net()
    with pytest.raises(ConfigError, match=r"dropout of hidden must be in \[0, 1\) but got 1"):
        net.set_dropout(hidden=1.0)
    with pytest.raises(ConfigError, match="dropout must be one of words"):
        net.set_dropout(paths=0.5)


def test_nni_samples_are_cells() -> None:
    space = RecurrentSpace(WORDS, 7, max_nodes=4)
    wrapped = space.model_space()
    random = np.random.RandomState(0)
    sizes = set()
    for _ in range(20):
        sample: dict = {}
        for mutable in wrapped.simplify().values():
            mutable.random(sample, random)
        genotype = wrapped.genotype(sample)
        assert wrapped.sample(genotype) == sample
        net = wrapped.freeze(sample)
        assert net.genotype == genotype
        assert net.cell.nodes() == list(genotype.nodes)
        sizes.add(len(genotype.nodes))
    assert sizes == {1, 2, 3, 4}
