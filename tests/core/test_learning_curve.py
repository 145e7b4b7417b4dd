from __future__ import annotations

import math
import random

import pytest

from nni_petridish.core.learning_curve import forecast_loss


def test_a_power_of_time_is_continued() -> None:
    curve = [2.0 * t**-0.5 for t in range(1, 9)]
    found = forecast_loss(range(1, 9), curve, 32)
    assert found is not None
    assert found.mean == pytest.approx(2.0 * 32**-0.5)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_a_rising_curve_stays_where_it_is() -> None:
    found = forecast_loss([1, 2, 3, 4], [1.0, 1.0, 1.2, 1.4], 100)
    assert found is not None
    assert found.mean == pytest.approx((1.0 * 1.2 * 1.4) ** (1 / 3))  # that of the last three


@pytest.mark.parametrize("losses", [[], [1.0, 0.9], [1.0, math.nan, 0.8]])
def test_short_curves_tell_nothing(losses: list[float]) -> None:
    assert forecast_loss(range(1, len(losses) + 1), losses, 10) is None


def test_the_standard_error_covers_what_comes() -> None:
    rng, covered, tries = random.Random(0), 0, 2000
    for _ in range(tries):
        curve = [t**-0.2 * math.exp(rng.gauss(0, 0.05)) for t in range(1, 13)]
        found = forecast_loss(range(1, 13), curve, 18)
        assert found is not None
        later = 18**-0.2 * math.exp(rng.gauss(0, 0.05))
        covered += abs(later - found.mean) < found.error
    # One standard error of Student's t with four degrees of freedom: 63 %; a slope that is cut off
    # at 0 makes it a little narrower.
    assert 0.57 < covered / tries < 0.69
