"""The paper's recipe for images as one dataclass, and its differences per data set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from nni_petridish.errors import ConfigError
from nni_petridish.search.constraints import Count, Device, Infinite, OneOf, Share, check_fields
from nni_petridish.tasks.recipes import named_recipe


@dataclass(frozen=True)
class Recipe:
    """The paper's CIFAR-10 recipe; the reason stands beside each value.

    Examples
    --------
    >>> Recipe(epochs=200).learning_rate(step=50, total=100, steps_per_epoch=1)
    0.0125
    >>> Recipe.named("digits", epochs=5).flip
    False
    """

    # Weak learning 80 and training after it 80; the seed model 200, a retraining 600.
    epochs: Count = 80
    batch_size: Count = 32
    # "decays from 0.025 to 0 in cosine decay"
    lr: Annotated[float, Gt(0)] = 0.025
    lr_min: Annotated[float, Ge(0)] = 0.0
    # cosine: per step, to lr_min; exponential: lr times `lr_decay` per epoch (the ImageNet runs).
    schedule: Annotated[str, OneOf(("cosine", "exponential"))] = "cosine"
    lr_decay: Annotated[float, Gt(0), Le(1)] = 0.97
    # Epochs at the full rate before it decays; told by a growth with `anneal`, not by a file.
    hold_epochs: Annotated[int, Ge(0)] = 0
    # The share of a training, its last epochs, over which the weights are averaged for evaluation
    # and for the saved model; 0 = the weights of the last step, as in the paper.
    average: Share = 0.0
    momentum: Share = 0.9
    # The authors' code; the paper does not say. Never on α and η: L1 alone decides on α.
    weight_decay: Annotated[float, Ge(0)] = 2e-4
    # Largest norm of the gradient: of the network's, and of the candidates' on its own.
    clip: Annotated[float, Gt(0), Infinite()] = 5.0
    # "the standard CIFAR-10 cut-out": side of the square, 0 = off.
    cutout: Annotated[int, Ge(0)] = 16
    # The standard CIFAR-10 augmentation: 4 pixels of padding, then a random crop and a flip.
    crop_padding: Annotated[int, Ge(0)] = 4
    flip: bool = True
    # "drop-path with probability 0.6": of keeping the deepest path at the end of training.
    drop_path_keep: Annotated[float, Gt(0), Le(1)] = 0.6
    label_smoothing: Share = 0.0
    # Weight of the auxiliary head's loss, if the network has one (retraining, as in DARTS).
    auxiliary_weight: Annotated[float, Ge(0)] = 0.4
    # bfloat16 on CUDA. It needs no loss scaling, which would distort the L1 term added to α.
    amp: bool = False
    # auto = cuda if there is one.
    device: Device = "auto"
    # The memory order in which depthwise and 1x1 convolutions are fastest, on CPUs too.
    channels_last: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lr_min > self.lr:
            raise ConfigError(f"lr_min must be at most lr ({self.lr}) but got {self.lr_min}.")

    @classmethod
    def named(cls, data: str, **changes: Any) -> Recipe:
        """Return the recipe for a data set (see `DIFFERENCES`), with `changes` made to it."""
        return named_recipe(cls, DIFFERENCES, data, changes)

    def learning_rate(self, step: int, total: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, counted from 0, out of `total`."""
        held = self.hold_epochs * steps_per_epoch
        if step < held:
            return self.lr
        step, total = step - held, total - held
        if self.schedule == "exponential":
            return max(self.lr_min, self.lr * self.lr_decay ** (step // steps_per_epoch))
        return self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * step / total)) / 2

    def check_image(self, image_shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` if the augmentation would leave nothing of such an image."""
        side = min(image_shape[1:])
        for name in ("cutout", "crop_padding"):
            if getattr(self, name) >= side:
                raise ConfigError(
                    f"{name} must be below the image's side ({side}) but got {getattr(self, name)}."
                )

    def check_batch(self, images: int, pixels: int) -> None:
        """Raise `ConfigError` if a batch gives the batch normalizations one value per channel.

        Parameters
        ----------
        images
            The number of images, which may be fewer than a batch.
        pixels
            The number of pixels in the smallest feature maps.
        """
        batch = min(self.batch_size, images)
        if batch * pixels < 2:
            raise ConfigError(
                "a batch must have at least 2 images, since the smallest feature maps have 1 pixel,"
                f" but has {batch}: batch_size is {self.batch_size}, and there are {images:,}"
                " training images."
            )


#: The differences from the CIFAR-10 recipe, by name of the data set.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "cifar10": {},
    "cifar100": {},
    # A mirrored digit is another sign, half an 8x8 image no digit; short runs of small networks
    # overfit too little for drop-path to pay.
    "digits": {
        "epochs": 10,
        "cutout": 0,
        "crop_padding": 1,
        "flip": False,
        "drop_path_keep": 1.0,
    },
    # A label may depend on every pixel, and 20,000 images are many for a small network.
    "teacher": {
        "epochs": 10,
        "cutout": 0,
        "crop_padding": 0,
        "flip": False,
        "drop_path_keep": 1.0,
    },
    "mnist": {"cutout": 0, "crop_padding": 2, "flip": False},
    # Clothes fill the image: a hole of a quarter of the side, the usual choice here.
    "fashion_mnist": {"cutout": 8, "crop_padding": 2},
    # Images of any kind: a mirrored or half hidden one may be of another class.
    "npz": {"cutout": 0, "crop_padding": 2, "flip": False},
    # ImageNet, as in the paper's transfer; crop and flip are made where the files are read.
    # Label smoothing and no drop-path: DARTS's ImageNet recipe, which the paper follows.
    "image_folder": {
        "epochs": 250,
        "batch_size": 128,
        "lr": 0.1,
        "schedule": "exponential",
        "weight_decay": 3e-5,
        "cutout": 0,
        "crop_padding": 0,
        "flip": False,
        "drop_path_keep": 1.0,
        "label_smoothing": 0.1,
    },
}
