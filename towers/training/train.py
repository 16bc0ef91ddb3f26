"""Training: one loop, which knows neither how many towers there are nor where they run."""

import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import tensorflow as tf

from towers import files
from towers.devices.gpu_health import GpuHealth
from towers.errors import RunError
from towers.monitoring import dashboard
from towers.monitoring.gallery import Gallery
from towers.monitoring.histograms import make_histograms
from towers.monitoring.monitor import Monitor, tensorboard_command
from towers.monitoring.profiler import Profiler
from towers.options.run import Options
from towers.options.timetable import Timetable
from towers.training import manifest
from towers.training.evaluate import Evaluation, make_evaluator
from towers.training.run import Run
from towers.training.start import Start, begin, build, restore
from towers.training.step import make_loss_fn, weights_of
from towers.training.stop import StopRequest
from towers.training.tensorflow_errors import one_line_errors

RESULT = "result.json"


def train(options: Options, start: float | None = None) -> dict[str, Any] | None:
    """Train, or continue what `options.train_dir` holds.

    Args:
        options: of the run.
        start: `time.perf_counter()` when the command started, for `seconds_to_first_step`.

    Returns:
        What result.json holds, or None if a signal stopped the run; it was saved then.

    Raises:
        InputError: the options cannot be had; nothing was written.
        RunError: the loss or a weight is not finite, a batch cannot be read, or the folder cannot
            be written.
    """
    start = time.perf_counter() if start is None else start
    out = sys.stderr if options.json else sys.stdout
    say = functools.partial(print, file=out, flush=True)
    folder = Path(options.train_dir)
    files.check_train_dir(folder, options.overwrite)
    with files.Lock() as lock:
        lock.take(folder)
        run = build(options, say)
        checkpoints, restored = restore(run, folder)
        if result := finished(run.timetable(), folder):
            say(
                f"finished    {folder} has all its {result['steps']} steps: more --num_epochs "
                "continue it, --overwrite moves it aside"
            )
            for line in table(result):
                say(line)
            return result
        begun = begin(run, folder, lock, checkpoints, restored, say)
        with one_line_errors(options):
            return _train(begun, out, start)


def _train(begun: Start, out: TextIO, start: float) -> dict[str, Any] | None:
    """Train from a start to the end of the run, and write what it ended with."""
    run, folder, timetable = begun.run, begun.folder, begun.timetable
    last, names = timetable.last_step, run.builder.devices
    evaluate = make_evaluator(run)
    with contextlib.ExitStack() as stack:
        read_health = stack.enter_context(contextlib.closing(GpuHealth())).read
        monitor = Monitor(folder, timetable, names, health=read_health, out=out)
        stack.enter_context(contextlib.closing(monitor))
        announce(monitor, begun)
        planned = run.options.profile_range()
        profiler = Profiler(
            folder, planned, last_step=last, placement=begun.placement, say=monitor.say
        )
        stack.enter_context(profiler)
        stop = stack.enter_context(StopRequest())
        gallery = make_gallery(begun, monitor)
        step, seconds = _make_steps(begun, monitor, profiler, gallery, evaluate, stop, start)
        evaluation = evaluate(stop) if step == last else None
        show_evaluation(monitor, gallery, step, evaluation)
        if evaluation and run.options.histogram_every_epochs:
            gallery.show_histograms(step)
    if evaluation is None:
        monitor.say(f"stopped at step {step} of {last}: saved; the same command continues the run")
        return None
    result = result_of(run, timetable, monitor, seconds, evaluation)
    dashboard.close_root(folder, result, timetable.x(last))
    manifest.finish(folder, run.masters.variables())
    files.write_json(folder / RESULT, result)  # the last: with it the run is finished
    if advice := monitor.advice():  # several towers, whose points agree
        monitor.say(f"gradient noise scale: {advice}")
    for line in table(result):
        monitor.say(line)
    return result


def _make_steps(
    begun: Start,
    monitor: Monitor,
    profiler: Profiler,
    gallery: Gallery,
    evaluate: Callable[..., Evaluation | None],
    stop: StopRequest,
    start: float,
) -> tuple[int, float | None]:
    """Make the steps that are left, and between them whatever is due; save at the end.

    Returned are the number of steps done, and the seconds from `start` to the first of them.
    """
    timetable, seconds_to_first_step = begun.timetable, None
    step = saved = timetable.first_step
    if timetable.evaluates(step) and not monitor.evaluated(step):  # it was stopped in that
        show_evaluation(monitor, gallery, step, evaluate(stop))
    while step < timetable.last_step and not stop():
        with monitor.pause():
            profiler.begin(step)
        num_steps = timetable.num_steps(step, profiler.due)
        with profiler.trace(step):
            values = begun.train_loop(begun.batches, tf.constant(num_steps))
        step += num_steps
        if seconds_to_first_step is None:
            values["loss"].numpy()  # waits for the devices
            seconds_to_first_step = time.perf_counter() - start
        monitor.progress(step, values)
        with monitor.pause():
            profiler.end(step)
        if timetable.logs(step):
            monitor.train_point(step, read_finite(values, step, begun.run))
        if timetable.saves(step):
            with monitor.pause():
                save_finite(begun, values, step)
            saved = step
        if timetable.draws_histograms(step):
            gallery.show_histograms(step)
        if timetable.evaluates(step):
            with monitor.pause():
                show_evaluation(monitor, gallery, step, evaluate(stop))
    profiler.stop()
    if step > saved:
        with monitor.pause():
            save_finite(begun, values, step)
    return step, seconds_to_first_step


def make_gallery(begun: Start, monitor: Monitor) -> Gallery:
    """Return what shows pictures and histograms of a run; the first ones are shown at once."""
    run, masters, builder = begun.run, begun.run.masters, begun.run.builder
    weights, loss_fn = weights_of(masters), make_loss_fn(masters, run.options)
    histograms = make_histograms(
        builder, masters.model, weights, loss_fn, masters.loss_scale, run.options
    )
    names, sampler = run.data.class_names, begun.sampler
    return Gallery(monitor, begun.timetable, sampler, histograms, builder, masters.model, names)


def announce(monitor: Monitor, begun: Start) -> None:
    """Print where the run stands and how to watch it."""
    folder, last = begun.run.options.train_dir, begun.timetable.last_step
    if begun.restored is None:
        monitor.say(f"new run     {folder}, {last} steps")
    else:
        monitor.say(f"continuing  {folder} at step {begun.restored} of {last}")
    monitor.say(f"watch it    {tensorboard_command(folder)}")
    monitor.say(f"profile it  kill -USR2 {os.getpid()}")


def read_finite(values: Mapping[str, tf.Tensor], step: int, run: Run) -> dict[str, Any]:
    """Return a step's metrics as numbers, those of each tower as lists.

    A loss that is no number ends the run: what follows would be lost work. A loss scale that can
    still be lowered may mend it.
    """
    metrics = {name: value.numpy().tolist() for name, value in values.items()}
    scale = run.masters.loss_scale
    if not math.isfinite(metrics["loss"]) and (scale is None or scale.numpy() <= 1):
        raise RunError(f"the loss is {metrics['loss']} at step {step - 1}: {_remedy(run)}")
    return metrics


def save_finite(begun: Start, values: Mapping[str, tf.Tensor], step: int) -> None:
    """Save a checkpoint, unless the loss or a weight is no number: older ones are worth more."""
    read_finite(values, step, begun.run)
    if not begun.run.masters.finite():
        raise RunError(f"a weight is infinite or NaN after {step} steps: {_remedy(begun.run)}")
    begun.checkpoints.save(step)


def _remedy(run: Run) -> str:
    return (
        "try a lower --learning_rate or --clip_global_norm=1; "
        f"{run.options.train_dir}/checkpoints holds the state before"
    )


def show_evaluation(
    monitor: Monitor, gallery: Gallery, step: int, evaluation: Evaluation | None
) -> None:
    """Show the figures of an evaluation, with pictures; None if it was stopped."""
    if evaluation is None:
        return
    if not monitor.evaluated(step):  # a crash came between this and what follows
        gallery.show_training(step)
        gallery.show_evaluation(step, evaluation.predictions)
    names = ("accuracy", "accuracy_ema", "loss", "loss_ema")
    monitor.eval_point(step, {name: getattr(evaluation, name) for name in names})


# What a run ended with.


def result_of(
    run: Run, timetable: Timetable, monitor: Monitor, seconds: float | None, evaluation: Evaluation
) -> dict[str, Any]:
    """Return what result.json is to hold; `seconds` are those to the first step."""
    return {
        "steps": timetable.last_step,
        "examples": timetable.examples(timetable.last_step),
        "examples_per_second": monitor.examples_per_second(),
        "seconds_to_first_step": seconds,
        "train_loss": monitor.last_loss,
        "gradient_noise_scale": monitor.noise_scale(),
        "test_accuracy": evaluation.accuracy,
        "test_accuracy_ema": evaluation.accuracy_ema,
        "test_loss": evaluation.loss,
        "test_loss_ema": evaluation.loss_ema,
        "test_examples": evaluation.examples,
        "num_towers": len(run.builder.devices),
        "devices": run.builder.devices,
        "batch_size": run.options.batch_size,
        "train_dir": run.options.train_dir,
    }


def finished(timetable: Timetable, folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that has nothing left to do, None for any other."""
    result = files.read_json(folder / RESULT)
    if not timetable.first_step == timetable.last_step == result.get("steps"):
        return None
    return result | {"train_dir": str(folder)}  # it may have been moved since


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table at a run's end."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
        return "-" if value is None else ", ".join(value) if isinstance(value, list) else str(value)

    lines = [f"  {name:22} {cell(value)}" for name, value in result.items()]
    return ["result", *lines, tensorboard_command(result["train_dir"])]
