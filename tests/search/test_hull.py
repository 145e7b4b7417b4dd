from __future__ import annotations

import math
import random
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from scipy.spatial import ConvexHull
from scipy.stats import chisquare

from nni_petridish.errors import SearchError
from nni_petridish.search.hull import Hull, choose_parent, lower_hull, within_band


def hull_by_definition(points: list[tuple[int, int]]) -> list[int]:
    """Keep what no other point dominates and no segment between two others touches or undercuts."""

    def dominated(i: int) -> bool:
        (x, y) = points[i]
        return any(
            (a <= x and b <= y) and ((a, b) != (x, y) or j < i) for j, (a, b) in enumerate(points)
        )

    def undercut(i: int) -> bool:
        (x, y) = points[i]
        return any(
            a < x < c and Fraction(b) + Fraction(d - b, c - a) * (x - a) <= y
            for (a, b) in points
            for (c, d) in points
        )

    found = [i for i in range(len(points)) if not dominated(i) and not undercut(i)]
    return sorted(found, key=lambda i: points[i][0])


def hull_by_scipy(points: np.ndarray) -> list[int]:
    """Keep the ends of the facets that look down and to the left."""
    hull = ConvexHull(points)
    down_left = (hull.equations[:, 0] < 0) & (hull.equations[:, 1] < 0)
    ends = set(hull.simplices[down_left].ravel().tolist())
    ends |= {int(points[:, 0].argmin()), int(points[:, 1].argmin())}
    return sorted(ends, key=lambda i: points[i, 0])


@pytest.mark.parametrize("seed", range(30))
def test_the_hull_is_the_lower_left_part_of_scipys_convex_hull(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = np.stack([rng.uniform(1e6, 1e9, 300), rng.lognormal(-3, 1, 300)], axis=1)
    assert lower_hull(points.tolist()) == hull_by_scipy(points)


@pytest.mark.parametrize("seed", range(60))
def test_ties_and_collinear_points_are_resolved_as_defined(seed: int) -> None:
    rng = random.Random(seed)
    points = [(rng.randint(0, 7), rng.randint(0, 7)) for _ in range(rng.randint(1, 25))]
    assert lower_hull(points) == hull_by_definition(points)


@pytest.mark.parametrize("seed", range(60))
def test_the_growing_hull_equals_the_batch_hull_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    if seed % 2:
        points = [(rng.randint(0, 30), rng.randint(0, 30) / 7) for _ in range(200)]
    else:
        points = [(rng.randint(1, 10**9), rng.random()) for _ in range(200)]
    order = list(range(len(points)))
    rng.shuffle(order)
    hull = Hull(tolerance=0.1)
    seen: list[int] = []
    for i in order:
        is_vertex = hull.add(i, *points[i])
        seen = sorted([*seen, i])
        so_far = [points[j] for j in seen]
        expected = [seen[j] for j in lower_hull(so_far)]
        assert hull.ids == expected
        assert is_vertex == (i in expected)
        band = [seen[j] for j in within_band(so_far, lower_hull(so_far), 0.1)]
        assert list(hull.band()) == sorted(band, key=lambda j: (points[j][1], points[j][0], j))


def test_almost_collinear_points_give_the_same_hull_in_every_order() -> None:
    # In floating point 0.1 * k is not on one line; rounding must not decide by order of arrival.
    points = [(k, 1.0 - 0.1 * k) for k in range(11)]
    expected = lower_hull(points)
    for seed in range(50):
        order = random.Random(seed).sample(range(11), 11)
        hull = Hull()
        for i in order:
            hull.add(i, *points[i])
        assert hull.ids == expected


def test_errors_that_are_not_finite_are_ignored() -> None:
    points = [(1, math.nan), (2, 0.5), (3, -math.inf), (4, math.inf), (5, 0.4), (math.nan, 0.1)]
    assert lower_hull(points) == [1, 4]
    hull = Hull(tolerance=0.5)
    assert [hull.add(i, *point) for i, point in enumerate(points)] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert hull.ids == [1, 4]
    assert within_band(points, [1, 4], 0.5) == [1, 4]


def test_no_points_and_one_point() -> None:
    assert lower_hull([]) == []
    assert lower_hull([(3, 0.2)]) == [0]
    assert list(Hull().band()) == []
    assert within_band([], [], 0.1) == []


@pytest.mark.parametrize("tolerance", [0.0, 0.025, 0.3])
def test_the_band_is_what_interpolation_says(tolerance: float) -> None:
    rng = np.random.default_rng(3)
    points = np.stack([rng.uniform(1, 100, 400), rng.uniform(0.1, 0.5, 400)], axis=1)
    hull = lower_hull(points.tolist())
    height = np.interp(points[:, 0], points[hull, 0], points[hull, 1])
    expected = set(np.flatnonzero(points[:, 1] <= height * (1 + tolerance)).tolist()) | set(hull)
    assert set(within_band(points.tolist(), hull, tolerance)) == expected


def test_a_hundred_thousand_points_take_little_time() -> None:
    rng = random.Random(0)
    hull = Hull()
    start = time.process_time()
    for i in range(100_000):
        hull.add(i, rng.randint(1, 10**9), rng.random())
    assert time.process_time() - start < 10


def paper_loop(ids: list[str], n: dict[str, int], rng: random.Random) -> str:
    while True:
        for id in ids:
            if rng.random() < 1 / (n[id] + 1):
                return id


def exact_frequencies(counts: list[int]) -> list[float]:
    """Sum the geometric series of passes with exact fractions."""
    first_pass, nothing = [], Fraction(1)
    for n in counts:
        p = Fraction(1, n + 1)
        first_pass.append(nothing * p)
        nothing *= 1 - p
    return [float(w / (1 - nothing)) for w in first_pass]


@pytest.mark.parametrize("counts", [[1], [3, 1, 2], [1, 1, 1, 1], [5, 2, 0, 1], [20, 9, 4, 50]])
def test_parents_are_chosen_as_often_as_the_formula_says(counts: list[int]) -> None:
    ids = [f"m{k}" for k in range(len(counts))]
    n = dict(zip(ids, counts, strict=True))
    draws = 20_000
    exact = exact_frequencies(counts)
    for choose in (choose_parent, paper_loop):
        rng = random.Random(1)
        seen = Counter(choose(ids, n, rng) for _ in range(draws))
        possible = [k for k, p in enumerate(exact) if p > 0]
        assert set(seen) <= {ids[k] for k in possible}
        if len(possible) > 1:
            observed = [seen[ids[k]] for k in possible]
            assert chisquare(observed, [draws * exact[k] for k in possible]).pvalue > 1e-3


def test_choosing_stays_quick_and_fair_when_models_were_chosen_very_often() -> None:
    n = {"a": 10**12, "b": 10**12}
    rng = random.Random(2)
    start = time.process_time()
    seen = Counter(choose_parent(["a", "b"], n, rng) for _ in range(10_000))
    assert time.process_time() - start < 5
    assert abs(seen["a"] - 5000) < 300


def test_a_model_never_chosen_before_shields_the_less_accurate_ones() -> None:
    rng = random.Random(0)
    assert {choose_parent(["best", "cheap"], {"cheap": 0}, rng) for _ in range(100)} == {"best"}


def test_there_must_be_something_to_choose_from() -> None:
    with pytest.raises(SearchError, match="at least 1"):
        choose_parent([], {}, random.Random(0))
