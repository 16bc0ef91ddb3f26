"""What comparing the towers tells: how noisy gradients are, and which tower the others wait for.

The simple gradient noise scale says at which batch size more examples a step stop to pay. Towers
give it for nothing: each has a gradient of a small batch, their mean is that of the whole. With G
the true gradient and S the trace of one example's covariance, a batch of b examples has the
expected squared norm |G|^2 + S / b. Two sizes of batch give both, and the scale is S / |G|^2.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1.
"""

import math
import statistics
from collections.abc import Sequence

_DECAY = 0.95  # of the averages, per point: one point's estimate is mostly noise
_SLOWER, _POINTS = 1.25, 2  # times what is usual, at so many points in a row


def estimate(
    norms: Sequence[float], examples: Sequence[float], norm_of_all: float
) -> tuple[float, float] | None:
    """Return the unbiased estimates (S, |G|^2) of one step; each may well be negative.

    Args:
        norms: of each tower's mean gradient, over its own examples.
        examples: numbers of examples; towers with none are left out.
        norm_of_all: of the mean gradient over all examples.

    Returns:
        None if fewer than two towers had examples, or a norm is infinite or NaN.
    """
    pairs = [(norm, count) for norm, count in zip(norms, examples, strict=True) if count > 0]
    if len(pairs) < 2:
        return None
    small, big = sum(norm**2 for norm, _ in pairs) / len(pairs), norm_of_all**2
    # What the towers' mean squared norm has of S, and what that of all has.
    of_small, of_big = sum(1 / n for _, n in pairs) / len(pairs), 1 / sum(n for _, n in pairs)
    trace = (small - big) / (of_small - of_big)
    return (trace, big - trace * of_big) if math.isfinite(trace) else None


class NoiseScale:
    """Averages the estimates of points, numerator and denominator apart, as their ratio."""

    _trace = _squared_norm = 0.0

    def add(self, trace: float, squared_norm: float) -> None:
        """Take one point's estimates in."""
        self._trace = _DECAY * self._trace + (1 - _DECAY) * trace
        self._squared_norm = _DECAY * self._squared_norm + (1 - _DECAY) * squared_norm

    def examples(self) -> float | None:
        """Return the scale in examples; None while noise hides one of the two."""
        known = self._trace > 0 and self._squared_norm > 0
        return self._trace / self._squared_norm if known else None

    def advice(self, batch_size: int) -> str:
        """Return one sentence on the global batch size, and on another tower."""
        examples = self.examples()
        if examples is None:
            return "cannot be told from these steps: the gradients are mostly noise, or agree fully"
        if batch_size < examples / 2:
            word, then = "well above", "another tower would help, with a larger batch"
        elif batch_size <= 2 * examples:
            word, then = "near", "a good place; another tower helps most by taking part of it"
        else:
            word, then = "well below", "a smaller batch would learn as much with fewer examples"
        return f"about {examples:.0f} examples, {word} the batch size of {batch_size}: {then}"


class Stragglers:
    """Watches the towers' times, point after point, and names one that the others wait for.

    Where towers meet within a step, as with BatchNorm over all of them, each waits for the slowest
    there: their times are alike, and none is named.
    """

    def __init__(self, devices: Sequence[str]):
        """Watch the towers on these devices."""
        self._devices, self._slowest, self._points_in_a_row = list(devices), None, 0

    def line(self, seconds: Sequence[float]) -> str | None:
        """Return a line when a tower has become the straggler; 0 seconds: it had no example."""
        known = [value for value in seconds if value > 0] or [0.0]
        # The median of all, not of the others: on devices that share cores it is one tower that
        # ends before the rest. Of two the smaller one.
        usual = min(known) if len(known) == 2 else statistics.median(known)
        slowest = seconds.index(max(known)) if max(known) > _SLOWER * usual else None
        self._points_in_a_row = self._points_in_a_row + 1 if slowest == self._slowest else 1
        self._slowest = slowest
        if slowest is None or self._points_in_a_row != _POINTS:
            return None
        return (
            f"straggler   tower {slowest} on {self._devices[slowest]} takes {seconds[slowest]:.3f} "
            f"s a step, {usual:.3f} s is usual: all wait for it"
        )
