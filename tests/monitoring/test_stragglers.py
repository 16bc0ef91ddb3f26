"""A tower that the others wait for is named, once, and not for one slow point."""

import pytest

from towers.monitoring.stragglers import Stragglers

EVEN, SLOW = [0.1, 0.1, 0.1], [0.1, 0.1, 0.3]


def lines(*points):
    watch = Stragglers([f"/gpu:{i}" for i in range(len(points[0]))])
    return [watch.line(point) for point in points]


def test_the_slow_tower_is_named_once_with_its_device_and_times():
    first, second, third = lines(*[[0.1, 0.2, 0.12]] * 3)
    assert first is None and third is None
    assert "tower 1 on /gpu:1" in second and "0.200" in second and "0.120" in second


@pytest.mark.parametrize(
    ("points", "named"),
    [
        ([EVEN, SLOW, EVEN, SLOW, EVEN], []),  # one slow point is nothing
        ([[0.1, 0.11, 0.12]] * 4, []),  # nor are little differences
        ([[0.08, 0.138, 0.139]] * 3, []),  # nor is one that is ahead
        ([[0.1, 0.14]] * 2, [1]),  # of two the slower is measured by the other
        ([[0.1, 0.1, 0.2, 0.21]] * 2, [3]),  # half of the towers are slow
        ([SLOW, SLOW, EVEN, SLOW, SLOW, [0.3, 0.1, 0.1], [0.3, 0.1, 0.1]], [2, 2, 0]),
        ([[0.3, 0.0, 0.0]] * 2, []),  # towers without examples are left out
        ([[0.3, 0.1, 0.0]] * 2, [0]),
        ([[0.11, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]] * 2, []),
        ([[0.0, 0.0, 0.0]] * 2, []),
    ],
)
def test_who_is_named(points, named):
    said = [line for line in lines(*points) if line]
    assert [int(line.split("tower ")[1].split()[0]) for line in said] == named
