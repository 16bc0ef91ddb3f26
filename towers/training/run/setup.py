"""Builds a run from its options: devices, data, a compiled model with its schedule, towers.

Options are read here and in `model.py`; what follows takes the parts of a `RunContext`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from towers import data, devices, tf_internals
from towers.builder.tower import TowerBuilder
from towers.data import Data, Split
from towers.data.device_cache import DeviceCache, cache_on_devices
from towers.devices import remote
from towers.errors import InputError
from towers.monitoring.results import Monitored
from towers.options.parts import DueOptions
from towers.options.run import Options
from towers.options.triggers import Timetable
from towers.training.run import loss_checks
from towers.training.run.model import build_model
from towers.training.run.optimizers import check_own, learning_rate
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.step.losses import LossRecorder
from towers.training.step.step import Task
from towers.training.step.train_loop import make_train_loop
from towers.training.step.train_state import VARIABLES, TrainState, placement
from towers.training.step.update import StepOptions

DEFAULT_EPOCHS = 10.0
OF_TOWERS = "num_towers", "accumulate_steps"  # which `on_first_device` sets to 1


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The parts of a run, built from its options."""

    options: Options
    builder: TowerBuilder
    data: Data
    task: Task
    directions: Mapping[str, str | None]  # {metric: "max" or "min", None if unknown}
    monitored: Monitored  # the metric that selects the best evaluation, and "max" or "min"
    total_epochs: float  # the length of schedules
    total_examples: int  # where the run ends, unless `max_steps` ends it earlier
    code: Mapping[str, str | None]  # see `model.code_of`
    given: Options  # before "auto", "default" and a fall back to one device were resolved
    diagnostics: list[str]  # of the towers' function

    def to_flagfile(self) -> str:
        """Return the run's flags.cfg, without the choices that each process makes for itself."""
        left_open = {n: getattr(self.given, n) for n in ("variables", *OF_TOWERS)}
        return dataclasses.replace(self.options, **left_open).to_flagfile()

    @property
    def of_one_tower(self) -> Options:
        """Options of the run with one tower, which takes each batch as a whole."""
        return dataclasses.replace(self.given, **dict.fromkeys(OF_TOWERS, 1))

    @property
    def folder(self) -> Path:
        """Its `train_dir`."""
        return Path(self.options.train_dir)

    @property
    def train_state(self) -> TrainState:
        """The variables that a step changes."""
        return self.task.train_state

    @functools.cached_property
    def due(self) -> DueOptions:
        """The triggers; callbacks read nothing else of the options."""
        return self.options.part(DueOptions)

    def steps_done(self) -> int:
        """Return the number of updates so far."""
        return int(self.train_state.step.numpy())

    def take_diagnostics(self) -> list[str]:
        """Return the warnings since the last call."""
        lines, self.diagnostics[:] = list(self.diagnostics), []
        return lines

    def train_loop(self, *, telemetry: bool = True) -> Callable:
        """Return the run's `TrainLoop`."""
        return make_train_loop(self.task, self.train_step(), telemetry=telemetry)

    @functools.cached_property
    def on_towers(self) -> DeviceCache | None:
        """The training set on the towers' devices, None if each step is sent its examples."""
        return cache_on_devices(self.data.train, self.builder.devices)

    def batches(self, step: int, examples: int) -> tf.data.Dataset:
        """See `Split.train_batches`: of this run, or their row numbers if towers hold the data."""
        source = self.on_towers or self.data.train
        size, seed = self.options.batch_size, self.options.seed
        return source.train_batches(size, seed=seed, step=step, examples=examples)

    def train_step(self) -> Callable:
        """Return `Task.make_train_step` of this run, which also takes row numbers for examples."""
        of_examples = self.task.make_train_step(self.learning_rate)

        def train_step(example: Any, draws: tf.Tensor, **keywords: Any) -> dict[str, tf.Tensor]:
            if tf.is_tensor(example):
                example = self.on_towers.example(example)
            return of_examples(example, draws, **keywords)

        return train_step

    def splits(self) -> dict[str, Split]:
        """Return {"train", "test" and perhaps "validation": split}."""
        splits = {"train": self.data.train, "test": self.data.test}
        return splits | ({"validation": v} if (v := self.data.validation) else {})

    def learning_rate(self, examples: tf.Tensor) -> tf.Tensor:
        """Return the learning rate after a number of examples, a float64 scalar."""
        epoch = tf.cast(examples, tf.float64) / self.data.train.size
        return learning_rate(self.options, self.total_epochs, epoch)

    def timetable(self) -> Timetable:
        """Return the timetable from the step of the train state to the end of the run."""
        step, examples = self.steps_done(), int(self.train_state.examples.numpy())
        left = math.ceil((self.total_examples - examples) / self.options.batch_size)
        if self.options.max_steps:
            left = min(left, self.options.max_steps - step)
        sizes = self.data.train.size, self.options.batch_size, self.options.steps_per_loop
        return Timetable(step, examples, step + max(left, 0), *sizes, self.due)


def prepare(options: Options, continues: bool = False) -> RunContext:
    """Build the run that `options` describe.

    Args:
        options: of the run.
        continues: whether it has a checkpoint.

    Raises:
        InputError: a device, the data or the model cannot be had as the options say.
        RunError: the data set cannot be read, or a GPU does not compute.
    """
    devices.configure_run(options)
    devices.try_out()
    return assemble(options, tower_devices(options, continues), load_data(options))


def tower_devices(options: Options, continues: bool = False) -> list[str]:
    """Return the towers' devices, on this machine or on others; see `prepare`."""
    if cluster := remote.connect_run(options, continues):
        return cluster.devices
    names = devices.tower_devices(options.num_towers, options.devices, divide_cores=True)
    if options.jit_compile:  # before the data are read, and models fill the memory of GPUs
        devices.try_xla(names)
    return names


def load_data(options: Options) -> Data:
    """Return the data set of a run, see `prepare`."""
    name, folder = options.dataset, options.data_dir or None
    with user_facing_errors():
        return data.load(name, folder, options.image_height_width(), options.validation_fraction)


def assemble(
    options: Options,
    device_names: Sequence[str],
    dataset: Data,
    *,
    exact: bool = False,
) -> RunContext:
    """Build a run on devices, one for each tower, with a data set.

    Args:
        options: of the run.
        device_names: one for each tower.
        dataset: what it trains on.
        exact: whether, with float64, layers of another floating type compute in float64, too.

    Raises:
        InputError: the options do not fit the model, or it has no trainable weights.
    """
    check_own(options)
    given, diagnostics = options, []
    # Checkpoints identify variables by name.
    with user_facing_errors(), tf_internals.named_as_in_a_new_process():
        built = build_model(options, dataset, exact)
        if not built.network.trainable_variables:
            raise InputError(
                f"--model={options.model} has no trainable weights; return a model that has some"
            )
        place, home = placement(options.variables, device_names)
        options = dataclasses.replace(
            options,
            augment=built.augment,
            variables=place if place in VARIABLES else options.variables,
        )
        of_step = dataclasses.replace(options.part(StepOptions), variables=place)
        # Callbacks may ask for the metrics of a batch, and verify compares them.
        reports = bool(options.metrics or options.callbacks or exact) or not built.by_flags
        builder = TowerBuilder(
            device_names,
            home,
            batch_norm=options.batch_norm,
            accumulate_steps=options.accumulate_steps,
            jit_compile=options.jit_compile,
            on_warning=diagnostics.append,
            check=options.check,
            on_inexact=options.on_inexact,
        )
        recorder = LossRecorder(built.network)
        with loss_checks.translate_loss_errors(recorder, options, dataset):
            of_model = built.prepare, recorder, built.by_flags, reports
            task = Task(builder, built.network, of_step, dataset, *of_model)
    _check_validation(options, dataset)
    length = _length(options, dataset.train.size)
    directions = _metric_directions(task)
    monitored = _monitored(options.monitor, directions)
    parts = options, builder, dataset, task, directions, monitored
    return RunContext(*parts, *length, built.code, given, diagnostics)


def _length(options: Options, size: int) -> tuple[float, int]:
    """Return the length of a run's schedules in epochs, and that of the run in examples."""
    if options.max_steps and not options.num_epochs:
        total_examples = options.max_steps * options.batch_size
        return total_examples / size, total_examples
    total_epochs = options.num_epochs or DEFAULT_EPOCHS
    return total_epochs, max(round(total_epochs * size), 1)


def _monitored(monitor: str, known: Mapping[str, str | None]) -> Monitored:
    """Return the metric that selects the best evaluation, and "max" or "min"; see `RunContext`.

    By default it is the accuracy, or the first metric whose direction is known, or the loss.
    """
    if not monitor:
        candidates = [name for name in known if name != "loss" and known[name]]
        rest = "loss" if "loss" in known else next(iter(known))
        name = "accuracy" if "accuracy" in candidates else next(iter(candidates), rest)
        return name, known[name] or "min"
    direction, _, name = monitor.rpartition(":")
    name = name.removeprefix("val_")
    name = {n.lower(): n for n in known}.get(name.lower(), name)  # Keras calls one AUC, or auc
    if direction not in ("", "max", "min") or name.removesuffix("_ema") not in known:
        raise InputError(
            f"--monitor={monitor}: allowed are {', '.join(known) or 'no metric yet'}, optionally "
            "with max: or min: before it"
        )
    direction = direction or known[name.removesuffix("_ema")]
    if direction is None:
        raise InputError(
            f"--monitor={name}: it is not known whether higher is better; type "
            f"--monitor=max:{name} or min:{name}"
        )
    return name, direction


def _metric_directions(task: Task) -> dict[str, str | None]:
    """Return {metric: "max" or "min", whichever is better, or None if unknown}."""
    directions = {
        name: metric_direction(task.model, name)
        or metric_direction(task.model, name.rstrip("0123456789").rstrip("_"))  # of a vector
        for name in task.figures
    }
    return directions | ({"accuracy": "max"} if "accuracy" in directions else {})


def metric_direction(model: keras.Model, name: str) -> str | None:
    """Return the better direction of a metric, "max" or "min", None if Keras does not know.

    Args:
        model: compiled.
        name: of the metric, or of a loss, as in the logs of `fit`.
    """
    if name == "loss" or name.endswith("_loss"):
        return "min"
    for metric in [m for one in model.metrics for m in (one, *getattr(one, "metrics", ()))]:
        is_it = f"_{name}".endswith(f"_{metric.name}")  # one of several follows the output's name
        if is_it and (direction := tf_internals.direction_of(metric)):
            return {"up": "max", "down": "min"}[direction]
    return None


def on_first_device(run: RunContext) -> RunContext:
    """Return a new run with one tower, on the first device."""
    alone = assemble(run.of_one_tower, run.builder.devices[:1], run.data)
    return dataclasses.replace(alone, given=run.given)


def _check_validation(options: Options, dataset: Data) -> None:
    """Raise InputError for early stopping or keeping the best without validation data."""
    for name in ("keep_best", "early_stopping_epochs"):
        evaluates = dataset.validation and options.evaluate_every_epochs
        if getattr(options, name) and not evaluates:
            raise InputError(
                f"--{name} needs evaluations on validation data; type --validation_fraction=0.1 "
                "(or return validation data from the data function) and --evaluate_every_epochs=1"
            )
