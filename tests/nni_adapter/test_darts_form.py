"""DARTS's published cells for images, as samples of NNI's spaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nni.nas.hub.pytorch import DARTS, ENAS, AmoebaNet, NASNet
from nni.nas.space import model_context
from torch import nn

from nni_petridish import attach_candidates, finalize_candidates, make_growable
from nni_petridish.errors import ConfigError, GenotypeError
from nni_petridish.nni_adapter import read_darts, write_darts
from nni_petridish.nni_adapter.user_spaces.space import UserSpace
from search_spaces.recurrent.genotype import RecurrentGenotype
from search_spaces.vision.genotype import VisionGenotype
from tests.support.nni_spaces import Vectors

V1 = (
    "Genotype(normal=[('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('skip_connect', 0),"
    " ('sep_conv_3x3', 1), ('skip_connect', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0),"
    " ('skip_connect', 2)], normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0),"
    " ('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 0), ('max_pool_3x3', 0),"
    " ('skip_connect', 2), ('skip_connect', 2), ('avg_pool_3x3', 0)], reduce_concat=range(2, 6))"
)
V2 = (
    "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0),"
    " ('sep_conv_3x3', 1), ('sep_conv_3x3', 1), ('skip_connect', 0), ('skip_connect', 0),"
    " ('dil_conv_3x3', 2)], normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0),"
    " ('max_pool_3x3', 1), ('skip_connect', 2), ('max_pool_3x3', 1), ('max_pool_3x3', 0),"
    " ('skip_connect', 2), ('skip_connect', 2), ('max_pool_3x3', 1)], reduce_concat=range(2, 6))"
)
NASNET = (
    "Genotype(normal=[('sep_conv_5x5', 1), ('sep_conv_3x3', 0), ('sep_conv_5x5', 0),"
    " ('sep_conv_3x3', 0), ('avg_pool_3x3', 1), ('skip_connect', 0), ('avg_pool_3x3', 0),"
    " ('avg_pool_3x3', 0), ('sep_conv_3x3', 1), ('skip_connect', 1)], normal_concat=range(2, 7),"
    " reduce=[('sep_conv_5x5', 1), ('sep_conv_7x7', 0), ('max_pool_3x3', 1), ('sep_conv_7x7', 0),"
    " ('avg_pool_3x3', 1), ('sep_conv_5x5', 0), ('skip_connect', 3), ('avg_pool_3x3', 2),"
    " ('sep_conv_3x3', 2), ('max_pool_3x3', 1)], reduce_concat=range(4, 7))"
)
AMOEBA = (
    "Genotype(normal=[('avg_pool_3x3', 0), ('max_pool_3x3', 1), ('sep_conv_3x3', 0),"
    " ('sep_conv_5x5', 2), ('sep_conv_3x3', 0), ('avg_pool_3x3', 3), ('sep_conv_3x3', 1),"
    " ('skip_connect', 1), ('skip_connect', 0), ('avg_pool_3x3', 1)], normal_concat=range(4, 7),"
    " reduce=[('avg_pool_3x3', 0), ('sep_conv_3x3', 1), ('max_pool_3x3', 0), ('sep_conv_7x7', 2),"
    " ('sep_conv_7x7', 0), ('avg_pool_3x3', 1), ('max_pool_3x3', 0), ('max_pool_3x3', 1),"
    " ('conv_7x1_1x7', 0), ('sep_conv_3x3', 5)], reduce_concat=[3, 4, 6])"
)
"""The cells of DARTS's cnn/genotypes.py."""
PUBLISHED = {"V1": (V1, DARTS), "V2": (V2, DARTS), "NASNet": (NASNET, NASNet)}
PUBLISHED["AmoebaNet"] = (AMOEBA, AmoebaNet)


def make(kind: Any, sample: dict[str, Any] | None = None) -> nn.Module:
    """Return a small space of NNI's hub, or one of its networks."""
    if sample is None:
        return kind(width=4, num_cells=3, dataset="cifar")
    with model_context(sample):
        return kind(width=4, num_cells=3, dataset="cifar")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_cells_round_trip_and_build(name: str) -> None:
    text, kind = PUBLISHED[name]
    sample = read_darts(f"{name} = {text}", make(kind))
    assert write_darts(sample, make(kind)) == text
    net = make(kind, sample)
    assert net(torch.randn(2, 3, 16, 16)).shape == (2, 10)


def test_a_published_cell_is_the_one_that_nni_ships() -> None:
    theirs = DARTS.load_searched_model("darts-v2", pretrained=False)
    sample = read_darts(V2, make(DARTS))
    with model_context(sample):
        ours = DARTS(width=36, num_cells=20, dataset="cifar")
    shapes = [(name, tensor.shape) for name, tensor in theirs.state_dict().items()]
    assert [(name, tensor.shape) for name, tensor in ours.state_dict().items()] == shapes
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 16, 16)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


def test_a_network_of_published_cells_grows_as_any_model() -> None:
    torch.manual_seed(0)
    net = make_growable(make(DARTS, read_darts(V2, make(DARTS))), torch.randn(2, 3, 16, 16))
    attach_candidates(net)
    net(torch.randn(4, 3, 16, 16)).square().mean().backward()
    finalize_candidates(net, i_max=1)
    assert net.genotype.growths == 1


def test_one_published_cell_stays_while_the_other_grows() -> None:
    normal = {
        label: value
        for label, value in read_darts(V2, make(DARTS)).items()
        if label.startswith("normal/")
    }
    space = UserSpace(DARTS, kwargs={"width": 4, "num_cells": 3, "dataset": "cifar"}, fixed=normal)
    grown = space.seed().grown({"reduce": (("0", "max_pool_3x3"), ("1", "sep_conv_3x3"))})
    written = write_darts(space.sample(grown), make(DARTS))
    assert written.startswith(V2.partition(", reduce=")[0])
    assert "reduce=[('max_pool_3x3', 0), ('sep_conv_3x3', 1)" in written


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("__import__('os').system('true')", DARTS, "DARTS's form must be"),
        ("Genotype(normal=open('x'))", DARTS, "DARTS's form must be"),
        (V1.replace(", normal_concat=range(2, 6)", ""), DARTS, "normal_concat: is missing"),
        (V1.replace("range(2, 6)", "[2, 3]", 1), DARTS, "concatenates all nodes, "),
        (V1.replace("range(2, 6)", "[1, 2]", 1), DARTS, "must be some of the nodes, 2 to 5"),
        (V1.replace("skip_connect', 2", "skip_connect', 5", 1), DARTS, "from 0 to 4 but got 5"),
        (V1.replace("sep_conv_3x3", "none", 1), DARTS, r"normal\[0\]: op must be one of .* 'none'"),
        (V1.replace("('sep_conv_3x3', 1), ", "", 1), DARTS, "4 nodes, 8 pairs"),
        (V1.replace("('sep_conv_3x3', 1)", "'sep'", 1), DARTS, r"normal\[0\]: must be \(op, state"),
        (AMOEBA, DARTS, "normal: the space's cell has 4 nodes, 8 pairs .* but got 10"),
        (AMOEBA, ENAS, r"reduce\[3\]: op must be one of .* 'sep_conv_7x7'"),
        (NASNET.replace("range(4, 7)", "range(2, 7)"), NASNet, "that no other one uses, "),
        (NASNET, ENAS, r"reduce\[1\]: op must be"),
    ],
)
def test_what_a_space_cannot_express_is_told(text: str, kind: Any, problem: str) -> None:
    with pytest.raises(GenotypeError, match=problem) as caught:
        read_darts(text, make(kind))
    assert "\n" not in str(caught.value)


def test_spaces_without_such_cells_are_refused() -> None:
    with pytest.raises(ConfigError, match="space must have cells labeled normal and reduce"):
        read_darts(V1, Vectors())
    with pytest.raises(GenotypeError, match="normal/op_2_0: is missing in the sample"):
        write_darts({}, make(DARTS))


def test_the_vision_space_says_why_it_has_no_such_cells() -> None:
    with pytest.raises(GenotypeError, match=r"concatenates its nodes.*read_darts"):
        VisionGenotype.from_darts(V1)
    with pytest.raises(GenotypeError, match="DARTS's form must be"):
        VisionGenotype.from_darts("Genotype(")
    with pytest.raises(GenotypeError, match="recurrent: is missing"):
        RecurrentGenotype.from_darts(V1)
