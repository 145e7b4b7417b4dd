"""Settings of a first search that fit some images: minutes on a few cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nni_petridish.errors import DataError
from nni_petridish.registry import Suggestion
from nni_petridish.tasks.vision.data import DATA_NAMES, count_training_images, describe
from nni_petridish.tasks.vision.folder import classes_of, find_image_size, holds_images
from search_spaces.vision.size import seed_size
from search_spaces.vision.space import VisionSpace

_FEWEST_IMAGES = 12
_MOST_IMAGES = 10_000
"""More training images are not used in a first search."""
_PASSES = 12_000
"""Images that the seed sees in its training."""
_GROWN = 20
"""Models up to so many times the seed are grown further."""
_READERS_START = 0.6
"""Seconds that four reading processes take to start, in each epoch, on two quiet cores."""


def suggest_for_images(source: str, root: str | None) -> Suggestion | None:
    """Return settings for images, None if the source is nothing of the kind."""
    data = _find(source, root)
    if data is None:
        return None
    name, images = str(data["name"]), count_training_images(data["name"], data.get("root"))
    if images < _FEWEST_IMAGES:
        raise DataError(
            f"{source} must have at least {_FEWEST_IMAGES} training images but has {images}."
        )
    described = describe(name, data.get("root"))
    side = min(described.image_shape[1:])
    validation = max(1, min(5000, images // (5 if images < 500 else 10)))
    data |= {"validation": validation}
    kept = images - validation
    if kept > _MOST_IMAGES:
        data["limit"] = kept = _MOST_IMAGES
    if name == "image_folder" and kept * _reading_seconds(side) < _READERS_START:
        data["workers"] = 0  # few small images are read before other processes have started
    space: dict[str, Any] = {
        "mode": "cell",
        "cells_per_stage": 1,
        "filters": 8 if side < 24 else 16,
        "stages": max(1, min(3, side.bit_length() - 1)),
        "stem": "imagenet" if side >= 128 else "plain",
    }
    multiply_adds, _ = seed_size(VisionSpace(*described, **space))
    epochs = max(2, min(20, round(_PASSES / kept)))
    settings: dict[str, Any] = {
        "seed_epochs": epochs,
        "weak_epochs": max(2, epochs // 2),
        "final_epochs": epochs,
        "limits": {
            "max_models": 8,
            "max_growths": 4,
            "max_multiply_adds": _rounded(_GROWN * multiply_adds),
            "max_seconds": 1800,
        },
    }
    shape = "x".join(str(size) for size in described.image_shape)
    found = f"{images:,} training images of {described.num_classes} classes, {shape}"
    notes = [f"{validation:,} of the training images are set aside for validation."]
    if name == "image_folder":
        notes.append(f"{data['root']}/val is the test set: the search never looks at it.")
    return Suggestion(found, tuple(notes), space, data, settings, _recipe(name, side, kept))


def _reading_seconds(side: int) -> float:
    """Return about how long one image takes to be read and cropped."""
    return 4e-4 + 1e-7 * side**2


def _recipe(name: str, side: int, images: int) -> dict[str, Any]:
    recipe: dict[str, Any] = {"batch_size": 32 if images >= 500 else 16, "lr": 0.05}
    if name == "image_folder":  # the recipe of the data is ImageNet's: 250 epochs of large batches
        recipe |= {"schedule": "cosine", "weight_decay": 0.0003, "label_smoothing": 0.0}
    elif side <= 16 and name != "digits":
        recipe["cutout"] = 0
    if side == 1:  # a signal
        recipe["crop_padding"] = 0
    return recipe


def _find(source: str, root: str | None) -> dict[str, Any] | None:
    """Return the options of the data that a source names."""
    names = {name.replace("_", ""): name for name in DATA_NAMES if name not in _OWN}
    named = names.get(source.lower().replace("_", "").replace("-", ""))
    if named is not None:
        return {"name": named, **({} if root is None else {"root": root})}
    path = Path(source).expanduser()
    if path.suffix == ".npz":
        return {"name": "npz", "root": str(path)}
    if classes_of(path / "train") or classes_of(path / "val"):
        return {"name": "image_folder", "root": str(path), "image_size": find_image_size(path)}
    if holds_images(path):
        raise DataError(
            f"{path} holds one folder per class; move most images of each class to"
            f" {path / 'train'}/CLASS and some, the test set, to {path / 'val'}/CLASS."
        )
    return None


_OWN = ("image_folder", "npz")


def _rounded(number: float) -> int:
    """Return a number with two digits that count."""
    return int(float(f"{number:.1e}"))
