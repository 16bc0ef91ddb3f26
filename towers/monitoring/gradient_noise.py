"""The gradient noise scale, and stragglers among the towers.

The simple gradient noise scale estimates the batch size above which more examples per step do not
pay. Towers provide it without extra cost: each has the gradient of a small batch, and their mean is
that of the global batch. With true gradient G and trace S of the covariance of one example's
gradient, E|g|^2 = |G|^2 + S / b for b examples. Two batch sizes give both; the scale is S / |G|^2.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1.
"""

import collections
import math
import statistics
from collections.abc import Sequence

import numpy as np

_DECAY = 0.95  # of the averages, per point: a single estimate is mostly noise
_MAX_POINTS = 200  # older ones have no weight
# The scale is known after this many points, if the standard errors of both parts are below this
# share of them: then the ratio's error is about a third, and two of them are a factor of two.
_MIN_POINTS, _MAX_ERROR = 10, 0.25
_SLOW_FACTOR, _SLOW_POINTS = 1.25, 2  # times the usual seconds, at this many points in a row


def estimate(
    norms: Sequence[float], examples: Sequence[float], norm_of_all: float
) -> tuple[float, float] | None:
    """Return the unbiased estimates (S, |G|^2) of one step; each may be negative.

    Args:
        norms: norm of each tower's mean gradient over its own examples.
        examples: number of examples of each tower; towers without any are ignored.
        norm_of_all: norm of the mean gradient over all examples.

    Returns:
        None if fewer than two towers had examples, or a norm is infinite or NaN.
    """
    pairs = [(norm, count) for norm, count in zip(norms, examples, strict=True) if count > 0]
    if len(pairs) < 2:
        return None
    small, big = sum(norm**2 for norm, _ in pairs) / len(pairs), norm_of_all**2
    # E|g_i|^2 = |G|^2 + S * mean(1 / b_i); E|g|^2 = |G|^2 + S / B.
    of_small, of_big = sum(1 / n for _, n in pairs) / len(pairs), 1 / sum(n for _, n in pairs)
    trace = (small - big) / (of_small - of_big)
    return (trace, big - trace * of_big) if math.isfinite(trace) else None


class NoiseScale:
    """Estimates the scale as the ratio of two moving averages over points.

    Late points have more weight, since the scale grows in training. The scatter of the points gives
    the averages' standard errors: in runs of a few hundred steps that of the squared norm was 0.3
    to 0.6 of it, and other seeds changed the scale fourfold.
    """

    def __init__(self) -> None:
        """Start without points."""
        self._points: collections.deque[tuple[float, float]] = collections.deque(maxlen=_MAX_POINTS)

    def add(self, trace: float, squared_norm: float) -> None:
        """Add a point.

        Args:
            trace: S of `estimate`.
            squared_norm: |G|^2 of `estimate`.
        """
        self._points.append((trace, squared_norm))

    def examples(self) -> float | None:
        """Return the scale in examples, None while one of its parts is negative."""
        trace, squared_norm = (mean for mean, _ in self._averages())
        return trace / squared_norm if trace > 0 and squared_norm > 0 else None

    def known_examples(self) -> float | None:
        """Return the scale in examples if it is known to about a factor of two, else None."""
        known = all(error <= _MAX_ERROR * mean for mean, error in self._averages())
        return self.examples() if known and len(self._points) >= _MIN_POINTS else None

    def _averages(self) -> list[tuple[float, float]]:
        """Return (average, its standard error) of the trace and of the squared norm."""
        if len(self._points) < 2:
            return [(mean, math.inf) for mean in (*self._points, (0.0, 0.0))[0]]
        points, ages = np.array(self._points), np.arange(len(self._points))[::-1]
        share = _DECAY**ages / np.sum(_DECAY**ages)
        mean = share @ points
        scatter = np.sum((share[:, None] * (points - mean)) ** 2, axis=0)
        few = 1 - np.sum(share**2)  # n / (n - 1) for equal weights
        return list(zip(mean.tolist(), np.sqrt(scatter / few).tolist(), strict=True))

    def advice(self, batch_size: int) -> str | None:
        """Return a sentence on batch size and number of towers, None if the scale is not known."""
        examples = self.known_examples()
        if examples is None:
            return None
        if batch_size < examples / 2:
            word, then = "well above", "another tower would help, with a larger batch"
        elif batch_size <= 2 * examples:
            word, then = "near", "a good place; another tower helps most by taking part of it"
        else:
            word, then = "well below", "a smaller batch would learn as much with fewer examples"
        return f"about {examples:.0f} examples, {word} the batch size of {batch_size}: {then}"


class Stragglers:
    """Finds a tower that the others wait for, from the towers' seconds at each point.

    If towers synchronize within a step, as for BatchNorm, all times are alike and none is found.
    """

    def __init__(self, devices: Sequence[str]):
        """Take the device of each tower."""
        self._devices, self._slowest, self._points_in_a_row = list(devices), None, 0

    def line(self, seconds: Sequence[float]) -> str | None:
        """Return a line when a tower has become a straggler; 0 seconds: it had no examples."""
        known = [value for value in seconds if value > 0] or [0.0]
        # The median of all, not of the others: on devices that share cores one tower may be faster
        # than the rest. Of two, the smaller.
        usual = min(known) if len(known) == 2 else statistics.median(known)
        slowest = seconds.index(max(known)) if max(known) > _SLOW_FACTOR * usual else None
        self._points_in_a_row = self._points_in_a_row + 1 if slowest == self._slowest else 1
        self._slowest = slowest
        if slowest is None or self._points_in_a_row != _SLOW_POINTS:
            return None
        return (
            f"straggler   tower {slowest} on {self._devices[slowest]} takes {seconds[slowest]:.3f} "
            f"s a step, {usual:.3f} s is usual: all wait for it"
        )
