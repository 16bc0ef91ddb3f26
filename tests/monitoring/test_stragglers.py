"""A tower that the others wait for is named, once, and not for one slow point."""

from towers.monitoring.stragglers import Stragglers

DEVICES = ["/gpu:0", "/gpu:1", "/gpu:2"]


def lines(*points):
    watch = Stragglers(DEVICES)
    return [watch.line(point) for point in points]


def test_the_slow_tower_is_named_with_its_device_and_times():
    first, second, third = lines(*[[0.1, 0.2, 0.12]] * 3)
    assert first is None and third is None
    assert "tower 1 on /gpu:1" in second and "0.200" in second and "0.120" in second


def test_one_slow_point_is_nothing():
    even = [0.1, 0.1, 0.1]
    assert lines(even, [0.1, 0.1, 0.3], even, [0.1, 0.1, 0.3], even) == [None] * 5


def test_little_differences_are_nothing():
    assert lines(*[[0.1, 0.11, 0.12]] * 4) == [None] * 4


def test_one_tower_that_is_ahead_makes_no_straggler_of_the_last():
    assert lines(*[[0.08, 0.138, 0.139]] * 3) == [None] * 3


def test_of_two_the_slower_is_measured_by_the_other():
    watch = Stragglers(DEVICES[:2])
    assert [bool(watch.line([0.1, 0.14])) for _ in range(2)] == [False, True]


def test_half_of_the_towers_are_slow():
    watch = Stragglers([f"/gpu:{i}" for i in range(4)])
    said = [watch.line([0.1, 0.1, 0.2, 0.21]) for _ in range(2)]
    assert said[0] is None and "tower 3" in said[1]


def test_it_is_said_again_when_it_comes_back_or_is_another():
    slow, even, other = [0.1, 0.1, 0.3], [0.1, 0.1, 0.1], [0.3, 0.1, 0.1]
    said = lines(slow, slow, even, slow, slow, other, other)
    assert [bool(line) for line in said] == [False, True, False, False, True, False, True]
    assert "tower 0" in said[-1]


def test_towers_without_examples_or_times_are_left_out():
    assert lines([0.3, 0.0, 0.0], [0.3, 0.0, 0.0]) == [None, None]
    assert "tower 0" in lines([0.3, 0.1, 0.0], [0.3, 0.1, 0.0])[1]
    assert lines(*[[0.11, 0.0, 0.1]] * 2) == [None, None]
    few = Stragglers(["/gpu:0"] * 5)
    assert [few.line([0.11, 0.1, 0.1, 0.0, 0.0]) for _ in range(2)] == [None, None]
    few = Stragglers(["/gpu:0"] * 8)
    assert [few.line([0.11, 0.1, 0.1] + [0.0] * 5) for _ in range(2)] == [None, None]
    assert lines([0.0] * 3, [0.0] * 3) == [None, None]
