"""The walk of forward stagewise regression: single steps, and jumps over repeated stretches."""

from __future__ import annotations

from itertools import count
from operator import sub

import numpy as np

from ._arrays import Floats, Ints

# Without max_steps, a path of more points than this is cut short.
MAX_POINTS = 500_000
# Repetitions are looked for between batches of single steps, which grow while none is found: with
# three and more features tied, most words never come back.
_SHORTEST_BATCH, _LONGEST_BATCH = 4, 256
_LONGEST_WORD = 64


class Walk:
    """The state of the walk: the correlations c = Xᵀr, and what was done so far.

    A step is written as a letter: 2j for β_j += ε, 2j + 1 for β_j −= ε. With `positive`, the
    second is allowed only where β_j > 0. The state is kept in doubles, whatever X is.
    """

    def __init__(
        self,
        X: Floats,
        y: Floats,
        step: float,
        tol: float,
        gram: Floats | None,
        *,
        positive: bool = False,
    ) -> None:
        self.X, self.step, self.gram, self.n_samples = X, step, gram, len(y)
        self.positive = positive
        self.c = (X.T @ y).astype(np.float64)
        squared_norms = np.einsum("ij,ij->j", X, X, dtype=np.float64)
        # β in steps, known with `positive` only.
        self.counts = np.zeros(X.shape[1], dtype=np.int64)
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
            magnitude = self._magnitude()
            j = int(magnitude.argmax())
            full = max_steps is None and len(self.ends) > MAX_POINTS
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

    def _magnitude(self) -> Floats:
        """Return the correlation of each feature in the better one of its allowed directions."""
        magnitude: Floats = np.abs(self.c)
        return np.where(self.counts > 0, magnitude, self.c) if self.positive else magnitude

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
        if self.positive:
            # A feature that stays at 0 is no rival in the forbidden direction.
            resting = self.counts == 0
            resting[features] = False
            size = len(resting)
            gaps[:, size : 2 * size][:, resting] = np.inf
        closing = rates > 0
        if (gaps < 0).any() or not closing.any():
            return 0
        repeats = int(min((gaps[closing] / rates[closing]).min(), 2**62))
        return min(repeats, self._room(features, signs)) if self.positive else repeats

    def _room(self, features: Ints, signs: Ints) -> int:
        """Count how often a word can be walked with every coefficient above 0 throughout."""
        net = np.bincount(features, weights=signs, minlength=len(self.counts)).astype(np.int64)
        falling = net < 0
        if not falling.any():
            return 2**62
        rooms = (self.counts[falling] - len(features)) // -net[falling]
        return max(0, int(rooms.min()))

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
        negative = (self.c[rivals] < 0) & (magnitude[rivals] >= 0)
        alphabet = (2 * rivals + negative).tolist()
        changes = np.array([self._change(letter) for letter in alphabet])
        effects = (changes[:, rivals] * np.where(negative, -1, 1)).tolist()
        floors, values = self.floor[rivals].tolist(), magnitude[rivals].tolist()
        counts, signs = self.counts[rivals].tolist(), np.where(negative, -1, 1).tolist()
        taken, alphas = list[int](), list[float]()
        for _ in range(batch):
            best = max(values)
            k = values.index(best)
            # A correlation that changed sign and leads is for argmax to find.
            turned = best <= -min(values)
            if turned and self.positive:
                turned = any(best <= -v for v, n in zip(values, counts, strict=True) if n > 0)
            if best <= floors[k] or turned:
                break
            alphas.append(best)
            taken.append(k)
            values = list(map(sub, values, effects[k]))
            if self.positive:
                counts[k] += signs[k]
                if counts[k] == 0:
                    break
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
        if self.positive:
            features, signs = _decode(np.array(letters, dtype=np.int64))
            np.add.at(self.counts, features, times * signs)
        self.letters += letters
        self.times += [times] * len(letters)

    def _change(self, letter: int) -> Floats:
        """ε·s·G_j: what one step takes away from the correlations."""
        j = letter // 2
        if j not in self.columns:
            column = self.X.T @ self.X[:, j] if self.gram is None else self.gram[:, j]
            self.columns[j] = self.step * column.astype(np.float64)
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
        # With `positive`, no allowed step may correlate at the end: that is 0, not less.
        alphas: Floats = np.maximum(self.alphas, 0.0)[kept] / self.n_samples
        dtype = self.X.dtype
        return alphas.astype(dtype), coefs.astype(dtype), np.cumsum(steps)


def _decode(letters: Ints) -> tuple[Ints, Ints]:
    """Return feature and sign of each letter."""
    return letters // 2, 1 - 2 * (letters % 2)
