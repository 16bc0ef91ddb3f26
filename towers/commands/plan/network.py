"""How fast workers are reached: copies that are timed."""

import timeit
from collections.abc import Sequence

import tensorflow as tf

from towers.builder.kinds import PROGRAM
from towers.commands.plan.cost_model import Link

SMALL_BYTES, LARGE_BYTES = 4, 2**24
SMALL_TRIPS, LARGE_TRIPS = 100, 3
REPEATS = 3


def measure_network(devices: Sequence[str]) -> Link:
    """Return the slowest way between this program and these devices, one of each worker.

    A tensor goes to the device and comes back, again and again inside one call of TensorFlow: a
    small one tells the latency, a large one the rate. The best of a few is taken, since what else
    a machine does makes copies slower, never faster.
    """
    latencies, rates = [], []
    for device in devices:
        small = _trip_seconds(device, SMALL_BYTES, SMALL_TRIPS)
        large = _trip_seconds(device, LARGE_BYTES, LARGE_TRIPS)
        latencies.append(small / 2)
        rates.append(2 * LARGE_BYTES / max(large - small, 1e-9))
    return Link("measured", min(rates) / 1e9, 1.0, max(latencies))


def _trip_seconds(device: str, num_bytes: int, num_trips: int) -> float:
    """Return the seconds of one way there and back."""

    @tf.function(autograph=False)
    def trips(values: tf.Tensor) -> tf.Tensor:
        def there_and_back(i: tf.Tensor, values: tf.Tensor) -> tuple:
            with tf.device(device):
                values = values + 1.0
            with tf.device(f"{PROGRAM}/cpu:0"):
                return i + 1, values * 0.5

        with tf.device(f"{PROGRAM}/cpu:0"):
            start = tf.constant(0), values
            most = tf.constant(num_trips)
            return tf.while_loop(lambda i, _: i < most, there_and_back, start)[1][0]

    values = tf.zeros([num_bytes // 4])
    trips(values).numpy()
    times = timeit.repeat(lambda: trips(values).numpy(), number=1, repeat=REPEATS)
    return min(times) / num_trips
