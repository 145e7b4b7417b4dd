from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from nni_petridish import Grower, make_growable, sites
from nni_petridish.core import GrowthSchedule, candidate_parameters
from nni_petridish.errors import GrowthError
from tests.support.grower_worker import PROCESSES, work
from tests.support.networks import batch, small_space

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "fused sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, fused=True),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01),  # decays by default
}


def network(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    space = small_space()
    return space.build(space.seed()), *batch(space, 8)


def train(net: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor, n: int) -> None:
    net.train()
    for _ in range(n):
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


def held(optimizer: Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_network_trains_as_without_candidates(name: str) -> None:
    net, images, labels = network()
    other = copy.deepcopy(net)
    optimizer, plain = OPTIMIZERS[name](net.parameters()), OPTIMIZERS[name](other.parameters())
    grower = Grower(net, optimizer)
    schedulers = [CosineAnnealingLR(one, 20) for one in (optimizer, plain)]
    for step in range(6):
        if step == 3:
            drawn = torch.get_rng_state()
            grower.attach()
            assert torch.equal(torch.get_rng_state(), drawn)
        train(net, optimizer, images, labels, 1)
        train(other, plain, images, labels, 1)
        for scheduler in schedulers:
            scheduler.step()
    state = net.state_dict()
    for key, value in other.state_dict().items():
        assert torch.equal(state[key], value), key
    kept = grower.network_parameters()
    for parameter, twin in zip(kept, other.parameters(), strict=True):
        for key, value in plain.state[twin].items():
            assert torch.equal(torch.as_tensor(optimizer.state[parameter][key]), value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_holds_every_parameter_once_at_all_times(name: str) -> None:
    net, images, labels = network()
    optimizer = OPTIMIZERS[name](net.parameters())
    grower = Grower(net, optimizer, i_max=2)
    for _ in range(2):
        before = [list(map(id, group["params"])) for group in optimizer.param_groups]
        grower.attach()
        for ids, group in zip(before, optimizer.param_groups, strict=True):
            assert [id(p) for p in group["params"]][: len(ids)] == ids
        assert sorted(held(optimizer)) == sorted(id(p) for p in net.parameters())
        train(net, optimizer, images, labels, 2)
        passing = {id(p): p for p in candidate_parameters(net)}
        momenta = {i: dict(optimizer.state[p]) for i, p in passing.items()}
        grower.finalize()
        assert sorted(held(optimizer)) == sorted(id(p) for p in net.parameters())
        assert {id(p) for p in optimizer.state} <= set(held(optimizer))
        kept = [p for p in net.parameters() if id(p) in passing]
        assert kept
        for parameter in kept:  # selected ops go on with their momentum
            state = optimizer.state[parameter]
            assert all(state[key] is value for key, value in momenta[id(parameter)].items())
        train(net, optimizer, images, labels, 2)
    assert grower.growths == 2


def test_alpha_and_eta_do_not_decay_and_follow_the_schedule() -> None:
    net, images, labels = network()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    grower = Grower(net, optimizer)
    scheduler = CosineAnnealingLR(optimizer, 10)
    grower.attach()
    train(net, optimizer, images, labels, 1)
    scheduler.step()
    tables = {id(site.weak_learner.table.alpha) for site in sites(net)}
    groups = [g for g in optimizer.param_groups if any(id(p) in tables for p in g["params"])]
    assert [group["weight_decay"] for group in groups] == [0.0]
    assert groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1
    grower.finalize()
    etas = {id(learner.eta) for site in sites(net) for learner in site.learners}
    (group,) = [g for g in optimizer.param_groups if any(id(p) in etas for p in g["params"])]
    assert group["weight_decay"] == 0.0


def test_new_parameters_join_the_group_of_their_site() -> None:
    net, _, _ = network()
    late = list(sites(net)[-1].parameters())
    early = [p for p in net.parameters() if all(p is not q for q in late)]
    optimizer = SGD([{"params": early, "lr": 0.1}, {"params": late, "lr": 0.01}], lr=1.0)
    grower = Grower(net, optimizer)
    grower.attach()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {rates[id(p)] for p in sites(net)[-1].weak_learner.ops.parameters()} == {0.01}
    assert {rates[id(p)] for p in sites(net)[0].weak_learner.ops.parameters()} == {0.1}


@pytest.mark.parametrize("stop", [2, 5, 8, 11])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_loop_goes_on_where_it_was_saved(name: str, stop: int) -> None:
    schedule = GrowthSchedule(wait=3, weak=4, growths=2)

    def begin() -> tuple[nn.Module, Optimizer, Grower, CosineAnnealingLR, Tensor, Tensor]:
        net, images, labels = network()
        optimizer = OPTIMIZERS[name](net.parameters())
        grower = Grower(net, optimizer, i_max=2, schedule=schedule)
        return net, optimizer, grower, CosineAnnealingLR(optimizer, 30), images, labels

    def run(parts: Any, n: int) -> None:
        net, optimizer, grower, scheduler, images, labels = parts
        for _ in range(n):
            train(net, optimizer, images, labels, 1)
            scheduler.step()
            grower.step()

    whole = begin()
    run(whole, stop)
    file = io.BytesIO()
    torch.save([one.state_dict() for one in whole[:4]], file)
    run(whole, 14 - stop)
    again = begin()
    net, optimizer, grower, scheduler, *_ = again
    file.seek(0)
    weights, momenta, growth, rates = torch.load(file, weights_only=True)
    grower.load_state_dict(growth)
    net.load_state_dict(weights)
    optimizer.load_state_dict(momenta)
    scheduler.load_state_dict(rates)
    run(again, 14 - stop)
    assert whole[2].growths == again[2].growths == 2
    expected, found = whole[0].state_dict(), again[0].state_dict()
    assert list(expected) == list(found)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_a_loss_scaler_works_across_a_growth() -> None:
    net, images, labels = network()
    optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9)
    grower, scaler = Grower(net, optimizer), torch.amp.GradScaler("cpu", init_scale=256.0)
    for change in (None, grower.attach, None, grower.finalize, None):
        if change is not None:
            change()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.isfinite(loss)
    assert grower.growths == 1


@pytest.mark.parametrize(
    "make", [lambda o: OneCycleLR(o, 0.1, 20), lambda o: ReduceLROnPlateau(o, patience=0)]
)
def test_schedulers_that_hold_something_for_each_group_work(make: Callable[..., Any]) -> None:
    net, images, labels = network()
    optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    grower = Grower(net, optimizer)
    scheduler = make(optimizer)
    for change in (grower.attach, grower.finalize, grower.attach, grower.finalize):
        change()
        train(net, optimizer, images, labels, 2)
        scheduler.step(*[1.0] * isinstance(scheduler, ReduceLROnPlateau))
    rates = {group["lr"] for group in optimizer.param_groups}
    assert len(rates) == 1
    assert rates != {0.05}


def test_a_schedule_with_patience_waits_until_the_metric_stalls() -> None:
    net, images, labels = network()
    optimizer = AdamW(net.parameters(), lr=0.01)
    grower = Grower(net, optimizer, schedule=GrowthSchedule(wait=2, weak=1, patience=2))
    losses = [5.0, 4.0, 3.0, 3.0, 2.9, 2.9, 3.0, 0.0]
    found = []
    for loss in losses:
        train(net, optimizer, images, labels, 1)
        found.append(grower.step(loss))
    assert found == [None] * 6 + ["attached", "finalized"]


def test_detaching_leaves_network_and_optimizer_as_they_were() -> None:
    net, images, labels = network()
    optimizer = AdamW(net.parameters(), lr=0.01)
    grower = Grower(net, optimizer)
    before = [held(optimizer), named(net)]
    grower.attach()
    train(net, optimizer, images, labels, 1)
    grower.detach()
    assert [held(optimizer), named(net)] == before
    assert len(optimizer.state) == len(held(optimizer))


def named(net: nn.Module) -> list[str]:
    return [name for name, _ in net.named_parameters()]


def test_parameters_of_other_networks_stay_where_they_are() -> None:
    net, _, _ = network()
    head = nn.Linear(4, 4)
    optimizer = SGD([*head.parameters(), *net.parameters()], lr=0.1, weight_decay=0.1)
    grower = Grower(net, optimizer, i_max=1)
    grower.attach()
    grower.finalize()
    assert held(optimizer)[:2] == [id(p) for p in head.parameters()]
    fresh, _, _ = network()
    other = SGD([*nn.Linear(4, 4).parameters(), *fresh.parameters()], lr=0.1, weight_decay=0.1)
    again = Grower(fresh, other, i_max=1)
    again.load_state_dict(grower.state_dict())
    assert [len(g["params"]) for g in other.param_groups] == [
        len(g["params"]) for g in optimizer.param_groups
    ]


def test_any_model_grows_in_a_loop_of_its_own() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    net = make_growable(module, torch.zeros(1, 4), sites=["2"], sources=["0"])
    optimizer = Adam(net.parameters(), lr=0.01)
    grower = Grower(net, optimizer, i_max=1)
    x, y = torch.randn(32, 4), torch.randint(2, (32,))
    for change in (grower.attach, grower.finalize):
        change()
        train(net, optimizer, x, y, 3)
    assert net.genotype.growths == 1
    assert sorted(held(optimizer)) == sorted(id(p) for p in net.parameters())


@pytest.mark.parametrize(
    "takes",
    [pytest.param("the module inside", marks=pytest.mark.slow), "the compiled network"],
)
def test_a_compiled_network_grows(takes: str) -> None:
    torch._dynamo.reset()
    net, images, labels = network()
    compiled = torch.compile(net, backend="eager")
    optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9)
    grower = Grower(net if takes == "the module inside" else compiled, optimizer)
    train(compiled, optimizer, images, labels, 1)
    grower.attach()
    before = [site.weak_learner.table.alpha.detach().clone() for site in sites(net)]
    train(compiled, optimizer, images, labels, 2)
    moved = [site.weak_learner.table.alpha for site in sites(net)]
    assert all(not torch.equal(a, b) for a, b in zip(before, moved, strict=True))
    grower.finalize()
    train(compiled, optimizer, images, labels, 1)
    assert net.genotype.growths == 1
    net.eval()
    assert torch.allclose(compiled(images), net(images), atol=1e-5)
    assert not any(
        name and "_orig_mod" in name for g in grower.state_dict()["groups"] for name in g
    )


def test_processes_stay_equal_and_a_stale_wrapper_is_refused(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=PROCESSES)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(PROCESSES))
    assert one == other
    assert one["same as without candidates"]
    message = "the network changed since DistributedDataParallel was made: wrap it anew after"
    assert [text[: len(message)] for text in one["refused"]] == [message] * 2


def test_a_scheduler_made_before_is_told() -> None:
    net, images, labels = network()
    optimizer = AdamW(net.parameters(), lr=0.01)
    cosine = CosineAnnealingLR(optimizer, 10)
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer), cosine], [2])
    grower = Grower(net, optimizer, schedulers=[scheduler])
    grower.attach()
    for _ in range(4):
        train(net, optimizer, images, labels, 1)
        scheduler.step()
    assert len(optimizer.param_groups) == len(scheduler.get_last_lr()) == 2
    assert len({group["lr"] for group in optimizer.param_groups}) == 1
    assert optimizer.param_groups[1]["params"]  # α, without decay


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda net, o: Grower(nn.Linear(1, 1), o), "Linear cannot grow: it has no genotype."),
        (lambda net, o: Grower(nn.DataParallel(net), o), "grow its .module, then wrap that anew"),
        (
            lambda net, o: Grower(net, SGD(nn.Linear(1, 1).parameters(), lr=1.0)),
            "optimizer must have parameters of the network but has none.",
        ),
        (
            lambda net, o: (CosineAnnealingLR(o, 5), Grower(net, o)),
            "has a learning-rate scheduler already: make the Grower before it.",
        ),
        (lambda net, o: Grower(net, o).step(), "step needs a schedule"),
        (
            lambda net, o: Grower(net, o, schedule=GrowthSchedule(patience=1)).step(),
            "step needs a metric: the schedule has patience.",
        ),
        (lambda net, o: GrowthSchedule(weak=0), "weak must be a whole number of at least 1 but"),
        (lambda net, o: Grower(net, o).load_state_dict({}), "version must be 1 but got None."),
        (lambda net, o: Grower(net, o).finalize(), "no candidates are attached"),
    ],
)
def test_misuse_is_told_in_one_line(make: Callable[..., Any], message: str) -> None:
    net, _, _ = network()
    optimizer = SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    with pytest.raises(GrowthError, match=message):
        make(net, optimizer)
