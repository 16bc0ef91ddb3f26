"""Starts a run: builds and restores it, places its graph, and only then writes to its folder."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towers import devices, files
from towers.builder.device_types import new_name, shown_name
from towers.errors import InputError
from towers.formatting import count
from towers.graphs import placement_report
from towers.graphs.placement import Placement, read_placement, short_device_name
from towers.monitoring import dashboard
from towers.options import code_trust
from towers.options.flags import IDENTITY
from towers.options.triggers import Timetable
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.parallelize import traced
from towers.training.run import checkpoint, manifest
from towers.training.run.checkpoint_manager import CheckpointManager
from towers.training.run.run_summary import run_summary
from towers.training.run.setup import RunContext, on_first_device
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.run.warm_start import init_from
from towers.training.step import loss_checks

Say = Callable[[str], None]
Batch = tuple[Any, tf.Tensor]  # (example, draws), see `data.Split`


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run that is ready for its next step."""

    run: RunContext
    checkpoints: CheckpointManager
    restored: int | None  # step of the restored checkpoint; None: it is a new run
    timetable: Timetable
    train_loop: Callable  # traced
    batches: Iterator  # for the train loop
    first_batch: Batch  # of the run, for pictures

    def steps_done(self) -> int:
        """Return the number of updates so far."""
        return int(self.run.train_state.step.numpy())


def restore(run: RunContext) -> tuple[CheckpointManager, int | None]:
    """Restore the newest checkpoint, unless the folder is to be overwritten.

    Args:
        run: built.

    Returns:
        The run's checkpoints, and the step of the restored one, None for a new run.

    Raises:
        InputError: the checkpoints are of another run or all damaged.
    """
    folder = run.folder
    identity = {name: getattr(run.options, name) for name in IDENTITY}
    kept = run.train_state.variables(), identity, run.options.keep_checkpoints
    checkpoints = CheckpointManager(folder / "checkpoints", *kept)
    if run.options.overwrite:
        return checkpoints, None
    files.clear_leftovers(folder)
    checkpoint.tidy(checkpoints.directory)
    restored = checkpoints.restore(lambda line: print(line, file=sys.stderr))
    run.train_state.set_copies()
    return checkpoints, restored


def begin(
    run: RunContext,
    lock: files.Lock,
    restored: int | None,
    preemption: PreemptionHandler,
    say: Say,
) -> PreparedRun:
    """Build the graph, report where it runs, and write the first files of the run's folder.

    Args:
        run: built, its variables restored.
        lock: of the run's folder, which is taken.
        restored: step of the restored checkpoint; None: it is a new run.
        preemption: handles signals while the first batch is read, and has the checkpoints.
        say: prints a line.

    Raises:
        RunError: towers differ from one device, with `--on_inexact=stop`. With "one_device" the
            prepared run is another one, on the first device.
    """
    try:
        return _begin(run, lock, restored, preemption, say)
    except InputError as error:
        if not run.builder.checks.inexact:
            raise
        device = shown_name(run.builder.devices[0])
        say(f"one device  {device} trains alone, which is exact; towers would not be: {error}")
    run = on_first_device(run)
    preemption.checkpoints, restored = restore(run)
    return _begin(run, lock, restored, preemption, say)


def _begin(
    run: RunContext,
    lock: files.Lock,
    restored: int | None,
    preemption: PreemptionHandler,
    say: Say,
) -> PreparedRun:
    """Begin a run as it is; raise InputError if `--on_inexact=one_device` does not allow it."""
    options, folder, checkpoints = run.options, run.folder, preemption.checkpoints
    with user_facing_errors(options), preemption:
        with preemption.first_batch():
            of_start = run.data.train.train_batches(options.batch_size, seed=options.seed)
            batch = next(iter(of_start))
        of_losses = loss_checks.check(run.task, batch)
        run.builder.checks.is_deferred = True  # `ExactnessChecks` calls them after steps
        run.builder.checks.passed |= manifest.passed(folder)
        with preemption.check():
            run.task.analyze(*batch)
    if options.on_inexact == "one_device" and (found := run.builder.checks.inexact):
        raise InputError(found[0])
    timetable, train_loop = run.timetable(), run.train_loop()
    if restored is None and options.init_from:
        say(init_from(run.train_state, options.init_from))
    step, examples = timetable.first_step, timetable.first_examples
    rules = run_summary(run)
    batches = iter(run.batches(step, examples))
    if run.on_towers:
        say(f"data        {run.on_towers}")
    for line in [*rules, *of_losses, *devices.report(run.builder.devices)]:
        say(line)
    placement, lines = _build_graph(run, train_loop, batches, say)
    lines += _report_diagnostics(run, say)
    # Nothing was written until here. The checkpoint comes first, so that a folder that cannot be
    # written, or a full disk, is found now and not after an hour.
    if options.overwrite and (aside := files.move_aside(folder)):
        say(f"moved aside {folder} to {aside}")
    with contextlib.suppress(OSError):  # saving the checkpoint raises a better message
        folder.mkdir(parents=True, exist_ok=True)
    lock.take(folder)
    if restored is None:
        checkpoints.save_now(0)
    files.write_text(folder / "flags.cfg", code_trust.signed(run.to_flagfile()))
    if options.log_device_placement:
        placement_report.write_tsv(folder / "placement.tsv", placement)
    for line in manifest.write(run, folder, restored):
        say(line)
    summary: list[str] = []
    run.train_state.model.summary(line_length=100, print_fn=lambda line, **_: summary.append(line))
    texts = {
        "rules": rules,
        "placement": [*lines, "", *placement_report.table(placement)],
        "model": "\n".join(summary).splitlines(),
    }
    graph = train_loop.get_concrete_function(batches, tf.constant(0)).graph
    best_known, _ = run.task.objective()
    names = sorted(run.task.metric_directions(), key=lambda n: (n != best_known, n == "loss"))
    parts = ["validation", "test"] if run.data.validation else ["test"]
    figures = [f"{part}_{name}" for part in parts for name in names]
    dashboard.open_root(folder, run.options, run.builder.devices, texts, placement, graph, figures)
    lock.take(folder)  # its subfolders, too, which exist now
    return PreparedRun(run, checkpoints, restored, timetable, train_loop, batches, batch)


def _build_graph(
    run: RunContext, train_loop: Callable, batches: Iterator, say: Say
) -> tuple[Placement, list[str]]:
    """Build the graph of a step; return the placement of its ops, and the report on it."""
    options, towers = run.options, run.builder.devices
    say(f"building    the graph of {count(len(towers), 'tower')} ...")
    with user_facing_errors(options):
        placement = traced(
            run.train_state.model, lambda: read_placement(train_loop, batches, tf.constant(0))
        )
    of_weights = towers if run.builder.gather_at_variables else []
    if options.variables == "replicated":
        of_weights = towers[:1]
    stray = placement_report.strays(
        placement, towers, run.train_state.variables(), [run.builder.gather_device, *of_weights]
    )
    lines = placement_report.report(placement, stray)
    more = []
    if options.log_device_placement:
        there = tf.config.list_logical_devices()
        everything = [new_name(short_device_name(device.name)) for device in there]
        more = ["  device mapping:", *(f"  {row}" for row in devices.describe(everything))]
        more += placement_report.table(placement)
    for line in [*lines, *more]:
        say(line)
    if options.placement == "strict":
        placement_report.check_strict(stray)
    return placement, lines


def _report_diagnostics(run: RunContext, say: Say) -> list[str]:
    """Report what is known to depend on the number of towers; return the lines."""
    lines = run.take_diagnostics()
    if lines:
        on_one = all(" runs on one device: " in line for line in lines)
        may_depend = "may depend on the number of towers"
        say(f"numbers     {'are those of one device' if on_one else may_depend}:")
    for line in lines:
        say(f"  {line}")
    return lines
