from __future__ import annotations

import copy
import doctest
import gc
import importlib
import json
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import (
    ConvNeXt,
    SwinTransformer,
    mobilenet_v2,
    resnet18,
    squeezenet1_1,
)
from torchvision.models.convnext import CNBlockConfig

from nni_petridish import (
    Genotype,
    PetridishError,
    alpha_tables,
    attach_candidates,
    count_multiply_adds,
    detach_candidates,
    finalize_candidates,
    make_growable,
    sites,
)
from nni_petridish.core import candidate_parameters
from nni_petridish.errors import GenotypeError, GrowthError
from search_spaces.any_model.genotype import ModelGenotype
from tests.support.networks import train

OPS = ["sep_conv_3x3", "max_pool_3x3", "identity"]


class Block(nn.Module):
    """A residual block that changes its sum in place, as torchvision's do."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(c_out)
        # Pooled, not strided over by the 1x1 conv: torch 2.15 corrupts memory in the weight
        # gradient of a strided 1x1 conv of few channels in channels_last, on AVX2 at least.
        pooled = nn.Sequential(nn.AvgPool2d(stride), nn.Conv2d(c_in, c_out, 1))
        self.skip = pooled if stride > 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += self.skip(x)
        return self.relu(y)


class Net(nn.Module):
    """A small ResNet with submodules that cannot be sites or sources."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.early = nn.Sequential(Block(4, 4, 1), Block(4, 4, 1))
        self.late = nn.Sequential(Block(4, 6, 2), Block(6, 6, 1))
        self.last = nn.Sequential(Block(6, 8, 2))
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Identity()
        self.unused = nn.Conv2d(8, 8, 1)
        self.pair = Pair()
        self.crop = Crop()
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        early = self.early(self.stem(images))
        self.crop(early)
        x = self.norm(self.last(self.late(early)))
        x = F.relu(x, inplace=True)
        x = self.twice(self.twice(x))
        return self.head(self.pair(x)[0])


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean((2, 3)), x


class Crop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 1:-2, 1:-2]


def images(n: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(n, 2, 8, 8, generator=torch.Generator().manual_seed(seed))


def labels(n: int = 6) -> Tensor:
    return torch.arange(n) % 4


def growable(**options: object) -> Net:
    torch.manual_seed(0)
    net = Net()
    train(net, images(), labels(), steps=1)
    return make_growable(net, images(1), **{"ops": OPS, **options})


def grown(growths: int = 1, **options: object) -> Net:
    net = growable(**options)
    for _ in range(growths):
        attach_candidates(net)
        train(net, images(), labels(), steps=2)
        finalize_candidates(net, 2)
        train(net, images(), labels(), steps=2)
    return net


def predict(net: nn.Module, x: Tensor | None = None) -> Tensor:
    net.eval()
    with torch.no_grad():
        return net(images() if x is None else x)


def test_a_growable_module_is_what_it_was() -> None:
    torch.manual_seed(0)
    net = Net()
    before, expected = copy.deepcopy(net.state_dict()), predict(net)
    net.train()
    net.late.eval()
    assert make_growable(net, images(1)) is net
    assert type(net) is Net
    modes = [module.training for module in (net, net.early, net.late, net.late[0])]
    assert modes == [True, True, False, False]
    assert list(net.state_dict()) == list(before)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert torch.equal(predict(net), expected)


def test_sites_are_the_ends_of_stages_and_read_the_two_before() -> None:
    net = growable()
    # `norm` is overwritten by the ReLU after it, which a site may be and a source may not.
    assert dict(net.genotype.sources) == {
        "late": ("early",),
        "norm": ("early", "late"),
    }
    assert [site.key for site in sites(net)] == ["late", "norm"]


@pytest.mark.parametrize(
    ("make", "size", "expected"),
    [
        (
            resnet18,
            64,
            {
                "layer1": ("relu",),
                "layer2": ("relu", "layer1"),
                "layer3": ("layer1", "layer2"),
                "layer4": ("layer2", "layer3"),
            },
        ),
        (
            lambda: mobilenet_v2(width_mult=0.5),
            64,
            {
                "features.1": ("features.0",),
                "features.3": ("features.0", "features.1"),
                "features.6": ("features.1", "features.3"),
                "features.10": ("features.3", "features.6"),
                "features.13": ("features.6", "features.10"),
                "features.16": ("features.10", "features.13"),
                "features.17": ("features.13", "features.16"),
                "features": ("features.16", "features.17"),
            },
        ),
        (  # its pools round down, so that earlier sizes cannot be halved to later ones
            squeezenet1_1,
            64,
            {"features": ("features.10",)},
        ),
    ],
)
def test_default_sites_of_torchvisions_models(
    make: Callable[[], nn.Module], size: int, expected: dict[str, tuple[str, ...]]
) -> None:
    net = make_growable(make(), torch.zeros(1, 3, size, size))
    assert dict(net.genotype.sources) == expected


def own_gradients(net: nn.Module, names: list[str]) -> dict[str, Tensor]:
    net.train()
    net.zero_grad()
    F.cross_entropy(net(images()), labels()).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if name in names}


@pytest.mark.parametrize("weak_learning", ["isolated", "joint"])
@pytest.mark.parametrize("growths", [0, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_attaching_and_finalising_change_nothing(
    growths: int, weak_learning: str, layout: torch.memory_format
) -> None:
    net = grown(growths).to(memory_format=layout)
    names = [name for name, p in net.named_parameters() if "unused" not in name]
    expected, gradients = predict(net), own_gradients(copy.deepcopy(net), names)
    attach_candidates(net, weak_learning=weak_learning)
    torch.testing.assert_close(predict(net), expected, rtol=0, atol=1e-6)
    for name, gradient in own_gradients(net, names).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=0, msg=name)
    assert all(parameter.grad is not None for parameter in candidate_parameters(net))
    if weak_learning == "isolated":
        train(net, images(), labels(), steps=1)
        expected = predict(net)
        finalize_candidates(net, 2)
        torch.testing.assert_close(predict(net), expected, rtol=0, atol=1e-6)
        assert net.genotype.growths == growths + 1


def test_detaching_leaves_no_trace() -> None:
    net = growable()
    keys = list(net.state_dict())
    detach_candidates(attach_candidates(net))
    assert list(net.state_dict()) == keys


def test_alpha_sees_the_inner_product_with_the_sites_gradient() -> None:
    """Eq. 7 holds for a site inside a container, with sources of other shapes."""
    names = {"late.0": ["stem", "early.0"]}
    net = growable(sources=names).double().train()
    x = images().double()
    layer: list[Tensor] = []
    values: dict[str, Tensor] = {}
    handles = [net.late[0].register_forward_hook(lambda m, a, out: layer.append(out))] + [
        module.register_forward_hook(lambda m, a, out, name=name: values.update({name: out}))
        for name, module in (("stem", net.stem), ("early.0", net.early[0]))
    ]
    loss = F.cross_entropy(net(x), labels())
    (nabla,) = torch.autograd.grad(loss, layer)
    for handle in handles:
        handle.remove()

    attach_candidates(net, l1=0.0)
    F.cross_entropy(net(x), labels()).backward()
    (site,) = sites(net)
    weak = site.weak_learner
    assert [s for s, _ in weak.table.shortcuts] == ["stem"] * 3 + ["early.0"] * 3
    with torch.no_grad():
        z = {name: weak.adapters[name](value) for name, value in values.items()}
        expected = [
            (nabla * op(z[source])).sum()
            for (source, _), op in zip(weak.table.shortcuts, weak.ops, strict=True)
        ]
    torch.testing.assert_close(weak.table.alpha.grad, torch.stack(expected), rtol=1e-8, atol=1e-12)


def test_a_source_that_is_a_site_is_read_after_its_weak_learners() -> None:
    net = grown(sources={"early": ["stem"], "late": ["early"]})
    net.eval()
    early, late = sites(net)
    with torch.no_grad():
        early.learners[0].eta.fill_(0.7)
        late.learners[0].eta.fill_(-0.3)
        stem = net.stem(images())
        raw = nn.Sequential(*net.early)(stem)  # the elements: without the container's hooks
        z = early.adapters["stem"](stem) if "stem" in early.adapters else stem
        boosted = raw + 0.7 * early.learners[0]({"stem": z}, early.drop)
        raw = nn.Sequential(*net.late)(boosted)
        z = late.adapters["early"](boosted)
        expected = raw - 0.3 * late.learners[0]({"early": z}, late.drop)
        x = F.relu(net.norm(net.last(expected)))
        expected = net.head(x.mean((2, 3)))
    torch.testing.assert_close(predict(net), expected)


@pytest.mark.parametrize("merge", ["concat_project", "weighted_sum"])
def test_saves_and_loads_by_constructor_genotype_and_state_dict(merge: str) -> None:
    net = grown(2, merge=merge, sources={"late.1": ["early.1", "stem"], "last": ["late"]})
    text = net.genotype.to_json()
    again = make_growable(Net(), images(1), genotype=Genotype.from_json(text))
    again.load_state_dict(net.state_dict())
    assert again.genotype == net.genotype
    assert torch.equal(predict(again), predict(net))
    attach_candidates(again)  # and it grows again, with the same candidates
    attach_candidates(net)
    assert list(again.state_dict()) == list(net.state_dict())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("attached", [False, True])
def test_copies_are_whole_and_independent(
    copied: Callable[[nn.Module], nn.Module], attached: bool
) -> None:
    net = grown()
    if attached:
        attach_candidates(net)
    other, expected = copied(net), predict(net)
    assert torch.equal(predict(other), expected)
    train(other, images(), labels())
    assert torch.equal(predict(net), expected)
    assert not torch.equal(predict(other), expected)
    finalize_candidates(other) if attached else attach_candidates(other)
    assert torch.equal(predict(net), expected)
    assert net.genotype.growths == 1


def test_exports_with_any_batch_size() -> None:
    net = grown(2).eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(net, (images(3),), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(program.module()(images(5)), predict(net, images(5)))


def test_multiply_adds_count_what_has_grown() -> None:
    before = count_multiply_adds(growable(), (2, 8, 8))
    net = grown(ops=["identity"])
    # late, 6 channels of 4x4: the factorized reduce from early's 4, and the projection of it;
    # norm, 8 channels of 2x2: two sources, halved once or twice, and the projection of both.
    late = 6 * 4 * 16 + 6 * 6 * 16
    norm = (4 * 4 * 16 + 8 * 4 * 4) + 8 * 6 * 4 + 16 * 8 * 4
    assert count_multiply_adds(net, (2, 8, 8)) == before + late + norm


class Remember(nn.Module):
    """A module that keeps weak references to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        self.seen.append(weakref.ref(y))
        return y


def test_nothing_is_kept_after_a_forward_pass_or_longer_than_needed() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), Remember(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))
    source = net[1]
    make_growable(net, images(1), sources={"2": ["1"]}, ops=["identity"])
    attach_candidates(net)
    alive = []
    net[3].register_forward_pre_hook(lambda m, args: alive.append(source.seen[-1]() is not None))
    predict(net)
    assert alive[-1] is False  # site 2 was its last reader
    net.train()
    loss = net(images()).sum()
    del loss
    gc.collect()
    assert source.seen[-1]() is None

    def fail(*args: object) -> None:
        raise KeyError("user")

    handle = net[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="user"):
        net(images())
    handle.remove()
    gc.collect()
    assert source.seen[-1]() is None
    net(images())


class Meet(nn.Module):
    """A module that waits until both threads have reached it."""

    barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        if Meet.barrier is not None:
            Meet.barrier.wait(20)
        return x.clone()


def test_forward_passes_in_several_threads_do_not_meet() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), Meet(), nn.Conv2d(4, 4, 1))
    genotype = ModelGenotype({"2": ["0"]}, ["identity"], {"2": [[["0", "identity"]]]})
    make_growable(net, images(1), genotype=genotype)
    expected = [predict(net, images(seed=seed)) for seed in range(2)]
    found: dict[int, Tensor] = {}
    Meet.barrier = threading.Barrier(2)
    try:
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: predict(net, images(seed=i))}))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        Meet.barrier = None
    assert all(torch.equal(found[i], expected[i]) for i in range(2))


def test_a_sequential_of_vectors_grows() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 12), nn.Tanh())
    net.append(nn.Linear(12, 4))
    x = images().flatten(1)
    make_growable(net, x[:1], sites=["2", "4"], sources=["1", "3"])
    for _ in range(2):
        attach_candidates(net)
        train(net, x, labels())
        expected = predict(net, x)
        genotype = finalize_candidates(net, 2)
        torch.testing.assert_close(predict(net, x), expected, rtol=0, atol=1e-6)
        train(net, x, labels())
    assert genotype.ops == ("relu", "tanh", "identity")
    assert dict(genotype.sources) == {"2": ("1",), "4": ("1", "3")}
    # net[-1] is the container of the sites, which a Sequential runs too: it does nothing.
    torch.testing.assert_close(predict(copy.deepcopy(net), x), predict(net, x))
    assert set(alpha_tables(attach_candidates(net))) == {"2", "4"}


def test_new_modules_go_where_the_network_is() -> None:
    net = attach_candidates(growable().double())
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    net = growable().to("meta")
    assert {p.device.type for p in attach_candidates(net).parameters()} == {"meta"}


def test_a_part_of_the_network_cannot_run_what_has_grown_on_it() -> None:
    net = grown()
    with pytest.raises(GrowthError, match=r"'late' needs the output of 'early'.*whole network"):
        net.late(torch.zeros(1, 4, 8, 8))
    predict(net)  # and the network still works


ERRORS = {
    "unknown": ({"sites": ["lat"]}, "site 'lat' is not a submodule of Net: did you mean 'late"),
    "unknown, nothing close": ({"sources": ["zzz"]}, "source 'zzz' is not a submodule of Net: it"),
    "root": ({"sites": [""]}, "site '' is not a submodule"),
    "not text": ({"sites": [3]}, "site 3 is not a submodule"),
    "not a list": ({"sites": "late"}, "sites must be names of submodules, in a list, but got"),
    "empty": ({"sources": []}, "sources must be names"),
    "not run": ({"sites": ["unused"]}, "site 'unused' is not run in a forward pass"),
    "run twice": ({"sources": {"norm": ["twice"]}}, "source 'twice' runs 2 times"),
    "not a tensor": ({"sites": ["pair"]}, "site 'pair' must return images"),
    "source after site": (
        {"sources": {"late": ["last"]}},
        "source 'last' must run before site 'late'",
    ),
    "site as its own source": ({"sources": {"late": ["late"]}}, "must run before site 'late'"),
    "nothing before": ({"sites": ["early"], "sources": ["late"]}, "site 'early' has no source"),
    "after all": (
        {"sites": ["late"], "sources": ["stem", "last"]},
        "source 'last' runs after every site",
    ),
    "first stage": ({"sites": ["stem"]}, "site 'stem' (4x8x8) has no stage before it"),
    "odd size": (
        {"sources": {"late": ["crop"]}},
        "source 'crop' (4x5x5) does not fit site 'late' (6x4x4): halving, rounding up, never",
    ),
    "vectors and images": (
        {"sources": {"head": ["late"]}},
        "source 'late' (6x4x4) does not fit site 'head' (4): one returns images and the other",
    ),
    "overwritten": (
        {"sources": {"late": ["early.0.norm"]}},
        "source 'early.0.norm': its output is changed in place",
    ),
    "sources of other sites": (
        {"sites": ["late"], "sources": {"last": ["early"]}},
        "sources must have a list for each of the sites late but got",
    ),
    "sources text": ({"sources": {"late": "early"}}, "sources must have a list"),
    "unknown op": ({"ops": ["conv_7x7"]}, "ops: must be some of sep_conv_3x3"),
    "ops of the other kind": ({"ops": ["tanh"]}, "ops must have at least one of sep_conv_3x3"),
    "unknown merge": ({"merge": "max"}, "merge: must be one of"),
    "example": ({"example": torch.zeros(1, 3, 8, 8)}, "the example does not run through Net:"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_is_one_clear_line_and_the_module_is_left_alone(name: str) -> None:
    options, message = ERRORS[name]
    options = dict(options)
    net, example = Net(), options.pop("example", images(1))
    with pytest.raises(PetridishError) as caught:
        make_growable(net, example, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    make_growable(net, images(1))


def test_what_is_not_a_growable_module_is_refused() -> None:
    with pytest.raises(GrowthError, match=r"torch\.nn\.Module but got int"):
        make_growable(3, images(1))
    with pytest.raises(GrowthError, match="has sites"):
        make_growable(growable(), images(1))
    net = Net()
    net.genotype = "mine"
    with pytest.raises(GrowthError, match="attribute 'genotype'"):
        make_growable(net, images(1))
    with pytest.raises(GrowthError, match=r"no stage that could read.*0 \(3x6x6\)"):
        make_growable(nn.Sequential(nn.Conv2d(2, 3, 3)), images(1))
    genotype = growable().genotype
    with pytest.raises(GrowthError, match="must not be given with a genotype"):
        make_growable(Net(), images(1), genotype=genotype, ops=OPS)
    other = Genotype.from_dict(
        {"version": 1, "space": "vision", "mode": "cell", "cells": {"normal": [], "reduce": []}}
    )
    with pytest.raises(GenotypeError, match="space: must be model but got 'vision'"):
        make_growable(Net(), images(1), genotype=other)


def document(**changes: object) -> dict:
    result = {
        "version": 1,
        "space": "model",
        "sources": {"b.1": ["a", "a.0"], "c": ["b.1"]},
        "ops": ["identity", "max_pool_3x3"],
        "learners": {"b.1": [[["a.0", "identity"]], [["h0", "max_pool_3x3"]]], "c": []},
        **changes,
    }
    return {key: value for key, value in result.items() if value is not ...}


def test_the_genotype_round_trips_and_grows() -> None:
    genotype = Genotype.from_dict(document(merge="weighted_sum"))
    assert isinstance(genotype, ModelGenotype)
    assert genotype.to_dict() == document(merge="weighted_sum")
    assert hash(Genotype.from_json(genotype.to_json())) == hash(genotype)
    assert genotype.growths == 2
    assert genotype.grown({"c": (("b.1", "identity"),)}).learners["c"] == ((("b.1", "identity"),),)
    with pytest.raises(GenotypeError, match=r"no site 'd'; there are b\.1, c"):
        genotype.grown({"d": (("b.1", "identity"),)})
    with pytest.raises(GenotypeError, match="merge: is 'weighted_sum' in the parent"):
        genotype.grown({}, merge="concat_project")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ops": ...}, "ops: is missing"),
        ({"colour": 1}, "colour: is not a key of a model genotype"),
        ({"ops": []}, "ops: must be some of"),
        ({"ops": ["identity", "identity"]}, "each once"),
        ({"ops": [["identity"]]}, "ops: must be some of"),
        ({"sources": {}}, "sources: must have the sources of at least one site"),
        ({"sources": {"b.1": "a", "c": ["b.1"]}}, "sources.b.1: must be a list of submodules"),
        ({"sources": {"b.1": ["h0"], "c": ["b.1"]}}, "sources.b.1: h0 is the name of a weak"),
        ({"sources": {"b.1": ["a", "a"], "c": ["b.1"]}}, "each submodule once"),
        ({"learners": {"b.1": []}}, "learners: must have the sites b.1, c for keys"),
        ({"learners": {"b.1": [], "c": [[["a", "identity"]]]}}, "learners.c[0][0]: source must be"),
        ({"learners": {"b.1": [], "c": [[["b.1", "tanh"]]]}}, "learners.c[0][0]: op must be one"),
        ({"merge": "max"}, "merge: must be one of"),
    ],
)
def test_a_malformed_genotype_is_one_line(changes: dict, message: str) -> None:
    with pytest.raises(GenotypeError) as caught:
        Genotype.from_json(json.dumps(document(**changes)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_example_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "any-model.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(code[1].replace('weights="DEFAULT"', "").replace("224, 224", "64, 64"), scope)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(predict(scope["again"], x), predict(scope["net"], x))


@pytest.mark.parametrize("more", ["", "--model shufflenet --on-lrs 0.1 0.01 --no-test --growths 2"])
def test_the_example_of_torchvision_runs(more: str) -> None:
    script = Path(__file__).parents[2] / "examples" / "grow_torchvision.py"
    short = f"--limit 64 --seeds 1 --epochs 1 --weak-epochs 1 --final-epochs 1 {more}"
    done = subprocess.run(
        [sys.executable, str(script), *short.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1] for row in rows[4:]] == ["parent", "trained", "grown"]
    assert int(rows[6][5]) > int(rows[4][5])  # multiply-adds
    assert (rows[6][4] == "nan%") == ("--no-test" in more)


def test_checkpointing_a_part_says_why_it_cannot_work() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    net = nn.Sequential(nn.Conv2d(2, 4, 3), Checkpointed(nn.Conv2d(4, 4, 1)), nn.ReLU())
    make_growable(net, images(1), sources={"1.0": ["0"]}, ops=["identity"])
    attach_candidates(net)
    with pytest.raises(GrowthError, match=r"'1\.0' needs the output of '0'"):
        net(images()).sum().backward()


@pytest.mark.parametrize(
    "module",
    [
        "search_spaces.any_model.genotype",
        "nni_petridish.core.named_modules",
        "search_spaces.any_model.growable",
    ],
)
def test_the_examples_in_the_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


class UNet(nn.Module):
    """A U-Net of two levels, with as many outputs as asked."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, 2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.up1 = nn.Sequential(nn.Conv2d(8, 6, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(6, 2, 1)
        self.more = nn.ModuleList(nn.Conv2d(8, 2, 1) for _ in range(outputs - 1))

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        first = self.down1(x)
        second = self.down2(first)
        result = self.out(self.up1(torch.cat([self.up(second), first], 1)))
        aside = {str(i): head(second) for i, head in enumerate(self.more)}
        return {"result": result, **aside} if aside else result


def test_default_sites_are_neither_heads_nor_pools_and_the_skipped_are_named() -> None:
    squeeze = make_growable(squeezenet1_1(num_classes=7), torch.zeros(1, 3, 64, 64))
    assert not [site for site in squeeze.genotype.sources if site.startswith("classifier")]
    assert squeeze.skipped_sites["classifier.2"] == "it makes the output of the network"
    assert squeeze.skipped_sites["features.4"] == "no earlier stage can be halved to 128x15x15"
    small = make_growable(resnet18(num_classes=7), torch.zeros(1, 3, 32, 32))
    assert list(small.genotype.sources) == ["layer1", "layer2", "layer3", "layer4"]
    assert small.skipped_sites == {
        "avgpool": "pooling and dropout do not end a stage",
        "fc": "it returns vectors, and stages return images",
        "relu": "it is the first stage: there is nothing to read",
    }


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_heads_of_a_u_net_are_not_sites(outputs: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    net = make_growable(UNet(outputs), torch.zeros(1, 3, 8, 8), ops=OPS)
    heads = ["out", "more.0"][:outputs]
    assert {site: tuple(names) for site, names in net.genotype.sources.items()} == {
        "down2": ("down1",),
        "up": ("down1",),
        "up1": ("down1", "up"),
    }
    for head in heads:
        assert net.skipped_sites[head] == "it makes the output of the network"
        assert f"{head} is not a site: it makes the output of the network." in caplog.messages
    named = make_growable(UNet(outputs), torch.zeros(1, 3, 8, 8), sites=["up1"])
    assert named.skipped_sites == {}


def small_swin() -> SwinTransformer:
    torch.manual_seed(0)
    return SwinTransformer([4, 4], 8, [1, 1], [2, 2], [4, 4], num_classes=4)


class OneSize(nn.Module):
    """Blocks on (N, H, W, C), for images of 8x8 pixels only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 1)
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 10))
        self.head = nn.Linear(8 * 8 * 10, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2:] == (8, 8)
        return self.head(self.block(self.stem(x).permute(0, 2, 3, 1)).flatten(1))


@pytest.mark.parametrize("size", [32, 34])
def test_stages_with_channels_last_grow_as_images(size: int) -> None:
    net = small_swin()
    x = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    expected = predict(net, x)
    make_growable(net, x[:1], ops=OPS)
    assert [str(site.shape) for site in sites(net)] == [
        "x".join(map(str, (c, s, s))) for c, s in ((8, size // 4), (16, -(-(size // 4) // 2)))
    ]
    attach_candidates(net)
    torch.testing.assert_close(predict(net, x), expected, rtol=0, atol=1e-6)
    train(net, x, labels(3), steps=2)
    expected = predict(net, x)
    finalize_candidates(net, 2)
    torch.testing.assert_close(predict(net, x), expected, rtol=0, atol=1e-6)
    train(net, x, labels(3), steps=1)
    again = make_growable(small_swin(), x[:1], genotype=net.genotype)
    again.load_state_dict(net.state_dict())
    assert torch.equal(predict(again, x), predict(net, x))


def test_a_network_for_one_size_has_its_layout_told_by_its_weights() -> None:
    net = make_growable(OneSize(), torch.zeros(1, 2, 8, 8), ops=OPS)
    assert {str(site.shape): site.channels_last for site in sites(net)} == {"10x8x8": True}
    assert predict(attach_candidates(net)).shape == (6, 4)


def test_blocks_that_permute_within_keep_channels_first() -> None:
    blocks = [CNBlockConfig(8, 12, 1), CNBlockConfig(12, None, 1)]
    net = make_growable(ConvNeXt(blocks, num_classes=4), torch.zeros(1, 3, 32, 32), ops=OPS)
    assert [(str(site.shape), site.channels_last) for site in sites(net)] == [("12x4x4", False)]


def test_a_plain_perceptron_grows_by_default() -> None:
    net = nn.Sequential(*(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3)))
    make_growable(net, torch.zeros(1, 6))
    assert {site: tuple(names) for site, names in net.genotype.sources.items()} == {"3": ("1",)}
    finalize_candidates(attach_candidates(net))
    assert net(torch.randn(4, 6)).shape == (4, 3)
