"""Evaluation in one pass over the images, compared with the plain ops."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from nni_petridish import attach_candidates, finalize_candidates
from nni_petridish.kernels import evaluation
from nni_petridish.kernels.evaluation import evaluates, value_term
from nni_petridish.kernels.native.terms import Merging, sum_terms
from nni_petridish.kernels.switch import plain_ops
from search_spaces import VisionSpace
from search_spaces.vision.network import Cell
from search_spaces.vision.op_registry import VISION_OPS
from search_spaces.vision.ops import FactorizedReduce, make_op, project
from tests.kernels.test_kernels import images
from tests.kernels.test_merging import LEARNERS, OneInput, grown_cell
from tests.kernels.test_native import LANES, pytestmark

__all__ = ["pytestmark"]
EXACT = {"rtol": 1e-9, "atol": 1e-11}
WIDTHS = (2, LANES - 1, LANES, 2 * LANES + 3)
SIZES = ((1, 3), (4, 4), (9, 17), (3, 70))


def with_statistics(module: nn.Module) -> nn.Module:
    """Give the norms of a module statistics and parameters of their own; in evaluation mode."""
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            if norm.affine:
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)
    return module.eval()


def grown(mode: str, growths: int, filters: int = 5, size: int = 9) -> nn.Module:
    space = VisionSpace((3, size, size), 10, cells_per_stage=1, filters=filters, mode=mode)
    net = space.build(space.seed())
    for _ in range(growths):
        attach_candidates(net)
        for name, parameter in net.named_parameters():
            if name.endswith("alpha"):
                nn.init.normal_(parameter)
        finalize_candidates(net)
    for name, parameter in net.named_parameters():
        if name.endswith("eta"):
            nn.init.constant_(parameter, 0.5)
    return with_statistics(net)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of terms of every pass in C."""
    found: list[int] = []

    def counted(terms: list[object], *rest: object, **named: object) -> object:
        found.append(len(terms))
        return sum_terms(terms, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluation, "sum_terms", counted)
    return found


def assert_evaluates_as_plain(module: nn.Module, x: Tensor, **tolerance: float) -> None:
    with torch.no_grad():
        found = module(x)
        with plain_ops():
            expected = module(x)
    torch.testing.assert_close(found, expected, **(tolerance or EXACT))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", VISION_OPS)
def test_every_op_of_any_width_and_size_equals_the_plain_op(
    name: str, stride: int, affine: bool, calls: list[int]
) -> None:
    torch.manual_seed(0)
    for channels, size in itertools.product(WIDTHS, SIZES):
        op = with_statistics(make_op(name, channels, stride, affine)).double()
        assert_evaluates_as_plain(op, images(3, channels, *size))
    is_norm = name == "identity" and stride == 1  # a batch norm of torch if it is alone
    assert len(calls) == (0 if is_norm else len(WIDTHS) * len(SIZES))


@pytest.mark.parametrize("make", [project, FactorizedReduce])
def test_projections_equal_the_plain_ops(
    make: Callable[[int, int], nn.Module], calls: list[int]
) -> None:
    torch.manual_seed(0)
    widths = ((3, 2 * LANES), (LANES, 4 * LANES), (2 * LANES + 1, LANES), (5, 3), (2, 7))
    for pair, size in itertools.product(widths, SIZES):
        op = with_statistics(make(*pair)).double()
        assert_evaluates_as_plain(op, images(3, pair[0], *size))
    assert len(calls) == len(widths) * len(SIZES)


@pytest.mark.parametrize("level", [0, 1])
def test_grown_cells_of_any_width_and_size_equal_the_plain_ops(
    level: int, calls: list[int]
) -> None:
    torch.manual_seed(0)
    for channels, size in itertools.product(WIDTHS, ((6, 7), (9, 17), (4, 70))):
        calls.clear()
        cell = with_statistics(OneInput(grown_cell(channels, level=level)))
        assert_evaluates_as_plain(cell, images(5, channels, *size))
        assert calls == [1 + level, 3, 3]  # x_k, and each weak learner


@pytest.mark.parametrize("mode", ["cell", "macro"])
@pytest.mark.parametrize("growths", [0, 1, 3])
def test_grown_networks_equal_the_plain_ops(mode: str, growths: int, calls: list[int]) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        net = grown(mode, growths).double()
        calls.clear()
        assert_evaluates_as_plain(net, images(7, 3, 9, 9))
        assert calls


def test_single_precision_is_as_exact_as_the_plain_ops() -> None:
    torch.manual_seed(0)
    net, x = grown("cell", 2, filters=16), images(8, 3, 9, 9, dtype=torch.float32, mean=1.0)
    with torch.no_grad():
        found = net(x)
        with plain_ops():
            plain, exact = net(x), copy.deepcopy(net).double()(x.double())
    worst = (plain.double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= 4 * worst + 1e-6


def test_weights_may_change_at_any_time(calls: list[int]) -> None:
    torch.manual_seed(0)
    net, x = grown("cell", 1).double(), images(7, 3, 9, 9)
    assert_evaluates_as_plain(net, x)
    with torch.no_grad():
        before = net(x)
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.1)
        assert not torch.equal(net(x), before)
    assert_evaluates_as_plain(net, x)
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.9
    assert_evaluates_as_plain(net, x)
    net.load_state_dict(grown("cell", 1).double().state_dict(), strict=False)
    assert_evaluates_as_plain(net, x)
    assert calls


def test_nothing_of_the_network_changes() -> None:
    torch.manual_seed(0)
    net, x = grown("cell", 1), images(7, 3, 9, 9, dtype=torch.float32)
    before, image = copy.deepcopy(net.state_dict()), x.clone()
    with torch.no_grad():
        net(x)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(x, image)


def test_the_number_of_threads_changes_no_bit() -> None:
    torch.manual_seed(0)
    cell = with_statistics(OneInput(grown_cell(16))).float()
    x, threads, found = images(7, 16, 9, 9, dtype=torch.float32), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with torch.inference_mode():
                found.append(cell(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


def _hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, x, y: 2 * y)


CHANGES: dict[str, Callable[[Cell], object]] = {
    "a hook on the learner": lambda cell: _hook(cell.learners[0]),
    "a hook on the merge": lambda cell: _hook(cell.learners[0].merge),
    "a hook on its conv": lambda cell: _hook(cell.learners[0].merge.conv),
    "a hook on its norm": lambda cell: _hook(cell.learners[0].merge.norm),
    "a hook on an op": lambda cell: _hook(cell.learners[0].ops[0]),
    "a hook within an op": lambda cell: _hook(cell.learners[0].ops[0][2]),
    "a hook on a depthwise conv": lambda cell: _hook(cell.learners[0].ops[0][1]),
    "a hook on a pooling": lambda cell: _hook(cell.learners[0].ops[1][0]),
    "a hook on the norm of an op": lambda cell: _hook(cell.learners[0].ops[0][-1]),
    "a hook on the seed": lambda cell: _hook(cell.seed),
    "a hook on the skip": lambda cell: _hook(cell.skip),
    "a hook on drop-path": lambda cell: _hook(cell.drop_path),
    "a pruned conv": lambda cell: prune.l1_unstructured(cell.learners[0].merge.conv, "weight", 0.5),
    "an odd norm": lambda cell: setattr(cell.learners[0].merge.norm, "eps", 0.3),
    "a norm in training": lambda cell: cell.learners[0].ops[0][-1].train(),
    "a norm of each batch": lambda cell: setattr(
        cell.learners[0].ops, "0", nn.BatchNorm2d(4, track_running_stats=False).double()
    ),
    "an unknown op": lambda cell: cell.learners[0].ops.__setitem__(0, nn.Softsign()),
    "an affine op": lambda cell: cell.learners[0].ops.__setitem__(
        1, make_op("max_pool_3x3", 4, 1, True)
    ),
    "a skip of another kind": lambda cell: setattr(cell, "skip", nn.Softsign()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_in_a_cell_happens(what: str, calls: list[int]) -> None:
    torch.manual_seed(0)
    cell = with_statistics(grown_cell(4, LEARNERS[:1]))
    CHANGES[what](cell)  # type: ignore[arg-type]
    assert_evaluates_as_plain(OneInput(cell.double()), images(5, 4, 6, 6))
    assert calls  # the rest of the cell


def test_drop_path_that_still_trains_drops_the_same(calls: list[int]) -> None:
    torch.manual_seed(0)
    cell = with_statistics(grown_cell(4))
    cell.drop_path.train().keep = 0.5  # type: ignore[union-attr]

    class Seeded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(1)
            return cell(x, x)

    assert_evaluates_as_plain(Seeded(), images(6, 4, 6, 6))
    assert calls


def test_a_merge_of_few_pixels_is_left_to_torch(calls: list[int]) -> None:
    torch.manual_seed(0)
    cell = with_statistics(OneInput(grown_cell(16, LEARNERS[:1])))
    assert_evaluates_as_plain(cell, images(1, 16, 4, 4))
    assert 3 not in calls
    assert_evaluates_as_plain(cell, images(2, 16, 4, 4))
    assert 3 in calls


def test_gradients_traces_and_other_precisions_see_plain_ops(calls: list[int]) -> None:
    torch.manual_seed(0)
    net, x = grown("cell", 1), images(7, 3, 9, 9, dtype=torch.float32)
    (gradient,) = torch.autograd.grad(net(x.requires_grad_()).sum(), x)
    assert gradient.abs().max() > 0
    x.requires_grad_(False)
    with torch.no_grad():
        torch.jit.trace(net, x, check_trace=False)
        torch.export.export(net, (x,))
        with torch.autocast("cpu", torch.bfloat16):
            assert net(x).dtype is torch.bfloat16
        with FlopCounterMode(display=False) as counter:
            net(x)
        assert counter.get_total_flops() > 0
        with forward_ad.dual_level():
            dual = net(forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(dual).tangent
            assert tangent is not None
            assert tangent.abs().max() > 0
        _, directional = torch.func.jvp(net, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(directional, tangent)
        copy.deepcopy(net).bfloat16()(x.bfloat16())
        assert not evaluates(x.contiguous())
        assert not calls
        net(x)
    assert calls


def test_what_does_not_fit_is_never_read() -> None:
    x = images(2, 3, 4, 4)
    term, norm = value_term(x), nn.BatchNorm2d(3).double().eval()
    out, _ = sum_terms([term, term], added=x)
    torch.testing.assert_close(out, 3 * x)
    weight = torch.ones(3, 3, 1, 1, dtype=x.dtype)
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: sum_terms([term, value_term(images(2, 3, 4, 5))])),
        (ValueError, lambda: sum_terms([term, value_term(images(3, 3, 4, 4))])),
        (ValueError, lambda: sum_terms([term, value_term(images(2, 4, 4, 4))])),
        (ValueError, lambda: sum_terms([term], added=images(2, 3, 4, 5))),
        (ValueError, lambda: sum_terms([term, term], Merging(weight, norm))),
        (TypeError, lambda: sum_terms([term, value_term(x.float())])),
        (TypeError, lambda: sum_terms([term], Merging(weight.float(), norm))),
        (TypeError, lambda: sum_terms([term], added=x.float())),
        (TypeError, lambda: sum_terms([term], added=x, eta=torch.ones(()))),
    ]
    for error, call in wrong:
        with pytest.raises(error):
            call()
