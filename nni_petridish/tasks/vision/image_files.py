"""The image sets that fit in memory, read from their files into arrays.

Each reader takes the folder and a seed, and returns training images, training labels, test images
and test labels: uint8 (N, C, H, W) and whole numbers.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import DataError

if TYPE_CHECKING:
    import numpy as np

Arrays = tuple["np.ndarray", "np.ndarray", "np.ndarray", "np.ndarray"]

#: Selects the test set of the digits, which does not depend on the seed of a search.
_DIGITS_TEST_SEED = 0
_DIGITS_TEST = 300


def read_digits(root: Path, seed: int) -> Arrays:
    """Read scikit-learn's digits; `seed` orders the training images."""
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, None]  # whole numbers 0 ... 16
    labels = digits.target
    # Sorted by writer: a split in this order would test on unseen handwritings only.
    order = np.random.default_rng(_DIGITS_TEST_SEED).permutation(len(labels))
    train, test = order[:-_DIGITS_TEST], order[-_DIGITS_TEST:]
    train = np.random.default_rng(seed).permutation(train)
    return images[train], labels[train], images[test], labels[test]


def read_mnist(dataset: str, root: Path, seed: int) -> Arrays:
    """Read MNIST or a set of its form by the name of torchvision's class."""
    from torchvision import datasets

    arrays = []
    for train in (True, False):
        try:
            part = getattr(datasets, dataset)(str(root), train=train, download=False)
        except Exception as error:  # torchvision's readers assert, or raise whatever they meet
            folder = root / dataset / "raw"
            raise DataError(f"{folder} cannot be read: {error!r}; get it anew.") from None
        arrays += [part.data.numpy()[:, None], part.targets.numpy()]
    return arrays[0], arrays[1], arrays[2], arrays[3]


def read_cifar(
    folder: str, train: tuple[str, ...], test: tuple[str, ...], key: str, root: Path, seed: int
) -> Arrays:
    """Read CIFAR from the pickles `train` and `test`, labels under `key`."""
    import numpy as np

    def part(files: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        contents = [_unpickle_arrays(root / folder / file) for file in files]
        try:
            images = np.concatenate([np.asarray(c["data"], np.uint8) for c in contents])
            labels = np.concatenate([np.asarray(c[key], np.int64) for c in contents])
            return images.reshape(-1, 3, 32, 32), labels
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{root / folder} is not a CIFAR folder: {error!r}") from None

    return (*part(train), *part(test))


def _unpickle_arrays(path: Path) -> Any:
    """Read a pickle that may hold arrays and plain values, and can run nothing else.

    CIFAR comes as pickles, and a pickle may name any function to call. torchvision trusts those
    whose md5 it knows; this reader needs not trust, so converted copies can be read as well.
    """
    import numpy as np

    reconstruct = np.empty(0).__reduce__()[0]
    allowed = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,
        # Python 3 writes bytes in this way in protocol 2.
        ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
    }

    class ArrayUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            try:
                return allowed[module, name]
            except KeyError:
                raise pickle.UnpicklingError(f"it names {module}.{name}") from None

    try:
        with path.open("rb") as file:
            return ArrayUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path} is not a pickle of plain arrays: {error}.") from None
