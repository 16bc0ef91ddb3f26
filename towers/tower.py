"""The tower pattern: copies of one function on several devices, gathered with `add_n`.

    builder = TowerBuilder(["/gpu:0", "/gpu:1"], gather_device="/cpu:0")

    @tf.function
    def train_step(images, labels):
        def loss_fn(images, labels):                 # runs once a tower, on its slice
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))

        loss, gradients = builder.gradients(loss_fn, model.trainable_variables, images, labels)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

The rules of a tower function: it may be called several times in one trace, once for each tower; it
creates no variables; it assigns to no `tf.Variable`. Keras variables it may assign (BatchNorm
statistics, seeds, metrics): `gradients` catches those assignments and makes each of them once.

This file needs no other of the package.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf


class PerTower:
    """A batch argument that hands tower i its own value instead of a slice."""

    def __init__(self, values: Sequence[Any]):
        """Hold `values`, one for each tower, in tower order."""
        self.values = list(values)


class TowerBuilder:
    """Copies functions onto devices and gathers their results.

    Every tensor of a `batch` (any `tf.nest` structure) is split along axis 0, one slice for each
    tower; where the number of examples does not divide, the first towers get one more. A `PerTower`
    is not split. Without a batch the function is just copied.
    """

    def __init__(self, devices: Sequence[str], gather_device: str = "/cpu:0"):
        """Set where the towers run and where their results are gathered.

        Args:
            devices: one TensorFlow device for each tower; a device may hold several towers.
            gather_device: the device of splitting, summing and joining.

        Raises:
            ValueError: `devices` is empty, or a string in place of a list of strings.
        """
        self.devices = [] if isinstance(devices, str) else list(devices)
        if not self.devices:
            raise ValueError(
                f"devices={devices!r} must be a list with one device for each tower, "
                'such as ["/gpu:0", "/gpu:1"]'
            )
        self.gather_device = gather_device

    def map(self, fn: Callable, *batch: Any) -> list[Any]:
        """Return what `fn` returns for each tower, in tower order."""
        parts, _ = self._split(batch)
        return [self._copy(i, fn, part) for i, part in enumerate(parts)]

    def sum(self, fn: Callable, *batch: Any) -> Any:
        """Return the sum over towers of what `fn` returns, by `add_n` on the gather device.

        `fn` may return any structure; `IndexedSlices` stay sparse, and `None` counts as nothing.
        """
        return self._gather(_add, self._map_occupied(fn, batch))

    def concat(self, fn: Callable, *batch: Any) -> Any:
        """Return what the towers return, joined along axis 0 in tower order: that of the batch."""
        return self._gather(_join, self._map_occupied(fn, batch))

    def gradients(
        self, loss_fn: Callable, variables: Iterable[Any], *batch: Any
    ) -> tuple[tf.Tensor, list[Any]]:
        """Return the mean loss over all examples and its gradients.

        Towers return sums, the gather adds them, one division ends it: uneven slices weigh what
        they should. Keras variables that `loss_fn` assigns are assigned once, after all towers:
        those that Keras adds up (`aggregation="sum"`: metrics) with the sum of the towers' changes;
        other floating-point ones with the mean over towers, weighted by examples; the rest
        (counters, seeds) as on the first tower.

        Args:
            loss_fn: maps a tower's slice of the batch to its losses, one for each example, `[b]`.
            variables: `keras.Variable`s, `tf.Variable`s or a mix.
            *batch: the global batch.

        Returns:
            The loss, a scalar, and a list like `variables`: tensors, `IndexedSlices` where all
            towers gave them, or None for a variable that no tower uses.

        Raises:
            ValueError: `variables` holds something else; or `loss_fn` returns no losses of shape
                `[b]`, creates a variable, assigns one inside a `tf.function`, loop or branch of its
                own, or, in a compiled step, calls a `tf.function` that keeps one tower's weights.
        """
        variables = [_tf_variable(v) for v in variables]
        scopes = []

        def backward(*part):
            with (
                _TowerScope() as scope,
                tf.variable_creator_scope(_refuse_variable),
                tf.GradientTape(watch_accessed_variables=False) as tape,
            ):
                tape.watch(variables)
                losses = _check_losses(loss_fn(*part))
                loss = tf.reduce_sum(losses)
            with keras.StatelessScope():  # what is recomputed here was assigned above
                gradients = tape.gradient(loss, variables)
            count = tf.cast(tf.shape(losses)[0], loss.dtype)
            if not tf.compat.dimension_value(losses.shape[0]):  # unknown, perhaps none
                gradients = [_zero_if_empty(g, count) for g in gradients]
            scope.close(count)
            scopes.append(scope)
            return loss, count, gradients

        loss, count, gradients = self.sum(backward, *batch)
        with tf.device(self.gather_device), tf.name_scope("gather"):
            _assign_once(scopes)
            return loss / count, [_divide(g, count) for g in gradients]

    def _copy(self, index: int, fn: Callable, part: Sequence[Any]) -> Any:
        """Run `fn` as tower `index`."""
        with tf.device(self.devices[index]), tf.name_scope(f"tower_{index}"):
            return fn(*part)

    def _map_occupied(self, fn: Callable, batch: Sequence[Any]) -> list[Any]:
        """`map`, leaving out the towers, always the last ones, that surely get no example."""
        parts, sizes = self._split(batch)
        num_occupied = sum(tf.is_tensor(size) or size > 0 for size in sizes)
        return [self._copy(i, fn, part) for i, part in enumerate(parts[: max(num_occupied, 1)])]

    def _gather(self, policy: Callable, results: list[Any]) -> Any:
        """Apply `policy` to the per-tower values at each place of the results' structure."""
        for i, result in enumerate(results):
            try:
                tf.nest.assert_same_structure(results[0], result)
            except (TypeError, ValueError):
                raise ValueError(
                    f"towers must return the same structure: tower 0 returned {results[0]!r}, "
                    f"tower {i} returned {result!r}"
                ) from None
        with tf.device(self.gather_device), tf.name_scope("gather"):
            return tf.nest.map_structure(lambda *values: policy(values), *results)

    def _split(self, batch: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return each tower's part of `batch`, and its number of examples (int or tensor)."""
        num_towers = len(self.devices)
        with tf.device(self.gather_device), tf.name_scope("split"):
            leaves = [_check_leaf(leaf, num_towers) for leaf in tf.nest.flatten(batch)]
            rows = [_num_rows(leaf) for leaf in leaves if not isinstance(leaf, PerTower)]
            sizes = _slice_sizes(rows, num_towers)
            stops = list(itertools.accumulate(sizes))
            parts = [
                [
                    leaf.values[i] if isinstance(leaf, PerTower) else leaf[stop - size : stop]
                    for leaf in leaves
                ]
                for i, (size, stop) in enumerate(zip(sizes, stops, strict=True))
            ]
        return [tf.nest.pack_sequence_as(batch, part) for part in parts], sizes


# Splitting.


def _check_leaf(leaf: Any, num_towers: int) -> Any:
    """Return a leaf of the batch as what can be split, or as a `PerTower`."""
    if leaf is None:
        return PerTower([None] * num_towers)
    if isinstance(leaf, PerTower):
        if len(leaf.values) != num_towers:
            raise ValueError(
                f"PerTower holds {len(leaf.values)} values for {num_towers} towers: "
                "it must hold one for each"
            )
        return leaf
    leaf = leaf if isinstance(leaf, tf.RaggedTensor) else tf.convert_to_tensor(leaf)
    if leaf.shape.rank == 0:
        raise ValueError(
            "a batch is split along axis 0 and cannot hold scalars: make a list of numbers an "
            "array; capture a single value in the function, or hand it over as towers.PerTower"
        )
    return leaf


def _num_rows(value: tf.Tensor | tf.RaggedTensor) -> int | tf.Tensor:
    """Return the size of axis 0, as an int where it is known."""
    known = tf.compat.dimension_value(value.shape[0])
    if known is not None:
        return known
    return value.nrows(tf.int32) if isinstance(value, tf.RaggedTensor) else tf.shape(value)[0]


def _slice_sizes(rows: Sequence[int | tf.Tensor], num_towers: int) -> list[int | tf.Tensor]:
    """Return each tower's share of a batch whose tensors have `rows` rows."""
    if not rows:
        return [1] * num_towers  # nothing to split: every tower runs
    known = sorted({size for size in rows if isinstance(size, int)})
    message = "the tensors of a batch must have the same size along axis 0"
    if len(known) > 1:
        raise ValueError(f"{message}, not {known}")
    total = known[0] if known else rows[0]
    for size in rows:
        if tf.is_tensor(size) and size is not total:
            tf.debugging.assert_equal(size, total, message)
    return [(total + num_towers - 1 - i) // num_towers for i in range(num_towers)]


# Gathering.


def _add(values: Sequence[Any]) -> Any:
    """Sum per-tower values; None counts as nothing, and all-sparse values stay sparse."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    if all(isinstance(value, tf.IndexedSlices) for value in values):
        return tf.IndexedSlices(
            tf.concat([value.values for value in values], axis=0),
            tf.concat([value.indices for value in values], axis=0),
            values[0].dense_shape,
        )
    # The name makes add_n move a single value to the gather device too.
    return tf.add_n([tf.convert_to_tensor(value) for value in values], name="AddN")


def _join(values: Sequence[Any]) -> Any:
    """Join per-tower values along axis 0; None counts as nothing."""
    values = [
        value if isinstance(value, tf.RaggedTensor) else tf.convert_to_tensor(value)
        for value in values
        if value is not None
    ]
    if any(value.shape.rank == 0 for value in values):
        raise ValueError("concat joins along axis 0 and cannot join scalars: use sum or map")
    return tf.concat(values, axis=0) if values else None


# Gradients.


def _tf_variable(variable: Any) -> tf.Variable:
    """Return the `tf.Variable` of a variable of either kind."""
    if not isinstance(variable, keras.Variable | tf.Variable):
        raise ValueError(
            f"variables must be a list of tf.Variables or keras.Variables, but holds {variable!r}"
        )
    return variable.value if isinstance(variable, keras.Variable) else variable


def _check_losses(losses: Any) -> tf.Tensor:
    """Return `losses` as a tensor [b], in float32 at least: sums in 16 bits lose examples."""
    losses = tf.convert_to_tensor(losses)
    if losses.shape.rank not in (None, 1):
        raise ValueError(
            f"loss_fn must return one loss for each example, shape [b], not {losses.shape}: "
            "reduce all axes but the first, the builder takes the mean over all towers "
            "(a Keras loss: reduction=None)"
        )
    return _widen(losses)


def _widen(value: tf.Tensor) -> tf.Tensor:
    """Return `value` in float32 at least."""
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value


def _divide(gradient: Any, count: tf.Tensor) -> Any:
    """Divide a summed gradient by the number of examples, which 16 bits cannot hold."""

    def divide(values):
        wide = _widen(values)
        return tf.cast(wide / tf.cast(count, wide.dtype), values.dtype)

    return _map_values(divide, gradient)


def _zero_if_empty(gradient: Any, count: tf.Tensor) -> Any:
    """Return zeros if the tower had no example: a mean over none has given NaN."""
    return _map_values(
        lambda values: tf.math.multiply_no_nan(values, tf.cast(count > 0, values.dtype)), gradient
    )


def _map_values(fn: Callable, gradient: Any) -> Any:
    """Apply `fn` to the values of a gradient: dense, sparse or None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(fn(gradient.values), gradient.indices, gradient.dense_shape)
    return fn(gradient)


# State of Keras variables.


class _TowerScope(keras.StatelessScope):
    """Keeps assignments to Keras variables in place of making them.

    Weights are read from their masters. Only the inner graphs of a compiled step (loops, functions)
    get copies, on the tower's device: XLA cannot read a master that lies on another, and a loop
    would fetch it each time round.
    """

    def __init__(self):
        super().__init__()
        self.eager = tf.executing_eagerly()
        self.graph = tf.compat.v1.get_default_graph()
        self.updates: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.copies: dict[int, tf.Tensor] = {}

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, _ = update
        if self._is_inside():
            raise ValueError(
                f"a tower cannot see the assignment of {variable.path!r} inside a tf.function, "
                "loop or branch of loss_fn: make a tf.function of the whole step instead"
            )
        super().add_update(update)
        self.updates[id(variable)] = update

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        if variable.trainable and variable._value is None:  # not initialized
            raise _creation_error(variable.path)
        value = super().get_current_value(variable)
        if value is None and self._is_inside() and not self.eager:
            if id(variable) not in self.copies:
                with self.graph.as_default():
                    self.copies[id(variable)] = tf.identity(variable._value)
            value = self.copies[id(variable)]
        return value

    def close(self, count: tf.Tensor) -> None:
        """Note the tower's number of examples, and that it makes no more use of its copies."""
        self.count = count
        self.num_uses = self._count_uses()

    def check_copies(self) -> None:
        """Raise an error if another tower has used this one's copies since it was closed."""
        if self._count_uses() != self.num_uses:
            raise ValueError(
                "a tf.function that loss_fn calls was traced for one tower, and would use its "
                "weights in the others: make a tf.function of the whole step instead"
            )

    def _count_uses(self) -> int:
        return sum(len(copy.consumers()) for copy in self.copies.values())

    def _is_inside(self) -> bool:
        return tf.compat.v1.get_default_graph() is not self.graph


def _refuse_variable(next_creator: Callable, **kwargs: Any) -> tf.Variable:
    """Let no trainable `tf.Variable` be created, by a `tf.variable_creator_scope`."""
    if kwargs.get("trainable") is False:
        return next_creator(**kwargs)
    raise _creation_error(kwargs.get("name"))


def _creation_error(name: str | None) -> ValueError:
    return ValueError(
        f"loss_fn creates the variable {name!r}, which `variables` cannot hold: "
        "build the model before, by calling it once outside the towers"
    )


def _assign_once(scopes: Sequence[_TowerScope]) -> None:
    """Make the assignments that the towers' scopes keep, one for each variable."""
    found = {}
    for scope in scopes:
        scope.check_copies()
        for key, (variable, value) in scope.updates.items():
            _, values, counts = found.setdefault(key, (variable, [], []))
            values.append(value)
            counts.append(scope.count)
    for variable, values, counts in found.values():
        variable.assign(_merge(variable, values, counts))


def _merge(variable: keras.Variable, values: list[tf.Tensor], counts: list[tf.Tensor]) -> tf.Tensor:
    """Return the one value for a variable that the towers assigned."""
    if len(values) == 1:
        return values[0]
    if variable.aggregation == "sum":
        return tf.add_n([variable.value, *(value - variable.value for value in values)])
    if not variable.value.dtype.is_floating or variable.aggregation == "only_first_replica":
        return values[0]
    values = [_widen(value) for value in values]
    weights = [tf.cast(count, values[0].dtype) for count in counts]
    weighted = [tf.math.multiply_no_nan(v, w) for v, w in zip(values, weights, strict=True)]
    return tf.add_n(weighted) / tf.add_n(weights)
