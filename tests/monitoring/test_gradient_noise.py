"""What towers tell by comparison: noise that is known is found, and a slow tower is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towers.monitoring.gradient_noise import NoiseScale, Stragglers, estimate

pytestmark = pytest.mark.unit

EVEN, SLOW = [0.1, 0.1, 0.1], [0.1, 0.1, 0.3]


def test_one_tower_has_nothing_to_compare():
    assert estimate([2.0], [64], 2.0) is None
    assert estimate([2.0, 0.0], [64, 0], 2.0) is None  # the second had no example


@given(
    trace=st.floats(0.1, 100),
    squared=st.floats(0.1, 100),
    sizes=st.lists(st.integers(1, 500), min_size=2, max_size=8),
)
def test_expected_norms_give_the_numbers_they_were_made_of(trace, squared, sizes):
    norms = [np.sqrt(squared + trace / size) for size in sizes]
    found = estimate([*norms, 0.0], [*sizes, 0], np.sqrt(squared + trace / sum(sizes)))
    assert found == pytest.approx((trace, squared), rel=1e-6)


def noise_of(points):
    noise = NoiseScale()
    for point in points:
        noise.add(*point)
    return noise


@pytest.mark.parametrize(
    "trace, words",
    [
        (1000.0, "about 1000 examples, well above the batch size of 128"),
        (128.0, "about 128 examples, near"),
        (20.0, "about 20 examples, well below"),
    ],
)
def test_the_scale_and_the_advice(trace, words):
    noise = noise_of([(trace, 1.0)] * 10)
    assert noise.examples() == noise.known_examples() == pytest.approx(trace)
    assert words in noise.advice(128)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(9.0, 1.0)] * 9,  # too few to tell how they scatter
        [(-5.0, 1.0)] * 10,  # noise hides all
        [(0.0, 1.0)] * 10,
        [(9.0, 1.0), (9.0, -0.9)] * 20,  # a small difference of large numbers
        [(9.0, 0.1)] * 9 + [(9.0, 10.0)],  # one point is most of it
    ],
)
def test_what_is_not_well_known_is_not_told(points):
    noise = noise_of(points)
    assert noise.known_examples() is noise.advice(128) is None


def test_what_is_told_is_right_to_a_factor_of_two():
    """Of runs whose squared norms scatter as those of real ones, a little or very much."""
    random = np.random.default_rng(0)
    told = []
    for scatter in 0.5, 1.0, 2.0, 4.0:
        for _ in range(50):
            points = zip(
                random.gamma(4, 100 / 4, 40), random.gamma(scatter**-2, scatter**2, 40), strict=True
            )
            told.append(noise_of(points).known_examples())
    known = [value for value in told if value is not None]
    assert 50 < len(known) < 150
    assert np.mean([50 < value < 200 for value in known]) > 0.95


@pytest.mark.parametrize(
    "points, named",
    [
        ([[0.1, 0.2, 0.12]] * 3, ["tower 1 on /gpu:1 takes 0.200 s a step, 0.120 s is"]),  # once
        ([EVEN, SLOW, EVEN, SLOW, EVEN], []),  # one slow point is nothing
        ([[0.1, 0.11, 0.12]] * 4, []),  # nor are little differences
        ([[0.08, 0.138, 0.139]] * 3, []),  # nor is one that is ahead
        ([[0.1, 0.14]] * 2, ["tower 1"]),  # of two the slower is measured by the other
        ([[0.1, 0.1, 0.2, 0.21]] * 2, ["tower 3"]),  # half of the towers are slow
        ([SLOW, SLOW, EVEN, SLOW, SLOW], ["tower 2", "tower 2"]),
        ([SLOW, SLOW, [0.3, 0.1, 0.1], [0.3, 0.1, 0.1]], ["tower 2", "tower 0"]),
        ([[0.3, 0.0, 0.0]] * 2, []),  # towers without examples are left out
        ([[0.3, 0.1, 0.0]] * 2, ["tower 0"]),
        ([[0.0, 0.0, 0.0]] * 2, []),
    ],
)
def test_a_tower_that_others_wait_for_is_named(points, named):
    watch = Stragglers([f"/gpu:{i}" for i in range(len(points[0]))])
    said = [line for point in points if (line := watch.line(point))]
    assert len(said) == len(named)
    assert all(name in line for name, line in zip(named, said, strict=True))
