"""What towers tell by comparison: noise that is known is found, and a slow tower is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towers.monitoring.comparison import NoiseScale, Stragglers, estimate

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


@pytest.mark.parametrize(
    ("trace", "scale", "words"),
    [
        (1000.0, 1000.0, "about 1000 examples, well above the batch size of 128"),
        (128.0, 128.0, "about 128 examples, near"),
        (20.0, 20.0, "about 20 examples, well below"),
        (-5.0, None, "cannot be told"),  # noise hides all
        (0.0, None, "cannot be told"),
    ],
)
def test_the_scale_and_the_advice(trace, scale, words):
    noise = NoiseScale()
    noise.add(trace, 1.0)
    assert noise.examples() == (scale and pytest.approx(scale))
    assert words in noise.advice(128)


@pytest.mark.parametrize(
    ("points", "named"),
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
