"""Two processes under DistributedDataParallel, over gloo and the loopback interface."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nni_petridish import Genotype, attach_candidates, finalize_candidates
from nni_petridish.errors import GrowthError
from tests.support.distributed_worker import CASES, PROCESSES, STEPS, work

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The findings of each process, by case."""
    folder = tmp_path_factory.mktemp("group")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=PROCESSES)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("case", CASES)
def test_alphas_selection_and_predictions_are_the_same_in_all_processes(
    found: Found, case: str
) -> None:
    one, other = (process[case] for process in found)
    for key in ("alphas", "genotype", "predictions", "trained on"):
        assert one[key] == other[key], key
    assert Genotype.from_json(one["genotype"]).growths == 1
    assert one["predictions"] != one["trained on"]


@pytest.mark.parametrize("case", CASES)
def test_alpha_gets_the_mean_gradient_and_the_l1_term_once(found: Found, case: str) -> None:
    for process in found:
        gradients, expected = process[case]["gradients"], process[case]["expected"]
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(
                torch.tensor(gradient), torch.tensor(expected[key]), rtol=1e-4, atol=1e-6
            )
        assert set(process[case]["backward_passes"]) == {STEPS}


@pytest.mark.parametrize("case", [name for name, c in CASES.items() if c.weak_learning != "joint"])
def test_finalising_changes_no_prediction(found: Found, case: str) -> None:
    assert all(process[case]["unchanged"] for process in found)


def test_a_wrapped_network_says_what_to_do() -> None:
    class Wrapped(DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:  # without a process group
            nn.Module.__init__(self)
            self.module = module

    case = CASES["vision, cells"]
    wrapped = Wrapped(attach_candidates(case.build()))
    for grow in (attach_candidates, finalize_candidates):
        with pytest.raises(GrowthError, match=r"grow its \.module, then wrap that anew"):
            grow(wrapped)
