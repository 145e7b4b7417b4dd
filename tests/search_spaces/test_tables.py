from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from nni_petridish import attach_candidates, detach_candidates, finalize_candidates, sites
from nni_petridish.errors import GenotypeError
from search_spaces.tables.cells import CellsGenotype, CellsSpace
from search_spaces.tables.macro import MacroGenotype, MacroSpace

MACRO_ROWS = {  # code: (flops, params), as NAS-Bench-Macro's table has them
    "00000000": (7713280, 387882),
    "10000000": (12128768, 396298),
    "01000000": (14447104, 415082),
    "02012100": (47327744, 890666),
    "11111111": (53246464, 1588874),
    "22222222": (105660928, 2932586),
}


CELL_ROWS = {  # code: (flops as published, rounded to 10 kFLOPs; parameters of the table)
    "111111": (7_780_000, 73306),
    "222222": (31_380_000, 241306),
    "333333": (220_120_000, 1531546),
    "421211": (15_650_000, 129306),
}


@pytest.mark.parametrize("code", MACRO_ROWS)
def test_macro_networks_have_the_sizes_of_the_table(code: str) -> None:
    space = MacroSpace()
    assert space.size(space.build(MacroGenotype(code))) == MACRO_ROWS[code]


@pytest.mark.parametrize("code", CELL_ROWS)
def test_cell_networks_have_the_sizes_of_the_table(code: str) -> None:
    space = CellsSpace()
    multiply_adds, parameters = space.size(space.build(CellsGenotype(code)))
    assert (round(multiply_adds, -4), parameters) == CELL_ROWS[code]


def test_a_cell_adds_its_edges() -> None:
    space = CellsSpace((3, 8, 8), 4, cells_per_stage=1, filters=4)
    x = torch.randn(2, 4, 8, 8)

    def output(code: str) -> torch.Tensor:
        return space.build(CellsGenotype(code)).layers[0](x)

    assert torch.allclose(output("111111"), 4 * x)  # 1 + 1 + (1 + 1)
    assert torch.equal(output("000100"), x)
    assert torch.equal(output("100010"), x)  # 0 → 1 → 3
    assert torch.equal(output("111000"), torch.zeros_like(x))  # nothing reaches the last node
    assert torch.allclose(output("000400"), F.avg_pool2d(x, 3, 1, 1, count_include_pad=False))


def test_all_cells_share_the_tables_of_their_edges() -> None:
    torch.manual_seed(0)
    space = CellsSpace((3, 8, 8), 4, cells_per_stage=1, filters=4)
    net = space.build(CellsGenotype("131111"))
    images, labels = torch.randn(6, 3, 8, 8), torch.randint(4, (6,))
    wider = attach_candidates(copy.deepcopy(net))
    tables = {site.key: site.weak_learner.table for site in sites(wider)}
    assert list(tables) == [f"edge_{i}" for i in (0, 2, 3, 4, 5)]
    assert len(sites(wider)) == 15
    assert tables["edge_0"].alpha.tolist() == pytest.approx([1 / 15] * 3)
    for one in (net, wider):
        F.cross_entropy(one(images), labels).backward()
    for name, parameter in net.named_parameters():
        assert torch.equal(dict(wider.named_parameters())[name].grad, parameter.grad), name
    grown = space.build_grown(net, CellsGenotype("131131"))
    assert torch.equal(grown.stem[0].weight, net.stem[0].weight)


def small_macro() -> MacroSpace:
    return MacroSpace((3, 8, 8), 4, stages=(1, 2), filters=4, features=8)


def test_candidates_sit_at_identities_only_and_change_nothing() -> None:
    torch.manual_seed(0)
    space = small_macro()
    net = space.build(MacroGenotype("020"))
    images, labels = torch.randn(6, 3, 8, 8), torch.randint(4, (6,))
    wider = attach_candidates(copy.deepcopy(net))
    assert [site.key for site in sites(wider) if site.weak_learner] == ["layer_0", "layer_2"]
    # All candidates compete: each starts at 1 over their number.
    assert all(site.weak_learner.table.alpha.tolist() == [0.25] * 2 for site in sites(wider))
    for one in (net, wider):
        F.cross_entropy(one(images), labels).backward()
    for name, parameter in net.named_parameters():
        found = dict(wider.named_parameters())[name]
        assert torch.equal(found.grad, parameter.grad), name
    assert list(detach_candidates(wider).state_dict()) == list(net.state_dict())


def test_finalizing_adds_one_block() -> None:
    net = attach_candidates(small_macro().build(MacroGenotype("000")))
    images = torch.randn(6, 3, 8, 8)
    before = net.eval()(images)
    scores = {"layer_0": [0.1, 0.2], "layer_1": [0.5, 0.4], "layer_2": [0.3, 0.0]}
    assert finalize_candidates(net, i_max=1, scores=scores) == MacroGenotype("010")
    assert torch.equal(net(images), before)


def test_codes_are_checked() -> None:
    with pytest.raises(GenotypeError, match="code: must be digits from 0 to 2 but got '03'"):
        MacroGenotype("03")
    with pytest.raises(GenotypeError, match="code: must have 8 digits but got '000'"):
        MacroSpace().build(MacroGenotype("000"))
    with pytest.raises(GenotypeError, match="layer_0 must have one operation"):
        MacroGenotype("1").grown({"layer_0": (("prev", "MB3_K3"),)})
