"""The objects that the contracts are tested on; to test a new one, list it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish import Genotype, make_growable
from nni_petridish.core.genotype import Learner
from nni_petridish.core.space import Space
from nni_petridish.nni_adapter.user_spaces.genotype import ChoiceGenotype
from nni_petridish.tasks.arrays.task import ArrayTask
from nni_petridish.tasks.arrays.training import ArrayRecipe, Examples
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.language.task import RecurrentTask
from nni_petridish.tasks.language.text import Corpus
from nni_petridish.tasks.task import Task
from nni_petridish.tasks.vision.data import DataSet
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.splits import TensorSplit, pixel_statistics
from nni_petridish.tasks.vision.task import VisionTask
from search_spaces import RecurrentSpace, VisionSpace
from search_spaces.any_model.genotype import ModelGenotype
from search_spaces.linear import LinearGenotype, LinearSpace
from search_spaces.recurrent.genotype import RecurrentGenotype
from search_spaces.vector import VectorSpace
from search_spaces.vector.genotype import VectorGenotype
from search_spaces.vision.genotype import VisionGenotype
from search_spaces.vision.op_registry import VISION_OPS

Additions = dict[str, Learner]


@dataclass(frozen=True)
class ListedGenotype:
    """A family of genotypes: a seed, one growth, and growths that it must refuse."""

    seed: Genotype
    additions: Additions
    refused: tuple[Additions, ...] = ()


GENOTYPES = {
    "vision, cell": ListedGenotype(
        VisionGenotype.seed(),
        {"reduce": (("prev", "identity"), ("prev_prev", "sep_conv_3x3"))},
        (
            {"stem": (("prev", "identity"),)},
            {"normal": (("h0", "identity"),)},
            {"normal": (("prev", "none"),)},
            {"normal": ()},
        ),
    ),
    "vision, macro": ListedGenotype(
        VisionGenotype.seed("macro", 2, "weighted_sum"),
        {"cell_01": (("prev", "max_pool_3x3"),)},
        ({"normal": (("prev", "identity"),)}, {"cell_00": (("h0", "identity"),)}),
    ),
    "recurrent": ListedGenotype(
        RecurrentGenotype.seed(),
        {"cell": (("s1", "tanh"),)},
        (
            {"normal": (("s0", "tanh"),)},
            {"cell": (("s2", "tanh"),)},
            {"cell": (("s0", "none"),)},
            {"cell": (("s0", "relu"), ("s1", "relu"))},
        ),
    ),
    "model": ListedGenotype(
        ModelGenotype.seed({"b": ["a"], "c": ["a", "b"]}, ["identity"]),
        {"c": (("b", "identity"),)},
        (
            {"a": (("b", "identity"),)},
            {"b": (("h0", "identity"),)},
            {"b": (("c", "identity"),)},
            {"b": (("a", "relu"),)},
        ),
    ),
    # Any label is valid here; the space checks it.
    "nni": ListedGenotype(ChoiceGenotype(), {"label": (("0", "conv"),)}, ({"label": ()},)),
    "linear": ListedGenotype(
        LinearGenotype.seed(),
        {"prediction": (("x2", "identity"),)},
        (
            {"normal": (("x0", "identity"),)},
            {"prediction": (("h0", "identity"),)},
            {"prediction": (("x0", "relu"),)},
        ),
    ),
    "vector": ListedGenotype(
        VectorGenotype.seed(2),
        {"cell_01": (("prev", "tanh"), ("prev_prev", "identity"))},
        (
            {"cell_02": (("prev", "relu"),)},
            {"cell_00": (("h0", "relu"),)},
            {"cell_00": (("prev", "sep_conv_3x3"),)},
            {"cell_00": ()},
        ),
    ),
}


@dataclass(frozen=True)
class ListedSpace:
    """A space, an input of its networks, and their loss on it.

    Parameters
    ----------
    make
        Makes the space: NNI's are read when they are made.
    inputs, targets
        One batch.
    loss
        From (outputs, targets).
    i_max
        How many shortcuts a growth adds.
    plain
        Whether the space is made of plain data, so that its description is complete.
    """

    make: Callable[[], Space]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Any, Tensor], Tensor] = field(default=F.cross_entropy)
    i_max: int = 2
    plain: bool = True


@dataclass(frozen=True)
class _ModelSpace:
    """Networks that `make_growable` makes of an ordinary module, as a space."""

    def _grow(self, genotype: Genotype | None) -> Any:
        stages = [
            nn.Sequential(nn.Conv2d(c_in, 4, 3, stride, 1, bias=False), nn.BatchNorm2d(4))
            for c_in, stride in ((2, 1), (4, 2), (4, 1))
        ]
        module = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
        example = torch.zeros(1, 2, 8, 8)
        if genotype is not None:
            return make_growable(module, example, genotype=genotype)
        ops = ["sep_conv_3x3", "identity"]
        return make_growable(module, example, sites=["1", "2"], sources=["0", "1"], ops=ops)

    def seed(self) -> Genotype:
        genotype: Genotype = self._grow(None).genotype
        return genotype

    def build(self, genotype: Genotype) -> nn.Module:
        net: nn.Module = self._grow(self.check(genotype))
        return net

    def check(self, genotype: Genotype) -> Genotype:
        return ModelGenotype.require(genotype)

    def describe(self) -> dict[str, Any]:
        return {}

    def size(self, net: nn.Module) -> tuple[int, int]:
        from nni_petridish import count_multiply_adds, count_parameters

        return count_multiply_adds(net, (2, 8, 8)), count_parameters(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        return (torch.zeros(1, 2, 8, 8),)


def _user_space() -> Space:
    from nni_petridish.nni_adapter.user_spaces.space import UserSpace
    from tests.support.nni_spaces import Tabular

    return UserSpace(Tabular, (5, 4))


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _classes(*shape: int) -> Tensor:
    return torch.randint(4, shape, generator=torch.Generator().manual_seed(1))


def _language_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0].flatten(0, 1), targets.flatten())


def _square_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.flatten(), targets)


_IMAGES, _LABELS = _randn(6, 2, 8, 8), _classes(6)
SPACES = {
    "vision, cell": ListedSpace(
        lambda: VisionSpace((2, 8, 8), 4, cells_per_stage=1, filters=4, stages=2), _IMAGES, _LABELS
    ),
    "vision, macro": ListedSpace(
        lambda: VisionSpace(
            (2, 8, 8),
            4,
            cells_per_stage=1,
            filters=4,
            stages=2,
            mode="macro",
            merge="weighted_sum",
            ops=["sep_conv_3x3", "identity"],
        ),
        _IMAGES,
        _LABELS,
    ),
    "recurrent": ListedSpace(
        lambda: RecurrentSpace(4, embedding=5, hidden=6, max_nodes=3),
        _classes(7, 3),
        _classes(7, 3),
        _language_loss,
        i_max=1,
    ),
    "linear": ListedSpace(
        lambda: LinearSpace(3, mean=(0.5, 0.0, -1.0)),
        _randn(6, 3).double(),
        _randn(6).double(),
        _square_loss,
    ),
    "model": ListedSpace(_ModelSpace, _IMAGES, _LABELS),
    "vector": ListedSpace(lambda: VectorSpace(5, 4, width=6, num_cells=2), _randn(6, 5), _LABELS),
    "vector, one cell": ListedSpace(
        lambda: VectorSpace(
            5, 1, width=3, num_cells=1, ops=["tanh", "identity"], merge="weighted_sum"
        ),
        _randn(6, 5),
        _randn(6),
        _square_loss,
    ),
    "nni": ListedSpace(_user_space, _randn(6, 5), _randn(6), _square_loss, plain=False),
}

OPS = VISION_OPS
"""The ops on images."""


def _vision_task() -> Task:
    def split(n: int, seed: int) -> TensorSplit:
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(0, 256, (n, 2, 8, 8), dtype=torch.uint8, generator=generator)
        labels = torch.randint(4, (n,), generator=generator)
        raw = raw.contiguous(memory_format=torch.channels_last)
        return TensorSplit(raw, labels, *pixel_statistics(raw))

    space = VisionSpace((2, 8, 8), 4, cells_per_stage=1, filters=4, stages=2)
    recipe = Recipe(epochs=2, batch_size=8, cutout=3, crop_padding=1, device="cpu")
    data = DataSet("made", (2, 8, 8), 4, split(24, 0), split(10, 1), split(10, 2))
    return VisionTask(space, data, recipe)


def _language_task() -> Task:
    words, texts = 7, [_classes(n) for n in (200, 90, 90)]
    corpus = Corpus("made", tuple(map(str, range(words))), *texts)
    recipe = LanguageRecipe(epochs=2, batch_size=4, evaluation_batch=3, bptt=8, device="cpu")
    return RecurrentTask(RecurrentSpace(words, 6), corpus, recipe)


def _array_task() -> Task:
    weights = _classes(20).float() + 1
    examples = Examples(_randn(20, 5), _classes(20), weights)
    recipe = ArrayRecipe(epochs=2, batch_size=8)
    return ArrayTask(VectorSpace(5, 4, width=6), examples, examples, recipe, testing=examples)


TASKS: dict[str, Callable[[], Task]] = {
    "vision": _vision_task,
    "language": _language_task,
    "arrays": _array_task,
}
