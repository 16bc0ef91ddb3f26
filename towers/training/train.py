"""Training: one loop, which knows neither how many towers there are nor where they run."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import keras
import tensorflow as tf

from towers import files, signals
from towers.devices.gpu_health import GpuHealth
from towers.devices.remote import DevicesChanged
from towers.errors import RunError
from towers.monitoring import dashboard
from towers.monitoring.gallery import Gallery
from towers.monitoring.histograms import make_histograms
from towers.monitoring.monitor import Monitor, in_notebook, tensorboard_command
from towers.monitoring.profiler import Profiler
from towers.monitoring.results import read_result
from towers.options.call import options_of
from towers.options.run import Options
from towers.options.timetable import Timetable
from towers.text import printable
from towers.training import checkpoint, keras_callbacks, manifest, nan
from towers.training.best import Best
from towers.training.evaluation import Evaluation
from towers.training.guest import as_a_guest
from towers.training.keras_callbacks import Callbacks
from towers.training.masters import kept
from towers.training.run import Run
from towers.training.start import Start, begin, build, restore
from towers.training.tensorflow_errors import one_line_errors
from towers.training.watch import Watch, check_snapshot
from towers.workers import Recovery, of_run

RESULT = "result.json"
_FINISHED = (
    "finished    {} has all its {} steps: more --num_epochs continue it, --overwrite moves it aside"
)


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

    def say(line: str) -> None:
        print(printable(line), file=out, flush=True)

    folder = Path(options.train_dir)
    files.check_train_dir(folder, options.overwrite)
    with files.Lock() as lock:
        lock.take(folder)
        with one_line_errors(options):
            callbacks = keras_callbacks.load(options.callbacks)
            of_run(options, bool(checkpoint.find(folder / "checkpoints")))
            run = build(options, say)
            checkpoints, restored = restore(run, folder)
        if result := finished(run, folder):
            for line in [_FINISHED.format(folder, result["steps"]), *table(result)]:
                say(line)
            return result
        recovery = Recovery(options, say)
        with contextlib.closing(GpuHealth()) as health:
            while True:
                run = nan.resumed(run, folder, restored)
                watch = Watch(options, checkpoints, say, health.read)
                try:
                    with one_line_errors(options), recovery.reraise_worker_loss():
                        begun = begin(run, folder, lock, checkpoints, restored, watch, say)
                    of_step = begun.steps_done, begun.largest_batch
                    with one_line_errors(options, *of_step), recovery.reraise_worker_loss():
                        return _train(begun, watch, health, out, start, callbacks)
                # Each goes on as a new process would.
                except nan.Rollback as rollback:
                    say(str(rollback))
                except DevicesChanged:
                    if not recovery.go_on(watch.save_kept()):
                        return None
                again = dataclasses.replace(run.options, overwrite=False, **run.left_open)
                run = build(again, say)
                checkpoints, restored = restore(run, folder)


def _train(
    begun: Start,
    watch: Watch,
    health: GpuHealth,
    out: TextIO,
    start: float,
    given: Sequence[keras.callbacks.Callback],
) -> dict[str, Any] | None:
    """Train from a start to the end of the run, and write what it ended with."""
    run, folder, timetable = begun.run, begun.folder, begun.timetable
    checkpoints, home = begun.checkpoints, begun.checkpoints.home
    last, names = timetable.last_step, run.builder.devices
    best, callbacks = best_of(run, folder), Callbacks(given, run, timetable)
    checkpoints.best = best.step if run.options.keep_best else None
    with contextlib.ExitStack() as stack:
        monitor = Monitor(folder, timetable, names, health=health.read, check=home.check, out=out)
        stack.enter_context(contextlib.closing(monitor))
        checkpoints.say = home.say = monitor.say
        stack.enter_context(contextlib.closing(checkpoints))
        announce(monitor, begun)
        planned = run.options.profile_range()
        profiler = Profiler(folder, planned, last_step=last, say=monitor.say)
        stack.enter_context(profiler)
        stack.enter_context(watch)
        watch.listener.keep(begun.batches)
        model, task = run.masters.model, run.task
        draw = make_histograms(run.builder, model, task.gradients, task.inputs)
        gallery = Gallery(monitor, timetable, begun.sampler, draw, run.builder, model, run.data)
        look = Look(begun, monitor, gallery, best, watch, callbacks)
        with saved_if_it_fails(begun, watch):
            step, seconds = _make_steps(begun, monitor, profiler, look, start)
        found = look.at_end(step) if step == last or look.is_over() else None
        if found and run.options.histogram_every_epochs:
            gallery.show_histograms(step)
    if found is None:
        signals.complain(
            f"stopped at step {step} of {last}: saved; the same command continues the run"
        )
        return None
    if not checkpoints.has(step):  # somebody may have deleted it meanwhile
        checkpoints.save_now(step)
    result = result_of(run, timetable, monitor, step, seconds, found)
    dashboard.close_root(folder, result, timetable.x(step))
    manifest.finish(folder, run.masters.variables())
    files.write_json(folder / RESULT, result)  # the last: with it the run is finished
    if advice := monitor.advice():  # several towers, whose points agree
        monitor.say(f"gradient noise scale: {advice}")
    if result.get("skipped_steps"):
        monitor.say(
            f"skipped     {result['skipped_steps']} of {step} steps, whose loss or gradient was "
            "not finite"
        )
    for line in table(result):
        monitor.say(line)
    return result


def _make_steps(
    begun: Start, monitor: Monitor, profiler: Profiler, look: "Look", start: float
) -> tuple[int, float | None]:
    """Make the steps that are left, and between them whatever is due; save at the end.

    Returned are the number of steps done, and the seconds from `start` to the first of them.
    """
    run, timetable, checkpoints = begun.run, begun.timetable, begun.checkpoints
    watch, callbacks = look.watch, look.callbacks
    alarm = nan.Alarm(run, begun.folder, timetable, monitor.say)
    step = saved = timetable.first_step
    seconds_to_first_step, changed = None, False
    callbacks.begin_run()
    if timetable.evaluates(step) and not look.has_seen(step):  # it was stopped in that
        look.at(step)
    while step < timetable.last_step and not watch() and not look.is_over():
        with monitor.pause():
            profiler.begin(step)
        num_steps = min(timetable.num_steps(step, profiler.due), watch.most_steps())
        num_steps = min(num_steps, 1) if callbacks else num_steps
        callbacks.begin_step(step)
        with profiler.trace(step), watch.steps(begun.train_loop, step, num_steps):
            shown = timetable.logs(step + num_steps)
            values = begun.train_loop(begun.batches, tf.constant(num_steps), shown)
            if shown:
                values["loss"].numpy()  # waits for the devices
        step += num_steps
        due = shown, timetable.saves(step), timetable.evaluates(step), step == timetable.last_step
        alarm.look(values, step, now=any(due))
        if seconds_to_first_step is None:
            seconds_to_first_step = time.perf_counter() - start
        monitor.progress(step, values)
        callbacks.end_step(step, values)
        with monitor.pause():
            profiler.end(step)
        if timetable.logs(step):
            metrics = {n: value.numpy().tolist() for n, value in values.items() if n != "batch"}
            monitor.train_point(step, metrics | {"skipped": run.task.num_skipped()})
        if watch.wants_save(step) or timetable.saves(step):
            with monitor.pause():
                save_finite(begun, alarm, watch, step)
            saved = step
        if timetable.draws_histograms(step):
            look.gallery.show_histograms(step)
        with monitor.pause():
            if timetable.evaluates(step) or (callbacks and step == timetable.last_step):
                if look.at(step) and run.options.keep_best:
                    if step > saved:
                        save_finite(begun, alarm, watch, step)
                        saved = step
                    checkpoints.close()  # it is to be there before the file names it
                look.best.write(monitor.say)
            changed |= callbacks.end_epoch(step, look.seen_at(step))
    profiler.stop()
    if step == timetable.last_step or look.is_over():
        if step < timetable.last_step:
            monitor.say(f"stopping    early, at step {step}: {look.why_over()}")
        changed |= run.task.finish()
        changed |= callbacks.end_run()
    if changed:
        look.forget()
    if changed or not checkpoints.has(step):
        save_finite(begun, alarm, watch, step, now=True)
    return step, seconds_to_first_step


def announce(monitor: Monitor, begun: Start) -> None:
    """Print where the run stands and how to watch it."""
    folder, last = begun.run.options.train_dir, begun.timetable.last_step
    if begun.restored is None:
        monitor.say(f"new run     {folder}, {last} steps")
    else:
        monitor.say(f"continuing  {folder} at step {begun.restored} of {last}")
    monitor.say(f"watch it    {tensorboard_command(folder)}")
    listens = threading.current_thread() is threading.main_thread()
    if listens and not in_notebook():  # which has no terminal beside it
        monitor.say(f"profile it  kill -USR2 {os.getpid()}")


def save_finite(
    begun: Start, alarm: nan.Alarm, watch: Watch, step: int, now: bool = False
) -> None:
    """Save a checkpoint, unless a step or a weight is not finite: older ones are worth more.

    It is written beside training, unless it has to be there `now`. Copies on other towers that have
    drifted away, as they may on unlike cards, get the values that are saved: the run goes on as one
    that is continued from this checkpoint does.
    """
    if drifted := begun.run.masters.make_copies_equal():
        name, device, other = drifted
        begun.checkpoints.say(
            f"warning     copies of {name} on {device} and {other} differ at step {step}: all go "
            f"on from that of {device}, which is saved; type --variables=cpu or sharded, which "
            "have one copy, or --deterministic"
        )
    alarm.check_weights(step)
    with watch.save(step):
        save = begun.checkpoints.save_now if now else begun.checkpoints.save
        save(step)


@contextlib.contextmanager
def saved_if_it_fails(begun: Start, watch: Watch) -> Iterator[None]:
    """Save the last finished step if data, a disk or a reader of the output fails in the block."""
    try:
        yield
    except (nan.NotFinite, nan.Rollback, DevicesChanged):
        raise
    except Exception:
        step, snapshot = watch.kept or (int(begun.run.masters.step.numpy()), None)
        if (watch.kept or watch.whole) and not begun.checkpoints.has(step):
            snapshot = snapshot or begun.checkpoints.snapshot()
            with contextlib.suppress(RunError):  # what failed first is what is told
                check_snapshot(snapshot)
                begun.checkpoints.save_now(step, snapshot)
        raise


class Look:
    """Evaluates a run on the way, and at its end, and shows what was found.

    On the way it sees validation data where there are any: the test set is for the end.
    """

    def __init__(
        self,
        begun: Start,
        monitor: Monitor,
        gallery: Gallery,
        best: Best,
        watch: Watch,
        callbacks: Callbacks,
    ):
        """Compile nothing yet."""
        self.begun, self.monitor, self.gallery = begun, monitor, gallery
        self.best, self.watch, self.callbacks = best, watch, callbacks
        self._last, self._last_step = None, None
        self._what, run = "validation" if begun.run.data.validation else "test", begun.run
        self._evaluate = callbacks.around(run.task.make_evaluator(run.splits()[self._what]))

    def at(self, step: int) -> bool:
        """Evaluate after `step` updates; return whether that is the best so far."""
        run = self.begun.run
        with self.watch.evaluation(step):
            self._last, self._last_step = self._evaluate(self.watch), step
            if self._last is None:
                return False
            if not self.monitor.evaluated(step):  # a crash came between this and what follows
                self.gallery.show_training(step)
                if self._last.predictions:
                    self.gallery.show_evaluation(step, self._last.predictions)
            metrics, (name, _) = self._last.metrics, run.task.objective()
            self.monitor.eval_point(step, metrics, self._what)
            value = metrics.get(f"{name}_ema")
            value = metrics.get(name) if value is None else value
            is_best = self.best.add(step, self.begun.timetable.examples(step), value)
            if is_best and run.options.keep_best:
                self.begun.checkpoints.best = step
            return is_best

    def forget(self) -> None:
        """Take no evaluation for that of the end: the weights are others now."""
        self._last_step = None

    def seen_at(self, step: int) -> Evaluation | None:
        """Return the evaluation after `step` updates, None if there was none."""
        return self._last if self._last_step == step else None

    def is_over(self) -> bool:
        """Tell whether the run ends early."""
        return self.best.is_over() or self.callbacks.stopped()

    def has_seen(self, step: int) -> bool:
        """Tell whether the evaluation after `step` updates is known."""
        needed = self.begun.run.options.keep_best or self.begun.run.options.early_stopping_epochs
        return self.monitor.evaluated(step) and (not needed or self.best.knows(step))

    def why_over(self) -> str:
        """Return why the run ends early."""
        if self.callbacks.stopped():
            return "a callback has set stop_training"
        name, _ = self.begun.run.task.objective()
        epochs = self.begun.run.options.early_stopping_epochs
        return f"{name} was best at step {self.best.step}, {epochs:g} epochs ago or more"

    def at_end(self, step: int) -> dict[str, Evaluation] | None:
        """Return the last evaluations by split, of the best weights if they are kept.

        None: it was stopped.
        """
        run, found = self.begun.run, {}
        with self.watch.evaluation(step):
            if self._last_step != step:
                self.at(step)
            if self._last is None:
                return None
            self.best.write()
            found[self._what] = self._last
            with self._best_weights(step) as others:
                if others:
                    found[self._what] = self._evaluate(self.watch)
                if "test" not in found:
                    found["test"] = run.task.make_evaluator(run.data.test)(self.watch)
                    if found["test"]:
                        self.monitor.say_figures("test", step, found["test"].metrics)
        return None if None in found.values() else found

    @contextlib.contextmanager
    def _best_weights(self, step: int) -> Iterator[bool]:
        """Let the masters be those of the best checkpoint in the block, if one is kept.

        What is told is whether they are others than those of `step`, which there are now.
        """
        checkpoints, masters = self.begun.checkpoints, self.begun.run.masters
        best = checkpoints.best
        if best not in (None, step) and not checkpoints.has(best):
            checkpoints.say(f"warning     the checkpoint of step {best}, the best, is not there")
            best = None
        if best in (None, step):
            yield False
            return
        with kept(masters.variables().values()):
            checkpoints.restore(wanted=best)
            masters.set_copies()
            yield True
        masters.set_copies()


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
        **({"skipped_steps": skipped} if (skipped := run.task.num_skipped()) is not None else {}),
        "objective": f"{'validation' if 'validation' in found else 'test'}_{name}",
        "direction": direction,
        "num_towers": len(run.builder.devices),
        "devices": run.builder.devices,
        "batch_size": run.options.batch_size,
        "train_dir": run.options.train_dir,
    }


def finished(run: Run, folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that has nothing left to do, None for any other."""
    result, timetable = read_result(folder), run.timetable()
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
    """Return the lines of the table at a run's end, of what has a value."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
        return ", ".join(value) if isinstance(value, list) else str(value)

    width = max(22, *map(len, result))
    known = {name: value for name, value in result.items() if value is not None}
    lines = [f"  {name:{width}} {cell(value)}" for name, value in known.items()]
    return ["result", *lines, tensorboard_command(result["train_dir"])]
