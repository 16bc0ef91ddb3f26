"""One of the runs that `towers.verify` compares: a compiled model, on its own towers."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_private
from towers.errors import InputError
from towers.training.masters import optimizers_of
from towers.training.parallel import builder_of, parallelize, unparallelize


class FitLane:
    """A compiled model on one device or on towers. Several lanes may have the same model."""

    def __init__(
        self,
        model: keras.Model,
        devices: Sequence[str] = (),
        how: Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
    ):
        """Set the model, built, and the towers' devices: none for plain Keras.

        Args:
            model: of which the lane changes nothing but while it is used, and variables.
            devices: of the towers.
            how: keyword arguments of `parallelize`.
            names: of the variables, as another lane has them; Keras numbers some by process.
        """
        self.model, self.num_towers = model, max(len(devices), 1)
        exact = all(weight.dtype == "float64" for weight in model.trainable_variables)
        self.precision = "float64" if exact else "float32"
        self.names = list(names) or _names(model)
        self._attributes = dict(vars(model))
        with self.current():
            if devices:
                parallelize(model, devices=list(devices), **how or {})
            else:
                unparallelize(model)
            self.builder = builder_of(model)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Let the model have the steps of this lane, and what was traced of them."""
        attributes = vars(self.model)
        before = dict(attributes)
        _replace(attributes, self._attributes)
        try:
            yield
        finally:
            self._attributes = dict(attributes)
            _replace(attributes, before)

    def variables(self) -> dict[str, np.ndarray]:
        """Return the variables of the model and of its optimizers, by name."""
        return {name: variable.numpy() for name, variable in self._variables()}

    def weight_names(self) -> list[str]:
        """Return the names of the trainable weights."""
        weights = {id(weight) for weight in self.model.trainable_variables}
        return [name for name, variable in self._variables() if id(variable) in weights]

    def take(self, values: Mapping[str, np.ndarray]) -> None:
        """Set the variables."""
        for name, variable in self._variables():
            variable.assign(values[name])

    def make_step(self, batch: tf.data.Dataset) -> dict[str, np.ndarray]:
        """Fit a batch; return the loss and the metrics, then the variables."""
        with self.current():
            logs = self.model.fit(batch, shuffle=False, verbose=0).history
        found = {"loss": np.asarray(logs.pop("loss")[-1])} if "loss" in logs else {}
        found |= {f"metric/{name}": np.asarray(values[-1]) for name, values in logs.items()}
        return found | self.variables()

    def evaluate(self, batch: tf.data.Dataset) -> dict[str, np.ndarray]:
        """Evaluate a batch; return the loss and the metrics."""
        with self.current():
            logs = self.model.evaluate(batch, verbose=0, return_dict=True)
        return {f"evaluation/{name}": np.asarray(value) for name, value in logs.items()}

    def predict(self, batch: tf.data.Dataset) -> dict[str, np.ndarray]:
        """Return what the model predicts of a batch."""
        with self.current():
            outputs = tf.nest.flatten(self.model.predict(batch, verbose=0))
        rows = [x.flat_values if isinstance(x, tf.RaggedTensor) else x for x in outputs]
        return {f"prediction/{i}": np.asarray(value) for i, value in enumerate(rows)}

    def graph(self, batch: tf.data.Dataset) -> tf.Graph:
        """Return the graph of a step on a batch, which is traced anew."""
        (data,) = batch
        with self.current():
            step = tf.function(lambda data: self.model.train_step(data), autograph=False)
            return step.get_concrete_function(data).graph

    def _variables(self) -> Iterator[tuple[str, keras.Variable]]:
        return zip(self.names, _variables(self.model), strict=True)


def copy_of(model: keras.Model, x: Any) -> keras.Model:
    """Return a compiled model of its own variables, with the values of another's.

    Layers are made anew of their configs, and so are loss, metrics and optimizer: what makes them
    in float64 is around this.

    Args:
        model: built or not.
        x: examples to build the copy with.

    Raises:
        Exception: of any kind, if the model, or what it was compiled with, cannot be made so.
    """
    if type(model).compile is not keras.Model.compile:
        raise InputError("it has a compile of its own")
    classes = {type(layer).__name__: type(layer) for layer in tf_private.layers_of(model)}
    with keras.saving.custom_object_scope(classes):
        copy = type(model).from_config(model.get_config())
        arguments = tf_private.compile_arguments(model)
        copy.compile(**{name: _made_anew(value) for name, value in arguments.items()})
    copy(x)
    copy.optimizer.build(copy.trainable_variables)
    if is_built(model):
        _copy_values(model.variables, copy.variables)
        if model.optimizer.built:
            _copy_values(model.optimizer.variables, copy.optimizer.variables)
    return copy


@contextlib.contextmanager
def kept(model: keras.Model) -> Iterator[None]:
    """Let a model and its variables be after the block as they were before."""
    attributes = dict(vars(model))
    variables = [*_variables(model), *model.metrics_variables]
    values = [variable.numpy() for variable in variables]
    try:
        yield
    finally:
        _replace(vars(model), attributes)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def is_built(model: keras.Model) -> bool:
    """Tell whether a model has all its weights."""
    return all(layer.built for layer in tf_private.layers_of(model))


def _variables(model: keras.Model) -> list[keras.Variable]:
    optimizers = optimizers_of(model)
    return [*model.variables, *(v for optimizer in optimizers for v in optimizer.variables)]


def _names(model: keras.Model) -> list[str]:
    """Return a name for each variable; those of the same path are counted."""
    own, seen, names = {id(variable) for variable in model.variables}, Counter(), []
    for variable in _variables(model):
        name = f"{'model' if id(variable) in own else 'optimizer'}/{variable.path}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def _replace(attributes: dict[str, Any], others: Mapping[str, Any]) -> None:
    others = dict(others)
    attributes.clear()
    attributes.update(others)


def _made_anew(value: Any) -> Any:
    """Return what `compile` takes with its objects made anew; functions and names stay."""
    if isinstance(value, dict):
        return {name: _made_anew(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_made_anew, value))
    if isinstance(value, keras.Loss | keras.Metric | keras.optimizers.Optimizer):
        return type(value).from_config(value.get_config())
    return value


def _copy_values(variables: Sequence[keras.Variable], copies: Sequence[keras.Variable]) -> None:
    for variable, copy in zip(variables, copies, strict=True):
        copy.assign(variable.numpy())
