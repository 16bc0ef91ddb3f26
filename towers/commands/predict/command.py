"""`towers predict`: a trained model's outputs for the user's files, computed on towers."""

import csv
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from towers import devices
from towers.builder.replica_scope import ReplicaScope
from towers.builder.tower import TowerBuilder
from towers.commands.predict import inputs
from towers.commands.predict.inputs import InputFile
from towers.commands.predict.options import PredictOptions
from towers.formatting import count
from towers.training.load import Classes, TrainedModel, load_run
from towers.training.run.process_state import preserve_rng
from towers.training.run.setup import tower_devices
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.step.evaluation import mirrored
from towers.training.step.step import floatx_of

Row = tuple[str, int, dict[str, np.ndarray]]  # file, index there, outputs by name


def run(options: PredictOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Print the outputs of a run's newest or best checkpoint for each example; see `flags.Verb`.

    All files are checked before anything is printed, and read again when they are needed.
    """
    run_options = dataclasses.replace(options.run, jit_compile=False)
    devices.configure_run(run_options)
    devices.try_out()
    # On one device, too, outputs of a model that mixes examples depend on the other files.
    builder = TowerBuilder(tower_devices(run_options), check="off")
    trained = load_run(run_options, averages=options.averages)
    parts = inputs.find(options.files, trained)
    num = sum(part.size for part in parts)
    for line in devices.report(builder.devices):
        say(line)
    kind = "averages" if trained.averaged else "weights"
    towers = count(len(builder.devices), "tower")
    say(f"step {trained.step}, {kind}, {count(num, 'example')}, {towers}")
    rows = _rows(trained, builder, parts, min(num, run_options.batch_size))
    write = _write_json if run_options.json else _write_csv
    with user_facing_errors(), preserve_rng():
        write(rows, Classes.of(trained))
    return {}


def _rows(
    trained: TrainedModel, builder: TowerBuilder, parts: Sequence[InputFile], batch_size: int
) -> Iterator[Row]:
    # From batches that are padded to one size.

    @floatx_of(trained.options.dtype)
    def on_tower(x: Any) -> Any:
        with ReplicaScope():  # drops assignments, as of call counters and seeds
            call = functools.partial(trained.model, training=False)
            flips = trained.options.test_time_flip
            return mirrored(call, trained.inputs(x)) if flips else call(trained.inputs(x))

    @tf.function(autograph=False)
    def predict(x: Any) -> Any:
        return builder.concat(on_tower, x)

    def stacked(rows: list[np.ndarray]) -> tf.Tensor:
        rest = [np.zeros_like(rows[0])] * (batch_size - len(rows))
        with tf.device("/cpu:0"):
            return tf.constant(np.stack([*rows, *rest]))

    places = ((part, index) for part in parts for index in range(part.size))
    with ThreadPoolExecutor() as pool:
        while batch := list(itertools.islice(places, batch_size)):
            examples = pool.map(lambda place: place[0].read(place[1]), batch)
            outputs = _by_name(trained.model, predict(stacked(list(examples))))
            for i, (part, index) in enumerate(batch):
                yield part.file, index, {name: array[i] for name, array in outputs.items()}


def _by_name(model: Any, outputs: Any) -> dict[str, np.ndarray]:
    if not tf.nest.is_nested(outputs):
        outputs = {"output": outputs}
    elif not isinstance(outputs, dict):
        names = getattr(model, "output_names", None) or []
        if len(names) != len(outputs):
            names = [f"output_{i}" for i in range(len(outputs))]
        outputs = dict(zip(names, outputs, strict=True))

    def array(output: tf.Tensor) -> np.ndarray:
        half = output.dtype.is_floating and output.dtype.size < 4  # prints too few digits
        return (tf.cast(output, tf.float32) if half else output).numpy()

    return {str(name): array(output) for name, output in outputs.items()}


def _write_csv(rows: Iterator[Row], classes: Classes | None) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for number, (file, index, outputs) in enumerate(rows):
        heads = ["class", "probability", "second", "second_probability"]
        if classes:
            cells = [cell for pair in classes.top_2(*outputs.values()) for cell in pair]
        else:  # columns of outputs as price.0, mask.0.17
            named = [(name, place) for name in outputs for place in np.ndindex(outputs[name].shape)]
            heads = [".".join(map(str, (name, *place))) for name, place in named]
            cells = [cell for value in outputs.values() for cell in _numbers(value.reshape(-1))]
        if not number:
            writer.writerow(["file", "index", *heads])
        writer.writerow([file, index, *cells])


def _write_json(rows: Iterator[Row], classes: Classes | None) -> None:
    before = "["
    for file, index, outputs in rows:
        best, probability = classes.top_2(*outputs.values())[0] if classes else (None, None)
        entry = {"file": file, "index": index, "class": best, "probability": probability}
        entry["outputs"] = {name: _numbers(output) for name, output in outputs.items()}
        print(before, json.dumps(entry), sep="\n", end="")
        before = ","
    print("\n]")


def _numbers(output: np.ndarray) -> Any:
    """Return an array as lists of numbers, float32 without spurious digits."""
    if output.dtype == np.float32:
        output = output.astype(str).astype(np.float64)
    return output.tolist()
