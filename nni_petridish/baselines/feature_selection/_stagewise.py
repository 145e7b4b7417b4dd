"""Forward stagewise linear regression (FSLR): many steps of size ε, each on one feature.

The paper's starting point: at every step the feature that correlates most with the residual gets
its weight changed by ±ε. The walk is exact and costs O(p) a step, because the correlations are
kept up to date by columns of the Gram matrix; and where it repeats itself (one feature again and
again, two in a zig-zag, several in turn) the whole stretch is jumped over at once.
"""

from __future__ import annotations

import warnings
from itertools import count
from operator import sub
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array

from nni_petridish.errors import ConfigError

from ._arrays import Floats, Ints, checked_x_y

Path = tuple[Floats, list[int], Floats]

# Without max_steps, a path of more points than this is cut short with a warning.
_MAX_POINTS = 500_000
# Repetitions are looked for between batches of single steps, which grow while none is found: with
# three and more features tied, most words never come back.
_SHORTEST_BATCH, _LONGEST_BATCH = 4, 256
_LONGEST_WORD = 64


@overload
def forward_stagewise_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    step: float = ...,
    max_steps: int | None = ...,
    tol: float = ...,
    Gram: ArrayLike | Literal["auto"] | None = ...,
    max_points: int | None = ...,
    return_path: bool = ...,
    return_steps: Literal[False] = ...,
) -> Path: ...


@overload
def forward_stagewise_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    step: float = ...,
    max_steps: int | None = ...,
    tol: float = ...,
    Gram: ArrayLike | Literal["auto"] | None = ...,
    max_points: int | None = ...,
    return_path: bool = ...,
    return_steps: Literal[True],
) -> tuple[Floats, list[int], Floats, Ints]: ...


def forward_stagewise_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    step: float = 0.01,
    max_steps: int | None = None,
    tol: float = 0.0,
    Gram: ArrayLike | Literal["auto"] | None = "auto",
    max_points: int | None = None,
    return_path: bool = True,
    return_steps: bool = False,
) -> Any:
    """Compute the path of forward stagewise linear regression.

    From β = 0, repeat: ``j = argmax |X_jᵀ r|``, ``β_j += step · sign(X_jᵀ r)`` with
    ``r = y − Xβ``. It ends when such a step would no longer reduce ‖r‖, when no
    ``|X_jᵀ r| / n_samples`` exceeds `tol`, or after `max_steps`.

    As in :func:`sklearn.linear_model.lars_path` nothing is centered or scaled here, and `step` is
    in the units of the coefficients.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features)
        Input data, usually centered and of equal column norms.
    y : array-like of shape (n_samples,)
        Target, usually centered.
    step : float, default=0.01
        ε: by how much one coefficient changes in one step.
    max_steps : int, optional
        The largest number of steps; those jumped over count like any other. By default none, but
        a path of more than 500 000 points ends with a warning.
    tol : float, default=0.0
        Stop when the largest ``|X_jᵀ r| / n_samples`` is at most this.
    Gram : "auto" or array-like of shape (n_features, n_features), default="auto"
        ``XᵀX`` if known already. Otherwise its columns are computed as features enter.
    max_points : int, optional
        Keep at most this many points of the path, evenly spread, the first and the last among
        them. All by default.
    return_path : bool, default=True
        If False, return only the last point of the path.
    return_steps : bool, default=False
        If True, also return how many steps lie behind each point.

    Returns
    -------
    alphas : ndarray of shape (n_points,)
        Largest absolute correlation with the residual, over n_samples, at each point.
    active : list of int
        Features in the order in which they first moved.
    coefs : ndarray of shape (n_features, n_points)
        Coefficients along the path. A stretch that was jumped over has no points inside: there
        the path is straight (one feature) or within `step` of straight (several in turn).
    steps : ndarray of shape (n_points,)
        Only with ``return_steps=True``. ``steps * step`` is the L1 arc length of the path.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> alphas, active, coefs = forward_stagewise_path(X, y - y.mean(), step=1.0)
    >>> active[:5]
    [2, 8, 3, 6, 1]
    """
    features, target = checked_x_y(X, y)
    if not step > 0 or not np.isfinite(step):
        raise ConfigError(f"step must be positive and finite but got {step}.")
    if max_steps is not None and max_steps < 0:
        raise ConfigError(f"max_steps cannot be negative but got {max_steps}.")
    if not tol >= 0:
        raise ConfigError(f"tol cannot be negative but got {tol}.")

    if max_points is not None and max_points < 2:
        raise ConfigError(f"max_points must be at least 2 but got {max_points}.")

    walk = _Walk(features, target, step, tol, _checked_gram(Gram, features.shape[1]))
    walk.run(max_steps)
    if max_steps is None and not walk.converged:
        left = walk.alphas[-1] / len(target)
        warnings.warn(
            f"forward stagewise stopped after {_MAX_POINTS} points with correlations up to "
            f"{left:.3g} left; increase step (now {step}) or set max_steps.",
            ConvergenceWarning,
            stacklevel=2,
        )
    alphas, coefs, steps = walk.path(max_points if return_path else 2)
    if not return_path:
        alphas, coefs, steps = alphas[-1:], coefs[:, -1], steps[-1:]
    return (alphas, walk.active, coefs, steps) if return_steps else (alphas, walk.active, coefs)


def _checked_gram(gram: ArrayLike | str | None, n_features: int) -> Floats | None:
    if gram is None or isinstance(gram, str):
        if gram not in (None, "auto"):
            raise ConfigError(f"Gram must be 'auto', None or an array but got {gram!r}.")
        return None
    array: Floats = check_array(gram, dtype=np.float64, input_name="Gram")
    if array.shape != (n_features, n_features):
        raise ConfigError(f"Gram must have shape {(n_features, n_features)} but got {array.shape}.")
    return array


class _Walk:
    """The state of the walk: the correlations c = Xᵀr, and what was done so far.

    A step is written as a letter: 2j for β_j += ε, 2j + 1 for β_j −= ε.
    """

    def __init__(self, X: Floats, y: Floats, step: float, tol: float, gram: Floats | None) -> None:
        self.X, self.step, self.gram, self.n_samples = X, step, gram, len(y)
        self.c = X.T @ y
        squared_norms = np.einsum("ij,ij->j", X, X)
        # No step changes any correlation by more (Cauchy-Schwarz).
        self.largest_change = step * float(squared_norms.max())
        # The step on j changes ‖r‖² by −2ε|c_j| + ε²‖X_j‖²: not a reduction below this |c_j|.
        self.floor = np.maximum(step / 2 * squared_norms, tol * len(y))
        self.columns: dict[int, Floats] = {}
        self.letters: list[int] = []
        self.times: list[int] = []
        self.ends: list[int] = [0]
        self.seen: dict[int, int] = {}
        self.alphas: list[float] = []
        self.active: list[int] = []
        self.converged = False

    def run(self, max_steps: int | None) -> None:
        """Walk until no step helps, `max_steps` are done or the path has too many points."""
        left = 2**62 if max_steps is None else max_steps
        batch = _SHORTEST_BATCH
        while True:
            magnitude = np.abs(self.c)
            j = int(magnitude.argmax())
            full = max_steps is None and len(self.ends) > _MAX_POINTS
            self.converged = bool(magnitude[j] <= self.floor[j])
            if self.converged or full or left <= 0:
                self.alphas.append(float(magnitude[j]))
                return
            word = self._word_before(2 * j + (self.c[j] < 0))
            repeats = min(self._repeats(word), left // len(word)) if word else 0
            if repeats:
                self.alphas.append(float(magnitude[j]))
                self._jump(word, repeats)
                left -= repeats * len(word)
            else:
                left -= self._walk(magnitude, float(magnitude[j]), min(batch, left))
            batch = _SHORTEST_BATCH if repeats > 2 else min(2 * batch, _LONGEST_BATCH)

    def _word_before(self, letter: int) -> list[int]:
        """Return what was done since `letter` was last taken, if it was done twice in a row."""
        length = len(self.letters) - self.seen.get(letter, -_LONGEST_WORD)
        if length > _LONGEST_WORD:
            return []
        word = self.letters[-length:]
        return word if self.letters[-2 * length : -length] == word else []

    def _repeats(self, word: list[int]) -> int:
        """Count how often `word` can be walked from here with every step the one argmax would take.

        After r words, the correlations before letter t are C_t − r·D, so "(j, s) is the argmax"
        is a linear inequality in r for each rival feature and sign. The last repetition is left
        out: there rounding could decide, and argmax itself should.
        """
        features, signs = _decode(np.array(word))
        changes = np.array([self._change(letter) for letter in word])
        before = self.c - np.vstack([np.zeros_like(self.c), np.cumsum(changes, axis=0)[:-1]])
        drift = changes.sum(axis=0)
        lead = (signs * before[np.arange(len(word)), features])[:, None]
        lead_drift = (signs * drift[features])[:, None]
        gaps = np.hstack([lead - before, lead + before, lead - self.floor[features][:, None]])
        rates = np.hstack([lead_drift - drift, lead_drift + drift, lead_drift])
        closing = rates > 0
        if (gaps < 0).any() or not closing.any():
            return 0
        return int(min((gaps[closing] / rates[closing]).min(), 2**62))

    def _jump(self, word: list[int], repeats: int) -> None:
        self._note(word, repeats)
        for letter in word:
            self.c -= repeats * self._change(letter)
        self.ends.append(len(self.letters))

    def _walk(self, magnitude: Floats, level: float, batch: int) -> int:
        """Make up to `batch` single steps, and return how many.

        Only features that could become the largest meanwhile take part, as plain floats: for a
        handful that is several times faster than arrays.
        """
        rivals = np.flatnonzero(magnitude >= level - 2 * batch * self.largest_change)
        alphabet = (2 * rivals + (self.c[rivals] < 0)).tolist()
        changes = np.array([self._change(letter) for letter in alphabet])
        effects = (changes[:, rivals] * np.where(self.c[rivals] < 0, -1, 1)).tolist()
        floors, values = self.floor[rivals].tolist(), magnitude[rivals].tolist()
        taken, alphas = list[int](), list[float]()
        for _ in range(batch):
            best = max(values)
            k = values.index(best)
            # A correlation that changed sign and leads is for argmax to find.
            if best <= floors[k] or best <= -min(values):
                break
            alphas.append(best)
            taken.append(k)
            values = list(map(sub, values, effects[k]))
        self.c -= np.bincount(taken, minlength=len(rivals)) @ changes
        self.alphas += alphas
        self.ends += range(len(self.letters) + 1, len(self.letters) + len(taken) + 1)
        self._note([alphabet[k] for k in taken], 1)
        return len(taken)

    def _note(self, letters: list[int], times: int) -> None:
        for letter in dict.fromkeys(letters):
            if letter not in self.seen and letter ^ 1 not in self.seen:
                self.active.append(letter // 2)
            self.seen[letter] = -1
        self.seen.update(zip(letters, count(len(self.letters)), strict=False))
        self.letters += letters
        self.times += [times] * len(letters)

    def _change(self, letter: int) -> Floats:
        """ε·s·G_j: what one step takes away from the correlations."""
        j = letter // 2
        if j not in self.columns:
            column = self.X.T @ self.X[:, j] if self.gram is None else self.gram[:, j]
            self.columns[j] = self.step * column
        return -self.columns[j] if letter % 2 else self.columns[j]

    def path(self, max_points: int | None) -> tuple[Floats, Floats, Ints]:
        """Return alphas, coefficients and step counts at the start and after every jump."""
        n_points = len(self.ends)
        size = min(n_points, max_points or n_points)
        kept = np.linspace(0, n_points - 1, size).round().astype(int)
        features, signs = _decode(np.array(self.letters, dtype=np.int64))
        times = np.array(self.times, dtype=np.int64)
        # The first kept point at which each letter has been walked.
        columns = np.searchsorted(np.array(self.ends)[kept], np.arange(1, len(times) + 1))
        counts = np.zeros((self.X.shape[1], size), dtype=np.int64)
        np.add.at(counts, (features, columns), signs * times)
        steps = np.bincount(columns, weights=times, minlength=size).astype(np.int64)
        # Whole steps are counted, so coefficients carry no accumulated rounding.
        coefs: Floats = np.cumsum(counts, axis=1) * np.float64(self.step)
        alphas: Floats = np.array(self.alphas)[kept] / self.n_samples
        return alphas, coefs, np.cumsum(steps)


def _decode(letters: Ints) -> tuple[Ints, Ints]:
    """Return feature and sign of each letter."""
    return letters // 2, 1 - 2 * (letters % 2)
