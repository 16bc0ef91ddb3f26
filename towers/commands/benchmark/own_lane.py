r"""One of our own configurations as a lane: the process that `towers benchmark` measures.

    python -m towers.commands.benchmark.own_lane \
        '{"options": {"num_towers": 2, ...}, "matmul_size": 2048, "export": ""}'

It prints {"ready": true, ...} with what is known before the first window. A line "2.0" lets it
train for at least two seconds, a line "0.5 control" lets it run one of the parts of a step; it
answers {"steps", "seconds"}, until the end of its input.
"""

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers
from towers import data, devices
from towers.commands.benchmark.parts import make_parts
from towers.data import augment
from towers.devices.memory import peak_mib
from towers.errors import InputError, RunError
from towers.graphs.flops import flop_per_example
from towers.options.run import Options
from towers.training.run import assemble, load_data
from towers.training.step import make_loss_fn

STORED_SHAPE = (32, 32, 3)  # of the images that the synthetic ones stand in for
NUM_CLASSES = 10
WARM_UP_SECONDS = 1.0


class OneBatch(data.ArraySplit):
    """A training split that gives out one batch for ever: nothing is read or drawn."""

    def train_batches(self, batch_size: int, *, seed: int) -> tf.data.Dataset:
        """See `data.Split.train_batches`."""
        batch = next(iter(super().train_batches(batch_size, seed=seed)))
        return tf.data.Dataset.from_tensors(batch).repeat()


class OwnLane:
    """The run of one configuration, warmed up, and what is known of it before its windows."""

    def __init__(self, options: Options, matmul_size: int):
        """Build and warm up; matrix products are `[matmul_size, matmul_size]`."""
        devices.configure(**dataclasses.asdict(options.gpu_options()))
        names = devices.tower_devices(options.num_towers, options.devices)
        dataset, options = load(options)
        start = time.perf_counter()
        self.run = assemble(options, names, dataset)
        loop = self.run.train_loop()
        batches = iter(dataset.train.train_batches(options.batch_size, seed=options.seed))
        self._loops: dict[str, Callable] = {"": lambda num_steps: loop(batches, num_steps)["loss"]}
        self._call("", 0)  # no step is made; the graph is built
        built = time.perf_counter()
        self._call("", 1)
        first_step = time.perf_counter()
        self.train(WARM_UP_SECONDS)
        # The parts that come now are no part of a run: their memory is not counted.
        peak = peak_mib()
        self._loops |= make_parts(self.run, options, matmul_size)
        if isinstance(dataset.train, OneBatch):
            del self._loops["constant"]  # it is the whole step
        for part in self._loops:
            self._call(part, 2)
        self.ready = self._describe() | {
            "ready": True,
            "parts": [part for part in self._loops if part],
            "graph_seconds": built - start,
            "first_step_seconds": first_step - built,
            "peak_memory_mib": peak,
            "matmul_flop": 2 * matmul_size**3 * len(names),
        }

    def _describe(self) -> dict[str, Any]:
        run, options, model = self.run, self.run.options, self.run.masters.model
        places = devices.describe(run.builder.devices)
        # All logical CPU devices are one, and so are the parts of a GPU that is split.
        hardware = {"cpu" if "cpu" in t.device else t.pci_bus_id or t.device for t in places}
        batches = run.data.train.train_batches(options.batch_size, seed=options.seed)
        loss_fn, dtype = make_loss_fn(run.masters, options), batches.element_spec[0].dtype
        return {
            "versions": {m.__name__: m.__version__ for m in (towers, tf, keras, np)}
            | {"python": platform.python_version()},
            "num_towers": len(places),
            "batch_size": options.batch_size,
            "devices": run.builder.devices,
            "device_names": [t.name for t in places],
            "shared": len(hardware) < len(places),
            "batch_norm": any("moving_mean" in v.path for v in model.variables),
            "image_shape": augment.output_shape(run.data.image_shape, options.augment),
            "num_classes": run.data.num_classes,
            "precision": options.dtype,
            "variables": options.variables,
            "flop_per_example": flop_per_example(model, loss_fn, run.data.image_shape, dtype),
        }

    def train(self, seconds: float, part: str = "") -> dict[str, float]:
        """Run whole loops for at least `seconds`; return {"steps", "seconds"}."""
        num_steps = 2 if part == "matmul" else self.run.options.steps_per_loop
        start, steps, passed = time.perf_counter(), 0, 0.0
        while passed < seconds:
            self._call(part, num_steps)
            steps += num_steps
            passed = time.perf_counter() - start
        return {"steps": steps, "seconds": passed}

    def _call(self, part: str, num_steps: int) -> None:
        """Make some steps, and wait for the devices by reading a number."""
        self._loops[part](tf.constant(num_steps)).numpy()


def load(options: Options) -> tuple[data.Data, Options]:
    """Return the data set, and the options that go with it: synthetic images are taken as is."""
    if options.dataset != "synthetic":
        return load_data(options), options
    size = options.image_height_width()
    stored = (*size, STORED_SHAPE[2]) if size else STORED_SHAPE
    image_shape = augment.output_shape(stored, options.augment)
    random = np.random.default_rng(options.seed)
    images = random.standard_normal((options.batch_size, *image_shape), np.float32)
    split = OneBatch(images, random.integers(NUM_CLASSES, size=options.batch_size))
    names = tuple(map(str, range(NUM_CLASSES)))
    dataset = data.Data("synthetic", split, split, NUM_CLASSES, image_shape, names)
    return dataset, dataclasses.replace(options, augment="off")


def export(train: data.Split, path: str) -> None:
    """Write a training set for programs that take bytes, if it holds any."""
    batches = train.eval_batches(1000)
    if batches.element_spec[0].dtype == tf.uint8:
        parts = [(images[weights > 0], labels[weights > 0]) for images, labels, weights in batches]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        np.savez(path, images=images, labels=labels)


def main(config: dict[str, Any]) -> None:
    """Serve windows until the end of standard input."""
    # What the user's own code prints goes to standard error: the answers stand alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        lane = OwnLane(Options(**config["options"]), config["matmul_size"])
        if config["export"]:
            export(lane.run.data.train, config["export"])
    except InputError as error:
        print(json.dumps({"refused": str(error)}), file=answers)
        return
    except RunError as error:
        sys.exit(str(error))
    print(json.dumps(lane.ready), file=answers)
    for line in sys.stdin:
        seconds, _, part = line.strip().partition(" ")
        print(json.dumps(lane.train(float(seconds), part)), file=answers)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main(json.loads(sys.argv[1]))
