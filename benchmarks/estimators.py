"""`GrowingClassifier` beside scikit-learn's classifiers and a plain network, on embedded sets.

Every method gets the same splits. The grown network comes first, with a limit of multiply-adds and
a number of models. The others then get what it took: its processor time as a limit, and networks of
at most its multiply-adds. The plain network, a CNN on images and an MLP with batch norm on tables,
uses all of that time for one training with a cosine schedule, on all examples; the grown network
sets 15 % aside. scikit-learn's classifiers stop by their own rules, mostly earlier.

Times are processor times of one thread, so that other work on the machine distorts them little.
Finished fits are kept in a folder, and the script goes on from there.

    python benchmarks/estimators.py --out runs/estimators
    python benchmarks/estimators.py --out runs/estimators --fashion-mnist FOLDER --table table.md
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from estimator_sets import Array, Load, Split, available, split
from scipy import stats
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from nni_petridish import GrowingClassifier, count_multiply_adds
from nni_petridish.gallery.files import write_file

GROWN = "GrowingClassifier"
BATCH = 64


@dataclass(frozen=True)
class Fit:
    """The result of one method on one split."""

    set: str
    seed: int
    method: str
    error: float
    multiply_adds: int | None
    seconds: float


class Cnn(nn.Sequential):
    """Four 3x3 convolutions with batch norm, two and two around a pooling."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        def block(c_in: int, c_out: int) -> Iterator[nn.Module]:
            yield from (nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out))
            yield nn.ReLU()

        super().__init__(
            *block(channels, width),
            *block(width, width),
            nn.MaxPool2d(2),
            *block(width, 2 * width),
            *block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, classes),
        )


class Mlp(nn.Sequential):
    """Two hidden layers with batch norm."""

    def __init__(self, features: int, classes: int, width: int) -> None:
        layers = [
            layer
            for size in (features, width)
            for layer in (nn.Linear(size, width), nn.BatchNorm1d(width), nn.ReLU())
        ]
        super().__init__(*layers, nn.Linear(width, classes))


def largest(make: Callable[[int], int], limit: int) -> int:
    """Return the largest width whose size is within the limit; sizes increase with the width."""
    width = 1
    while make(width + 1) <= limit:
        width += 1
    return width


def standardized(part: Split) -> tuple[Tensor, Tensor]:
    """Return inputs by feature, or by channel, with mean 0 and variance 1 in training."""
    axes = (0, *range(2, part.X.ndim)) if part.X.ndim == 4 else (0,)
    if part.X.ndim == 3:
        axes = (0, 1, 2)
    mean, scale = (f(part.X, axis=axes, keepdims=True) for f in (np.mean, np.std))
    both = [(X - mean) / np.where(scale > 0, scale, 1.0) for X in (part.X, part.X_test)]
    tensors = [torch.from_numpy(X).float() for X in both]
    if part.X.ndim == 3:
        tensors = [X[:, None] for X in tensors]
    return tensors[0], tensors[1]


def fit_plain(part: Split, seed: int, limit: int, seconds: float) -> tuple[float, int]:
    """Train a plain network for so much processor time; return its test error and its size."""
    torch.manual_seed(seed)
    X, X_test = standardized(part)
    y, classes = torch.from_numpy(part.y).long(), int(part.y.max()) + 1
    kind, shape = (Cnn if part.is_image else Mlp), tuple(X.shape[1:])

    def size(width: int) -> int:
        return count_multiply_adds(kind(shape[0], classes, width), shape)

    net = kind(shape[0], classes, largest(size, limit))
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=3e-4)
    began, steps, progress = time.process_time(), max(1, len(X) // BATCH), 0.0
    while progress < 1:
        net.train()
        for chosen in torch.randperm(len(X)).tensor_split(steps):
            # The schedule follows the processor time, so that it ends with the budget.
            progress = min(1.0, (time.process_time() - began) / seconds)
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * 0.5 * (1 + np.cos(np.pi * progress))
            optimizer.zero_grad()
            F.cross_entropy(net(X[chosen]), y[chosen]).backward()
            optimizer.step()
            if progress >= 1:
                break
    net.eval()
    with torch.no_grad():
        found = torch.cat([net(each) for each in X_test.split(1024)]).argmax(1).numpy()
    return float(np.mean(found != part.y_test)), count_multiply_adds(net, shape)


def fit_mlp(part: Split, seed: int, limit: int, seconds: float) -> tuple[float, int]:
    """Train `MLPClassifier` with its defaults, but for its width, until it converges or time is up.

    Each call of ``partial_fit`` is an epoch; it ends as ``fit`` does, when the loss has not fallen
    by ``tol`` for ten epochs.
    """
    X, X_test = (X.reshape(len(X), -1) for X in (part.X, part.X_test))
    scaler = StandardScaler().fit(X)
    X, classes = scaler.transform(X), np.unique(part.y)

    def size(width: int) -> int:
        return width * (X.shape[1] + width + len(classes))

    width = largest(size, limit)
    net = MLPClassifier((width, width), random_state=seed)
    began, best, stalled = time.process_time(), np.inf, 0
    while stalled < net.n_iter_no_change and time.process_time() - began < seconds:
        net.partial_fit(X, part.y, classes=classes)
        stalled = stalled + 1 if net.loss_ > best - net.tol else 0
        best = min(best, net.loss_)
    error = float(np.mean(net.predict(scaler.transform(X_test)) != part.y_test))
    return error, size(width)


def fit_grown(part: Split, seed: int, max_models: int) -> tuple[float, int]:
    """Grow with the defaults, within the limit of multiply-adds."""
    grown = GrowingClassifier(
        max_multiply_adds=part.limit, max_models=max_models, random_state=seed
    ).fit(part.X, part.y)
    return 1 - float(grown.score(part.X_test, part.y_test)), grown.model_.multiply_adds


def fit_boosting(part: Split, seed: int) -> tuple[float, None]:
    """Train `HistGradientBoostingClassifier` with its defaults."""
    X, X_test = (X.reshape(len(X), -1) for X in (part.X, part.X_test))
    found = HistGradientBoostingClassifier(random_state=seed).fit(X, part.y).predict(X_test)
    return float(np.mean(found != part.y_test)), None


@dataclass(frozen=True)
class Budget:
    """The cost of the grown network; before it is there, its own limits."""

    max_models: int
    multiply_adds: int
    seconds: float = float("inf")


Method = Callable[[Split, int, Budget], tuple[float, int | None]]
METHODS: dict[str, Method] = {
    GROWN: lambda part, seed, has: fit_grown(part, seed, has.max_models),
    "plain network": lambda part, seed, has: fit_plain(part, seed, has.multiply_adds, has.seconds),
    "MLPClassifier": lambda part, seed, has: fit_mlp(part, seed, has.multiply_adds, has.seconds),
    "HistGradientBoosting": lambda part, seed, has: fit_boosting(part, seed),
}
Fits = dict[tuple[str, int, str], Fit]


def file_name(key: tuple[str, int, str]) -> str:
    return "-".join(map(str, key)).replace(" ", "_") + ".json"


def read(folder: Path) -> Fits:
    fits = [Fit(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return {(fit.set, fit.seed, fit.method): fit for fit in fits}


def run(sets: dict[str, Load], seeds: Sequence[int], max_models: int, folder: Path) -> Fits:
    """Carry out the fits that are missing in the folder; return all of these sets and seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    known, fits = read(folder), Fits()
    with tqdm(total=len(sets) * len(seeds) * len(METHODS), unit="fit") as bar:
        for name, load in sets.items():
            X, y = load()
            for seed in seeds:
                part = split(X, y, seed)
                budget = Budget(max_models, part.limit)
                for method, fit in METHODS.items():
                    bar.set_description(f"{name}, seed {seed}, {method}")
                    key = (name, seed, method)
                    if key not in known:
                        began = time.process_time()
                        error, size = fit(part, seed, budget)
                        known[key] = Fit(*key, error, size, time.process_time() - began)
                        write_file(folder / file_name(key), json.dumps(vars(known[key])).encode())
                    fits[key] = known[key]
                    if method == GROWN:
                        size = fits[key].multiply_adds or part.limit
                        budget = Budget(max_models, size, fits[key].seconds)
                    bar.update()
    return fits


def table(fits: Fits) -> str:
    """Return errors, paired differences, and sizes and times as Markdown.

    A seed counts if all methods have it.
    """
    seeds: dict[str, list[int]] = {}
    for name, seed in dict.fromkeys((name, seed) for name, seed, _ in fits):
        if all((name, seed, method) in fits for method in METHODS):
            seeds.setdefault(name, []).append(seed)

    def values(name: str, method: str, field: str) -> Array:
        found = [getattr(fits[name, seed, method], field) for seed in seeds[name]]
        return np.array([np.nan if value is None else value for value in found], dtype=float)

    def error(name: str, method: str) -> str:
        return f"{100 * values(name, method, 'error').mean():.2f}"

    def difference(name: str, method: str) -> str:
        paired = 100 * (values(name, method, "error") - values(name, GROWN, "error"))
        if len(paired) < 2:
            return f"{paired.mean():+.2f}"
        half = stats.t.ppf(0.975, len(paired) - 1) * stats.sem(paired)
        return f"{paired.mean():+.2f} ± {half:.2f}"

    def cost(name: str, method: str) -> str:
        size = values(name, method, "multiply_adds").mean()
        seconds = f"{values(name, method, 'seconds').mean():.1f} s"
        return seconds if np.isnan(size) else f"{size:,.0f}; {seconds}"

    parts = {
        "Mean test error in %": error,
        "Error of the others minus that of GrowingClassifier, in percent points, paired by split,"
        " with 95 % intervals of Student's t": difference,
        "Mean multiply-adds; processor time": cost,
    }
    lines: list[str] = []
    for title, cell in parts.items():
        shown = [method for method in METHODS if cell is not difference or method != GROWN]
        lines += [f"{title}:", "", f"| set | seeds | {' | '.join(shown)} |"]
        lines += ["| --- " * (len(shown) + 2) + "|"]
        for name, used in seeds.items():
            cells = " | ".join(cell(name, method) for method in shown)
            lines.append(f"| {name} | {len(used)} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished fits")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--sets", nargs="+", help="names of sets; all by default")
    parser.add_argument("--models", type=int, default=3, help="models that a search trains")
    parser.add_argument("--fashion-mnist", metavar="FOLDER", help="in torchvision's layout")
    parser.add_argument("--table", type=Path, help="file to write the tables to")
    parser.add_argument("--finished", action="store_true", help="only tables of the finished fits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = available(options.fashion_mnist)
    chosen = {name: sets[name] for name in options.sets or sets}
    done = read(options.out) if options.finished else {}
    text = table(done or run(chosen, options.seeds, options.models, options.out))
    print(text)
    if options.table:
        write_file(options.table, text.encode())


if __name__ == "__main__":
    main()
