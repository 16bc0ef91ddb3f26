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

The pattern is all in this file. Three details that make N towers compute what one device computes
are apart: `scope` (assignments), `draws` (randomness by example), `batch_norm` (global moments);
and so is `compiled` (towers as programs of XLA's).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import batch_norm as batch_norms
from towers import compiled, gather
from towers.draws import Rows, of_rows
from towers.exchange import Exchange
from towers.scope import TowerScope, assign_once, refuse_variable, widen


class PerTower:
    """A batch argument that hands tower i its own value instead of a slice."""

    def __init__(self, values: Sequence[Any]):
        """Hold `values`, one for each tower, in tower order."""
        self.values = list(values)


@dataclasses.dataclass(frozen=True)
class TowerSums:
    """What each tower has of its examples; the last towers may be missing, if there was none.

    Attributes:
        losses: sums, scalars.
        counts: numbers of examples, scalars.
        gradients: of each tower a list like the variables: sums.
        scopes: what the towers assigned.
    """

    losses: list[tf.Tensor]
    counts: list[tf.Tensor]
    gradients: list[list[Any]]
    scopes: list[TowerScope]


class TowerBuilder:
    """Copies functions onto devices and gathers their results.

    Every tensor of a `batch` (any `tf.nest` structure) is split along axis 0, one slice for each
    tower; where the number of examples does not divide, the first towers get one more. A `PerTower`
    is not split. Without a batch the function is just copied.
    """

    def __init__(
        self,
        devices: Sequence[str],
        gather_device: str = "/cpu:0",
        *,
        batch_norm: str = "local",
        accumulate_steps: int = 1,
        gather_at_variables: bool = False,
        jit_compile: bool = False,
    ):
        """Set where the towers run and where their results are gathered.

        Args:
            devices: one TensorFlow device for each tower; a device may hold several towers.
            gather_device: the device of splitting, summing and joining.
            batch_norm: what the moments of Keras' BatchNorm layers are taken over: "local" the
                tower's own slice; "sync" those of all towers, in a compiled step only.
            accumulate_steps: `gradients` takes the batch in so many parts, one after the other,
                each split over the towers: less memory, and the same sums.
            gather_at_variables: gather each gradient where its variable lies, and not on
                `gather_device`.
            jit_compile: XLA compiles what `gradients` computes in a tower, forward and backward;
                BatchNorm layers must be local then.

        Raises:
            ValueError: `devices` is empty, or a string in place of a list of strings; or another
                argument is out of range.
        """
        self.devices = [] if isinstance(devices, str) else list(devices)
        if not self.devices:
            raise ValueError(
                f"devices={devices!r} must be a list with one device for each tower, "
                'such as ["/gpu:0", "/gpu:1"]'
            )
        if batch_norm not in batch_norms.MODES:
            raise ValueError(f"batch_norm={batch_norm!r} must be 'sync' or 'local'")
        if accumulate_steps < 1:
            raise ValueError(f"accumulate_steps={accumulate_steps} must be at least 1")
        self.gather_device = gather_device
        self.batch_norm = batch_norm
        self.accumulate_steps = accumulate_steps
        self.gather_at_variables = gather_at_variables
        self.jit_compile = jit_compile

    def map(self, fn: Callable, *batch: Any) -> list[Any]:
        """Return what `fn` returns for each tower, in tower order."""
        return self._copies(fn, self._split(batch))

    def sum(self, fn: Callable, *batch: Any) -> Any:
        """Return the sum over towers of what `fn` returns, by `add_n` on the gather device.

        `fn` may return any structure; `IndexedSlices` stay sparse, and `None` counts as nothing.
        """
        return self._gather(gather.add, self._copies(fn, _occupied(self._split(batch))))

    def concat(self, fn: Callable, *batch: Any) -> Any:
        """Return what the towers return, joined along axis 0 in tower order: that of the batch."""
        return self._gather(gather.join, self._copies(fn, _occupied(self._split(batch))))

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
            variables: `keras.Variable`s, `tf.Variable`s or a mix. A `PerTower` of `keras.Variable`s
                is one variable with a copy for each tower: `loss_fn` uses the first, and each tower
                reads its own in its place.
            *batch: the global batch.

        Returns:
            The loss, a scalar, and a list like `variables`: tensors, `IndexedSlices` where all
            towers gave them, or None for a variable that no tower uses; `PerTower`s of these for
            copies, summed by collectives.

        Raises:
            ValueError: `variables` holds something else; or `loss_fn` returns no losses of shape
                `[b]`, creates a variable, assigns one inside a `tf.function`, loop or branch of its
                own, or, in a compiled step, calls a `tf.function` that keeps one tower's weights.
        """
        variables = list(variables)
        return self.gather_sums(self.tower_sums(loss_fn, variables, *batch), variables)

    def tower_sums(self, loss_fn: Callable, variables: Iterable[Any], *batch: Any) -> "TowerSums":
        """Return what each tower computes for `gradients`, before the gather.

        Args and errors as of `gradients`. `gather_sums` must follow: it makes the assignments.
        """
        variables = list(variables)
        scopes = []

        def backward(tower, member, *part):
            if self.jit_compile and member:
                member = compiled.NO_EXCHANGE

            def compute():
                own = [_tf_variable(_of_tower(v, tower)) for v in variables]
                with (
                    TowerScope(_replaced(variables, tower)) as scope,
                    batch_norms.over_all_towers(member, self.batch_norm),
                    tf.variable_creator_scope(refuse_variable),
                    tf.GradientTape(watch_accessed_variables=False) as tape,
                ):
                    tape.watch(own)
                    losses = _check_losses(loss_fn(*part))
                    loss = tf.reduce_sum(losses)
                with keras.StatelessScope():  # what is recomputed here was assigned above
                    gradients = tape.gradient(loss, own)
                count = tf.cast(tf.shape(losses)[0], loss.dtype)
                if not tf.compat.dimension_value(losses.shape[0]):  # unknown, perhaps none
                    gradients = [gather.zero_if_empty(g, count) for g in gradients]
                return scope, (loss, count, gradients)

            scope, sums = compiled.by_xla(compute) if self.jit_compile else compute()
            scope.close(sums[1])
            scopes.append(scope)
            return sums

        sums = zip(*self._accumulate(backward, batch), strict=True)
        return TowerSums(*map(list, sums), scopes)

    def gather_sums(
        self, sums: "TowerSums", variables: Sequence[Any]
    ) -> tuple[tf.Tensor, list[Any]]:
        """Return the mean loss and its gradients, as `gradients` does, from the towers' sums."""
        loss, count = self._gather(gather.add, sums.losses), self._gather(gather.add, sums.counts)
        gradients = self.gather_gradients(sums.gradients, variables, count)
        with tf.device(self.gather_device), tf.name_scope("gather"):
            assign_once(sums.scopes)
            return loss / count, gradients

    def gather_gradients(
        self, gradients: Sequence[Sequence[Any]], variables: Sequence[Any], count: tf.Tensor
    ) -> list[Any]:
        """Return the mean gradients, as `gradients` does.

        Args:
            gradients: of each tower a list like `variables`: sums over its examples.
            variables: as in `gradients`.
            count: number of all examples.
        """
        with tf.name_scope("gather"):
            if any(isinstance(v, PerTower) for v in variables):
                means = gather.mean_on_every_tower(
                    gradients, self.devices, self.gather_device, count
                )
                means = zip(zip(*means, strict=True), variables, strict=True)
                return [PerTower(m) if isinstance(v, PerTower) else m[0] for m, v in means]
            places = [self.gather_device] * len(variables)
            if self.gather_at_variables:
                places = [_tf_variable(v).device for v in variables]
            return gather.mean_at(gradients, places, count)

    def _copies(self, fn: Callable, slices: Sequence["_Slice"], by_xla: bool = False) -> list[Any]:
        """Run `fn`, which XLA may compile, once for each slice: the first on tower 0, and so on."""
        results = []
        for i, (device, part) in enumerate(zip(self.devices, slices, strict=False)):
            draws = of_rows(part.rows, by_xla)
            with tf.device(device), tf.name_scope(f"tower_{i}"), draws:
                results.append(fn(*part.batch))
        return results

    def _accumulate(self, fn: Callable, batch: Sequence[Any]) -> list[Any]:
        """Return the towers' sums of what `fn` returns, taking the batch part by part.

        `fn` gets the tower's number, its part in the exchanges (one tower: None), then its slice.
        A part waits for the one before it, so that only one part's activations are in memory.
        """
        num_towers = len(self.devices)
        slices = self._split(batch, self.accumulate_steps)
        totals: list[Any] = []
        for start in range(0, len(slices), num_towers):
            part = _occupied(slices[start : start + num_towers])
            if start and _is_empty(part[0]):
                break
            exchange = Exchange(len(part)) if len(part) > 1 else None
            part = [
                _Slice((i, exchange and exchange.member(i), *slice_.batch), slice_.rows)
                for i, slice_ in enumerate(part)
            ]
            with tf.control_dependencies(_tensors(totals)):
                # Each op of a part waits for this one, and not for every sum: far fewer edges.
                before = [tf.no_op()] if totals else []
            with tf.control_dependencies(before):
                results = self._copies(fn, part, self.jit_compile)
                if exchange:
                    exchange.join(self.gather_device)
            if not totals:
                totals = results
                continue
            for i, result in enumerate(results):
                with tf.device(self.devices[i]), tf.name_scope(f"tower_{i}"):
                    totals[i] = gather.map_towers(gather.add, [totals[i], result])
        return totals

    def _gather(self, policy: Callable, results: list[Any]) -> Any:
        """Apply `policy` to the per-tower values, on the gather device."""
        with tf.device(self.gather_device), tf.name_scope("gather"):
            return gather.map_towers(policy, results)

    def _split(self, batch: Sequence[Any], num_rounds: int = 1) -> list["_Slice"]:
        """Return each tower's slice of `batch`; with rounds, those of one after the other's."""
        num_towers = len(self.devices)
        with tf.device(self.gather_device), tf.name_scope("split"):
            leaves = [_check_leaf(leaf, num_towers) for leaf in tf.nest.flatten(batch)]
            num_rows = [_num_rows(leaf) for leaf in leaves if not isinstance(leaf, PerTower)]
            if not num_rows:  # nothing to split: every tower runs once
                values = [[leaf.values[i] for leaf in leaves] for i in range(num_towers)]
                return [_Slice(tf.nest.pack_sequence_as(batch, part), None) for part in values]
            rounds = _slice_sizes(_check_rows(num_rows), num_rounds)
            sizes = [size for part in rounds for size in _slice_sizes(part, num_towers)]
            slices = []
            for i, (size, stop) in enumerate(zip(sizes, itertools.accumulate(sizes), strict=True)):
                rows = Rows(stop - size, size)
                part = [
                    leaf.values[i % num_towers]
                    if isinstance(leaf, PerTower)
                    else leaf[rows.start : stop]
                    for leaf in leaves
                ]
                slices.append(_Slice(tf.nest.pack_sequence_as(batch, part), rows))
        return slices


# Splitting.


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A tower's part of the batch, and which rows of it these are; None: nothing was split."""

    batch: Any
    rows: Rows | None


def _occupied(slices: Sequence[_Slice]) -> list[_Slice]:
    """Leave out the slices, always the last ones, that surely hold no example; never all."""
    return list(slices[: max(sum(not _is_empty(part) for part in slices), 1)])


def _is_empty(part: _Slice) -> bool:
    """Tell whether a slice surely holds no example."""
    return part.rows is not None and not tf.is_tensor(part.rows.size) and part.rows.size == 0


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


def _slice_sizes(total: int | tf.Tensor, num_slices: int) -> list[int | tf.Tensor]:
    """Return the sizes of the slices of `total` rows."""
    return [(total + num_slices - 1 - i) // num_slices for i in range(num_slices)]


def _check_rows(rows: Sequence[int | tf.Tensor]) -> int | tf.Tensor:
    """Return the number of examples of a batch whose tensors have `rows` rows."""
    known = sorted({size for size in rows if isinstance(size, int)})
    message = "the tensors of a batch must have the same size along axis 0"
    if len(known) > 1:
        raise ValueError(f"{message}, not {known}")
    total = known[0] if known else rows[0]
    for size in rows:
        if tf.is_tensor(size) and size is not total:
            tf.debugging.assert_equal(size, total, message)
    return total


# Gradients.


def _of_tower(variable: Any, tower: int) -> Any:
    """Return a tower's own copy of a variable."""
    return variable.values[tower] if isinstance(variable, PerTower) else variable


def _replaced(variables: Sequence[Any], tower: int) -> dict[int, tf.Variable]:
    """Return {id of a variable that `loss_fn` uses: the copy that the tower is to read}."""
    copies = [v.values for v in variables if isinstance(v, PerTower)]
    return {id(values[0]): _tf_variable(values[tower]) for values in copies}


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
    return widen(losses)


def _tensors(structure: Any) -> list[tf.Tensor]:
    """Return the tensors of a structure, those of sparse ones too."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]
