"""Learning rates against the formulas, in plain Python."""

import math

import pytest
import tensorflow as tf

from towers.options.parts import SCHEDULES, UpdateOptions
from towers.training.run.optimizers import learning_rate

pytestmark = pytest.mark.unit
EPOCHS = [0.0, 1e-6, 0.5, 1.0, 2.4999, 2.5, 4.0, 5.0, 7.5, 9.999, 10.0, 12.0]


def rates(kind, epochs, *, peak=0.1, total_epochs=10.0, decay_epochs=(), **options):
    options |= {"learning_rate": peak, "decay_epochs": ",".join(map(str, decay_epochs))}
    options = UpdateOptions(schedule=kind, **options)
    epochs = [tf.constant(epoch, tf.float64) for epoch in epochs]
    results = [learning_rate(options, total_epochs, epoch) for epoch in epochs]
    assert all(result.dtype == tf.float64 and result.shape == () for result in results)
    return [float(result) for result in results]


def half_cosine(done):
    """Fall from 1 to 0 while `done` rises from 0 to 1; it stays there."""
    return 0.5 * (1 + math.cos(math.pi * min(done, 1)))


def expected(kind, epoch, warmup, peak=0.1, total=10.0):
    if kind == "onecycle":
        rise = warmup or total / 4
        first, last = peak / 25, peak / 1e4
        if epoch < rise:
            return first + (peak - first) * epoch / rise
        return last + (peak - last) * half_cosine((epoch - rise) / (total - rise))
    if epoch < warmup:
        return peak * epoch / warmup
    if kind == "step":
        return peak * 0.5 ** sum(epoch >= boundary for boundary in (2.5, 5, 7.5))
    if kind == "linear":
        return peak * (1 - min((epoch - warmup) / (total - warmup), 1))
    if kind == "cosine":
        return peak * half_cosine((epoch - warmup) / (total - warmup))
    return peak


@pytest.mark.parametrize("warmup", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_formulas(kind, warmup):
    found = rates(kind, EPOCHS, warmup_epochs=warmup, decay_epochs=[2.5, 5, 7.5], decay_factor=0.5)
    assert found == pytest.approx([expected(kind, epoch, warmup) for epoch in EPOCHS], rel=1e-12)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_runs_of_no_length_or_shorter_than_the_warmup_have_rates(kind):
    for warmup in (0.0, 1.0):
        (rate,) = rates(kind, [0.0], total_epochs=0.0, warmup_epochs=warmup)
        assert 0 <= rate <= 0.1
    found = rates(kind, [0, 5, 10], warmup_epochs=40)
    first = 0.004 if kind == "onecycle" else 0
    assert found == pytest.approx([first + (0.1 - first) * part for part in (0, 1 / 8, 1 / 4)])
