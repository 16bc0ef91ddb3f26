"""The gradient noise scale, against gradients whose noise is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towers.monitoring.noise_scale import NoiseScale, advice, estimate


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


def test_noise_that_hides_all_gives_no_number():
    assert NoiseScale().examples() is None
    for pair in (5.0, -0.1), (-5.0, 0.1):
        scale = NoiseScale()
        scale.add(*pair)
        assert scale.examples() is None


@pytest.mark.parametrize(
    ("examples", "words"),
    [
        (1000.0, ["about 1000 examples", "another tower would help", "3 towers", "=192"]),
        (128.0, ["about 128 examples", "good place"]),
        (20.0, ["about 20 examples", "--batch_size=20", "only by taking a part"]),
        (0.4, ["--batch_size=2 "]),
        (None, ["cannot be told"]),
    ],
)
def test_the_advice(examples, words):
    line = advice(examples, 128, 2)
    assert all(word in line for word in words)
    assert "\n" not in line
