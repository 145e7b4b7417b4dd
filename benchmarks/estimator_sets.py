"""The sets of `estimators.py`: scikit-learn's embedded ones, generated ones, and two if present."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.model_selection import train_test_split
from torch.nn import functional as F

Array = NDArray[Any]
Load = Callable[[], tuple[NDArray[Any], NDArray[Any]]]
IMAGE_LIMIT, TABLE_LIMIT = 2_000_000, 20_000


class Split(NamedTuple):
    """Examples of one seed."""

    X: Array
    y: Array
    X_test: Array
    y_test: Array

    @property
    def is_image(self) -> bool:
        return self.X.ndim > 2

    @property
    def limit(self) -> int:
        return IMAGE_LIMIT if self.is_image else TABLE_LIMIT


def california_like() -> tuple[Array, Array]:
    """Return quarters of a price that depends on a place and five more features, some without use.

    As in California's housing data there are eight features, and prices differ from town to town.
    """
    n = 3000
    place, town = datasets.make_blobs(n, centers=15, cluster_std=0.7, random_state=0)
    rest, price = datasets.make_friedman1(n, n_features=6, noise=1.0, random_state=0)
    level = np.random.default_rng(0).normal(scale=3.0, size=15)[town]
    total = price + level
    return np.hstack([place, rest]), np.digitize(total, np.quantile(total, [0.25, 0.5, 0.75]))


def photo_patches() -> tuple[Array, Array]:
    """Return gray patches of scikit-learn's two photographs, and which one they are from."""
    side, parts = 8, []
    for name in ("china.jpg", "flower.jpg"):
        gray = datasets.load_sample_image(name).mean(axis=2)
        rows, columns = (size // side for size in gray.shape)
        cut = gray[: rows * side, : columns * side].reshape(rows, side, columns, side)
        patches = cut.swapaxes(1, 2).reshape(-1, side, side)
        spread = patches.std(axis=(1, 2), keepdims=True)
        parts.append((patches - patches.mean(axis=(1, 2), keepdims=True)) / (spread + 1.0))
    return np.concatenate(parts), np.repeat([0, 1], [len(part) for part in parts])


def fashion_mnist(root: str) -> tuple[Array, Array]:
    """Return 6,000 images of Fashion-MNIST in 14 x 14 pixels."""
    from torchvision.datasets import FashionMNIST

    data = FashionMNIST(root, train=True)
    chosen = np.random.default_rng(0).permutation(len(data))[:6000]
    images = data.data[chosen].float()[:, None]
    return F.avg_pool2d(images, 2)[:, 0].numpy(), data.targets.numpy()[chosen]


def mnist_1d() -> tuple[Array, Array]:
    """Return MNIST-1D, which its package generates."""
    from mnist_1d import make

    made = make()
    return made["x"], made["y"]


def embedded(load: Callable[..., Any]) -> Load:
    return lambda: load(return_X_y=True)


def digits() -> tuple[Array, Array]:
    X, y = datasets.load_digits(return_X_y=True)
    return X.reshape(-1, 8, 8), y


def available(fashion_root: str | None) -> dict[str, Load]:
    found: dict[str, Load] = {
        "iris": embedded(datasets.load_iris),
        "wine": embedded(datasets.load_wine),
        "breast cancer": embedded(datasets.load_breast_cancer),
        "California-like": california_like,
        "hypercube": lambda: datasets.make_classification(
            2000, 20, n_informative=8, n_classes=4, n_clusters_per_class=2, random_state=0
        ),
        "spheres": lambda: datasets.make_gaussian_quantiles(
            n_samples=2000, n_features=10, n_classes=3, random_state=0
        ),
        "digits": digits,
        "photo patches": photo_patches,
    }
    if importlib.util.find_spec("mnist1d"):
        found["MNIST-1D"] = mnist_1d
    if fashion_root:
        found["Fashion-MNIST"] = lambda: fashion_mnist(fashion_root)
    return found


def split(X: Array, y: Array, seed: int) -> Split:
    """Set 30 % aside for the test."""
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.3, random_state=seed, stratify=y)
    return Split(X, y, X_test, y_test)
