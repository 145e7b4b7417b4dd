"""Write MNIST-1D, signals of ten classes, as an .npz file for a search.

Needs its package: ``pip install mnist1d``. A longer signal has the same shapes in more samples, so
that a network has to see further.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_ZERO, _SCALE = 128, 32  # of the whole numbers from 0 to 255 for values of about -4 to 4


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="such as data/mnist1d.npz")
    parser.add_argument("--length", type=int, default=40, metavar="N", help="samples of a signal")
    parser.add_argument("--training", type=int, default=4000, metavar="N", help="training signals")
    parser.add_argument("--test", type=int, default=1000, metavar="N", help="test signals")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="of all signals")
    asked = parser.parse_args()

    made = make(asked.length, asked.training, asked.test, asked.seed)
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        asked.file,
        x_train=to_images(made["x"]),
        y_train=made["y"],
        x_test=to_images(made["x_test"]),
        y_test=made["y_test"],
    )


def make(
    length: int = 40, training: int = 4000, test: int = 1000, seed: int = 42
) -> dict[str, Array]:
    """Return x, y, x_test and y_test."""
    from mnist1d.data import get_dataset_args, make_dataset

    settings = get_dataset_args()
    settings.seed = seed
    settings.final_seq_length = length
    settings.num_samples = training + test
    settings.train_split = training / settings.num_samples
    made: dict[str, Array] = make_dataset(settings)
    return made


def to_images(signals: Array) -> npt.NDArray[np.uint8]:
    """Return signals as images of height 1."""
    pixels = np.rint(_ZERO + _SCALE * signals)
    return np.clip(pixels, 0, 255).astype(np.uint8)[:, None, :]


if __name__ == "__main__":
    main()
