"""Training: one loop, which knows neither how many towers there are nor where they run."""

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
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
from towers.options.call import options_of
from towers.options.run import Options
from towers.options.timetable import Timetable
from towers.training import manifest
from towers.training.best import Best
from towers.training.evaluation import Evaluation
from towers.training.guest import as_a_guest
from towers.training.masters import kept
from towers.training.run import Run
from towers.training.start import Start, begin, build, restore
from towers.training.stop import StopRequest
from towers.training.tensorflow_errors import one_line_errors

RESULT = "result.json"


@as_a_guest()
def train(
    options: Options | None = None, start: float | None = None, /, **fields: Any
) -> dict[str, Any] | None:
    """Train, or continue what `train_dir` holds.

        result = towers.train(model=build, dataset=data, train_dir="runs/mine", num_epochs=2)

    Ctrl-C, or a notebook's interrupt, saves and returns None; the same call goes on from there.

    Args:
        options: of the run; None: as the fields say, and of an existing run as its flags.cfg says.
        start: `time.perf_counter()` when the command started, for `seconds_to_first_step`.
        **fields: of `towers.Options`: `model`, `dataset`, `num_towers`, `train_dir`, ... Functions
            may be given as such or as "module:function", data as what such a function returns.

    Returns:
        What result.json holds, or None if a signal stopped the run; it was saved then.

    Raises:
        InputError: the options cannot be had; nothing was written.
        RunError: the loss or a weight is not finite, a batch cannot be read, or the folder cannot
            be written.
    """
    start = time.perf_counter() if start is None else start
    options = options_of(options, fields)
    out = sys.stderr if options.json else sys.stdout
    say = functools.partial(print, file=out, flush=True)
    folder = Path(options.train_dir)
    files.check_train_dir(folder, options.overwrite)
    with files.Lock() as lock:
        lock.take(folder)
        run = build(options, say)
        checkpoints, restored = restore(run, folder)
        if result := finished(run, folder):
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
    best = best_of(run, folder)
    begun.checkpoints.best = best.step if run.options.keep_best else None
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
        look = Look(begun, monitor, gallery, best, stop)
        step, seconds = _make_steps(begun, monitor, profiler, gallery, look, start)
        found = look.at_end(step) if step == last or best.is_over() else None
        if found and run.options.histogram_every_epochs:
            gallery.show_histograms(step)
    if found is None:
        monitor.say(f"stopped at step {step} of {last}: saved; the same command continues the run")
        return None
    result = result_of(run, timetable, monitor, step, seconds, found)
    dashboard.close_root(folder, result, timetable.x(step))
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
    look: "Look",
    start: float,
) -> tuple[int, float | None]:
    """Make the steps that are left, and between them whatever is due; save at the end.

    Returned are the number of steps done, and the seconds from `start` to the first of them.
    """
    run, timetable, seconds_to_first_step = begun.run, begun.timetable, None
    step = saved = timetable.first_step
    values: Mapping[str, tf.Tensor] = {}
    if timetable.evaluates(step) and not look.has_seen(step):  # it was stopped in that
        look.at(step)
    while step < timetable.last_step and not look.stop() and not look.best.is_over():
        with monitor.pause():
            profiler.begin(step)
        num_steps = timetable.num_steps(step, profiler.due)
        with profiler.trace(step):
            shown = timetable.logs(step + num_steps)
            values = begun.train_loop(begun.batches, tf.constant(num_steps), shown)
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
                is_best = look.at(step)
                if is_best and run.options.keep_best and step > saved:
                    save_finite(begun, values, step)
                    saved = step
                look.best.write()
    profiler.stop()
    if step < timetable.last_step and look.best.is_over():
        monitor.say(f"stopping    early, at step {step}: {look.why_over()}")
    ended = step == timetable.last_step or look.best.is_over()
    changed = ended and run.task.finish()
    if changed:
        look.forget()
    if changed or step > saved:
        with monitor.pause():
            save_finite(begun, values, step)
    return step, seconds_to_first_step


def make_gallery(begun: Start, monitor: Monitor) -> Gallery:
    """Return what shows pictures and histograms of a run; the first ones are shown at once."""
    run, model, builder = begun.run, begun.run.masters.model, begun.run.builder
    histograms = make_histograms(builder, model, run.task.gradients, run.task.inputs)
    return Gallery(monitor, begun.timetable, begun.sampler, histograms, builder, model, run.data)


def announce(monitor: Monitor, begun: Start) -> None:
    """Print where the run stands and how to watch it."""
    folder, last = begun.run.options.train_dir, begun.timetable.last_step
    if begun.restored is None:
        monitor.say(f"new run     {folder}, {last} steps")
    else:
        monitor.say(f"continuing  {folder} at step {begun.restored} of {last}")
    monitor.say(f"watch it    {tensorboard_command(folder)}")
    if threading.current_thread() is threading.main_thread():  # else nobody listens
        monitor.say(f"profile it  kill -USR2 {os.getpid()}")


def read_finite(values: Mapping[str, tf.Tensor], step: int, run: Run) -> dict[str, Any]:
    """Return a step's metrics as numbers, those of each tower as lists.

    A loss that is no number ends the run: what follows would be lost work. A loss scale that can
    still be lowered may mend it.
    """
    metrics = {name: value.numpy().tolist() for name, value in values.items()}
    scale = run.masters.loss_scale
    if not math.isfinite(metrics.get("loss", 0.0)) and (scale is None or scale.numpy() <= 1):
        raise RunError(f"the loss is {metrics['loss']} at step {step - 1}: {_remedy(run)}")
    return metrics


@contextlib.contextmanager
def best_weights(begun: Start, step: int) -> Iterator[bool]:
    """Let the masters be those of the best checkpoint in the block, if one is kept.

    What is told is whether they are others than those of `step`, which there are now.
    """
    if begun.checkpoints.best in (None, step):
        yield False
        return
    with kept(begun.run.masters.variables().values()):
        begun.checkpoints.restore(wanted=begun.checkpoints.best)
        yield True


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


class Look:
    """Evaluates a run on the way, and at its end, and shows what was found.

    On the way it sees validation data where there are any: the test set is for the end.
    """

    def __init__(
        self, begun: Start, monitor: Monitor, gallery: Gallery, best: Best, stop: StopRequest
    ):
        """Compile nothing yet."""
        self.begun, self.monitor, self.gallery = begun, monitor, gallery
        self.best, self.stop, run = best, stop, begun.run
        self._last, self._last_step = None, None
        self._what = "validation" if run.data.validation else "test"
        self._evaluate = run.task.make_evaluator(run.splits()[self._what])

    def at(self, step: int) -> bool:
        """Evaluate after `step` updates; return whether that is the best so far."""
        self._last, self._last_step = self._evaluate(self.stop), step
        if self._last is None:
            return False
        self._show(step, self._last)
        run = self.begun.run
        name, _ = run.task.objective()
        value = self._last.metrics.get(f"{name}_ema")
        value = self._last.metrics.get(name) if value is None else value
        is_best = self.best.add(step, self.begun.timetable.examples(step), value)
        if is_best and run.options.keep_best:
            self.begun.checkpoints.best = step
        return is_best

    def forget(self) -> None:
        """Take no evaluation for that of the end: the weights are others now."""
        self._last_step = None

    def has_seen(self, step: int) -> bool:
        """Tell whether the evaluation after `step` updates is known."""
        needed = self.begun.run.options.keep_best or self.begun.run.options.early_stopping_epochs
        return self.monitor.evaluated(step) and (not needed or self.best.knows(step))

    def why_over(self) -> str:
        """Return the words for a run that has become no better."""
        name, _ = self.begun.run.task.objective()
        epochs = self.begun.run.options.early_stopping_epochs
        return f"{name} was best at step {self.best.step}, {epochs:g} epochs ago or more"

    def at_end(self, step: int) -> dict[str, Evaluation] | None:
        """Return the last evaluations by split, of the best weights if they are kept.

        None: it was stopped.
        """
        if self._last_step != step:
            self.at(step)
        if self._last is None:
            return None
        self.best.write()
        found: dict[str, Evaluation | None] = {self._what: self._last}
        run = self.begun.run
        with best_weights(self.begun, step) as others:
            if others:
                found[self._what] = self._evaluate(self.stop)
            if "test" not in found:
                found["test"] = run.task.make_evaluator(run.data.test)(self.stop)
                if found["test"]:
                    self.monitor.say_figures("test", step, found["test"].metrics)
        return None if None in found.values() else found

    def _show(self, step: int, evaluation: Evaluation) -> None:
        """Show the figures of an evaluation, with pictures."""
        if not self.monitor.evaluated(step):  # a crash came between this and what follows
            self.gallery.show_training(step)
            if evaluation.predictions:
                self.gallery.show_evaluation(step, evaluation.predictions)
        self.monitor.eval_point(step, evaluation.metrics, self._what)


# What a run ended with.


def result_of(
    run: Run,
    timetable: Timetable,
    monitor: Monitor,
    step: int,
    seconds: float | None,
    found: Mapping[str, Evaluation],
) -> dict[str, Any]:
    """Return what result.json is to hold; `seconds` are those to the first step."""
    name, direction = run.task.objective()
    figures = {f"{s}_{n}": v for s, own in found.items() for n, v in own.metrics.items()}
    return {
        "steps": step,
        "examples": timetable.examples(step),
        "examples_per_second": monitor.examples_per_second(),
        "seconds_to_first_step": seconds,
        "train_loss": monitor.last_loss,
        "gradient_noise_scale": monitor.noise_scale(),
        **figures,
        "test_examples": found["test"].examples,
        "objective": f"{'validation' if 'validation' in found else 'test'}_{name}",
        "direction": direction,
        "num_towers": len(run.builder.devices),
        "devices": run.builder.devices,
        "batch_size": run.options.batch_size,
        "train_dir": run.options.train_dir,
    }


def finished(run: Run, folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that has nothing left to do, None for any other."""
    result, timetable = files.read_json(folder / RESULT), run.timetable()
    over = timetable.first_step == timetable.last_step or best_of(run, folder).is_over()
    if not over or result.get("steps") != timetable.first_step:
        return None
    return result | {"train_dir": str(folder)}  # it may have been moved since


def best_of(run: Run, folder: Path) -> Best:
    """Return what is known of the run's evaluations up to where it stands."""
    options, step = run.options, int(run.masters.step.numpy())
    patience = options.early_stopping_epochs * run.data.train.size
    return Best(folder, run.task.objective(), patience, options.keep_best, step)


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table at a run's end."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
        return "-" if value is None else ", ".join(value) if isinstance(value, list) else str(value)

    width = max(22, *map(len, result))
    lines = [f"  {name:{width}} {cell(value)}" for name, value in result.items()]
    return ["result", *lines, tensorboard_command(result["train_dir"])]
