"""Finished weak learners in one pass, compared with the plain ops."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.kernels import merging
from nni_petridish.kernels.native import calls as native
from nni_petridish.kernels.native.merges import Merge, MergedShortcut, MergeParameters
from nni_petridish.kernels.switch import plain_ops
from search_spaces.vision.network import Cell
from search_spaces.vision.op_registry import VISION_OPS
from search_spaces.vision.ops import ConcatProject, make_op
from search_spaces.vision.space import Shape
from tests.kernels.test_kernels import assert_same_as_plain, forward_and_backward, images
from tests.kernels.test_native import LANES, Through, _checkpointed, _with_layout_lost, pytestmark

__all__ = ["pytestmark"]
EXACT = {"rtol": 1e-7, "atol": 1e-9}
LEARNERS = (
    (("prev", "sep_conv_3x3"), ("prev_prev", "max_pool_3x3"), ("prev", "identity")),
    (("h0", "avg_pool_3x3"), ("prev", "dil_conv_5x5"), ("prev_prev", "identity")),
)


class OneInput(nn.Module):
    """A cell that reads one tensor twice."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x, x)


def grown_cell(channels: int, learners: object = LEARNERS, level: int = 0) -> Cell:
    """Return a cell with weak learners; one of level 1 halves the resolution."""
    before = Shape(channels, 0)
    cell = Cell("cell", before, before, Shape(channels, level), VISION_OPS)
    for learner in learners:  # type: ignore[attr-defined]
        cell.add_learner(learner, "concat_project")
    for learner in cell.learners:
        nn.init.constant_(learner.eta, 0.7)
        nn.init.normal_(learner.merge.norm.weight)
        nn.init.normal_(learner.merge.norm.bias)
    return cell.double()


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether h was wanted, of every merge in one pass."""
    found: list[bool] = []
    apply = Merge.forward

    def counted(self: Merge, x_k: Tensor, running: object, wants_h: bool) -> object:
        found.append(wants_h)
        return apply(self, x_k, running, wants_h)  # type: ignore[arg-type]

    monkeypatch.setattr(Merge, "forward", counted)
    return found


@pytest.mark.parametrize("level", [0, 1])
def test_any_width_and_size_equals_the_plain_ops(level: int, merges: list[bool]) -> None:
    torch.manual_seed(0)
    sizes = ((2, 3), (4, 4), (9, 17))
    for channels, size in itertools.product((2, LANES - 1, LANES, 2 * LANES + 3), sizes):
        merges.clear()
        assert_same_as_plain(
            OneInput(grown_cell(channels, level=level)), images(3, channels, *size), **EXACT
        )
        assert merges == [True, False]  # the second learner reads h of the first


@pytest.mark.parametrize("name", VISION_OPS)
@pytest.mark.parametrize("level", [0, 1])
def test_every_op_may_be_merged(name: str, level: int, merges: list[bool]) -> None:
    torch.manual_seed(0)
    learners = [(("prev", name),), (("prev_prev", name), ("prev", name))]
    cell = OneInput(grown_cell(5, learners, level))
    assert_same_as_plain(cell, images(3, 5, 6, 7), **EXACT)
    assert merges == [False, False]


def test_a_grown_cell_passes_gradcheck() -> None:
    torch.manual_seed(0)
    cell = OneInput(grown_cell(2))
    x = images(2, 2, 3, 3).requires_grad_()
    names = [key for key, _ in cell.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(cell, parameters, (x,))

    assert torch.autograd.gradcheck(run, (x, *cell.parameters()), atol=1e-6)


def test_single_precision_is_as_exact_as_the_plain_ops() -> None:
    torch.manual_seed(0)
    cell, x = OneInput(grown_cell(16)).float(), images(8, 16, 16, 16, dtype=torch.float32, mean=1.0)
    found = forward_and_backward(cell, x)
    with plain_ops():
        plain = forward_and_backward(cell, x)
        exact = forward_and_backward(copy.deepcopy(cell).double(), x.double())
    for key, value in exact.items():
        worst = (plain[key].double() - value).abs().max()
        assert (found[key].double() - value).abs().max() <= 6 * worst + 1e-5, key


def test_drop_path_draws_the_same_and_drops_the_same(merges: list[bool]) -> None:
    torch.manual_seed(0)
    cell = grown_cell(4)
    cell.drop_path.keep = 0.5

    def call(module: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return module(x)

    assert_same_as_plain(Through(OneInput(cell), call), images(6, 4, 5, 5), **EXACT)
    assert len(merges) == 2


@pytest.mark.parametrize("call", [_checkpointed, _with_layout_lost])
def test_gradients_are_right_however_the_cell_is_called(
    call: Callable[[nn.Module, Tensor], Tensor], merges: list[bool]
) -> None:
    torch.manual_seed(0)
    assert_same_as_plain(Through(OneInput(grown_cell(4)), call), images(3, 4, 6, 7), **EXACT)
    assert merges


def _hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, x, y: 2 * y)


def _odd(norm: nn.BatchNorm2d) -> None:
    norm.eps, norm.momentum = 0.3, 0.2


PLAIN_MERGES: dict[str, Callable[[WeakLearner], object]] = {
    "a hook on the learner": lambda learner: _hook(learner),
    "a hook on the merge": lambda learner: _hook(learner.merge),
    "a hook on its conv": lambda learner: _hook(learner.merge.conv),
    "a hook on its norm": lambda learner: _hook(learner.merge.norm),
    "a pruned conv": lambda learner: prune.l1_unstructured(learner.merge.conv, "weight", 0.5),
    "an odd norm": lambda learner: _odd(learner.merge.norm),
    "a frozen norm": lambda learner: learner.merge.norm.eval(),
}
FUSED_MERGES: dict[str, Callable[[WeakLearner], object]] = {
    "a hook on an op": lambda learner: _hook(learner.ops[0]),
    "a hook within an op": lambda learner: _hook(learner.ops[0][2]),
    "a hook on a pooling": lambda learner: _hook(learner.ops[1][0]),
    "a hook on the norm of an op": lambda learner: _hook(learner.ops[0][-1]),
    "an odd norm in an op": lambda learner: _odd(learner.ops[0][-1]),
    "a frozen norm in an op": lambda learner: learner.ops[1][-1].eval(),
    "an unknown op": lambda learner: learner.ops.__setitem__(0, nn.Softsign()),
    "an affine op": lambda learner: learner.ops.__setitem__(1, make_op("max_pool_3x3", 4, 1, True)),
}


@pytest.mark.parametrize("what", [*PLAIN_MERGES, *FUSED_MERGES])
def test_what_was_changed_in_a_learner_happens(what: str, merges: list[bool]) -> None:
    torch.manual_seed(0)
    cell = grown_cell(4, LEARNERS[:1])
    (PLAIN_MERGES | FUSED_MERGES)[what](cell.learners[0])
    module, x = OneInput(cell.double()), images(3, 4, 6, 6)
    states = [copy.deepcopy(module.state_dict()) for _ in range(2)]

    def gradients(state: dict[str, Tensor]) -> list[Tensor | None]:
        module.load_state_dict(state)
        module.zero_grad()
        module(x).sin().sum().backward()
        return [*(p.grad for p in module.parameters()), *(b.clone() for b in module.buffers())]

    found = gradients(states[0])
    assert bool(merges) == (what in FUSED_MERGES)
    with plain_ops():
        torch.testing.assert_close(found, gradients(states[1]), **EXACT)


def test_a_site_with_its_own_drop_path_is_computed_by_plain_ops(merges: list[bool]) -> None:
    class Halved(Cell):
        def drop(self, shortcut: tuple[str, str], value: Tensor) -> Tensor:
            return value / 2

    torch.manual_seed(0)
    cell = grown_cell(4)
    cell.__class__ = Halved
    assert_same_as_plain(OneInput(cell), images(3, 4, 6, 6), **EXACT)
    assert not merges


def test_the_gradient_of_h_alone_is_right() -> None:
    torch.manual_seed(0)
    cell, x = grown_cell(4, LEARNERS[:1]), images(3, 4, 6, 6)
    weight = torch.randn(3, 4, 6, 6, dtype=torch.float64)

    def gradients() -> tuple[Tensor, ...]:
        inputs = {"prev": x, "prev_prev": x}
        learner = cell.learners[0]
        boosted = learner.boost(x, inputs, cell.drop_factors, True)
        h = learner(inputs, cell.drop) if boosted is None else boosted[1]
        used = [p for name, p in learner.named_parameters() if name != "eta"]
        return torch.autograd.grad((h * weight).sum(), used)

    found = gradients()
    with plain_ops():
        torch.testing.assert_close(found, gradients(), **EXACT)


def test_threads_change_rounding_at_most() -> None:
    torch.manual_seed(0)
    cell, x = OneInput(grown_cell(16)).float(), images(7, 16, 9, 9, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = forward_and_backward(cell, x)
        torch.set_num_threads(3)
        many, again = forward_and_backward(cell, x), forward_and_backward(cell, x)
    finally:
        torch.set_num_threads(threads)
    for key, value in one.items():
        torch.testing.assert_close(many[key], value, rtol=1e-4, atol=1e-4)
        assert torch.equal(many[key], again[key])


def test_what_does_not_fit_is_never_read() -> None:
    x = images(2, 3, 4, 4)
    parameters = MergeParameters(
        *(torch.ones(shape, dtype=x.dtype) for shape in ((), (3, 3, 1, 1), (3,), (3,)))
    )
    moments = native.moments(x)
    good = Merge([MergedShortcut(x, moments, None)], parameters, 1e-5, 0.1)
    running = [(), ()]
    assert torch.isfinite(good.forward(x, running, True).out).all()
    short = x[0, 0, 0, :2]
    wrong: list[tuple[type[Exception], Merge]] = [
        (
            ValueError,
            Merge([MergedShortcut(images(2, 3, 4, 5), None, None)], parameters, 1e-5, 0.1),
        ),
        (ValueError, Merge([MergedShortcut(x, (short, short), None)], parameters, 1e-5, 0.1)),
        (ValueError, Merge([MergedShortcut(x, None, short[:1])], parameters, 1e-5, 0.1)),
        (ValueError, Merge([*good.shortcuts, *good.shortcuts], parameters, 1e-5, 0.1)),
        (ValueError, Merge(good.shortcuts, parameters._replace(beta=short), 1e-5, 0.1)),
        (TypeError, Merge([MergedShortcut(x.float(), None, None)], parameters, 1e-5, 0.1)),
    ]
    for error, merge in wrong:
        with pytest.raises(error):
            merge.forward(x, running, True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        Merge([MergedShortcut(x[:1, :, :1, :1], None, None)], parameters, 1e-5, 0.1).forward(
            x[:1, :, :1, :1], running, True
        )


def test_one_value_per_channel_is_left_to_torch() -> None:
    merge = ConcatProject(3, 1).double()
    assert merging.can_merge(images(2, 3, 1, 2), merge, 1)
    assert not merging.can_merge(images(1, 3, 1, 1), merge, 1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        OneInput(grown_cell(3, level=1))(images(1, 3, 2, 2))
