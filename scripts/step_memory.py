"""Measures the most memory of a GPU that a step takes, in multiples of the weights.

    python scripts/step_memory.py [--only=TEXT]

It needs one GPU, or two for all rows; GPUs of host memory will do (tests/gpu/README.md). Each row
is a process that trains Dense layers by Adam, 16 examples for each GPU: the weights and their slots
alone are 3 times the weights. Counted is what TensorFlow's allocator has given away on /gpu:0.
"""

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

DENSE, SMALL, LARGE = (60, 1000), (200, 500), (6, 4000)  # layers, width
ROWS: list[tuple[tuple[int, int], str, int, dict[str, Any]]] = [  # net, way, GPUs, options
    (DENSE, "plain", 1, {}),
    (DENSE, "plain", 1, {"global_clipnorm": 1.0}),
    (DENSE, "fit", 1, {}),
    (DENSE, "fit", 2, {}),
    (DENSE, "train", 1, {}),
    (DENSE, "train", 1, {"clip_global_norm": 1.0, "weight_decay": 1e-4}),
    (DENSE, "train", 1, {"ema_decay": 0.999}),
    (DENSE, "train", 1, {"dtype": "mixed_float16"}),
    (DENSE, "train", 2, {}),
    *((net, way, 1, {}) for net in (SMALL, LARGE) for way in ("plain", "fit", "train")),
]


def measure(shape: tuple[int, int], way: str, gpus: int, options: dict[str, Any]) -> list[float]:
    """Return what is held between steps, and the peak of a few steps, in multiples of the weights.

    Args:
        shape: number of layers and their width.
        way: "plain" for Keras alone, "fit" for `towers.parallelize`, or "train".
        gpus: number of towers.
        options: of Keras' Adam, or of `towers train`.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import towers
    from towers import devices
    from towers.options.run import Options
    from towers.training.run.setup import assemble, load_data

    def net(num_classes: int = 10, image_shape: Any = None) -> keras.Model:
        hidden = [keras.layers.Dense(width, "relu", use_bias=False) for _ in range(layers)]
        return keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(num_classes)])

    (layers, width), size, random = shape, 16 * gpus, np.random.default_rng(0)
    x, y = random.normal(size=(3 * size, width)).astype("f"), random.integers(0, 10, 3 * size)
    if way == "train":
        module = types.ModuleType("dense")
        module.net, module.data = net, lambda: ((x, y), (x, y))
        sys.modules["dense"] = module  # by which the options name both
        given = dict(model="dense:net", dataset="dense:data", batch_size=size, num_towers=gpus)
        run_options = Options(
            **given, variables="replicated", optimizer="adam", check="off", **options
        )
        run = assemble(run_options, devices.tower_devices(gpus), load_data(run_options))
        model, loop, batches = run.train_state.model, run.train_loop(), iter(run.batches(0, 0))
        step = lambda: loop(batches, tf.constant(3))["loss"].numpy()  # noqa: E731
    else:
        model = net()
        if way == "fit":
            towers.parallelize(model, num_towers=gpus, check="off")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(**options), loss, jit_compile=False)
        step = lambda: model.fit(x, y, batch_size=size, verbose=0)  # noqa: E731
    step()  # makes what is kept
    memory, gpu = tf.config.experimental, "/gpu:0"
    memory.reset_memory_stats(gpu)
    held = memory.get_memory_info(gpu)["current"]
    step()
    weights = sum(4 * v.value.shape.num_elements() for v in model.trainable_variables)
    return [held / weights, memory.get_memory_info(gpu)["peak"] / weights]


def main() -> None:
    """Print the table, or measure one row in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose text has this, such as '1 | train'")
    parser.add_argument("--row", help="measure this row, as JSON, and print both figures")
    flags = parser.parse_args()
    if flags.row:
        print(json.dumps(measure(*json.loads(flags.row))))
        return
    print("| net | GPUs | way | held | peak |\n|---|---|---|---|---|")
    for row in ROWS:
        (layers, width), way, gpus, options = row
        told = " ".join([f"`{way}`", *(f"{name}={value}" for name, value in options.items())])
        text = f"| {layers} x Dense({width}) | {gpus} | {told} |"
        if flags.only in text.replace("`", ""):
            command = [sys.executable, __file__, f"--row={json.dumps(row)}"]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = (done.stdout if not done.returncode else done.stderr).splitlines()
            held, peak = json.loads(lines[-1]) if not done.returncode else (0, 0)
            print(text, f"{held:.2f} | {peak:.2f} |" if peak else f"failed: {lines[-1]} |")


if __name__ == "__main__":
    main()
