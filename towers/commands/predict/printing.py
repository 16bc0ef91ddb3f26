"""Writers of predictions; all but npy print an example as soon as it is computed."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from towers.commands.predict.inputs import InputFile
from towers.errors import InputError
from towers.formatting import printable
from towers.training.output_classes import Classes

_SHOWN = 6  # numbers of an output in a table


class Row(NamedTuple):
    """An example: its file, its index there, and its outputs by name."""

    file: str
    index: int
    outputs: dict[str, np.ndarray]


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
    heads = ["class", "probability", "second", "second_probability"] if classes else None
    for number, row in enumerate(rows):
        if classes:
            cells = [cell for pair in classes.top_2(*row.outputs.values()) for cell in pair]
        else:
            cells = [cell for value in row.outputs.values() for cell in _numbers(value.reshape(-1))]
        if not number and not classes:  # columns as price, mask.0.17
            places = {name: np.ndindex(output.shape) for name, output in row.outputs.items()}
            heads = [".".join(map(str, (n, *place))) for n in places for place in places[n]]
        if not number:
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


WRITE = {"table": _write_table, "csv": _write_csv, "json": _write_json, "npy": _write_npy}
