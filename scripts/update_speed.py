"""What an update costs on CPUs, in core-milliseconds: the finite test, norm, L2 and optimizer.

    python scripts/update_speed.py

The weights are those of the CNN, their gradients are given. Time is that of all cores together,
so that other programs of the machine change little.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from towers.cli import quiet_start  # noqa: E402 - found by the line above

with quiet_start(level=3):
    import keras
    import tensorflow as tf

from towers.options.run import Options  # noqa: E402
from towers.training.masters import Masters  # noqa: E402
from towers.training.update import make_optimizer, make_update  # noqa: E402

STEPS, WINDOWS = 60, 15


def core_milliseconds(name: str, l2: float) -> float:
    """Return the median time of an update; `l2` is the factor of a Keras regulariser, or 0."""
    own = dict(kernel_regularizer=keras.regularizers.L2(l2) if l2 else None)
    layers = [keras.Input([24, 24, 3])]
    for _ in range(2):
        layers += [keras.layers.Conv2D(64, 5, padding="same", **own), keras.layers.MaxPool2D()]
    layers += [keras.layers.Flatten(), *(keras.layers.Dense(n, **own) for n in (384, 192, 10))]
    model = keras.Sequential(layers)
    options = Options(optimizer=name, weight_decay=0.0)
    weights = model.trainable_variables
    update = make_update(Masters(model, make_optimizer(weights, options)), options)
    gradients = [tf.random.normal(weight.shape) for weight in weights]

    @tf.function
    def steps() -> None:
        for _ in tf.range(STEPS):
            update([[tf.identity(g) for g in gradients]], [tf.constant(1e-6)])

    seconds = []
    for _ in range(WINDOWS + 1):
        start = time.process_time()
        steps()
        seconds.append((time.process_time() - start) / STEPS)
    return statistics.median(seconds[1:]) * 1000


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name in ("sgd", "momentum", "adam"):
        for l2 in (0.0, 1e-4):
            print(f"{name:10} L2 {l2:<7g} {core_milliseconds(name, l2):.2f} core-ms", flush=True)
