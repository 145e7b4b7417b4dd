"""Cells in the form in which the authors of Petridish released theirs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from nni_petridish import attach_candidates, finalize_candidates
from nni_petridish.core.complexity import count_parameters
from nni_petridish.errors import GenotypeError
from search_spaces import VisionSpace
from search_spaces.vision.genotype import VisionGenotype
from search_spaces.vision.op_registry import KNOWN_OPS, register_op
from search_spaces.vision.ops import make_op

RELEASED = {
    "normal": [
        (3, [1, 1, 1], [30, 9, 1, 22]),
        (4, [3, 1, 3], [23, 23, 30, 22]),
        (2, [1, 1, 3, 4], [23, 1, 14, 14, 11]),
    ],
    "reduction": [
        (3, [1, 1, 0], [9, 24, 23, 22]),
        (4, [3, 1, 1], [31, 1, 8, 22]),
        (5, [0, 1, 1], [1, 23, 1, 22]),
        (2, [1, 1, 3, 4, 5], [23, 1, 14, 14, 14, 11]),
    ],
}
"""(id, inputs, operations) of petridishnn's result_net_info/cifar_search_model.txt."""
SKELETON = [
    (i, [i - 2, i - 1], [1, 1, "reduction" if i in (5, 9) else "normal"]) for i in range(2, 13)
]
CELLS = {
    "normal": (
        (("prev", "dil_conv_3x3"), ("prev", "avg_pool_3x3"), ("prev", "identity")),
        (("h0", "sep_conv_3x3"), ("prev", "sep_conv_3x3"), ("h0", "dil_conv_3x3")),
    ),
    "reduce": (
        (("prev", "avg_pool_3x3"), ("prev", "sep_conv_5x5"), ("prev_prev", "sep_conv_3x3")),
        (("h0", "dil_conv_5x5"), ("prev", "identity"), ("prev", "max_pool_3x3")),
        (("prev_prev", "identity"), ("prev", "sep_conv_3x3"), ("prev", "identity")),
    ),
}


def layers(rows: list[tuple[int, list[int], list[Any]]]) -> list[dict[str, Any]]:
    """Return the layers of a list as petridishnn writes them."""
    result = []
    for number, inputs, operations in [(0, [], []), (1, [], []), *rows]:
        layer = {"id": number, "inputs": inputs, "operations": operations}
        layer["down_sampling"] = int(operations[-1:] == ["reduction"])
        result.append({**layer, "stop_gradient": 0, "aux_weight": 0, "is_candidate": 0})
    return result


def released() -> dict[str, Any]:
    """Return the released net_info, without the α of its selections."""
    master = layers(SKELETON)
    master[-1]["aux_weight"] = 1.0
    return {"master": master} | {key: layers(rows) for key, rows in RELEASED.items()}


def test_the_released_cells_are_read_and_written() -> None:
    data = released()
    data["normal"][2]["extra_dict"] = {"ops_ids": [2, 5, 6], "fs_omega": [4e-11, -3e-11, -2e-11]}
    genotype = VisionGenotype.from_net_info(json.dumps(data))
    assert genotype == VisionGenotype("cell", CELLS)
    assert json.loads(genotype.to_net_info()) == released()


def test_the_released_cells_have_the_size_that_the_paper_reports() -> None:
    space = VisionSpace((3, 32, 32), 10, cells_per_stage=6, filters=32)
    with torch.device("meta"):
        net = space.build(VisionGenotype("cell", CELLS))
    assert count_parameters(net) == pytest.approx(2.5e6, rel=0.05)


def test_the_released_cells_grow_on() -> None:
    torch.manual_seed(0)
    space = VisionSpace((3, 8, 8), 10, cells_per_stage=1, filters=4)
    net = space.build(VisionGenotype.from_net_info(json.dumps(released())))
    attach_candidates(net)
    net(torch.randn(4, 3, 8, 8)).square().mean().backward()
    grown = finalize_candidates(net, i_max=2)
    assert VisionGenotype.from_net_info(grown.to_net_info(1, 3)) == grown
    assert [len(learners) for learners in grown.cells.values()] == [3, 4]


@pytest.mark.parametrize("merge", ["concat_project", "weighted_sum"])
def test_seed_and_merges_round_trip(merge: str) -> None:
    cells = {"normal": [[("prev", "identity")]], "reduce": []}
    genotype = VisionGenotype("cell", cells, merge)
    assert VisionGenotype.from_net_info(genotype.to_net_info(6, 2)) == genotype
    seed = VisionGenotype.seed()
    assert VisionGenotype.from_net_info(seed.to_net_info().encode()) == seed


def changed(cell: str, index: int, **fields: Any) -> str:
    """Return the released net_info with other fields of one layer."""
    data = released()
    data[cell][index].update(fields)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Genotype(normal=[])", "net_info: not JSON"),
        ("[]", "the single list of a macro search is not read"),
        (json.dumps({"master": [], "normal": layers(RELEASED["normal"])}), "reduction: is missing"),
        (changed("normal", 2, operations=[6, 9, 1, 22]), r"normal\[2\]: an operation must be .* 6"),
        (changed("normal", 2, operations=[30, 9, 1, 10]), r"normal\[2\]: the merge must be one of"),
        (changed("normal", 3, operations=[23, 23, 30, 28]), "all layers must merge alike"),
        (changed("normal", 2, inputs=[1, 1, 4]), r"normal\[2\]: has no layer 4 before it"),
        (changed("normal", 2, is_candidate=1), r"normal\[2\]: is_candidate must be 0 in a cell"),
        (changed("normal", 4, operations=[23, 1, 14, 14, 10]), r"normal\[4\]: .* must end in"),
        (changed("normal", 4, inputs=[1, 1, 3], operations=[23, 1, 14, 11]), "must end in"),
        (changed("reduction", 3, id=3), r"reduction\[3\]: id 3 stands twice"),
        (changed("reduction", 0, id="0"), r"reduction\[0\]: must have id, inputs and operations"),
        (
            changed("reduction", 2, operations=[9, 24, 22]),
            "an operation on each input, and a merge",
        ),
        (changed("reduction", 2, inputs=[True, 1, 0]), "must have whole numbers"),
        (json.dumps(released() | {"normal": [1, 2, 3]}), r"normal\[0\]: must be an object"),
        (json.dumps(released() | {"normal": {}}), "normal: must be a list"),
    ],
)
def test_what_the_space_cannot_express_is_told(text: str, problem: str) -> None:
    with pytest.raises(GenotypeError, match=problem) as caught:
        VisionGenotype.from_net_info(text)
    assert "\n" not in str(caught.value)


def test_what_petridishnn_cannot_express_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOWN_OPS, "makers", dict(KNOWN_OPS.makers))  # the op is for this test only
    macro = VisionGenotype.seed("macro", 5)
    with pytest.raises(GenotypeError, match="mode: petridishnn's form has two cells"):
        macro.to_net_info()
    register_op("net_info_test_op")(lambda *args: make_op("identity", *args))
    own = VisionGenotype("cell", {"normal": [[("prev", "net_info_test_op")]], "reduce": []})
    with pytest.raises(GenotypeError, match=r"cells.normal\[0\]: petridishnn has no number"):
        own.to_net_info()
