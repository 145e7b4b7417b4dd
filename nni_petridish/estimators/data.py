"""From arrays as users have them to examples: merged, standardized, split."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nni_petridish.tasks.arrays.training import Examples

Floats = NDArray[np.float64]
_FEW = 20
"""The number of examples below which none are set aside: they validate as well."""


@dataclass(frozen=True)
class Scaling:
    """Mean and scale of each feature, or of each channel of images, and of the targets.

    Parameters
    ----------
    mean, scale
        Of the inputs, in a shape that broadcasts with one input.
    target_mean, target_scale
        Of the numbers to predict; 0 and 1 for classes.
    """

    mean: Floats
    scale: Floats
    target_mean: float = 0.0
    target_scale: float = 1.0

    def inputs(self, X: Floats) -> Floats:
        """Return standardized inputs; a constant feature becomes 0."""
        scaled: Floats = (X - self.mean) / self.scale
        return scaled

    @classmethod
    def of(cls, X: Floats, weights: Floats, targets: Floats | None) -> Scaling:
        """Measure inputs, and targets unless they are classes, by weight."""
        axes = (0,) if X.ndim == 2 else (0, 2, 3)
        spread = weights.reshape(-1, *[1] * (X.ndim - 1)) / weights.sum()
        cells = X.size // (len(X) * X.shape[1])
        mean = (X * spread).sum(axis=axes, keepdims=True)[0] / cells
        variance = (np.square(X - mean) * spread).sum(axis=axes, keepdims=True)[0] / cells
        if targets is None:
            return cls(mean, _scale(variance, mean))
        target_mean = np.average(targets, weights=weights)
        target_variance = np.average(np.square(targets - target_mean), weights=weights)
        target_scale = _scale(target_variance, target_mean)
        return cls(mean, _scale(variance, mean), float(target_mean), float(target_scale))


def _scale(variance: Any, mean: Any) -> Any:
    """Return the standard deviation, or 1 where it is nothing but rounding."""
    scale = np.sqrt(variance)
    return np.where(scale > 10 * np.finfo(np.float64).eps * np.abs(mean), scale, 1.0)


def merged(X: Floats, y: Any, weights: Floats) -> tuple[Floats, Any, Floats]:
    """Merge equal examples, add up their weights, and put them in an order of their own.

    So a weight of 2 is the same as an example given twice, to the bit, a weight of 0 the same as
    none, and the order of the examples does not matter.
    """
    places: dict[bytes, list[int]] = {}
    for i in range(len(X)):
        # Adding 0 makes -0.0 the same as 0.0.
        content = (X[i] + 0.0).tobytes() + (y[i] + 0).tobytes()
        places.setdefault(hashlib.blake2b(content, digest_size=16).digest(), []).append(i)
    ordered = [places[key] for key in sorted(places)]
    first = [same[0] for same in ordered]
    return X[first], y[first], np.array([weights[same].sum() for same in ordered])


def split(
    X: Floats, y: Any, weights: Floats, fraction: float, seed: int, scaling: Scaling
) -> tuple[Examples, Examples]:
    """Return training and validation examples, standardized.

    Of each class the fraction is set aside, of numbers to predict that of their whole. A class of
    one example trains.
    """
    aside = _set_aside(y, fraction, np.random.default_rng(seed))
    train = ~aside
    if not aside.any() or train.sum() < 2:
        aside = train = np.ones(len(X), dtype=bool)
    return _examples(X, y, weights, train, scaling), _examples(X, y, weights, aside, scaling)


def _set_aside(y: Any, fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    aside = np.zeros(len(y), dtype=bool)
    if len(y) < _FEW:
        return aside
    groups = [np.flatnonzero(y == label) for label in np.unique(y)]
    if y.dtype != np.int64:
        groups = [np.arange(len(y))]
    for members in groups:
        count = min(round(fraction * len(members)), len(members) - 1)
        aside[rng.permutation(members)[:count]] = True
    return aside


def _examples(
    X: Floats, y: Any, weights: Floats, chosen: NDArray[np.bool_], scaling: Scaling
) -> Examples:
    rows = np.flatnonzero(chosen)
    if len(rows) == 1:
        rows = np.repeat(rows, 2)  # batch norm needs two
    targets = y[rows]
    if targets.dtype != np.int64:
        targets = ((targets - scaling.target_mean) / scaling.target_scale).astype(np.float32)
    return Examples(
        torch.from_numpy(scaling.inputs(X[rows]).astype(np.float32)),
        torch.from_numpy(targets),
        torch.from_numpy(weights[rows].astype(np.float32)),
    )
