"""Runners for verify: a model that trains as `towers train` or as `fit` does."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import devices, tf_internals
from towers.builder.sharding import num_rows
from towers.builder.tower import TowerBuilder
from towers.errors import InputError, first_line
from towers.options.fields import parse_tower_numbers
from towers.options.run import Options
from towers.training.parallelize import parallelize
from towers.training.run.setup import RunContext
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.step import train_state
from towers.training.step.on_towers import builder_of, traced, unparallelize
from towers.training.step.train_state import methods_set_on

Arrays = dict[str, np.ndarray]


class Runner:
    """A model that trains on its own towers, or on one device as plain Keras does.

    Subclasses have `make_step(batch)`, which returns "loss", "metric/..." and all variables; and
    `evaluate(batch)`: "evaluation/..." and "prediction/...". Those on towers have
    `tower_function(batch)`, the towers' function and its arguments; those on one device the graph
    of a step, `graph(batch)`.
    """

    num_towers: int  # 1 for plain Keras, too
    dtype: str  # the narrowest of the layers' compute dtypes
    model: keras.Model
    builder: TowerBuilder | None  # None for plain Keras
    named: Mapping[str, Any]  # variables that a step changes, by names that all runners share

    def variables(self) -> Arrays:
        """Return the values of the variables."""
        return {name: variable.numpy() for name, variable in self.named.items()}

    def weight_names(self) -> list[str]:
        """Return the names of the trainable weights."""
        weights = {id(v) for w in self.model.trainable_variables for v in (w, w.value)}
        return [name for name, variable in self.named.items() if id(variable) in weights]

    def results(self, metrics: Mapping[str, tf.Tensor]) -> Arrays:
        """Return the metrics of a step, and all variables after it."""
        return {name: x.numpy() for name, x in metrics.items()} | self.variables()

    def set_variables(self, values: Mapping[str, np.ndarray]) -> None:
        """Set the variables."""
        for name, variable in self.named.items():
            variable.assign(values[name])


class TrainRunner(Runner):
    """A run, as `towers train` makes it of its options. A batch is (example, draws)."""

    def __init__(self, run: RunContext):
        """Trace the step of a run, which is built."""
        self.run, self.model, self.builder = run, run.train_state.model, run.builder
        self.num_towers, self.dtype = len(run.builder.devices), run.options.dtype
        self.named = run.train_state.variables()
        batches = run.data.train.train_batches(run.options.batch_size, seed=run.options.seed)
        run.task.analyze(*next(iter(batches)))
        train_step, spec = run.train_step(), batches.element_spec
        step = tf.function(lambda *batch: train_step(*batch), autograph=False)
        with user_facing_errors(), tf_internals.convolve_without_xla():
            self._step = traced(self.model, lambda: step.get_concrete_function(*spec))

    def set_variables(self, values: Mapping[str, np.ndarray]) -> None:
        """Set the master variables, and their copies."""
        super().set_variables(values)
        self.run.train_state.set_copies()

    def make_step(self, batch: Any) -> Arrays:
        """Make a step."""
        with user_facing_errors():
            metrics = self._step(*batch)
        batch_metrics = {n.replace("batch/", "metric/"): v for n, v in metrics.items() if "/" in n}
        return self.results({"loss": metrics["loss"]} | batch_metrics)

    def evaluate(self, batch: Any) -> Arrays:
        """Return the metrics of an evaluation."""
        with user_facing_errors():
            evaluation = self.run.task.test_step.evaluate([batch], len(batch[1]))
            return evaluation_arrays(evaluation.metrics, self.run.options)

    def tower_function(self, batch: Any) -> tuple[Callable, Sequence[Any]]:
        """See `Runner`."""
        example, draws = batch
        return self.run.task.tower_function, (*example, draws)


def evaluation_arrays(metrics: Mapping[str, Any], options: Options) -> Arrays:
    """Return the metrics of an evaluation as arrays of the run's precision, see `Options`.

    Sums have more bits.
    """
    arrays = {f"evaluation/{name}": np.asarray(value) for name, value in metrics.items()}
    dtype = options.input_dtype
    return {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in arrays.items()}


class FitRunner(Runner):
    """A compiled and built model under `fit`. A batch is an element of a data set for `fit`."""

    def __init__(
        self,
        model: keras.Model,
        devices: Sequence[str] = (),
        how: Mapping[str, Any] | None = None,
        reference: "FitRunner | None" = None,
    ):
        """Put a compiled model on towers, see `parallelize`; without devices, on one as in Keras.

        A `reference` names the variables, since Keras numbers some names.
        """
        self.model, self.num_towers = model, max(len(devices), 1)
        dtypes = {layer.compute_dtype for layer in tf_internals.layers_of(model)}
        floating = [d for d in sorted(dtypes) if d and tf.as_dtype(d).is_floating]
        self.dtype = min(floating, key=lambda d: tf.as_dtype(d).size, default="float32")
        slots = [v for optimizer in train_state.optimizers_of(model) for v in optimizer.variables]
        pairs = [(f"model/{v.path}", v) for v in model.variables]
        pairs += [(f"optimizer/{v.path}", v) for v in slots]
        self.named = train_state.by_unique_name(pairs)
        if reference:
            self.named = dict(zip(reference.named, self.named.values(), strict=True))
        self._parts = reference._parts if reference else ["evaluate", "predict"]
        unparallelize(model)
        model.jit_compile = False  # nor do towers: on new GPUs XLA may end the process
        if devices:
            parallelize(model, devices=list(devices), **how or {})
        self.builder = builder_of(model)

    def make_step(self, batch: Any) -> Arrays:
        """Make a step by `fit`, without gradients."""
        logs = self.model.fit(batched(batch, rows_in(batch)), shuffle=False, verbose=0).history
        arrays = {"loss": np.asarray(logs.pop("loss")[-1])} if "loss" in logs else {}
        arrays |= {f"metric/{name}": np.asarray(values[-1]) for name, values in logs.items()}
        return arrays | self.variables()

    def evaluate(self, batch: Any) -> Arrays:
        """Evaluate and predict, unless plain Keras cannot (a model may have no `call`)."""
        results, batches = {}, batched(batch, rows_in(batch))
        for part in list(self._parts):
            try:
                if part == "evaluate":
                    logs = self.model.evaluate(batches, verbose=0, return_dict=True)
                    results |= {f"evaluation/{name}": logs[name] for name in logs}
                else:
                    outputs = tf.nest.flatten(self.model.predict(batches, verbose=0))
                    results |= {f"prediction/{i}": x for i, x in enumerate(outputs)}
            except Exception as error:
                if self.builder:
                    raise
                self._parts.remove(part)
                reason = f"{part} is not compared, it fails on one device: {first_line(error)}"
                warnings.warn(reason, stacklevel=2)
        return {name: np.asarray(getattr(x, "flat_values", x)) for name, x in results.items()}

    def tower_function(self, batch: Any) -> tuple[Callable, Sequence[Any]]:
        """See `Runner`."""
        return lambda x: self.model(x, training=True), [inputs_of(batch)]

    def graph(self, batch: Any) -> tf.Graph:
        """See `Runner`."""
        self.model.reset_metrics()
        step = tf.function(lambda data: self.model.train_step(data), autograph=False)
        return step.get_concrete_function(batch).graph


def numbers_to_compare(asked: str, names: str | Sequence[str]) -> list[int]:
    """Return the numbers of towers that are asked for, see `towers.devices.tower_devices`.

    The default leaves out those for which there are not enough GPUs.
    """
    numbers = parse_tower_numbers(asked)
    most = devices.most_towers(names) if numbers == [1, 2, 3, 4] else None
    return numbers[:most]


def in_float64(
    make: Callable[[], Runner], batch: Any, failure: str, say: Callable[[str], None]
) -> Runner | None:
    """Return a runner that can make a step in float64, or print why not and return None.

    Args:
        make: makes the runner.
        batch: batch for a trial step, which is undone.
        failure: beginning of the line that is printed.
        say: called with that line.

    Raises:
        InputError: `make` or the step raised it.
    """
    try:
        runner = make()
        before, unseeded = runner.variables(), tf_internals.state_of_unseeded_draws()
        drawn = tf.identity(unseeded)
        runner.make_step(batch)
        runner.set_variables(before)
        unseeded.assign(drawn)
    except InputError:
        raise
    except Exception as error:  # the model's own code may raise any
        say(f"in float64  {failure}: {first_line(error)}")
        return None
    return runner


def copy_of(model: keras.Model, x: Any) -> keras.Model:
    """Return a compiled copy of a model with variables of its own.

    Layers, loss, metrics and optimizer are made from their configs, in the current floatx and
    policies. Any exception of these configs may be raised.

    Args:
        model: a compiled model.
        x: inputs to build the copy with.

    Raises:
        TypeError: the model has its own `compile`, or methods that were set on it.
    """
    if type(model).compile is not keras.Model.compile:
        raise TypeError("it has its own compile")
    if own := methods_set_on(model):
        raise TypeError(f"its {', '.join(own)} was set on the object, which its config lacks")
    classes = {type(layer).__name__: type(layer) for layer in tf_internals.layers_of(model)}
    with keras.saving.custom_object_scope(classes):
        copy = type(model).from_config(model.get_config())
        arguments = tf_internals.compile_arguments(model)
        kinds = keras.Loss | keras.Metric | keras.optimizers.Optimizer
        copied = tf.nest.map_structure(
            lambda x: type(x).from_config(x.get_config()) if isinstance(x, kinds) else x, arguments
        )
        copy.compile(**copied)
    copy(x)
    if not is_built(model):
        copy.optimizer.build(copy.trainable_variables)
        return copy
    pairs = list(zip(model.variables, copy.variables, strict=True))
    copied_by_id = {id(variable): copied for variable, copied in pairs}
    copy.optimizer.build([copied_by_id[id(v)] for v in model.trainable_variables])
    if model.optimizer.built:
        pairs += zip(model.optimizer.variables, copy.optimizer.variables, strict=True)
    for variable, copied in pairs:
        copied.assign(variable.numpy())
    return copy


def twin_of(model: keras.Model) -> keras.Model:
    """Return a shallow copy of a model, whose steps can be replaced."""
    twin = object.__new__(type(model))
    vars(twin).update(vars(model))
    return twin


def is_built(model: keras.Model) -> bool:
    """Return whether a model has all its weights."""
    return all(layer.built for layer in tf_internals.layers_of(model))


def inputs_of(batch: Any) -> Any:
    """Return the inputs in a batch that `fit` takes."""
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def rows_in(batch: Any) -> int:
    """Return the number of examples in a batch."""
    return int(num_rows(tf.nest.flatten(batch)[0]))


def batched(batch: Any, size: int) -> tf.data.Dataset:
    """Return the examples in batches of a static shape but for axis 0.

    Args:
        batch: what `tf.data.Dataset.from_tensors` takes.
        size: examples of a batch; the last may have fewer.
    """
    return tf.data.Dataset.from_tensors(batch).unbatch().batch(size)
