"""A^n + B^n for two random matrices: on one device, then with a tower for each matrix.

    python scripts/matpow.py [--size=1000] [--n=10]

Prints both times, their ratio, and the largest difference from numpy in float64. On a machine whose
towers share the same cores, as two logical CPU devices do, the ratio is near 1.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

import towers  # noqa: E402
from towers.devices.selection import tower_devices  # noqa: E402


def power(matrix: tf.Tensor, n: int) -> tf.Tensor:
    """Return matrix^n by n - 1 products, so that the work grows with n."""
    result = matrix
    for _ in range(n - 1):
        result = tf.matmul(result, matrix)
    return result


def time_of(function: Callable, *arguments: tf.Tensor) -> tuple[float, np.ndarray]:
    """Return the median seconds of a call, after one that builds the graph, and its result."""
    result = function(*arguments).numpy()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        function(*arguments).numpy()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--n", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.size < 1 or arguments.n < 1:
        parser.error("--size and --n must be at least 1")
    devices = tower_devices(2)
    rng = np.random.default_rng(0)
    # Scaled to a spectral radius near 1, so that powers neither vanish nor overflow.
    shape = (2, arguments.size, arguments.size)
    matrices = (rng.standard_normal(shape) / np.sqrt(arguments.size)).astype(np.float32)
    a, b = tf.constant(matrices[0]), tf.constant(matrices[1])

    @tf.function
    def on_one_device(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        with tf.device(devices[0]):
            return power(a, arguments.n) + power(b, arguments.n)

    builder = towers.TowerBuilder(devices)

    @tf.function
    def on_two_towers(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return builder.sum(lambda m: power(m, arguments.n), towers.PerTower([a, b]))

    one_seconds, one = time_of(on_one_device, a, b)
    two_seconds, two = time_of(on_two_towers, a, b)
    exact = sum(np.linalg.matrix_power(m.astype(np.float64), arguments.n) for m in matrices)
    difference = max(np.abs(one - exact).max(), np.abs(two - exact).max()) / np.abs(exact).max()
    # Each of n products of `size` terms rounds; errors add up like a random walk.
    bound = 10 * arguments.n * np.sqrt(arguments.size) * np.finfo(np.float32).eps
    print(f"A^{arguments.n} + B^{arguments.n}, {arguments.size} x {arguments.size}, float32")
    print(f"one device   {one_seconds:.4f} s   {devices[0]}")
    print(f"two towers   {two_seconds:.4f} s   {', '.join(devices)}")
    print(f"ratio        {one_seconds / two_seconds:.2f}")
    print(f"difference   {difference:.2e} of the largest element; float32 explains {bound:.2e}")
    sys.exit(0 if difference <= bound else 1)


if __name__ == "__main__":
    main()
