"""`towers train`: the training loop, independent of the number of towers and their devices."""

import contextlib
import functools
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import keras
import tensorflow as tf

from towers import devices, files, signals
from towers.devices import remote
from towers.formatting import count, print_line
from towers.monitoring.monitor import Monitor, tensorboard_command
from towers.monitoring.profiler import Profiler
from towers.options.flags import options_from_call
from towers.options.functions import call_without_arguments
from towers.options.run import Options
from towers.training.callbacks import user_callbacks
from towers.training.callbacks.evaluator import Evaluator
from towers.training.callbacks.exactness import ExactnessChecks
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.callbacks.saver import Saver
from towers.training.callbacks.user_callbacks import Callbacks
from towers.training.run import checkpoint
from towers.training.run.place import END, EPOCH, STEP
from towers.training.run.prepare_run import PreparedRun, begin, restore
from towers.training.run.process_state import preserve_rng
from towers.training.run.result import table, tell_finished, write_result
from towers.training.run.setup import prepare
from towers.training.run.tensorflow_errors import user_facing_errors


@preserve_rng()
def train(
    options: Options | None = None, start: float | None = None, /, **fields: Any
) -> dict[str, Any] | None:
    """Train a model, or resume the run in `train_dir`.

        result = towers.train(model=build, dataset=data, train_dir="runs/mine", num_epochs=2)

    Ctrl-C, or a notebook's interrupt, saves and returns None; the same call resumes.

    Args:
        options: of the run; None: those of `fields`, on top of the flags.cfg of an existing run.
        start: `time.perf_counter()` when the command started, for `seconds_to_first_step`.
        **fields: of `towers.Options`: `model`, `dataset`, `num_towers`, `train_dir`, ... Functions
            are passed directly or as "module:function", data also as the function's result.

    Returns:
        The contents of result.json, or None if a signal, or the loss of a machine, stopped the run,
        which is saved then.

    Raises:
        InputError: an option is invalid. Nothing has been written.
        RunError: the loss or a weight is not finite, a batch cannot be read, the folder cannot be
            written, or towers differ from one device and `on_inexact` does not allow it.
    """
    start = time.perf_counter() if start is None else start
    options = options_from_call(options, fields)
    names = filter(None, options.callbacks.split(","))
    made = [call_without_arguments("callbacks", name) for name in names]
    out = sys.stderr if options.json else sys.stdout
    lines = _OnlyWarnings() if options.quiet else out
    say = functools.partial(print_line, stream=lines)
    folder = Path(options.train_dir)
    files.check_train_dir(folder, options.overwrite)
    prepared: PreparedRun | None = None
    errors = user_facing_errors(lambda: prepared and prepared.run.steps_done())
    loose_ops = devices.loose_ops_on(options.devices)
    with files.Lock() as lock, remote.loss_is_an_end(), loose_ops, errors:
        lock.take(folder)
        continues = not options.overwrite and bool(checkpoint.find(folder / "checkpoints"))
        run = prepare(options, continues)
        callbacks = user_callbacks.checked(made, run)
        restored = restore(run)
        if restored.result:
            return _printed(tell_finished(run, restored, say), out)
        stalls = options.stall_seconds, options.on_stall
        preemption = PreemptionHandler(restored.checkpoints, say, *stalls)
        with remote.saved_when_lost(preemption.save_backup, say):
            prepared = begin(run, restored, lock, preemption, say)
            del run, restored  # which may be those of towers that are not used
            return _printed(_train(prepared, preemption, lines, start, callbacks), out)
    return None


class _OnlyWarnings(io.TextIOBase):
    """Sends warnings to standard error, and drops all other lines."""

    def write(self, text: str) -> int:
        """Write a line."""
        if text.startswith("warning"):
            print_line(text, sys.stderr)
        return len(text)


def _printed(result: dict[str, Any] | None, out: TextIO | None) -> dict[str, Any] | None:
    for line in table(result) if result else ():
        print_line(line, out)
    return result


def _train(
    prepared: PreparedRun,
    preemption: PreemptionHandler,
    out: TextIO | None,
    start: float,
    keras_callbacks: Sequence[keras.callbacks.Callback],
) -> dict[str, Any] | None:
    """Make the steps of a run, and what ends it; return as `train` does."""
    run, timetable, place = prepared.run, prepared.timetable, prepared.restored.place
    step, last = timetable.first_step, timetable.last_step
    due = run.due
    with contextlib.ExitStack() as stack:
        monitor = Monitor(run.folder, timetable, run.builder.devices, out=out, start=start)
        prepared.checkpoints.say = monitor.say
        stack.enter_context(contextlib.closing(prepared.checkpoints))
        _announce(monitor, prepared)
        profiler = stack.enter_context(Profiler(run.folder, due.profile_range(), monitor))
        if due.histogram_every_epochs:
            monitor.histograms(step, run.task.model)
        stack.enter_context(preemption)
        callbacks = Callbacks(keras_callbacks, run, timetable, place)
        saver = Saver(prepared, monitor, preemption, callbacks)
        evaluator = Evaluator(prepared, monitor, preemption, callbacks, saver)
        exactness = ExactnessChecks(run, monitor, preemption)
        stack.enter_context(saver.saved_if_it_fails())

        for line in callbacks.begin_run():
            monitor.say(line)
        if place.stage == STEP:
            evaluator.after_step(step)
        while step < last and not preemption() and not evaluator.stops_early():
            # One call of TensorFlow makes all steps until something is due.
            num_steps = min(timetable.num_steps(step, profiler.due), preemption.most_steps())
            num_steps = 1 if callbacks else num_steps
            callbacks.begin_step()
            with (
                profiler.call(step, num_steps),
                preemption.steps(prepared.train_loop, step, num_steps),
            ):
                logs = timetable.logs(step + num_steps)
                values = prepared.train_loop(prepared.batches, tf.constant(num_steps), logs)
                if logs:
                    values["loss"].numpy()  # waits for the devices
            step += num_steps
            saver.after_step(step, values)
            monitor.after_step(step, values, run.task.num_skipped)
            callbacks.end_step(values)
            exactness.after_step(step)
            saver.save_if_due(step)
            if timetable.draws_histograms(step):
                monitor.histograms(step, run.task.model)
            evaluator.after_step(step)
        profiler.stop()
        if saver.unsaved:
            saver.save(step, now=True)
        ended = step == last or evaluator.stops_early()
        if ended and place.stage == EPOCH and not preemption():
            evaluator.finish(step)
        evaluations = evaluator.evaluate_at_end(step) if place.stage == END else None
        if evaluations:
            exactness.after_step(step)  # of the evaluation
            if due.histogram_every_epochs and step > timetable.first_step:
                monitor.histograms(step, run.task.model)
    if evaluations is None:
        signals.print_error(
            f"stopped at step {step} of {last}: saved; the same command resumes the run"
        )
        return None
    return write_result(prepared, monitor, evaluations)


def _announce(monitor: Monitor, prepared: PreparedRun) -> None:
    options, last = prepared.run.options, prepared.timetable.last_step
    if prepared.restored.step is None:
        of = f"{options.model} on {options.dataset}"
        monitor.say(f"new run     {options.train_dir}, {count(last, 'step')} of {of}")
    else:
        at = f"step {prepared.restored.step} of {last}, the newest checkpoint"
        monitor.say(f"continuing  {options.train_dir} at {at}")
    monitor.say(f"watch it    {tensorboard_command(options.train_dir)}")
