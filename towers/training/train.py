"""Training: one loop, which knows neither how many towers there are nor where they run."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from towers import devices, files
from towers.devices.gpu_health import GpuHealth
from towers.errors import RunError
from towers.graphs import placement_report
from towers.monitoring import dashboard
from towers.monitoring.gallery import Gallery
from towers.monitoring.histograms import Histograms
from towers.monitoring.monitor import Monitor, tensorboard_command
from towers.monitoring.profiler import Profiler
from towers.monitoring.samples import Sampler
from towers.options.run import Options
from towers.options.timetable import Timetable
from towers.training import logits, manifest, opening
from towers.training.checkpoint import Checkpoints
from towers.training.evaluate import Evaluation, make_evaluator
from towers.training.rules import rule_book
from towers.training.run import Run, one_line_errors
from towers.training.step import make_loss_fn, weights_of
from towers.training.stop import StopRequest


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
    folder = Path(options.train_dir)
    files.check_train_dir(folder, options.overwrite)
    with files.Lock() as lock:
        lock.take(folder)
        return _train(options, folder, lock, start)


def _train(options: Options, folder: Path, lock: files.Lock, start: float) -> dict[str, Any] | None:
    """Train in a folder that is locked; see `train`."""
    run = opening.build(options)
    options = run.options
    checkpoints, restored = opening.restore(run, folder)
    opening.check_curves(folder, restored, options)
    timetable = make_timetable(run)
    first, last = timetable.first_step, timetable.last_step
    out = sys.stderr if options.json else sys.stdout
    if result := finished(timetable, folder):
        remedy = "more --num_epochs continue it, --overwrite moves it aside"
        print(f"finished    {folder} has all its {last} steps: {remedy}", file=out)
        print(*table(result), sep="\n", file=out)
        return result
    train_loop = run.train_loop()
    batches = iter(
        run.data.train.train_batches(
            options.batch_size, seed=options.seed, step=first, examples=timetable.first_examples
        )
    )
    start_lines = [*rule_book(run), *logits.notes(run), *devices.report(run.builder.devices)]
    print(*start_lines, sep="\n", file=out, flush=True)
    sampler = Sampler(run.data.train, options, run.masters.step)
    with one_line_errors(options):
        batch = sampler.batch(first, timetable.first_examples)
    if batch is not None:
        run.rehearse(batch.tensors)
    placement, lines = opening.place(run, train_loop, batches, out)
    lines += opening.check_numbers(run, placement, batch, out)
    opening.open_folder(run, folder, lock, checkpoints, restored, placement)
    for line in manifest.write(run, folder, restored, sampler):
        print(line, file=out, flush=True)
    graph = train_loop.get_concrete_function(batches, tf.constant(0)).graph
    texts = {
        "rules": rule_book(run),
        "placement": [*lines, "", *placement_report.table(placement)],
        "model": model_lines(run),
    }
    dashboard.open_root(folder, options, run.builder.devices, texts, placement, graph)
    evaluator = make_evaluator(run)
    health = GpuHealth()
    monitor = Monitor(folder, timetable, run.builder.devices, health=health.read, out=out)
    announce(monitor, run, timetable, restored)
    profiler = Profiler(
        folder, options.profile_range(), last_step=last, placement=placement, say=monitor.say
    )
    step, saved, seconds_to_first_step = first, first, None
    with (
        dashboard.failing(folder),
        one_line_errors(options),
        contextlib.closing(health),
        contextlib.closing(monitor),
        profiler,
        StopRequest() as stop,
    ):
        gallery = make_gallery(run, monitor, timetable, sampler)
        if timetable.evaluates(step) and not monitor.evaluated(step):  # it was stopped in that
            show_evaluation(monitor, gallery, step, evaluator(stop))
        while step < last and not stop():
            with monitor.pause():
                profiler.begin(step)
            num_steps = timetable.num_steps(step, profiler.due)
            with profiler.trace(step):
                values = train_loop(batches, tf.constant(num_steps))
            step += num_steps
            if seconds_to_first_step is None:
                values["loss"].numpy()  # waits for the devices
                seconds_to_first_step = time.perf_counter() - start
            monitor.progress(step, values)
            with monitor.pause():
                profiler.end(step)
            if timetable.logs(step):
                monitor.train_point(step, read_finite(values, step, run))
            if timetable.saves(step):
                with monitor.saving(step):
                    save_finite(checkpoints, values, step, run)
                saved = step
            if timetable.draws_histograms(step):
                gallery.show_histograms(step)
            if timetable.evaluates(step):
                with monitor.pause():
                    show_evaluation(monitor, gallery, step, evaluator(stop))
        profiler.stop()
        if step > saved:
            with monitor.saving(step):
                save_finite(checkpoints, values, step, run)
        evaluation = evaluator(stop) if step == last else None
        show_evaluation(monitor, gallery, step, evaluation)
        if evaluation and options.histogram_every_epochs:
            gallery.show_histograms(step)
    if evaluation is None:
        monitor.say(f"stopped at step {step} of {last}: saved; the same command continues the run")
        return None
    speeds = {
        "examples_per_second": monitor.examples_per_second(),
        "seconds_to_first_step": seconds_to_first_step,
        "train_loss": monitor.last_loss(),
        "gradient_noise_scale": monitor.noise_scale(),
    }
    result = finish(run, timetable, speeds, evaluation)
    dashboard.close_root(folder, result, timetable.x(last))
    manifest.finish(folder, run.masters.variables())
    files.write_json(folder / "result.json", result)  # the last: with it the run is finished
    if advice := monitor.advice():
        monitor.say(f"gradient noise scale: {advice}")
    for line in table(result):
        monitor.say(line)
    return result


def make_timetable(run: Run) -> Timetable:
    """Return the calendar from where the master variables are to the end of the run."""
    step, examples = int(run.masters.step.numpy()), int(run.masters.examples.numpy())
    return Timetable(
        first_step=step,
        first_examples=examples,
        last_step=step + run.steps_left(step, examples),
        train_size=run.data.train.size,
        options=run.options,
    )


def make_gallery(run: Run, monitor: Monitor, timetable: Timetable, sampler: Sampler) -> Gallery:
    """Return what shows pictures and histograms of a run; the first ones are shown at once."""
    masters = run.masters
    histograms = Histograms(
        run.builder,
        masters.model,
        weights_of(masters),
        make_loss_fn(masters, run.options),
        masters.loss_scale,
        run.options,
    )
    return Gallery(
        monitor, timetable, sampler, histograms, run.builder, masters.model, run.data.class_names
    )


def model_lines(run: Run) -> list[str]:
    """Return Keras' summary of the model."""
    blocks: list[str] = []
    run.masters.model.summary(line_length=100, print_fn=lambda line, **_: blocks.append(line))
    return "\n".join(blocks).splitlines()


def finished(timetable: Timetable, folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that has nothing left to do, None for any other."""
    result = files.read_json(folder / "result.json")
    if not timetable.first_step == timetable.last_step == result.get("steps"):
        return None
    return result | {"train_dir": str(folder)}  # it may have been moved since


def announce(monitor: Monitor, run: Run, timetable: Timetable, restored: int | None) -> None:
    """Print where the run stands and how to watch it."""
    folder = run.options.train_dir
    if restored is None:
        monitor.say(f"new run     {folder}, {timetable.last_step} steps")
    else:
        monitor.say(f"continuing  {folder} at step {restored} of {timetable.last_step}")
    monitor.say(f"watch it    {tensorboard_command(folder)}")
    monitor.say(f"profile it  kill -USR2 {os.getpid()}")


def read_finite(values: Mapping[str, tf.Tensor], step: int, run: Run) -> dict[str, Any]:
    """Return a step's metrics as numbers, those of each tower as arrays.

    Raises:
        RunError: the loss is infinite or NaN: what follows would be lost work. A loss scale that
            can still be lowered may mend it.
    """
    metrics = {name: value.numpy().tolist() for name, value in values.items()}
    scale = run.masters.loss_scale
    if not math.isfinite(metrics["loss"]) and (scale is None or scale.numpy() <= 1):
        raise RunError(f"the loss is {metrics['loss']} at step {step - 1}: {_remedy(run)}")
    return metrics


def save_finite(
    checkpoints: Checkpoints, values: Mapping[str, tf.Tensor], step: int, run: Run
) -> None:
    """Save a checkpoint that a run can go on from.

    Raises:
        RunError: the loss or a weight is infinite or NaN: the older checkpoints are worth more.
    """
    read_finite(values, step, run)
    if not run.masters.finite():
        raise RunError(f"a weight is infinite or NaN after {step} steps: {_remedy(run)}")
    checkpoints.save(step)


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


def finish(
    run: Run, timetable: Timetable, speeds: dict[str, Any], evaluation: Evaluation
) -> dict[str, Any]:
    """Return what result.json is to hold."""
    return {
        "steps": timetable.last_step,
        "examples": timetable.examples(timetable.last_step),
        **speeds,
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


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table at a run's end."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
        return "-" if value is None else ", ".join(value) if isinstance(value, list) else str(value)

    lines = [f"  {name:22} {cell(value)}" for name, value in result.items()]
    return ["result", *lines, tensorboard_command(result["train_dir"])]
