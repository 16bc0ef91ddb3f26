"""The simple gradient noise scale: at which batch size more examples a step stop to pay.

Towers give it for nothing: each has a gradient of a small batch, their mean is that of the whole.
With G the true gradient and S the trace of one example's covariance, a batch of b examples has the
expected squared norm |G|^2 + S / b. Two sizes of batch give both, and the scale is S / |G|^2.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1.
"""

import math
from collections.abc import Sequence

_DECAY = 0.95  # of the averages, per point: one point's estimate is mostly noise


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


def advice(examples: float | None, batch_size: int, num_towers: int) -> str:
    """Return one sentence on the global batch size, and on another tower, at a scale."""
    if examples is None:
        return "cannot be told from these steps: the gradients are mostly noise, or agree fully"
    about, batch = f"about {examples:.0f} examples", f"the batch size of {batch_size}"
    if batch_size < examples / 2:
        grown = batch_size + -(-batch_size // num_towers)  # each tower's part as it is
        return (
            f"{about}, well above {batch}: another tower would help ({num_towers + 1} towers with "
            f"--batch_size={grown}, with a learning rate to match)"
        )
    if batch_size <= 2 * examples:
        return f"{about}, near {batch}: a good place; another tower helps most by taking part of it"
    return (
        f"{about}, well below {batch}: --batch_size={max(round(examples), num_towers)} would learn "
        "as much with fewer examples, and another tower helps only by taking a part of the batch"
    )
