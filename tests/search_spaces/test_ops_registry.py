"""Third-party operations, from one decorated function to an exported network."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from nni_petridish import (
    Genotype,
    attach_candidates,
    count_multiply_adds,
    finalize_candidates,
    make_growable,
    register_op,
    sites,
)
from nni_petridish.errors import ConfigError, GenotypeError
from nni_petridish.gallery.saved_model import SavedModel, read_model, write_model
from nni_petridish.kernels.switch import plain_ops
from nni_petridish.results.export import export_model
from nni_petridish.running.config import SearchConfig
from search_spaces import VisionSpace
from search_spaces.any_model.genotype import ModelGenotype
from search_spaces.vision import op_registry
from search_spaces.vision.genotype import VisionGenotype
from search_spaces.vision.network import VisionNetwork
from search_spaces.vision.ops import make_op
from tests.support.networks import batch, small_space, train

ROOT = Path(__file__).parents[2]
PAPER = [
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
    "max_pool_3x3",
    "avg_pool_3x3",
    "identity",
]


def conv_3x3(channels: int, stride: int, affine: bool) -> nn.Module:
    conv = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(channels, affine=affine))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the ops that a test registers."""
    known = op_registry.KNOWN_OPS
    monkeypatch.setattr(known, "makers", dict(known.makers))


@pytest.fixture
def own_op(registry: None) -> str:
    register_op("conv_3x3")(conv_3x3)
    return "conv_3x3"


def grown(space: VisionSpace, own_op: str) -> tuple[VisionNetwork, Genotype, Tensor]:
    """Return a network whose first weak learners begin with the registered op."""
    torch.manual_seed(0)
    net = space.build(space.seed())
    images, labels = batch(space)
    attach_candidates(net)
    train(net, images, labels, steps=1)
    for site in sites(net):
        table = site.weak_learner.table
        with torch.no_grad():
            table.alpha[table.shortcuts.index(("prev", own_op))] = 10.0
    genotype = finalize_candidates(net, 2)
    train(net, images, labels, steps=1)
    return net.eval(), genotype, images


def test_the_papers_ops_come_first_in_their_order(own_op: str) -> None:
    assert list(VisionSpace((3, 8, 8), 10).ops) == PAPER
    assert [*op_registry.KNOWN_OPS] == [*PAPER, own_op]
    for name in PAPER:
        assert make_op(name, 4, 2)(torch.zeros(2, 4, 5, 5)).shape == (2, 4, 3, 3)


def test_an_unknown_op_is_refused_with_all_that_are_known(own_op: str) -> None:
    known = rf"sep_conv_3x3, .*, identity, {own_op}"
    cells = {"normal": [[["prev", "conv_9x9"]]], "reduce": []}
    with pytest.raises(GenotypeError, match=rf"op must be one of {known} but got 'conv_9x9'"):
        VisionGenotype("cell", cells)
    with pytest.raises(
        ConfigError, match=rf"ops must be .* one of {known}, but got \('conv_9x9',\)"
    ):
        VisionSpace((3, 8, 8), 10, ops=["conv_9x9"])
    with pytest.raises(GenotypeError, match=rf"op must be one of {known} but got 'conv_9x9'"):
        make_op("conv_9x9", 4)
    with pytest.raises(GenotypeError, match=rf"must be some of {known}, relu, tanh, .*, each once"):
        ModelGenotype.seed({"b": ["a"]}, ["conv_9x9"])


@pytest.mark.usefixtures("registry")
def test_an_op_is_unknown_before_it_is_registered() -> None:
    with pytest.raises(ConfigError, match=r"ops must be .* one of sep_conv_3x3"):
        VisionSpace((3, 8, 8), 10, ops=["conv_3x3"])


def test_a_name_belongs_to_one_function(own_op: str) -> None:
    def other(channels: int, stride: int, affine: bool) -> nn.Module:
        return nn.BatchNorm2d(channels, affine=affine)

    for name in (own_op, "identity"):
        with pytest.raises(ConfigError, match=rf"op '{name}' is registered already, by .*{name}"):
            register_op(name)(other)
    assert register_op(own_op)(conv_3x3) is conv_3x3  # again, as in a notebook
    assert isinstance(make_op(own_op, 3), nn.Sequential)
    with pytest.raises(ConfigError, match="must be an identifier but got 'conv 3x3'"):
        register_op("conv 3x3")


@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_an_own_op_grows_and_goes_through_json(mode: str, own_op: str) -> None:
    space = small_space(mode, ops=[own_op, "sep_conv_3x3"])
    net, genotype, images = grown(space, own_op)
    assert all(learners[0][0] == ("prev", own_op) for learners in genotype.cells.values())
    again = space.build(Genotype.from_json(genotype.to_json()))
    again.load_state_dict(net.state_dict())
    assert torch.equal(again.eval()(images), net(images))
    seed = space.build(space.seed())
    shape = space.image_shape
    assert count_multiply_adds(net, shape) > count_multiply_adds(seed, shape)
    assert VisionSpace(**space.describe()) == space


@pytest.mark.parametrize("format", ["state_dict", "torch_export", "onnx"])
def test_an_own_op_is_exported(format: str, own_op: str, tmp_path: Path) -> None:
    space = small_space(ops=[own_op, "identity"])
    net, genotype, images = grown(space, own_op)
    described = {"space": "vision", **space.describe()}
    model = SavedModel(described, genotype, net.state_dict())
    path = tmp_path / "model"
    if format == "state_dict":
        write_model(model, path)
        assert torch.equal(read_model(path).build()(images), net(images))
    else:
        # It compares what it wrote with the network. Nothing is known of raw pixels here.
        export_model(model, path, format, pixels=False)
        assert path.stat().st_size > 0


def test_an_own_op_leaves_the_others_fast_and_learns_the_same_numbers(own_op: str) -> None:
    space = small_space(stages=2, ops=["sep_conv_3x3", own_op, "max_pool_3x3"])
    torch.manual_seed(0)
    net = space.build(space.seed()).double()
    attach_candidates(net)
    images, labels = batch(space)
    images = images.double()
    twin = copy.deepcopy(net)
    plain: list[list[str]] = []

    def note(learner: nn.Module, arguments: object, x_k: Tensor) -> None:
        kinds, shortcuts = x_k.grad_fn.kinds, learner.table.shortcuts
        fast = len(kinds.late) + len(kinds.deferred)
        plain.append([shortcuts[i][1] for i in kinds.order[: len(kinds.order) - fast]])

    for site in sites(net):
        site.weak_learner.register_forward_hook(note)
    train(net, images, labels, steps=1)
    assert plain == [[own_op, own_op]] * len(list(sites(net)))  # of prev_prev and of prev
    with plain_ops():
        train(twin, images, labels, steps=1)
    expected = twin.state_dict()
    for name, found in net.state_dict().items():
        torch.testing.assert_close(found, expected[name], rtol=1e-7, atol=1e-9, msg=name)


def test_an_own_op_grows_on_any_model(own_op: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    images, labels = torch.randn(6, 2, 8, 8), torch.arange(6) % 3
    make_growable(net, images, sites=["1"], sources=["0"], ops=[own_op])
    attach_candidates(net)
    train(net, images, labels, steps=1)
    genotype = finalize_candidates(net, 1)
    assert genotype.learners["1"] == ((("0", own_op),),)
    assert Genotype.from_json(genotype.to_json()) == genotype


def test_a_configuration_takes_own_ops(own_op: str, tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "configs/petridish.yml").read_text())
    path = tmp_path / "own.yml"
    for ops in ([own_op, "identity"], ["conv_9x9"]):
        document["searchSpace"]["ops"] = ops
        path.write_text(yaml.safe_dump(document))
        if own_op in ops:
            assert SearchConfig.from_yaml(path).space["ops"] == ops
        else:
            with pytest.raises(ConfigError, match=rf"searchSpace.*identity, {own_op}"):
                SearchConfig.from_yaml(path)


def test_a_package_can_name_a_module_with_ops(tmp_path: Path) -> None:
    (tmp_path / "some_ops.py").write_text(
        "from nni_petridish import register_op\n"
        "@register_op('some_op')\n"
        "def some_op(channels, stride, affine): ...\n"
    )
    facts = tmp_path / "some_ops-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: some-ops\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[nni_petridish.ops]\nsome = some_ops\n")
    program = (
        "import sys; from search_spaces.vision.genotype import VisionGenotype\n"
        "VisionGenotype('cell', {'normal': [[['prev', 'identity']]], 'reduce': []})\n"
        "assert 'some_ops' not in sys.modules\n"
        "VisionGenotype('cell', {'normal': [[['prev', 'some_op']]], 'reduce': []})\n"
        "assert 'torch' not in sys.modules\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/own_op.py"), "--steps", "2", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "same predictions" in done.stdout
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"genotype.json", "weights.safetensors", "model.pt2"}
