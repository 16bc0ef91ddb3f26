r"""One of our own configurations as a lane: the process that `towers benchmark` measures.

    python -m towers.commands.benchmark.own_lane \
        '{"options": {"num_towers": 2, ...}, "matmul_size": 2048}'

It prints {"ready": true, ...} with what is known before the first window. A line "2.0" lets it
train for at least two seconds, a line "0.5 control" lets it run one of `benchmark_parts`; it
answers {"steps", "seconds"}. At the end of its input it prints {"peak_memory_mib"}.
"""

import contextlib
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import towers  # noqa: E402
from towers import data, devices  # noqa: E402
from towers.commands.benchmark.parts import make_parts  # noqa: E402
from towers.data import augment  # noqa: E402
from towers.devices.memory import peak_mib  # noqa: E402
from towers.errors import InputError, RunError  # noqa: E402
from towers.graphs.flops import flop_per_example  # noqa: E402
from towers.options.run import Options  # noqa: E402
from towers.training import trial  # noqa: E402
from towers.training.run import assemble, one_line_errors  # noqa: E402
from towers.training.step import make_loss_fn  # noqa: E402

STORED_SHAPE = (32, 32, 3)  # of the images that the synthetic ones stand in for
NUM_CLASSES = 10
WARM_UP_SECONDS = 1.0


class OneBatch:
    """A training split that gives out one random batch for ever: nothing is read or drawn."""

    def __init__(self, image_shape: Sequence[int], size: int, seed: int):
        """Draw the batch.

        Args:
            image_shape: (H, W, C) that the model sees.
            size: examples of the batch.
            seed: of the pixels, normal with mean 0 and deviation 1, and of the labels.
        """
        self.size = size
        random = np.random.default_rng(seed)
        images = random.standard_normal((size, *image_shape), np.float32)
        labels = random.integers(0, NUM_CLASSES, size).astype(np.int32)
        draws = random.random((size, augment.NUM_DRAWS), np.float32)
        self._batch = (images, labels, draws)

    def train_batches(self, batch_size: int, **_: int) -> tf.data.Dataset:
        """Return the batch again and again, as `data.Split.train_batches` gives out many."""
        with tf.device("/cpu:0"):
            batch = tuple(tf.constant(array[:batch_size]) for array in self._batch)
        return tf.data.Dataset.from_tensors(batch).repeat()


class OwnLane:
    """The run of one configuration, warmed up and ready for its windows."""

    def __init__(self, options: Options, matmul_size: int):
        """Build and warm up.

        Raises:
            InputError: the options cannot be had.
            RunError: the data set cannot be read.
        """
        devices.configure(**dataclasses.asdict(options.gpu_options()))
        names = devices.tower_devices(options.num_towers, options.devices)
        dataset, options = load(options)
        if options.variables == "auto":  # the trial's memory counts, too, as in a run
            options = trial.fastest(options, names, dataset, print)
        self.options, self.data = options, dataset
        start = time.perf_counter()
        self.run = assemble(options, names, dataset)
        loop, batches = self._make_loop()
        self._loops: dict[str, Callable] = {"": lambda num_steps: loop(batches, num_steps)["loss"]}
        self._loops[""](tf.constant(0))  # no step is made; the graph is built
        self.graph_seconds = time.perf_counter() - start
        self.first_step_seconds = self._call("", 1)[0]
        self.train(WARM_UP_SECONDS)
        # The parts that come now are no part of a run: their memory is not counted.
        self.peak_memory_mib = peak_mib()
        self._loops |= make_parts(self.run, options, matmul_size)
        if isinstance(dataset.train, OneBatch):
            del self._loops["constant"]  # it is the whole step
        for part in self._loops:
            self._call(part, 2)

    def _make_loop(self) -> tuple[Callable, Any]:
        """Return the loop of a run, and its batches."""
        loop = self.run.train_loop()
        size, seed = self.options.batch_size, self.options.seed
        return loop, iter(self.data.train.train_batches(size, seed=seed))

    def train(self, seconds: float, part: str = "") -> dict[str, float]:
        """Run whole loops for at least `seconds`; return {"steps", "seconds", "loss"}."""
        num_steps = 2 if part == "matmul" else self.options.steps_per_loop
        start, steps, passed, value = time.perf_counter(), 0, 0.0, 0.0
        while passed < seconds:
            _, value = self._call(part, num_steps)
            steps += num_steps
            passed = time.perf_counter() - start
        loss = {} if part else {"loss": value}
        return {"steps": steps, "seconds": passed} | loss

    def _call(self, part: str, num_steps: int) -> tuple[float, float]:
        """Make some steps; return the seconds, and a number that the devices were waited for."""
        start = time.perf_counter()
        value = float(self._loops[part](tf.constant(num_steps)))
        return time.perf_counter() - start, value

    def parts(self) -> list[str]:
        """Return the names that `train` takes beside the whole step."""
        return [part for part in self._loops if part]


def load(options: Options) -> tuple[data.Data, Options]:
    """Return the data set, and the options that go with it: synthetic images are taken as they are.

    Raises:
        InputError: the data set cannot be had.
        RunError: the data set cannot be read.
    """
    size = options.image_height_width()
    if options.dataset != "synthetic":
        with one_line_errors(options):
            return data.load(options.dataset, options.data_dir or None, size), options
    stored = (*size, STORED_SHAPE[2]) if size else STORED_SHAPE
    image_shape = augment.output_shape(stored, options.augment)
    split = OneBatch(image_shape, options.batch_size, options.seed)
    names = tuple(map(str, range(NUM_CLASSES)))
    dataset = data.Data("synthetic", split, split, NUM_CLASSES, image_shape, names)
    return dataset, dataclasses.replace(options, augment="off")


def describe(lane: OwnLane, matmul_size: int) -> dict[str, Any]:
    """Return what is known of a lane before its first window; sizes are of one step."""
    run, options = lane.run, lane.options
    places = devices.describe(run.builder.devices)
    # All logical CPU devices are one, and so are the parts of a GPU that is split.
    hardware = {"cpu" if "cpu" in t.device else t.pci_bus_id or t.device for t in places}
    batches = lane.data.train.train_batches(options.batch_size, seed=options.seed)
    image_dtype = batches.element_spec[0].dtype
    return {
        "ready": True,
        "versions": {
            "towers": towers.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "devices": run.builder.devices,
        "device_names": [t.name for t in places],
        "shared": len(hardware) < len(places),
        "batch_norm": any("moving_mean" in v.path for v in run.masters.model.variables),
        "image_shape": augment.output_shape(lane.data.image_shape, options.augment),
        "num_classes": lane.data.num_classes,
        "parts": lane.parts(),
        "graph_seconds": lane.graph_seconds,
        "first_step_seconds": lane.first_step_seconds,
        "peak_memory_mib": lane.peak_memory_mib,
        "precision": options.dtype,
        "variables": options.variables,
        "flop_per_example": flop_per_example(
            run.masters.model,
            make_loss_fn(run.masters, options),
            lane.data.image_shape,
            image_dtype,
        ),
        "matmul_flop": 2 * matmul_size**3 * len(places),
    }


def export(train: data.Split, path: str) -> bool:
    """Write a training set for programs that take bytes; tell whether it holds any."""
    parts = []
    for images, labels, weights in train.eval_batches(1000):
        if images.dtype != tf.uint8:
            return False
        kept = weights.numpy() > 0
        parts.append((images.numpy()[kept], labels.numpy()[kept]))
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    np.savez(path, images=images, labels=labels)
    return True


def main(config: dict[str, Any], stdin: TextIO, stdout: TextIO) -> None:
    """Serve windows until the end of `stdin`.

    Args:
        config: {"options": fields of Options, "matmul_size": n, "export": path or ""}.
        stdin: lines of seconds, and of seconds and a part.
        stdout: where the answers go.
    """

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=stdout, flush=True)

    matmul_size = config["matmul_size"]
    try:
        lane = OwnLane(Options(**config["options"]), matmul_size)
    except InputError as error:
        say({"refused": str(error)})
        return
    exported = bool(config.get("export")) and export(lane.data.train, config["export"])
    say(describe(lane, matmul_size) | {"exported": exported})
    for line in iter(stdin.readline, ""):
        seconds, _, part = line.strip().partition(" ")
        say(lane.train(float(seconds), part))
    say({"peak_memory_mib": lane.peak_memory_mib})


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    # What the user's own code prints goes to standard error: the answers stand alone.
    with os.fdopen(os.dup(1), "w") as answers, contextlib.suppress(BrokenPipeError):
        os.dup2(2, 1)
        try:
            main(json.loads(sys.argv[1]), sys.stdin, answers)
        except RunError as error:
            sys.exit(str(error))
