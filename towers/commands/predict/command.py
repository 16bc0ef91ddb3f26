"""`towers predict`: a trained model's outputs for the user's files, computed on towers."""

import csv
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers import devices
from towers.builder.replica_scope import ReplicaScope
from towers.builder.tower import TowerBuilder
from towers.commands.predict import inputs
from towers.commands.predict.inputs import InputFile
from towers.commands.predict.options import PredictOptions
from towers.errors import InputError
from towers.formatting import count, first_of, printable
from towers.training.load import Classes, TrainedModel, load_run
from towers.training.run.model import floatx_of
from towers.training.run.process_state import suppress_retracing_warnings
from towers.training.run.setup import tower_devices
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.step.output_activation import logits_of

_SHOWN = 6  # numbers of an output in a table


class Row(NamedTuple):
    """An example: its file, its index there, and its outputs by name."""

    file: str
    index: int
    outputs: dict[str, np.ndarray]


def run(options: PredictOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Print the outputs of a run's newest or best checkpoint for each example; return {}.

    All files are checked before anything is printed, and read again when they are needed.

    Args:
        options: the run, the files and the format.
        say: called with each line about the run.
    """
    run_options = options.run
    devices.configure(**dataclasses.asdict(run_options.gpu_options()))
    devices.try_out()
    builder = TowerBuilder(tower_devices(run_options))
    trained = load_run(run_options, averages=options.averages)
    parts = inputs.find(options.files, trained, say)
    num = sum(part.size for part in parts)
    for line in devices.report(builder.devices):
        say(line)
    if notes := [f"{part.file}: {part.note}" for part in parts if part.note]:
        say(f"note: {first_of(notes, 3)}")
    kind = "averages" if trained.averaged else "weights"
    towers = count(len(builder.devices), "tower")
    say(f"step {trained.step}, {kind}, {count(num, 'example')}, {towers}")
    rows = _rows(trained, builder, parts, min(num, run_options.batch_size))
    write = _WRITE["json" if run_options.json else options.format]
    with user_facing_errors(run_options), suppress_retracing_warnings():
        write(rows, Classes.of(trained), parts)
    return {}


def _rows(
    trained: TrainedModel, builder: TowerBuilder, parts: Sequence[InputFile], batch_size: int
) -> Iterator[Row]:
    """Yield the examples with their outputs, from batches that are padded to one size."""

    @floatx_of(trained.options.dtype)
    def on_tower(x: Any) -> Any:
        with ReplicaScope():  # drops assignments, as of call counters and seeds
            return logits_of(trained.model, trained.inputs(x), trained.options.test_time_flip)

    @tf.function(autograph=False)
    def predict(x: Any) -> Any:
        return builder.concat(on_tower, x)

    def filled(array: np.ndarray) -> tf.Tensor:
        rest = np.zeros([batch_size - len(array), *array.shape[1:]], array.dtype)
        with tf.device("/cpu:0"):
            return tf.constant(np.concatenate([array, rest]))

    for rows, examples in inputs.batches(parts, batch_size):
        outputs = predict(tf.nest.map_structure(filled, examples))
        if not tf.nest.is_nested(outputs):
            outputs = {"output": outputs}
        elif not isinstance(outputs, dict):
            names = getattr(trained.model, "output_names", None) or []
            if len(names) != len(outputs):
                names = [f"output_{i}" for i in range(len(outputs))]
            outputs = dict(zip(names, outputs, strict=True))
        arrays = {}
        for name, output in outputs.items():
            half = output.dtype.is_floating and output.dtype.size < 4  # prints too few digits
            arrays[str(name)] = (tf.cast(output, tf.float32) if half else output).numpy()
        for i, (file, index) in enumerate(rows):
            yield Row(file, index, {name: array[i] for name, array in arrays.items()})


# Each format; all but npy print an example as soon as it is computed.


def _write_table(rows: Iterator[Row], classes: Classes | None, parts: Sequence[InputFile]) -> None:
    file = max(len("file"), *(len(part.file) for part in parts))
    name = max(len("class"), *map(len, classes.names)) if classes else 0
    rest = f"{'class':{name}}  probability  {'second':{name}}  probability"
    print(f"{'file':{file}}  row    {rest if classes else 'outputs'}")
    for row in rows:
        if classes:
            cells = [f"{c:{name}}  {p:11.4f}" for c, p in classes.top_2(*row.outputs.values())]
        else:
            cells = [f"{n} {_first_numbers(output)}" for n, output in row.outputs.items()]
        print(printable(f"{row.file:{file}}  {row.index:<5}  {'  '.join(cells)}"))


def _first_numbers(output: np.ndarray) -> str:
    flat = output.reshape(-1)
    numbers = " ".join(f"{value:.6g}" for value in flat[:_SHOWN].tolist())
    return numbers + (f" ... ({'x'.join(map(str, output.shape))})" if len(flat) > _SHOWN else "")


def _write_csv(rows: Iterator[Row], classes: Classes | None, parts: Sequence[InputFile]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    heads = ["class", "probability", "second", "second_probability"] if classes else []
    for number, row in enumerate(rows):
        if classes:
            cells = [cell for pair in classes.top_2(*row.outputs.values()) for cell in pair]
        else:
            cells = [cell for value in row.outputs.values() for cell in _numbers(value.reshape(-1))]
        if not number:  # columns of outputs as price, mask.0.17
            for name, output in row.outputs.items() if not classes else ():
                heads += [".".join(map(str, (name, *place))) for place in np.ndindex(output.shape)]
            writer.writerow(["file", "index", *heads])
        writer.writerow([row.file, row.index, *cells])


def _write_json(rows: Iterator[Row], classes: Classes | None, parts: Sequence[InputFile]) -> None:
    before = "["
    for row in rows:
        outputs = {name: _numbers(output) for name, output in row.outputs.items()}
        best, probability = classes.top_2(*row.outputs.values())[0] if classes else (None, None)
        entry = {"file": row.file, "index": row.index, "class": best, "probability": probability}
        print(before, json.dumps(entry | {"outputs": outputs}), sep="\n", end="")
        before = ","
    print("\n]")


def _numbers(output: np.ndarray) -> Any:
    """Return an array as lists of numbers, float32 without spurious digits."""
    if output.dtype == np.float32:
        output = output.astype(str).astype(np.float64)
    return output.tolist()


def _write_npy(rows: Iterator[Row], classes: Classes | None, parts: Sequence[InputFile]) -> None:
    if sys.stdout.isatty():
        raise InputError("--format=npy is no text: type towers predict ... --format=npy > FILE.npy")
    outputs = []
    for row in rows:
        if len(row.outputs) > 1:
            names = ", ".join(row.outputs)
            raise InputError(f"--format=npy is for one output, and this model has {names}: --json")
        outputs += row.outputs.values()
    sys.stdout.flush()
    np.save(sys.stdout.buffer, np.stack(outputs), allow_pickle=False)


_WRITE = {"table": _write_table, "csv": _write_csv, "json": _write_json, "npy": _write_npy}
