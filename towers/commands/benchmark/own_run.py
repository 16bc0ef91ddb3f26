"""The process of one number of towers, which `towers benchmark` measures.

    python -m towers.commands.benchmark.own_run '{"num_towers": 2, ...}'

For a line "2.0" it trains two seconds and prints {"steps": 120, "seconds": 2.01}. For "0.5 control"
it computes the control: each tower's forward and backward pass with its own weights, without
gather, update or input. This is the speed of perfect scaling on this machine.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import data, devices
from towers.builder import batch_norm
from towers.builder.sharding import PerTower
from towers.data import augment
from towers.devices.memory import peak_mib
from towers.devices.shown_names import shown_name
from towers.errors import InputError, RunError
from towers.options.parts import parse_augment
from towers.options.run import Options
from towers.training.run.setup import RunContext, assemble, load_data, tower_devices

STORED_SHAPE, NUM_CLASSES = (32, 32, 3), 10  # of synthetic images, as a data set would store them
WARM_UP_SECONDS = 1.0


class OwnRun:
    """A run of one configuration; `ready` describes it."""

    def __init__(self, options: Options):
        """Build the run and warm it up."""
        start = time.perf_counter()
        devices.configure_run(options)
        names = tower_devices(options)
        dataset, options = load(options)
        self.run = run = assemble(options, names, dataset)
        loop, batches = run.train_loop(), run.batches(0, 0)
        if dataset.name == "synthetic":  # one batch, without reading or augmentation
            batches = dataset.train.train_batches(options.batch_size, seed=options.seed)
            batches = tf.data.Dataset.from_tensors(next(iter(batches))).repeat()
        self.batches = batches = iter(batches)
        self._loops: dict[str, Callable] = {"": lambda num_steps: loop(batches, num_steps)["loss"]}
        self.train(1e-9)
        first_call = time.perf_counter() - start
        self.train(WARM_UP_SECONDS)
        self.ready = {
            "seconds_to_first_call": first_call,
            "num_towers": len(names),
            "batch_size": options.batch_size,
            "devices": list(map(shown_name, names)),
        }
        self.ready |= {"peak_memory_mib": peak_mib()}  # without the control's memory
        self._loops["control"] = make_control(run)
        self._loops["control"](tf.constant(2))

    def train(self, seconds: float, loop: str = "") -> dict[str, float]:
        """Call a loop, see `Runner.loops`, at least so long; return its "steps" and "seconds"."""
        num_steps = self.run.options.steps_per_loop
        start, steps, passed = time.perf_counter(), 0, 0.0
        while passed < seconds:
            self._loops[loop](tf.constant(num_steps)).numpy()  # waits for the devices
            steps += num_steps
            passed = time.perf_counter() - start
        if bool(self.run.train_state.stuck()):  # from then on steps do nothing
            raise RunError("the loss or a gradient is not finite: try a lower --learning_rate")
        return {"steps": steps, "seconds": passed}


def make_control(run: RunContext) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that makes a number of steps of gradients alone.

    Towers have their own weights, layers' assignments are dropped, and BatchNorm takes moments over
    a tower's slice, so that nothing crosses between towers. Batch and weights are read in each
    step, so that nothing can be hoisted out of the loop.
    """
    builder, variables = run.builder, run.train_state.model.variables
    trainable = {id(v) for v in run.train_state.model.trainable_variables}
    copies = []
    for device in builder.devices:
        with tf.device(device):
            copies.append([tf.Variable(v.value, trainable=False) for v in variables])
    batches = run.data.train.train_batches(run.options.batch_size, seed=run.options.seed)
    repeated = iter(tf.data.Dataset.from_tensors(tuple(next(iter(batches)))).repeat())

    def backward(copied: Sequence[tf.Variable], *part: tf.Tensor) -> tf.Tensor:
        pairs = [(v, tf.convert_to_tensor(copy)) for v, copy in zip(variables, copied, strict=True)]
        weights = [value for v, value in pairs if id(v) in trainable]
        with (
            keras.StatelessScope(state_mapping=pairs),
            # with the same kernels
            batch_norm.over_all_towers(None, builder.batch_norm, builder.devices[0]),
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            tape.watch(weights)
            losses, *_ = tf.nest.flatten(run.task.tower_function(*part))
            loss = tf.reduce_sum(losses)
        with keras.StatelessScope():  # recomputed layers may assign again
            results = [loss, *tape.gradient(loss, weights)]
        # Use every result: TensorFlow prunes ops whose values are unused, even with a control
        # dependency on them.
        leaves = tf.nest.flatten(results, expand_composites=True)
        firsts = [tf.reshape(leaf, [-1])[:1] for leaf in leaves if leaf is not None]
        return tf.reduce_sum(tf.concat([tf.cast(x, tf.float32) for x in firsts], axis=0))

    @tf.function(autograph=False)
    def loop(iterator: tf.data.Iterator, num_steps: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.device("/cpu:0"):
                example, draws = iterator.get_next()
            sums = builder.map(backward, PerTower(copies), *example, draws)
            with tf.device("/cpu:0"):
                return i + 1, tf.add_n([total, *sums])

        start = tf.constant(0), tf.constant(0.0)
        return tf.while_loop(lambda i, _: i < num_steps, body, start, parallel_iterations=1)[1]

    return lambda num_steps: loop(repeated, num_steps)


def load(options: Options) -> tuple[data.Data, Options]:
    """Return the data set, and options to match: synthetic images are not augmented."""
    if options.dataset != "synthetic":
        return load_data(options), options
    size, base = options.image_height_width(), parse_augment(options.augment).base
    stored = (*size, STORED_SHAPE[2]) if size else STORED_SHAPE
    image_shape = augment.output_shape(stored, "tutorial" if base == "auto" else base)
    random = np.random.default_rng(options.seed)
    images = random.standard_normal((options.batch_size, *image_shape), np.float32)
    split = data.ArraySplit(images, random.integers(NUM_CLASSES, size=options.batch_size))
    dataset = data.Data("synthetic", split, split, NUM_CLASSES, tuple(map(str, range(NUM_CLASSES))))
    return dataset, dataclasses.replace(options, augment="none")


def main(config: dict[str, Any]) -> None:
    """Run the windows that standard input asks for."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for what the user's own code prints
    try:
        own_run = OwnRun(Options(**config))
        print(json.dumps(own_run.ready), file=answers)
        for line in sys.stdin:
            seconds, _, loop = line.strip().partition(" ")
            print(json.dumps(own_run.train(float(seconds), loop)), file=answers)
    except InputError as error:
        print(json.dumps({"refused": str(error)}), file=answers)
    except RunError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
