"""The weights of a run, for its model (`towers.load`) or for another run (`--init_from`)."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from towers import tf_internals
from towers.builder.device_names import devices_here
from towers.data import augment
from towers.errors import InputError
from towers.formatting import first_of, print_line
from towers.options.flags import options_from_call
from towers.options.functions import PREFIX, load_function
from towers.options.run import Options
from towers.training.callbacks.best_checkpoint import step_of
from towers.training.run import checkpoint, manifest, model
from towers.training.run.process_state import preserve_rng
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.step.step import floatx_of
from towers.training.step.train_state import TrainState, by_unique_name, move_all, variables_of

KINDS = "model/", "average/"  # of a checkpoint's variables, with which their names begin
Values = dict[str, np.ndarray]
_MOST_NAMES = 10  # weights that a line names


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """The model of a run with the weights of a checkpoint."""

    options: Options
    task: dict[str, Any]  # see `manifest.task_of`
    model: keras.Model
    step: int
    averaged: bool  # whether the weights are moving averages

    def spec(self) -> tuple:
        """Return the structure of `tf.TensorSpec`s of one example."""
        return tuple(manifest.spec_of(part) for part in self.task["spec"])

    def inputs(self, x: Any) -> Any:
        """Return the model's inputs for a batch of x as the data set stores it."""
        kind = self.task["augment"] if self.task["image_shape"] else None
        return augment.preparation(kind, self.options.input_dtype)((x,), None)[0]


class Classes(NamedTuple):
    """The classes of a model, and whether its outputs are logits or probabilities."""

    names: list[str]
    logits: bool

    @classmethod
    def of(cls, trained: TrainedModel) -> "Classes | None":
        """Return the classes of a model, or None if it is not a classifier."""
        model, names = trained.model, trained.task["class_names"]
        loss = model.loss if model.compiled else trained.options.loss or None
        name = str(getattr(loss, "name", getattr(loss, "__name__", loss)))
        widths = {len(names), 1} if len(names) == 2 else {len(names)}
        shape = getattr(model, "output_shape", (None, len(names)))
        is_classifier = names and (loss is None or "crossentropy" in name)
        if not is_classifier or shape not in [(None, width) for width in widths]:
            return None
        return cls(names, loss is None or getattr(loss, "from_logits", False))

    def top_2(self, output: np.ndarray) -> list[tuple[str, float]]:
        """Return the two most probable classes of an output, with their probabilities."""
        output = output.astype(np.float64)
        if len(output) == 1 and len(self.names) == 2:  # of the second class
            output = np.append(0, output) if self.logits else np.append(1 - output, output)
        if self.logits:
            exponentials = np.exp(output - np.max(output))
            output = exponentials / np.sum(exponentials)
        order = np.argsort(-output, kind="stable")[:2]
        return [(self.names[i], round(float(output[i]), 6)) for i in order]


def load(
    train_dir: str,
    *,
    averages: bool = False,
    step: int | None = None,
    model: Callable | None = None,
    trust: bool = False,
) -> keras.Model:
    """Return the Keras model of a run with its trained weights.

        model = towers.load("runs/mine")
        model.save("mine.keras")

    Args:
        train_dir: the folder of the run, which may still be training.
        averages: whether to load the moving averages of the weights (`--ema_decay`).
        step: of the checkpoint; None: the best one if the run keeps it, otherwise the newest.
        model: the model function, if that of the run has no importable name.
        trust: whether to run the functions that the run of somebody else names.

    Returns:
        The run's model, compiled by its function or from the run's flags. It takes preprocessed
        inputs, such as images standardized by the run's `augment`; `towers export` adds that to the
        model.

    Raises:
        InputError: there is no such run or checkpoint, it is damaged, or the model now has other
            variables.
    """
    given = {"model": model, "train_dir": str(train_dir), "trust": trust}
    fields = {name: value for name, value in given.items() if value is not None}
    with preserve_rng():
        options = options_from_call(None, fields, verb="load")
        trained = load_run(options, averages=averages, step=step)
    if devices_here("GPU"):  # as in a run
        floats = [v for v in trained.model.variables if v.value.dtype.is_floating]
        move_all(floats, "/gpu:0")
    return trained.model


def load_run(options: Options, *, averages: bool = False, step: int | None = None) -> TrainedModel:
    """Build the model of a run in `options.train_dir` and read its weights, see `load`."""
    found, values = read_weights(Path(options.train_dir), step)
    if averages and not averages_in(values):
        raise InputError(
            f"--train_dir={options.train_dir} has no moving averages; use its weights, or train "
            "with --ema_decay"
        )
    recorded = manifest.read(Path(options.train_dir))
    function = load_function("model", options.model)
    code = model.code_of(options.model, function)
    for line in manifest.differences({"code": code}, recorded):
        print_line(f"warning     {line}", sys.stderr)
    task = recorded.get("task")
    if not task:
        raise InputError(
            f"--train_dir={options.train_dir}: manifest.json is missing or damaged; type towers "
            f"train --train_dir={options.train_dir} to write it again"
        )
    floatx = floatx_of(options.dtype)
    with user_facing_errors(), tf_internals.named_as_in_a_new_process(), floatx:
        network = model.build_for(
            dataclasses.replace(options, augment=task["augment"]),
            function,
            num_classes=task["num_classes"],
            x=manifest.spec_of(task["spec"][0]),
            image_shape=task["image_shape"],
        )
        inline = PREFIX in f"{options.loss}{options.metrics}{options.optimizer}"
        if not (network.compiled or inline):  # inline objects have no name to load
            model.compile_from_flags(network, options)
    variables = by_unique_name((v.path, v) for v in variables_of(network))
    values |= averages_in(values) if averages else {}
    own = {n.removeprefix("model/"): x for n, x in values.items() if n.startswith("model/")}
    assign(options, found, variables, own)
    return TrainedModel(options, task, network, found, averages)


def assign(options: Options, step: int, variables: Mapping[str, Any], values: Values) -> None:
    """Assign values, by name, of a run's checkpoint to variables, by name; see `read_weights`.

    Raises:
        InputError: names or shapes differ.
    """
    named = variables, values
    here, there = ({name: str(list(v.shape)) for name, v in each.items()} for each in named)
    if differs := checkpoint.first_difference(here, there):
        raise InputError(
            f"--train_dir={options.train_dir}: the checkpoint of step {step} does not fit "
            f"{options.model}, which has changed: {differs}; undo the change"
        )
    for name, variable in variables.items():
        variable.assign(values[name])


def averages_in(values: Values) -> Values:
    """Return {"model/dense/kernel": its moving average} of a checkpoint, {} without EMA."""
    names = [name for name in values if name.startswith("average/")]
    return {name.replace("average/", "model/", 1): values[name] for name in names}


def read_weights(train_dir: Path, step: int | None = None) -> tuple[int, Values]:
    """Return the step of a run's checkpoint, and its values of `KINDS` by name; see `load`.

    Raises:
        InputError: there is none, or it cannot be read. No older one stands in for it: its results
            would be taken for those of the run.
    """
    folder = train_dir / "checkpoints"
    steps = dict(checkpoint.find(folder))
    if not steps:
        raise InputError(
            f"--train_dir={train_dir}: no checkpoint in {folder}; train first, or name the folder "
            "of a run"
        )
    if step is not None and step not in steps:
        raise InputError(
            f"--train_dir={train_dir} has no checkpoint of step {step}; it has those of steps "
            f"{', '.join(map(str, steps))}"
        )

    def read(_: str, reader: Any) -> Values:
        keys = checkpoint.keys_of(reader).items()
        return {name: reader.get_tensor(key) for name, key in keys if name.startswith(KINDS)}

    wanted = step_of(train_dir) if step is None else step
    return checkpoint.read_newest(folder, read, None, wanted)


def init_from(train_state: TrainState, source: str) -> str:
    """Initialize a model's weights, frozen ones too, and their averages from another run.

    Args:
        train_state: of a run before its first step.
        source: the folder of a run, whose averages are preferred.

    Returns:
        A line that says how many weights were loaded, and names those that were not.

    Raises:
        InputError: there is no such run, or it has no weight of this model.
    """
    folder, model = Path(source).expanduser(), train_state.model
    if not folder.is_dir():
        raise InputError(
            f"--init_from={source} is not the folder of a run; to load weights from a file, call "
            "model.load_weights(FILE, skip_mismatch=True) in the model function"
        )
    try:
        step, values = read_weights(folder)
    except InputError as error:
        raise InputError(str(error).replace("--train_dir", "--init_from", 1)) from None
    averages = averages_in(values)
    named = by_unique_name((f"model/{v.path}", v) for v in variables_of(model))
    shapes = {name: tuple(variable.shape) for name, variable in named.items()}
    fitting = {
        id(named[name]): value
        for name, value in (values | averages).items()
        if shapes.get(name) == value.shape
    }
    missing = [variable.path for variable in model.weights if id(variable) not in fitting]
    loaded = len(model.weights) - len(missing)
    if not loaded:
        raise InputError(
            f"--init_from={source} has none of the weights of this model, such as "
            f"{first_of(missing, _MOST_NAMES)}"
        )
    for variable in model.weights:
        if id(variable) in fitting:
            variable.assign(fitting[id(variable)])
    for variable, average in train_state.averages:
        average.assign(variable.value)
    train_state.set_copies()
    kind = "averages" if averages else "weights"
    of_all = f"{loaded} of {len(model.weights)} weights"
    line = f"init_from   {source}, its {kind} at step {step}: {of_all}"
    return f"{line}; not loaded: {first_of(missing, _MOST_NAMES)}" if missing else line
