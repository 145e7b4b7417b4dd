"""The recipe of trainings on arrays, readable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from nni_petridish.search.constraints import Count, Share, check_fields


@dataclass(frozen=True)
class ArrayRecipe:
    """The recipe of a training: SGD with momentum and a cosine schedule.

    Parameters
    ----------
    epochs
        The number of epochs.
    batch_size
        The least number of examples of a step, if there are so many; batch norm needs two.
    lr, momentum, weight_decay
        Options of SGD; the learning rate decreases to 0.
    clip
        The largest norm of the gradients of the network, and of those of its candidates.
    average
        The share of a training, its last epochs, over which the weights are averaged for evaluation
        and for the saved model; 0 for none.
    """

    epochs: Count = 20
    batch_size: Annotated[int, Ge(2)] = 64
    lr: Annotated[float, Gt(0)] = 0.05
    momentum: Share = 0.9
    weight_decay: Annotated[float, Ge(0)] = 3e-4
    clip: Annotated[float, Gt(0)] = 5.0
    average: Share = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
