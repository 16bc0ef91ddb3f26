"""Starts a run: restores it, places its graph, prints its summary, then writes to its folder."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers import devices, files, signals
from towers.devices.shown_names import new_name, short_device_name, shown_name
from towers.errors import InputError
from towers.formatting import count, print_line
from towers.graphs import placement_report
from towers.graphs.placement import Placement, read_placement
from towers.graphs.step_graph import step_graph
from towers.monitoring import dashboard, results
from towers.options import code_trust
from towers.options.flags import IDENTITY, MANIFEST
from towers.options.run import names_that_affect
from towers.options.triggers import Timetable
from towers.training.callbacks.best_checkpoint import BestTracker
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.load import init_from
from towers.training.run import checkpoint, loss_checks, manifest
from towers.training.run.checkpoint_manager import CheckpointManager
from towers.training.run.place import END, EPOCH, Place
from towers.training.run.setup import RunContext, on_first_device
from towers.training.run.summary import run_summary
from towers.training.step.on_towers import traced

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Restored:
    """What the folder of a run holds."""

    checkpoints: CheckpointManager
    step: int | None  # of the restored checkpoint; None: it is a new run
    place: Place  # that the run has reached
    best: BestTracker  # its evaluations
    manifest: Mapping[str, Any]  # {} of a new run
    result: Mapping[str, Any]  # {} unless the run is finished


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run that is ready for its next step."""

    run: RunContext
    restored: Restored
    timetable: Timetable
    train_loop: Callable  # traced
    batches: Iterator  # for the train loop
    placement: Placement  # of the graph of a step
    summary: Sequence[str]  # lines that were printed, and those on the placement
    places: Sequence[str]

    @property
    def checkpoints(self) -> CheckpointManager:
        """The run's checkpoints."""
        return self.restored.checkpoints


def restore(run: RunContext) -> Restored:
    """Restore the newest checkpoint, unless the folder is to be overwritten.

    Raises:
        InputError: the checkpoints are of another run or all damaged, or the data are others.
    """
    folder, options, variables = run.folder, run.options, run.train_state.variables()
    identity = {name: getattr(options, name) for name in IDENTITY}
    kept = variables, identity, options.keep_checkpoints
    checkpoints = CheckpointManager(folder / "checkpoints", *kept)
    if options.overwrite:
        return Restored(checkpoints, None, Place(), BestTracker(run), {}, {})
    files.clear_leftovers(folder)
    recorded, result = manifest.read(folder), results.read(folder)
    checkpoint.tidy(checkpoints.directory)
    of_run = run.data, options, recorded.get("task", {})
    try:
        step = checkpoints.restore(lambda line: print_line(line, sys.stderr))
    except InputError:
        manifest.check_data(*of_run, trains=True, number=True)  # may be why shapes differ
        raise
    place, best = checkpoints.restored_place, BestTracker(run)
    if step is None:
        return Restored(checkpoints, None, place, best, {}, {})
    manifest.check_data(*of_run, trains=True)
    run.train_state.set_copies()
    last_step = run.timetable().last_step
    over = step == last_step or best.is_over() or place.is_stopped(options.callbacks, last_step)
    if place.stage == END and not over:
        place.stage = EPOCH  # the run is to be longer than it was
    if not over or result.get("steps") != step:
        result = {}
        _check_not_beyond(run)
    return Restored(checkpoints, step, place, best, recorded, result)


def _check_not_beyond(run: RunContext) -> None:
    """Raise InputError if a run has made more steps than it is to have.

    It would end at once, and its flags.cfg forget how long it was to be.
    """
    options, step = run.options, run.steps_done()
    beyond = int(run.train_state.examples.numpy()) - run.total_examples
    too_many = 0 < options.max_steps < step
    if too_many or beyond >= options.batch_size:
        epochs = f"--num_epochs={run.total_epochs:g}"
        raise InputError(
            f"{f'--max_steps={options.max_steps}' if too_many else epochs}: the run in "
            f"{run.folder} is already longer ({count(step, 'step')}); raise it, or type "
            f"towers evaluate --train_dir={run.folder}"
        )


def begin(
    run: RunContext, restored: Restored, lock: files.Lock, preemption: PreemptionHandler, say: Say
) -> PreparedRun:
    """Build the graph, report where it runs, and write the first files of the run's folder.

    Args:
        run: built, its variables restored.
        restored: what its folder holds.
        lock: of the run's folder, which is taken.
        preemption: handles signals while the first batch is read, and has the checkpoints.
        say: prints a line.

    Raises:
        RunError: towers differ from one device, with `--on_inexact=stop`. With "one_device" the
            prepared run is another one, on the first device.
    """
    try:
        prepared = _prepare(run, restored, preemption, say)
    except InputError as error:
        if not run.builder.checks.inexact:
            raise
        device = shown_name(run.builder.devices[0])
        say(f"one device  trains only on {device}, because towers would differ from it: {error}")
        run = on_first_device(run)
        restored = restore(run)
        preemption.checkpoints = restored.checkpoints
        prepared = _prepare(run, restored, preemption, say)
    _open_folder(prepared, lock, say)
    if listener := signals.owner():
        listener.keep(prepared.batches)  # deleting them may wait for a source for ever
    return prepared


def _prepare(
    run: RunContext, restored: Restored, preemption: PreemptionHandler, say: Say
) -> PreparedRun:
    """Prepare a run as it is; raise InputError if `--on_inexact=one_device` does not allow it."""
    options, checks = run.options, run.builder.checks
    with preemption:
        with preemption.first_batch():
            of_start = run.data.train.train_batches(options.batch_size, seed=options.seed)
            batch = next(iter(of_start))
        of_losses = loss_checks.check(run.task, batch)
        checks.is_deferred = True  # `ExactnessChecks` calls them after steps
        checks.passed |= manifest.passed(run.folder)
        with preemption.check():
            run.task.analyze(*batch)
    if options.on_inexact == "one_device" and checks.inexact:
        raise InputError(checks.inexact[0])
    timetable, train_loop = run.timetable(), run.train_loop()
    if restored.step is None and options.init_from:
        say(init_from(run.train_state, options.init_from))
    elif options.init_from:
        say(f"init_from   {options.init_from} is not read: the resumed run has its own weights")
    batches = iter(run.batches(timetable.first_step, timetable.first_examples))
    summary = run_summary(run)
    cached = [f"data        {run.on_towers}"] if run.on_towers else []
    for line in [*cached, *summary, *of_losses, *devices.report(run.builder.devices)]:
        say(line)
    say(f"building    the graph of {count(len(run.builder.devices), 'tower')} ...")
    placement = traced(run.task.model, lambda: read_placement(train_loop, batches, tf.constant(0)))
    places = _report_placement(run, placement, say)
    return PreparedRun(run, restored, timetable, train_loop, batches, placement, summary, places)


def _report_placement(run: RunContext, placement: Placement, say: Say) -> list[str]:
    """Report where a step's ops run, and what may depend on the number of towers; return that."""
    options, towers = run.options, run.builder.devices
    of_weights = towers if run.builder.gather_at_variables else []
    if options.variables == "replicated":
        of_weights = towers[:1]
    expected = [run.builder.gather_device, *of_weights]
    stray = placement_report.strays(placement, towers, run.train_state.variables(), expected)
    lines, mapping = placement_report.report(placement, stray), []
    if options.log_device_placement:
        there = [new_name(short_device_name(d.name)) for d in tf.config.list_logical_devices()]
        mapping = ["  device mapping:", *(f"  {row}" for row in devices.describe(there))]
        mapping += placement_report.table(placement)
    for line in [*lines, *mapping]:
        say(line)
    if options.placement == "strict":
        placement_report.check_strict(stray)
    if found := run.take_diagnostics():
        on_one = all(" runs on one device: " in line for line in found)
        may_depend = "may depend on the number of towers"
        say(f"results     {'are those of one device' if on_one else may_depend}:")
    for line in found:
        say(f"  {line}")
    return lines + found


def _open_folder(prepared: PreparedRun, lock: files.Lock, say: Say) -> None:
    """Write the first files of a run's folder; nothing was written before.

    The checkpoint comes first, so that a folder that cannot be written, or a full disk, is found
    now and not after an hour.
    """
    run, restored, folder = prepared.run, prepared.restored, prepared.run.folder
    if run.options.overwrite and (aside := files.move_aside(folder)):
        say(f"moved aside {folder} to {aside}")
    with contextlib.suppress(OSError):  # saving the checkpoint raises a better message
        folder.mkdir(parents=True, exist_ok=True)
    lock.take(folder)
    if restored.step is None:
        prepared.checkpoints.save_now(0)
    record, differences = manifest.extended(run, restored.manifest)
    for line in differences:
        say(f"warning     {line}")
    _write_dashboard(prepared)
    if run.options.log_device_placement:
        placement_report.write_tsv(folder / "placement.tsv", prepared.placement)
    files.write_text(folder / "flags.cfg", code_trust.signed(run.to_flagfile()))
    files.write_json(folder / MANIFEST, record)


def _write_dashboard(prepared: PreparedRun) -> None:
    """Write what TensorBoard shows of the run beside its curves."""
    run, model = prepared.run, []
    run.task.model.summary(line_length=100, print_fn=lambda line, **_: model.append(line))
    texts = {
        "summary": prepared.summary,
        "placement": [*prepared.places, "", *placement_report.table(prepared.placement)],
        "model": "\n".join(model).splitlines(),
        "flags": run.options.to_flagfile().splitlines(),
        "environment": dashboard.environment(run.builder.devices),
    }
    part = "validation" if run.data.validation else "test"
    metrics = [f"{part} {name}" for name in run.task.figures if name != "loss"]
    names = names_that_affect("result", "speed", "machine", "report")
    flags = {name: getattr(run.options, name) for name in names}
    flags |= {"num_towers": len(run.builder.devices)}
    graph = prepared.train_loop.get_concrete_function(prepared.batches, tf.constant(0)).graph
    step = step_graph(graph, prepared.placement)
    dashboard.write_root(run.folder, metrics, texts, step, flags)
