from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish import (
    Genotype,
    L1Schedule,
    alpha_tables,
    attach_candidates,
    detach_candidates,
    extra_loss,
    finalize_candidates,
    sites,
)
from nni_petridish.core import candidate_parameters, has_candidates, stop_forward, stop_gradient
from nni_petridish.core.alpha_table import AlphaTable
from nni_petridish.core.weak_learner import Candidates
from nni_petridish.errors import ConfigError, GrowthError
from nni_petridish.kernels.switch import plain_ops
from search_spaces.vision.network import VisionNetwork
from tests.support.networks import batch, grow, grown_network, small_space, train


def predictions(net: nn.Module, images: Tensor) -> Tensor:
    net.eval()
    with torch.no_grad():
        return net(images)


def gradients(net: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    net.train()
    net.zero_grad()
    F.cross_entropy(net(images), labels).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def set_alphas(net: VisionNetwork, values: Tensor) -> None:
    for site in sites(net):
        with torch.no_grad():
            site.weak_learner.table.alpha.copy_(values)


def test_stop_forward_hides_a_value_and_stop_gradient_a_gradient() -> None:
    x = torch.tensor([1.5, -2.0], requires_grad=True)
    assert torch.equal(stop_forward(x), torch.zeros(2))
    assert torch.equal(stop_gradient(x), x)
    (stop_forward(x) * torch.tensor([3.0, 4.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([3.0, 4.0]))
    assert not stop_gradient(x).requires_grad


@pytest.mark.parametrize("plain", [True, False])
def test_weak_learning_is_the_gradient_of_the_inner_product_with_x_c(plain: bool) -> None:
    torch.manual_seed(0)
    shortcuts = [("a", "linear"), ("b", "linear"), ("a", "square")]
    ops = [nn.Linear(3, 3), nn.Linear(3, 3), Square()]
    learner = Candidates(AlphaTable(shortcuts, 0.0), ops, {"b": nn.Tanh()}).double()
    a, b, x_k, g = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(4))
    alpha = learner.table.alpha
    x_c = alpha[0] * ops[0](a) + alpha[1] * ops[1](b.tanh()) + alpha[2] * a**2
    wanted = [*ops[0].parameters(), *ops[1].parameters(), alpha]
    expected = torch.autograd.grad((g.detach() * x_c).sum(), wanted)
    with plain_ops() if plain else nullcontext():
        y = learner(x_k, {"a": a, "b": b})
    assert torch.equal(y, x_k)
    y.backward(g.detach())
    for parameter, gradient in zip(wanted, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert torch.equal(x_k.grad, g)
    assert a.grad is None
    assert b.grad is None


def test_weak_learning_can_be_transformed() -> None:
    torch.manual_seed(0)
    learner = Candidates(AlphaTable([("z", "linear")], 0.0), [nn.Linear(3, 3)], {}).double()
    x_k, z = torch.randn(2, 5, 3, dtype=torch.float64)

    def loss(alpha: Tensor) -> Tensor:
        parameters = {**dict(learner.named_parameters()), "table.alpha": alpha}
        return torch.func.functional_call(learner, parameters, (x_k, {"z": z})).pow(2).sum()

    expected = (2 * x_k * learner.ops[0](z)).sum()
    found = torch.func.grad(loss)(learner.table.alpha.detach())
    torch.testing.assert_close(found, expected.reshape(1))


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


@pytest.mark.parametrize("weak_learning", ["isolated", "joint"])
@pytest.mark.parametrize(
    ("mode", "stages", "growths"),
    list(itertools.product(["cell", "macro"], [1, 2, 3], [0, 1, 2, 3])),
)
def test_attaching_changes_no_prediction_and_no_gradient(
    mode: str, stages: int, growths: int, weak_learning: str
) -> None:
    net, images, labels = grown_network(small_space(mode, stages), growths)
    net.set_drop_path(0.6, 1.0)
    before = predictions(net, images)
    torch.manual_seed(5)
    own = gradients(copy.deepcopy(net), images, labels)
    attach_candidates(net, weak_learning=weak_learning)
    assert (predictions(net, images) - before).abs().max() < 1e-6
    torch.manual_seed(5)
    with_candidates = gradients(net, images, labels)
    for name, gradient in own.items():
        torch.testing.assert_close(with_candidates[name], gradient, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("mode", "stages", "growths"),
    list(itertools.product(["cell", "macro"], [1, 2, 3], [0, 1, 2, 3])),
)
def test_finalising_changes_no_prediction(mode: str, stages: int, growths: int) -> None:
    net, images, labels = grown_network(small_space(mode, stages), growths)
    attach_candidates(net)
    train(net, images, labels)
    before = predictions(net, images)
    finalize_candidates(net)
    assert (predictions(net, images) - before).abs().max() < 1e-6
    assert net.genotype.growths == growths + 1


def test_finished_learners_do_change_predictions_once_trained() -> None:
    net, images, _ = grown_network(small_space(), 1)
    before = predictions(net, images)
    with torch.no_grad():
        for site in sites(net):
            site.learners[0].eta.zero_()
    assert (predictions(net, images) - before).abs().max() > 1e-6


@pytest.mark.parametrize("growths", [0, 2])
@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_candidate_gradients_are_those_of_the_inner_product(mode: str, growths: int) -> None:
    """Compute Eq. 7 explicitly: first ∇_{x_k} L, then the gradient of ⟨∇_{x_k} L, x_c⟩."""
    l1 = 0.37
    net, images, labels = grown_network(small_space(mode), growths)
    net.double().train()
    images = images.double()

    layers: dict[nn.Module, Tensor] = {}
    handles = [s.register_forward_hook(lambda m, i, o: layers.update({m: o})) for s in sites(net)]
    loss = F.cross_entropy(net(images), labels)
    for handle in handles:
        handle.remove()
    nabla = dict(zip(layers, torch.autograd.grad(loss, list(layers.values())), strict=True))

    attach_candidates(net, l1)
    set_alphas(net, torch.randn_like(sites(net)[0].weak_learner.table.alpha))
    inputs: dict[nn.Module, dict[str, Tensor]] = {}
    handles = [
        s.weak_learner.register_forward_pre_hook(
            lambda m, args, s=s: inputs.update({s: dict(args[1])})
        )
        for s in sites(net)
    ]
    found = gradients(net, images, labels)
    for handle in handles:
        handle.remove()

    inner = torch.zeros((), dtype=torch.float64)
    for site in sites(net):
        weak = site.weak_learner
        z = {source: value.detach() for source, value in inputs[site].items()}
        z = {s: weak.adapters[s](v) if s in weak.adapters else v for s, v in z.items()}
        x_c = sum(
            weak.table.alpha[i] * op(z[source])
            for i, ((source, _), op) in enumerate(zip(weak.table.shortcuts, weak.ops, strict=True))
        )
        inner = inner + (nabla[site] * x_c).sum()
    for site in sites(net):
        site.weak_learner.table.l1 = 0.0  # Eq. 7 does not include the L1 term
    names = {id(p): name for name, p in net.named_parameters()}
    parameters = candidate_parameters(net)
    assert parameters
    alphas = {id(site.weak_learner.table.alpha) for site in sites(net)}
    for parameter, expected in zip(parameters, torch.autograd.grad(inner, parameters), strict=True):
        if id(parameter) in alphas:
            expected = expected + l1 * parameter.detach().sign()
        torch.testing.assert_close(found[names[id(parameter)]], expected, rtol=1e-8, atol=1e-12)


def reachable_leaves(node: torch.autograd.graph.Node | None, seen: set) -> set[int]:
    """Return the ids of the tensors whose gradient this node's backward can reach."""
    if node is None or node in seen:
        return set()
    seen.add(node)
    own = {id(node.variable)} if hasattr(node, "variable") else set()
    return own.union(*(reachable_leaves(after, seen) for after, _ in node.next_functions))


def deferred_sums(node: torch.autograd.graph.Node | None, seen: set) -> list:
    if node is None or node in seen:
        return []
    seen.add(node)
    own = [node] if type(node).__name__ == "_AddDeferredSumBackward" else []
    return own + [x for after, _ in node.next_functions for x in deferred_sums(after, seen)]


@pytest.mark.parametrize("growths", [0, 1])
def test_no_gradient_is_computed_for_the_inputs_of_a_candidate(growths: int) -> None:
    net, images, labels = grown_network(small_space(), growths)
    attach_candidates(net)
    net.train()
    loss = F.cross_entropy(net(images), labels)
    sums = deferred_sums(loss.grad_fn, set())
    assert len(sums) == len(sites(net))
    candidates = {id(p) for p in candidate_parameters(net)}
    for node in sums:
        edges = [after for after, _ in node.next_functions[1:]]  # [0] is x_k itself
        leaves = set().union(*(reachable_leaves(edge, set()) for edge in edges))
        assert leaves
        assert leaves <= candidates


def test_l1_counts_once_per_table_with_and_without_extra_loss() -> None:
    l1 = 0.25
    net, images, labels = grown_network(small_space(), 0)
    attach_candidates(net, l1)
    table = sites(net)[0].weak_learner.table
    plain = {s.key: s.weak_learner.table for s in sites(net)}
    assert len(plain) == 2
    assert table is sites(net)[2].weak_learner.table  # both normal cells share one

    def alpha_gradient(scale: float, with_extra: bool) -> Tensor:
        net.train()
        net.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        (scale * (loss + extra_loss(net)) if with_extra else scale * loss).backward()
        assert table.alpha.grad is not None
        return table.alpha.grad.clone()

    for t in plain.values():
        t.l1 = 0.0
    bare = alpha_gradient(1.0, False)
    for t in plain.values():
        t.l1 = l1
    sign = table.alpha.detach().sign()
    torch.testing.assert_close(alpha_gradient(1.0, False), bare + l1 * sign)
    torch.testing.assert_close(alpha_gradient(1.0, True), bare + l1 * sign)
    torch.testing.assert_close(alpha_gradient(8.0, True) / 8.0, bare + l1 * sign)
    torch.testing.assert_close(alpha_gradient(1.0, False), bare + l1 * sign)
    expected = l1 * sum(float(t.alpha.detach().abs().sum()) for t in plain.values())
    assert extra_loss(net).item() == pytest.approx(expected)


@pytest.mark.parametrize("to_none", [True, False])
def test_l1_counts_once_per_step_however_many_passes_are_accumulated(to_none: bool) -> None:
    """Against the mean of the gradients without L1, plus λ·sign(α)."""
    l1, k = 0.25, 4
    net, images, labels = grown_network(small_space(), 0)
    attach_candidates(net, l1)
    table = sites(net)[0].weak_learner.table
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    tables = {id(s.weak_learner.table): s.weak_learner.table for s in sites(net)}.values()

    def accumulated(l1: float) -> Tensor:
        for one in tables:
            one.l1 = l1
        optimizer.zero_grad(set_to_none=to_none)
        for _ in range(k):
            (F.cross_entropy(net(images), labels) / k).backward()
        assert table.alpha.grad is not None
        return table.alpha.grad.clone()

    net.eval()  # so that batch norms do not change from pass to pass
    for _ in range(3):
        bare, sign = accumulated(0.0), table.alpha.detach().sign()
        torch.testing.assert_close(accumulated(l1), bare + l1 * sign)
        optimizer.step()


def test_l1_survives_a_deep_copy() -> None:
    net, images, labels = grown_network(small_space(), 0)
    attach_candidates(net, 0.5)
    twin = copy.deepcopy(net)
    name = "cells.0.weak_learner.table.alpha"
    expected = gradients(net, images, labels)[name]
    torch.testing.assert_close(gradients(twin, images, labels)[name], expected)
    tables = {id(s.weak_learner.table) for s in sites(twin)}
    assert len(tables) == 2
    assert tables.isdisjoint(id(s.weak_learner.table) for s in sites(net))


def test_large_l1_shrinks_alphas() -> None:
    def mass(l1: float) -> float:
        net, images, labels = grown_network(small_space(), 0)
        attach_candidates(net, l1)
        train(net, images, labels, steps=20, lr=0.01)
        return sum(abs(row["alpha"]) for rows in alpha_tables(net).values() for row in rows)

    assert mass(0.3) < 0.5 * mass(0.0)


def test_l1_schedule_follows_the_backward_passes() -> None:
    net, images, labels = grown_network(small_space(), 0)
    attach_candidates(net, L1Schedule("linear", 1.0, steps=4))
    table = sites(net)[0].weak_learner.table
    seen = []
    for _ in range(6):
        seen.append(table.current_l1())
        gradients(net, images, labels)
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_selection_is_by_absolute_alpha_over_all_pairs() -> None:
    net, *_ = grown_network(small_space(), 1)
    attach_candidates(net)
    table = sites(net)[0].weak_learner.table
    values = torch.linspace(-0.3, 0.2, len(table.shortcuts))
    values[[4, 17, 9]] = torch.tensor([-5.0, 3.0, -1.0])
    set_alphas(net, values)
    expected = tuple(table.shortcuts[i] for i in (4, 17, 9))
    rows = alpha_tables(net)["normal"]
    assert [(r["source"], r["op"]) for r in rows[:3]] == list(expected)
    assert [abs(r["alpha"]) for r in rows] == sorted((abs(r["alpha"]) for r in rows), reverse=True)
    genotype = finalize_candidates(net, i_max=3)
    assert genotype.cells["normal"][1] == expected
    assert genotype.cells["reduce"][1] == expected
    assert expected[1][0] == "h0"


def test_cell_mode_shares_one_table_per_type_and_macro_mode_none() -> None:
    torch.manual_seed(0)
    for mode, tables in (("cell", 2), ("macro", 5)):
        space = small_space(mode, stages=3)
        net = attach_candidates(space.build(space.seed()))
        assert len({id(s.weak_learner.table.alpha) for s in sites(net)}) == tables
        for i, site in enumerate(sites(net)):
            with torch.no_grad():
                site.weak_learner.table.alpha[i] = 10.0 + i
        genotype = finalize_candidates(net, i_max=1)
        learners = [site.learners[0].shortcuts for site in sites(net)]
        assert learners == [genotype.cells[site.key][0] for site in sites(net)]
        assert len(set(learners)) == tables


def test_selected_ops_keep_weights_statistics_and_the_weighted_sum() -> None:
    net, images, labels = grown_network(small_space(), 0)
    attach_candidates(net)
    train(net, images, labels)
    weak = [site.weak_learner for site in sites(net)]
    before = [copy.deepcopy(w) for w in weak]
    finalize_candidates(net, i_max=3)
    for site, joint in zip(sites(net), before, strict=True):
        learner = site.learners[0]
        indices = [joint.table.shortcuts.index(s) for s in learner.shortcuts]
        for op, i in zip(learner.ops, indices, strict=True):
            for name, tensor in op.state_dict().items():
                assert torch.equal(tensor, joint.ops[i].state_dict()[name])
        outputs = [torch.randn(2, site.out.channels, 5, 5) for _ in indices]
        expected = sum(
            joint.table.alpha[i].detach() * u for i, u in zip(indices, outputs, strict=True)
        )
        torch.testing.assert_close(learner.merge.conv(torch.cat(outputs, 1)), expected)
        assert learner.eta.item() == 0.0


def test_weighted_sum_merge_has_no_projection_and_is_remembered() -> None:
    space = small_space(merge="weighted_sum")
    net, *_ = grown_network(space, 2)
    assert net.genotype.merge == "weighted_sum"
    assert Genotype.from_json(net.genotype.to_json()).merge == "weighted_sum"
    assert not any("merge.conv" in name for name, _ in net.named_parameters())
    plain = small_space()
    net = plain.build(plain.seed())
    attach_candidates(net)
    assert finalize_candidates(net, merge="weighted_sum").merge == "weighted_sum"


def test_joint_weak_learning_keeps_its_step_as_eta() -> None:
    net, images, labels = grown_network(small_space(), 0)
    attach_candidates(net, weak_learning="joint")
    train(net, images, labels)
    scales = [site.weak_learner.scale.item() for site in sites(net)]
    finalize_candidates(net)
    assert [site.learners[0].eta.item() for site in sites(net)] == scales
    assert any(scales)


def test_joint_weak_learning_does_disturb_its_parent() -> None:
    own, images, labels = grown_network(small_space(), 0)
    joint = attach_candidates(copy.deepcopy(own), weak_learning="joint")
    isolated = attach_candidates(copy.deepcopy(own))
    for net in (own, joint, isolated):
        train(net, images, labels, steps=4)
    name = "cells.0.seed.1.weight"
    weight = {id(n): dict(n.named_parameters())[name] for n in (own, joint, isolated)}
    assert torch.equal(weight[id(own)], weight[id(isolated)])
    assert not torch.equal(weight[id(own)], weight[id(joint)])


def test_later_growths_use_earlier_learners() -> None:
    """With prev and prev_prev made useless as inputs, the next learner reads h0."""
    net, images, labels = grown_network(small_space(), 1)
    attach_candidates(net)
    table = sites(net)[0].weak_learner.table
    values = torch.tensor([1.0 if s == "h0" else 0.1 for s, _ in table.shortcuts])
    set_alphas(net, values)
    genotype = finalize_candidates(net)
    assert all(source == "h0" for source, _ in genotype.cells["normal"][1])
    train(net, images, labels)
    attach_candidates(net)
    sources = {s for s, _ in sites(net)[0].weak_learner.table.shortcuts}
    assert sources == {"prev_prev", "prev", "h0", "h1"}


def test_some_tables_only() -> None:
    net, *_ = grown_network(small_space(), 0)
    attach_candidates(net)
    genotype = finalize_candidates(net, keys=["normal"])
    assert len(genotype.cells["normal"]) == 1
    assert len(genotype.cells["reduce"]) == 0
    assert not has_candidates(net)
    attach_candidates(net, keys=["reduce"])
    assert set(alpha_tables(net)) == {"reduce"}


def test_detaching_restores_the_network() -> None:
    net, *_ = grown_network(small_space(), 1)
    names = list(net.state_dict())
    detach_candidates(attach_candidates(net))
    assert list(net.state_dict()) == names
    assert not has_candidates(net)


def test_eval_without_gradients_runs_no_candidate() -> None:
    net, images, _ = grown_network(small_space(), 0)
    attach_candidates(net)
    calls: defaultdict[str, int] = defaultdict(int)
    for site in sites(net):
        for op in site.weak_learner.ops:
            op.register_forward_hook(lambda m, i, o: calls.update(n=calls["n"] + 1))
    predictions(net, images)
    assert calls["n"] == 0
    net(images)
    assert calls["n"] == len(sites(net)) * 14


def test_what_is_wrong_is_said_in_one_line() -> None:
    space = small_space()
    net = space.build(space.seed())
    for problem, call in {
        "no candidates are attached": lambda: finalize_candidates(net),
        "i_max must be a whole number of at least 1 but got 0": lambda: finalize_candidates(net, 0),
        "but got True": lambda: finalize_candidates(net, True),
        "l1 must be a number that is not negative but got -1": lambda: attach_candidates(net, -1),
        "got nan": lambda: attach_candidates(net, float("nan")),
        "weak_learning must be one of isolated, joint": lambda: attach_candidates(
            net, weak_learning="both"
        ),
        "keys must be among normal, reduce but got 'x'": lambda: attach_candidates(net, keys=["x"]),
        "Linear cannot grow: it has no genotype": lambda: attach_candidates(nn.Linear(1, 1)),
        "DataParallel cannot grow: it has no genotype: grow its .module": lambda: attach_candidates(
            nn.DataParallel(net)
        ),
        "merge must be one of": lambda: finalize_candidates(net, merge="max"),
    }.items():
        with pytest.raises((GrowthError, ConfigError)) as caught:
            call()
        assert problem in str(caught.value)
        assert "\n" not in str(caught.value)
    attach_candidates(net)
    with pytest.raises(GrowthError, match="attached already"):
        attach_candidates(net)
    with torch.no_grad():
        sites(net)[0].weak_learner.table.alpha[3] = float("nan")
    with pytest.raises(GrowthError, match=r"diverged.*dil_conv_5x5\(prev_prev\).*'normal'"):
        finalize_candidates(net)


def test_more_shortcuts_than_there_are_takes_them_all() -> None:
    net, images, labels = grown_network(small_space(ops=["identity"]), 0)
    assert len(grow(net, images, labels, i_max=9).cells["normal"][0]) == 2


def test_attaching_follows_the_networks_precision_and_mode() -> None:
    space = small_space()
    net = space.build(space.seed()).double().eval()
    attach_candidates(net)
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    assert not any(module.training for module in net.modules())
    finalize_candidates(net)
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    assert net(batch(space)[0].double()).dtype == torch.float64
