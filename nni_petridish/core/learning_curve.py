"""Learning curves: what training a network on would bring, with its uncertainty.

At a constant learning rate the held-out loss of a network falls about like a power of its training
time t, over a few doublings:

    ln L(t) = a − b·ln t + noise.

Least squares on the second half of the curve gives a, b and the spread s of the noise. The loss at
a later t* is then forecast as exp(a − b·ln t*). Its logarithm has the usual standard error of a
prediction, s·√(1 + 1/n + (ln t* − mean)²/Σ(ln t − mean)²), and the forecast that error times
itself. A curve that rises is forecast to stay where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LEAST = 3
"""The smallest number of points of a curve: two determine a line, and one more its spread."""


class Forecast(NamedTuple):
    """A number that is expected, and its standard error."""

    mean: float
    error: float


def forecast_loss(times: Sequence[float], losses: Sequence[float], later: float) -> Forecast | None:
    """Forecast the loss of a network that is trained on; None if its curve is too short.

    Parameters
    ----------
    times
        Positive times, ascending.
    losses
        The held-out loss at each of them.
    later
        The time to forecast for.

    Examples
    --------
    >>> curve = [2.0 * t**-0.5 for t in range(1, 9)]
    >>> round(forecast_loss(range(1, 9), curve, 16).mean, 3)
    0.5
    """
    kept = max(LEAST, math.ceil(len(times) / 2))
    points = [
        (math.log(t), math.log(loss))
        for t, loss in zip(times[-kept:], losses[-kept:], strict=True)
        if math.isfinite(loss) and loss > 0
    ]
    n = len(points)
    if n < LEAST:
        return None
    mean_x = math.fsum(x for x, _ in points) / n
    mean_y = math.fsum(y for _, y in points) / n
    square = math.fsum((x - mean_x) ** 2 for x, _ in points)
    slope = min(0.0, math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / square)
    rest = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    distance = math.log(later) - mean_x
    spread = math.sqrt(rest / (n - 2)) * math.sqrt(1 + 1 / n + distance**2 / square)
    mean = math.exp(mean_y + slope * distance)
    return Forecast(mean, mean * spread)
