"""Before a run: is its gather right on these devices, and where are the variables fastest?"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.builder import gather
from towers.data import Data
from towers.errors import RunError
from towers.options.run import Options
from towers.training.masters import VARIABLES
from towers.training.run import Run, assemble
from towers.training.step import weights_of

TOLERANCE = 1e-5  # of sums in another order, relative to the largest value
WINDOWS = 5
_WINDOW_SECONDS = 0.3


def check_gather(run: Run) -> None:
    """Compare a gather that is not `add_n` on the gather device with it, on the model's own shapes.

    Raises:
        RunError: they differ, as where copies between GPUs are broken.
    """
    if run.options.variables == "cpu" or len(run.builder.devices) == 1:
        return
    # Compiled: towers sum together only where they run side by side.
    difference = float(tf.function(lambda: _gather_difference(run), autograph=False)())
    if not difference <= TOLERANCE:
        raise RunError(
            f"--variables={run.options.variables}: gathered gradients differ from add_n's by "
            f"{difference:.1e} on {', '.join(run.builder.devices)}: type --variables=cpu, and see "
            "the copies between devices in towers doctor"
        )


def _gather_difference(run: Run) -> tf.Tensor:
    """Return how far random gradients are from `add_n`'s after the run's gather, relative."""
    builder, weights = run.builder, weights_of(run.masters)
    shapes = [(w.shape, w.dtype) for w in run.masters.model.trainable_variables]
    gradients = []
    for tower, device in enumerate(builder.devices):
        with tf.device(device):
            draw = tf.random.stateless_normal
            gradients.append([draw(s, [tower, i], dtype=d) for i, (s, d) in enumerate(shapes)])
    count = tf.constant(float(len(builder.devices)))
    found = builder.gather_gradients(gradients, weights, count)
    expected = gather.mean_at(gradients, [builder.gather_device] * len(weights), count)
    differences = []
    with tf.device(builder.gather_device):
        for means, right in zip(found, expected, strict=True):
            for mean in getattr(means, "values", [means]):
                off = tf.reduce_max(tf.abs(mean - right)) / tf.reduce_max(tf.abs(right))
                differences.append(tf.cast(off, tf.float64))
        return tf.reduce_max(tf.stack(differences))


def fastest(
    options: Options, device_names: Sequence[str], dataset: Data, say: Callable[[str], None]
) -> Options:
    """Return the options with that `variables` which makes the steps of this run fastest.

    Each is tried on a model of its own, in turn, window by window; a gather that is wrong on these
    devices is not taken. Nothing of the trial remains.
    """
    if len(device_names) == 1:
        say("variables   cpu: there is one tower, and nothing to try")
        return dataclasses.replace(options, variables="cpu")
    windows: dict[str, Callable[[], float]] = {}
    for mode in VARIABLES:
        run = assemble(dataclasses.replace(options, variables=mode), device_names, dataset)
        try:
            check_gather(run)
        except RunError as error:
            say(f"variables   {mode} is left out: {error}")
        else:
            windows[mode] = _window(run)
    rounds = [{mode: window() for mode, window in windows.items()} for _ in range(WINDOWS)]
    rates = {mode: [rate[mode] for rate in rounds] for mode in windows}
    medians = {mode: statistics.median(values) for mode, values in rates.items()}
    best = max(medians, key=medians.__getitem__)
    figures = ", ".join(
        f"{mode} {medians[mode]:.0f} ({min(values):.0f} to {max(values):.0f})"
        for mode, values in rates.items()
    )
    say(f"variables   {best}, the fastest; examples/s, median of {WINDOWS} windows: {figures}")
    return dataclasses.replace(options, variables=best)


def _window(run: Run) -> Callable[[], float]:
    """Return a function that trains for a while and returns its examples/s, the graph built."""
    options, train_loop = run.options, run.train_loop()
    batches = iter(run.data.train.train_batches(options.batch_size, seed=options.seed))
    num_steps = tf.constant(min(options.steps_per_loop, 10))

    def window() -> float:
        start, steps = time.perf_counter(), 0
        while not steps or time.perf_counter() - start < _WINDOW_SECONDS:
            train_loop(batches, num_steps)["loss"].numpy()
            steps += int(num_steps)
        return steps * options.batch_size / (time.perf_counter() - start)

    window()
    return window
