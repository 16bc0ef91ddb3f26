"""`towers train`: the training loop, independent of the number of towers and their devices."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import keras
import tensorflow as tf

from towers import devices, files, signals
from towers.devices import remote
from towers.devices.shown_names import shown_name
from towers.errors import InputError
from towers.formatting import count, figure, printable
from towers.monitoring import dashboard
from towers.monitoring.monitor import Monitor, tensorboard_command
from towers.monitoring.profiler import Profiler
from towers.options.flags import options_from_call
from towers.options.functions import PREFIX
from towers.options.run import Options, text_of
from towers.training.callbacks import user_callbacks
from towers.training.callbacks.best_checkpoint import BestTracker
from towers.training.callbacks.evaluator import Evaluator
from towers.training.callbacks.exactness import ExactnessChecks
from towers.training.callbacks.preemption import PreemptionHandler
from towers.training.callbacks.saver import Saver
from towers.training.callbacks.user_callbacks import Callbacks
from towers.training.run import checkpoint, manifest
from towers.training.run.place import END, EPOCH, STEP, Place
from towers.training.run.prepare_run import PreparedRun, begin, restore
from towers.training.run.process_state import preserve_rng
from towers.training.run.setup import RunContext, prepare
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.step.evaluation import Evaluation

RESULT = "result.json"


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
            are given as such or as "module:function", data also as the function's result.

    Returns:
        The contents of result.json, or None if a signal, or the loss of a machine, stopped the run,
        which is saved then.

    Raises:
        InputError: an option is not possible; nothing was written.
        RunError: the loss or a weight is not finite, a batch cannot be read, the folder cannot be
            written, or towers differ from one device and `on_inexact` does not allow it.
    """
    start = time.perf_counter() if start is None else start
    options = options_from_call(options, fields)
    if options.overwrite and manifest.overwrite_began(options):  # a job that is queued again
        options = dataclasses.replace(options, overwrite=False)
    out = sys.stderr if options.json else sys.stdout

    def say(line: str) -> None:
        print(printable(line), file=out, flush=True)

    folder = Path(options.train_dir)
    data = filter(None, [options.data_dir, *options.dataset.split(",")])
    files.check_train_dir(folder, options.overwrite, needed=data)
    loose_ops = devices.loose_ops_on(options.devices)
    with files.Lock() as lock, remote.loss_is_an_end(), loose_ops:
        lock.take(folder)
        with user_facing_errors(options):
            callbacks = user_callbacks.load(options.callbacks)
            continues = not options.overwrite and bool(checkpoint.find(folder / "checkpoints"))
            remote.connect_run(options, continues)
            run = prepare(options)
            user_callbacks.check(callbacks, run)
        recorded = {} if options.overwrite else manifest.read(folder)
        task = recorded.get("task", {})
        try:
            with user_facing_errors(options):
                checkpoints, restored = restore(run)
        except InputError:
            # Another number of classes may be why shapes differ.
            manifest.check_data(run.data, options, task, trains=True, number=True)
            raise
        if restored is not None:
            manifest.check_data(run.data, options, task, trains=True)
            if options.init_from:
                say(f"init_from   the run has its own weights: {options.init_from} is not read")
        if result := _finished(run, checkpoints.restored_place):
            now = {"code": manifest.code(run.options), "data": manifest.data_record(run)}
            trained = (recorded.get("sessions") or [{}])[-1]
            for line in manifest.differences(now, trained, "when it was trained"):
                say(f"warning     {line}: the result is of what it was trained on")
            for line in [_finished_line(run, result), *table(result)]:
                say(line)
            return result
        if restored is not None:
            _check_not_beyond(run)

        def save() -> str:
            """Save the state before the current call; return what the run continues from."""
            return preemption.save_backup() if preemption.checkpoints.begun else ""

        stalls = options.stall_seconds, options.on_stall
        preemption = PreemptionHandler(checkpoints, say, *stalls)
        with user_facing_errors(options), remote.saved_when_lost(options, save, say):
            prepared = begin(run, lock, restored, preemption, say)
        del run, checkpoints  # which may be those of towers that are not used
        of_step = user_facing_errors(options, prepared.steps_done)
        with of_step, remote.saved_when_lost(options, save, say):
            return _train(prepared, preemption, out, start, callbacks)
    return None


def _train(
    prepared: PreparedRun,
    preemption: PreemptionHandler,
    out: TextIO,
    start: float,
    keras_callbacks: Sequence[keras.callbacks.Callback],
) -> dict[str, Any] | None:
    """Make the steps of a run, and what ends it; return as `train` does."""
    run, timetable, checkpoints = prepared.run, prepared.timetable, prepared.checkpoints
    options, step, last = run.options, timetable.first_step, timetable.last_step
    place = _place_of(prepared)
    with contextlib.ExitStack() as stack:
        monitor = Monitor(run.folder, timetable, run.builder.devices, out=out, start=start)
        checkpoints.say = monitor.say
        stack.enter_context(contextlib.closing(checkpoints))
        _announce(monitor, prepared)
        profiler = stack.enter_context(Profiler(run.folder, options.profile_range(), monitor))
        stack.enter_context(preemption).listener.keep(prepared.batches)
        if options.histogram_every_epochs:
            monitor.histograms(step, run.train_state.model)
        callbacks = Callbacks(keras_callbacks, run, timetable, place)
        saver = Saver(prepared, monitor, preemption, callbacks, place)
        evaluator = Evaluator(prepared, monitor, preemption, callbacks, saver)
        exactness = ExactnessChecks(prepared, monitor, preemption)
        stack.enter_context(saver.saved_if_it_fails())

        for line in callbacks.begin_run():
            monitor.say(line)
        if place.stage == STEP:
            evaluator.after_step(step)
        while step < last and not preemption() and not evaluator.stops_early():
            # One call of TensorFlow makes all steps until something is due.
            num_steps = min(timetable.num_steps(step, profiler.due), preemption.most_steps())
            num_steps = min(num_steps, 1) if callbacks else num_steps
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
                monitor.histograms(step, run.train_state.model)
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
        if evaluations and options.histogram_every_epochs and step > timetable.first_step:
            monitor.histograms(step, run.train_state.model)
    if evaluations is None:
        signals.print_error(
            f"stopped at step {step} of {last}: saved; the same command continues the run"
        )
        return None
    return _write_result(prepared, monitor, evaluator, evaluations)


def _write_result(
    prepared: PreparedRun,
    monitor: Monitor,
    evaluator: Evaluator,
    evaluations: Mapping[str, Evaluation],
) -> dict[str, Any]:
    """Write and print the result of a run, from the evaluations of its final weights."""
    run, timetable, place = prepared.run, prepared.timetable, evaluator.saver.place
    step, options, devices = prepared.steps_done(), run.options, run.builder.devices
    skipped, (name, direction) = run.task.num_skipped(), run.objective
    ended_by_callback = step < timetable.last_step and evaluator.callbacks.stopped()
    result = {
        "steps": step,
        "examples": timetable.examples(step),
        "examples_per_second": place.examples_per_second,
        "seconds_to_first_step": monitor.seconds_to_first_step,
        "train_loss": place.train_loss,
        **{f"{s}_{n}": v for s, e in evaluations.items() for n, v in e.metrics.items()},
        "test_examples": evaluations["test"].examples,
        **({} if skipped is None else {"skipped_steps": skipped}),
        **({"best_step": evaluator.best.step} if options.keep_best else {}),
        **({"planned_steps": timetable.last_step} if ended_by_callback else {}),
        "objective": f"{'validation' if 'validation' in evaluations else 'test'}_{name}",
        "direction": direction,
        "num_towers": len(devices),
        "devices": list(map(shown_name, devices)),
        "batch_size": options.batch_size,
        "train_dir": options.train_dir,
    }
    dashboard.write_result(run.folder, result, step)
    manifest.finish(run.folder, run.train_state.variables())
    files.write_json(run.folder / RESULT, result)  # written last: it marks the run as finished
    if skipped:
        monitor.say(f"skipped     {skipped} of {step} steps, whose loss or gradient was not finite")
    for line in table(result):
        monitor.say(line)
    return result


def _place_of(prepared: PreparedRun) -> Place:
    """Return the place from which a run continues."""
    place, run = Place(**prepared.checkpoints.restored_place), prepared.run
    if place.stage == END and not _is_over(run, place):
        place.stage = EPOCH  # the run is to be longer than it was
    return place


def _is_over(run: RunContext, place: Place) -> bool:
    """Return whether a run makes no further step."""
    timetable = run.timetable()
    at_end = timetable.first_step == timetable.last_step or BestTracker(run).is_over()
    return at_end or place.is_stopped(run.options, timetable.last_step)


def _announce(monitor: Monitor, prepared: PreparedRun) -> None:
    folder, last = prepared.run.options.train_dir, prepared.timetable.last_step
    if prepared.restored is None:
        options = prepared.run.options
        of = f"{options.model} on {options.dataset}"
        monitor.say(f"new run     {folder}, {count(last, 'step')} of {of}")
    else:
        at = f"step {prepared.restored} of {last}, the newest checkpoint"
        monitor.say(f"continuing  {folder} at {at}")
    monitor.say(f"watch it    {tensorboard_command(folder)}")


def _finished(run: RunContext, place: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the result of a run that is finished, None for any other."""
    result = files.read_json(run.folder / "result.json")
    if result.get("steps") != run.timetable().first_step or not _is_over(run, Place(**place)):
        return None
    return result | {"train_dir": str(run.folder)}  # the folder may have been moved


def _check_not_beyond(run: RunContext) -> None:
    """Raise InputError if a run that goes on has made more steps than it is to have.

    It would end at once, and its flags.cfg forget how long it was to be.
    """
    options, step = run.options, int(run.train_state.step.numpy())
    beyond = int(run.train_state.examples.numpy()) - run.total_examples
    if beyond >= options.batch_size or 0 < options.max_steps < step:
        asked = f"--num_epochs={run.total_epochs:g}"
        if 0 < options.max_steps < step:
            asked = f"--max_steps={options.max_steps}"
        raise InputError(
            f"{asked}: the run in {run.folder} has made {count(step, 'step')}, which are more: "
            f"raise it, or type towers evaluate --train_dir={run.folder}"
        )


def _last_session(folder: Path) -> Mapping[str, Any]:
    """Return the manifest's record of a run's last start, {} if there is none."""
    return (manifest.read(folder).get("sessions") or [{}])[-1]


def _finished_line(run: RunContext, result: Mapping[str, Any]) -> str:
    timetable, folder = run.timetable(), result["train_dir"]
    step, last = timetable.first_step, timetable.last_step
    done, more = f"has all its {step} steps", "more --num_epochs or --max_steps"
    if step < last:
        done = f"ended early, at step {step} of {last}"
        more = "a larger --early_stopping_epochs"
        if "planned_steps" in result:
            more = "an empty or another --callbacks=, or more --num_epochs,"
    line = f"finished    {folder} {done}: {more} continues it, --overwrite moves it aside"
    trained = _last_session(Path(folder)).get("flags", {})
    unused = [
        f"--{field.name}={f'{now:g}' if isinstance(now, float) else text_of(now)}"
        for field in dataclasses.fields(run.options)
        if field.metadata["affects"] == "result"
        and trained.get(field.name, now := getattr(run.options, field.name)) != now
        and not str(now).startswith(PREFIX)  # an object, which has no lasting name
    ]
    return f"{line}; it was not trained with {' '.join(unused)}" if unused else line


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the result as the lines of a table, without values of None."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.1f}" if 100 <= abs(value) < 1e5 else figure(value)
        return ", ".join(value) if isinstance(value, list) else str(value)

    width = max(22, *map(len, result))
    known = {name: value for name, value in result.items() if value is not None}
    lines = [f"  {name:{width}} {cell(value)}" for name, value in known.items()]
    return ["result", *lines, tensorboard_command(result["train_dir"])]
