"""Image classification as a task: the vision space, images, and a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from nni_petridish.core.complexity import count_multiply_adds
from nni_petridish.registry import ERROR, Measure
from nni_petridish.tasks.loop import History, LoopOptions
from nni_petridish.tasks.space_task import SpaceTask
from nni_petridish.tasks.task import Record
from nni_petridish.tasks.vision.data import DataSet
from nni_petridish.tasks.vision.inference import image_facts
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.splits import Split, steps_per_epoch
from nni_petridish.tasks.vision.training import evaluate, fit

if TYPE_CHECKING:
    from search_spaces import VisionSpace


@dataclass(frozen=True)
class VisionTask(SpaceTask):
    """Image classification with the paper's recipe.

    Parameters
    ----------
    space
        The space of networks.
    data
        Training, validation and test images; only `test` looks at the test images.
    recipe
        The recipe of training; its number of epochs is replaced by that of each phase.
    """

    space: VisionSpace
    data: DataSet
    recipe: Recipe

    measure: ClassVar[Measure] = ERROR

    def __post_init__(self) -> None:
        self.recipe.check_batch(len(self.data.train), self.space.smallest_map)

    def _fit(
        self, net: nn.Module, recipe: Recipe, seed: int, **options: Unpack[LoopOptions]
    ) -> History:
        validation = self.data.validation
        return fit(net, self.data.train, recipe, seed=seed, validation=validation, **options)

    def steps(self, epochs: int) -> int:
        """Return the number of steps in so many epochs."""
        return epochs * steps_per_epoch(len(self.data.train), self.recipe.batch_size)

    def evaluate(self, net: nn.Module) -> Record:
        """Return error, accuracy and loss on the validation images."""
        return self._metrics(net, self.data.validation)

    def test(self, net: nn.Module) -> Record:
        """Return the same on the test images, for the report on a finished model."""
        return self._metrics(net, self.data.test)

    def operations(self, net: nn.Module, epochs: int) -> int:
        """Return the forward multiply-adds of so many epochs, candidates included."""
        images = self.steps(epochs) * self.recipe.batch_size
        return images * count_multiply_adds(net, self.space.image_shape, candidates=True)

    def data_facts(self) -> dict[str, Any]:
        """Return normalization, range of pixels and class names."""
        return image_facts(self.data)

    def validation_losses(self, net: nn.Module) -> Iterator[Tensor]:
        """Yield differentiable parts of the validation loss, which is their sum."""
        device, n = next(net.parameters()).device, len(self.data.validation)
        split = self.data.validation.to(device)
        for raw, labels in split.batches(self.recipe.batch_size):
            yield F.cross_entropy(net(split.normalize(raw)), labels, reduction="sum") / n

    def _metrics(self, net: nn.Module, split: Split) -> Record:
        metrics = evaluate(net, split, self.recipe)
        return {"error": metrics.error, "accuracy": metrics.accuracy, "loss": metrics.loss}
