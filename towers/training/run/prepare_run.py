"""Starts a run: restores it, places its graph, says its rules, and then writes to its folder."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from towers import devices, files
from towers.devices.shown_names import new_name, short_device_name, shown_name
from towers.errors import InputError
from towers.formatting import count
from towers.graphs import placement_report
from towers.graphs.placement import Placement, read_placement
from towers.graphs.step_graph import step_graph
from towers.monitoring import dashboard
from towers.options import code_trust
from towers.options.flags import IDENTITY
from towers.options.run import names_that_affect
from towers.options.triggers import Timetable
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.run import checkpoint, loss_checks, manifest
from towers.training.run.checkpoint_manager import CheckpointManager
from towers.training.run.setup import RunContext, on_first_device
from towers.training.run.summary import run_summary
from towers.training.run.warm_start import init_from
from towers.training.step.on_towers import traced

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run that is ready for its next step."""

    run: RunContext
    checkpoints: CheckpointManager
    restored: int | None  # step of the restored checkpoint; None: it is a new run
    timetable: Timetable
    train_loop: Callable  # traced
    batches: Iterator  # for the train loop
    placement: Placement  # of the graph of a step
    report: Mapping[str, list[str]]  # {"rules", "placement": lines}

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
        prepared = _prepare(run, restored, preemption, say)
    except InputError as error:
        if not run.builder.checks.inexact:
            raise
        device = shown_name(run.builder.devices[0])
        say(f"one device  {device} trains alone, which is exact; towers would not be: {error}")
        run = on_first_device(run)
        preemption.checkpoints, restored = restore(run)
        prepared = _prepare(run, restored, preemption, say)

    # Nothing was written until here. The checkpoint comes first, so that a folder that cannot be
    # written, or a full disk, is found now and not after an hour.
    options, folder = run.options, run.folder
    if options.overwrite and (aside := files.move_aside(folder)):
        say(f"moved aside {folder} to {aside}")
    with contextlib.suppress(OSError):  # saving the checkpoint raises a better message
        folder.mkdir(parents=True, exist_ok=True)
    lock.take(folder)
    if restored is None:
        prepared.checkpoints.save_now(0)
    files.write_text(folder / "flags.cfg", code_trust.signed(run.to_flagfile()))
    if options.log_device_placement:
        placement_report.write_tsv(folder / "placement.tsv", prepared.placement)
    for line in manifest.write(run, folder, restored):
        say(line)
    _open_dashboard(prepared)
    return prepared


def _prepare(
    run: RunContext, restored: int | None, preemption: PreemptionHandler, say: Say
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
    if restored is None and options.init_from:
        say(init_from(run.train_state, options.init_from))
    batches = iter(run.batches(timetable.first_step, timetable.first_examples))
    rules = run_summary(run)
    cached = [f"data        {run.on_towers}"] if run.on_towers else []
    for line in [*cached, *rules, *of_losses, *devices.report(run.builder.devices)]:
        say(line)
    say(f"building    the graph of {count(len(run.builder.devices), 'tower')} ...")
    model = run.train_state.model
    placement = traced(model, lambda: read_placement(train_loop, batches, tf.constant(0)))
    report = {"rules": rules, "placement": _report_placement(run, placement, say)}
    state = preemption.checkpoints, restored, timetable, train_loop, batches
    return PreparedRun(run, *state, placement, report)


def _report_placement(run: RunContext, placement: Placement, say: Say) -> list[str]:
    """Report where a step's ops run, and what may depend on the number of towers; return that."""
    options, towers = run.options, run.builder.devices
    of_weights = towers if run.builder.gather_at_variables else []
    if options.variables == "replicated":
        of_weights = towers[:1]
    stray = placement_report.strays(
        placement, towers, run.train_state.variables(), [run.builder.gather_device, *of_weights]
    )
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
        say(f"numbers     {'are those of one device' if on_one else may_depend}:")
    for line in found:
        say(f"  {line}")
    return lines + found


def _open_dashboard(prepared: PreparedRun) -> None:
    """Write what TensorBoard shows of the run beside its curves."""
    run, model = prepared.run, []
    run.train_state.model.summary(line_length=100, print_fn=lambda line, **_: model.append(line))
    lines = [*prepared.report["placement"], "", *placement_report.table(prepared.placement)]
    texts = {
        "rules": prepared.report["rules"],
        "placement": lines,
        "model": "\n".join(model).splitlines(),
        "flags": run.options.to_flagfile().splitlines(),
        "environment": dashboard.environment(run.builder.devices),
    }
    graph = prepared.train_loop.get_concrete_function(prepared.batches, tf.constant(0)).graph
    part = "validation" if run.data.validation else "test"
    metrics = [f"{part} {name}" for name in run.task.figures if name != "loss"]
    names = names_that_affect("result", "speed", "machine", "report")
    flags = {name: getattr(run.options, name) for name in names}
    flags |= {"num_towers": len(run.builder.devices)}
    step = step_graph(graph, prepared.placement)
    dashboard.write_root(run.folder, metrics, texts, step, flags)
