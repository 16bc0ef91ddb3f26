"""How a run begins: built, restored, placed; and only then is its folder written to."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import tensorflow as tf

from towers import devices, files
from towers.errors import InputError, RunError
from towers.graphs import placement_report
from towers.graphs.placement import Placement, read_placement, short
from towers.monitoring import events
from towers.monitoring.samples import Batch
from towers.options.run import Options
from towers.training import faults, trial
from towers.training.checkpoint import Checkpoints
from towers.training.run import Run, assemble, find, one_line_errors


def build(options: Options) -> Run:
    """Build the run, its variables where they are fastest if the options leave that open.

    Raises:
        InputError: a device, the data or the model cannot be had as the options say.
        RunError: the data set cannot be read, a GPU does not compute, or gradients are gathered
            wrong.
    """
    names, dataset = find(options)
    if options.variables == "auto":
        out = sys.stderr if options.json else sys.stdout
        options = trial.fastest(
            options, names, dataset, lambda line: print(line, file=out, flush=True)
        )
    run = assemble(options, names, dataset)
    trial.check_gather(run)
    return run


def restore(run: Run, folder: Path) -> tuple[Checkpoints, int | None]:
    """Restore the newest checkpoint of the folder, if it is to be continued; write nothing.

    Returns:
        The checkpoints, and the step that was restored, None for a new run.
    """
    checkpoints = Checkpoints(
        folder / "checkpoints",
        run.masters.variables(),
        {n: getattr(run.options, n) for n in ("model", "model_args", "augment", "dataset")},
        run.options.keep_checkpoints,
    )
    if run.options.overwrite:
        return checkpoints, None
    restored = checkpoints.restore(lambda line: print(line, file=sys.stderr))
    run.masters.spread()
    return checkpoints, restored


def check_curves(folder: Path, restored: int | None, options: Options) -> None:
    """Refuse to write where curves are that this run cannot go on with.

    Args:
        folder: of the run.
        restored: step of the checkpoint that it goes on with, None for a new run.
        options: of the run.

    Raises:
        InputError: the curves are another program's, or over something else; one line.
    """
    if options.overwrite:
        return
    if restored is None:
        if any(events.paths(folder / part) for part in ("train", "eval")):
            raise InputError(
                f"--train_dir={folder}: there are event files in its train or eval, and no "
                "checkpoint that they belong to: name another folder"
            )
        return
    given, lines = options.tensorboard_x, []
    with contextlib.suppress(OSError, ValueError):
        lines = (folder / "flags.cfg").read_text(encoding="utf-8").splitlines()
    for line in lines:
        before = line.removeprefix("--tensorboard_x=")
        if before not in (line, given):
            raise InputError(
                f"--tensorboard_x={given}: the curves in {folder} are over {before}; go on "
                f"with --tensorboard_x={before}, or --overwrite moves the run aside"
            )


def place(
    run: Run, train_loop: Callable, batches: Iterator, out: TextIO
) -> tuple[Placement, list[str]]:
    """Build the graph of a step, and say where TensorFlow put it; no step is made.

    Returns:
        The placement, and the report on it that was printed.

    Raises:
        RunError: a tower's op runs elsewhere, and --placement=strict forbids it.
    """
    towers = f"{len(run.builder.devices)} tower{'s' * (len(run.builder.devices) > 1)}"
    print(f"building    the graph of {towers} ...", file=out, flush=True)
    with one_line_errors(run.options):
        placement = read_placement(train_loop, batches, tf.constant(0))
    builder = run.builder
    stray = placement_report.strays(
        placement, builder.devices, run.masters.variables(), run.master_devices()
    )
    lines = placement_report.report(placement, stray)
    print(*lines, sep="\n", file=out)
    if run.options.log_device_placement:
        everything = [short(d.name) for d in tf.config.list_logical_devices()]
        mapping = ["  device mapping:", *(f"  {row}" for row in devices.describe(everything))]
        print(*mapping, *placement_report.table(placement), sep="\n", file=out)
    out.flush()
    if run.options.placement == "strict":
        placement_report.check_strict(stray)
    return placement, lines


def check_numbers(run: Run, placement: Placement, batch: Batch | None, out: TextIO) -> list[str]:
    """Say before the first step what makes the numbers depend on the number of towers.

    Args:
        run: to be started.
        placement: of its train loop.
        batch: that it trains on; None: it cannot be had.
        out: where the lines go.

    Returns:
        The lines.

    Raises:
        RunError: a random draw is among it, and --draws=strict forbids that.
    """
    if len(run.builder.devices) * run.builder.accumulate_steps == 1:
        return []
    found = list(run.doubts)
    if batch is not None:
        found += faults.find(run.rehearse(batch.tensors), batch.tensors)
    found += faults.random_ops_of(placement.ops + placement.compiled + placement.gone)
    found = list(dict.fromkeys(found))
    if found:
        print("numbers     may depend on the number of towers:", file=out)
        print(*(f"  {line}" for line in found), sep="\n", file=out, flush=True)
    if run.options.draws == "strict" and (draws := [f for f in found if faults.of_draws(f)]):
        more = f", and {len(draws) - 1} more" if len(draws) > 1 else ""
        raise RunError(f"--draws=strict: {draws[0]}{more}; or type --draws=report")
    return found


def open_folder(
    run: Run,
    folder: Path,
    lock: files.Lock,
    checkpoints: Checkpoints,
    restored: int | None,
    placement: Placement,
) -> None:
    """Make the folder that of this run: until here, nothing was written.

    A checkpoint is written before any step: a folder that cannot be written, or is full, is found
    now and not after an hour.
    """
    if run.options.overwrite:
        files.move_aside(folder)
    with contextlib.suppress(OSError):  # the checkpoint says it better
        folder.mkdir(parents=True, exist_ok=True)
    lock.take(folder)
    if restored is None:
        checkpoints.save(0)
    files.write_text(folder / "flags.cfg", run.options.to_flagfile())
    if run.options.log_device_placement:
        placement_report.write_tsv(folder / "placement.tsv", placement)
