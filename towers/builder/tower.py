"""The tower pattern: copies of one function on several devices, gathered with `add_n`.

    builder = TowerBuilder(["/gpu:0", "/gpu:1"], gather_device="/cpu:0")

    @tf.function
    def train_step(images, labels):
        def loss_fn(images, labels):                 # runs once a tower, on its slice
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))

        loss, gradients = builder.gradients(loss_fn, model.trainable_variables, images, labels)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

The rules of a tower function: it may be called several times in one trace, once for each tower, and
before that on made-up examples, to learn what it does with each of them; it creates no variables;
it assigns to no `tf.Variable`. Keras variables it may assign (BatchNorm statistics, seeds,
metrics): those assignments are caught, and each is made once.

The pattern is all in this file. The details that make N towers compute what one device computes are
apart: `splitting`, `scope` (assignments), `draws` (randomness by example), `rehearsal` (what is by
example), `batch_norm` (global moments); and so is `compiled` (towers as programs of XLA's).
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_private
from towers.builder import batch_norm as batch_norms
from towers.builder import gather
from towers.builder import xla as compiled
from towers.builder.assignments import (
    TowerScope,
    assign_once,
    assignments_refused,
    refuse_variable,
    widen,
)
from towers.builder.draws import Drawn, of_rows
from towers.builder.exchange import Exchange, Member
from towers.builder.layers import NO_LAYER
from towers.builder.rehearsal import Rehearsal, ambiguous, not_put_together, parts_of, rehearse
from towers.builder.splitting import PerTower, Slice, is_empty, occupied, split
from towers.errors import InputError


@dataclasses.dataclass(frozen=True)
class TowerSums:
    """What each tower has of its examples; the last towers may be missing, if there was none.

    Attributes:
        losses: sums, scalars.
        counts: numbers of examples, scalars.
        gradients: of each tower a list like the variables: sums.
        scopes: what the towers assigned.
        policies: how these values make one, see `scope.assign_once`.
    """

    losses: list[tf.Tensor]
    counts: list[tf.Tensor]
    gradients: list[list[Any]]
    scopes: list[TowerScope]
    policies: dict[int, str]


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
        on_doubt: Callable[[str], None] = warnings.warn,
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
            on_doubt: is told, in a sentence, of what a function does that several towers may not
                compute as one device does.

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
        self.on_doubt = on_doubt
        self._rehearsed: list[tuple[list[Any], Rehearsal]] = []  # the newest first
        self._told: set[str] = set()

    def map(self, fn: Callable, *batch: Any) -> list[Any]:
        """Return what `fn` returns for each tower, in tower order."""
        return self._run(fn, self._split(batch), batch)

    def sum(self, fn: Callable, *batch: Any) -> Any:
        """Return the sum over towers of what `fn` returns, by `add_n` on the gather device.

        `fn` may return any structure; `IndexedSlices` stay sparse, and `None` counts as nothing.
        """
        return self._gather(gather.add, self._run(fn, occupied(self._split(batch)), batch))

    def concat(self, fn: Callable, *batch: Any) -> Any:
        """Return what the towers return, joined along axis 0 in tower order: that of the batch."""
        return self._gather(gather.join, self._run(fn, occupied(self._split(batch)), batch))

    def gradients(
        self, loss_fn: Callable, variables: Iterable[Any], *batch: Any
    ) -> tuple[tf.Tensor, list[Any]]:
        """Return the mean loss over all examples and its gradients.

        Towers return sums, the gather adds them, one division ends it: uneven slices weigh what
        they should. Keras variables that `loss_fn` assigns are assigned once, after all towers:
        as their `aggregation` says ("sum" of the towers' changes: metrics; "mean", weighted by
        examples; "only_first_replica"); the others as a rehearsal finds it (sums, means, running
        maxima and minima, counters of steps). What cannot be told goes to `on_doubt`.

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
            ValueError: `variables` holds something else; or `loss_fn` returns no floating-point
                losses of shape `[b]`, creates a variable, or assigns a `tf.Variable`.
        """
        variables = list(variables)
        return self.gather_sums(self.tower_sums(loss_fn, variables, *batch), variables)

    def rehearse(self, fn: Callable, *batch: Any) -> Rehearsal:
        """Find out what `fn` does with its examples; doubts go to `on_doubt`, once.

        The other methods do so by themselves where there are several towers. What was found of the
        last functions is kept.

        Args:
            fn: a tower function.
            *batch: as it is split; where its values are known, they are tried, and made-up ones of
                that type and shape where they are not.
        """
        parts = parts_of(fn, batch)
        for before, found in self._rehearsed:
            if len(parts) == len(before) and all(map(_is_same, parts, before)):
                return found
        found = rehearse(fn, batch)
        self._rehearsed = [(parts, found), *self._rehearsed[:_NUM_KEPT]]
        self._doubt(found.doubts())
        return found

    def _doubt(self, doubts: Iterable[str]) -> None:
        """Tell what has not been told yet."""
        for doubt in doubts:
            if doubt not in self._told:
                self._told.add(doubt)
                self.on_doubt(doubt)

    def tower_sums(self, loss_fn: Callable, variables: Iterable[Any], *batch: Any) -> "TowerSums":
        """Return what each tower computes for `gradients`, before the gather.

        Args and errors as of `gradients`. `gather_sums` must follow: it makes the assignments.
        """
        variables = list(variables)
        rehearsal = self._rehearse(loss_fn, batch, self.accumulate_steps, losses=True)
        scopes = []

        def backward(tower: int, member: Member | None, part: Slice) -> tuple:
            if self.jit_compile and member:
                member = compiled.NO_EXCHANGE
            own = [_tf_variable(_of_tower(v, tower)) for v in variables]

            def compute() -> tuple:
                with self._inside(tower, member, _replaced(variables, tower)) as scope:
                    with tf.GradientTape(watch_accessed_variables=False) as tape:
                        tape.watch(own)
                        losses = _check_losses(loss_fn(*part.batch), part)
                        loss = tf.reduce_sum(losses)
                    # What is recomputed in the backward pass runs in what the forward pass ran in;
                    # what it assigns was assigned above.
                    with TowerScope(scope.own, scope.device, outer=scope.outer):
                        gradients = tape.gradient(loss, own)
                count = tf.cast(tf.shape(losses)[0], loss.dtype)
                if not tf.compat.dimension_value(losses.shape[0]):  # unknown, perhaps none
                    gradients = [gather.zero_if_empty(g, count) for g in gradients]
                scope.close(count)
                return scope, (loss, count, gradients)

            scope, sums = compiled.by_xla(compute) if self.jit_compile else compute()
            scope.count = sums[1]
            scopes.append(scope)
            return sums

        sums = zip(*self._accumulate(backward, batch, rehearsal.draws), strict=True)
        return TowerSums(*map(list, sums), scopes, rehearsal.policies)

    def gather_sums(
        self, sums: "TowerSums", variables: Sequence[Any]
    ) -> tuple[tf.Tensor, list[Any]]:
        """Return the mean loss and its gradients, as `gradients` does, from the towers' sums."""
        loss, count = self._gather(gather.add, sums.losses), self._gather(gather.add, sums.counts)
        gradients = self.gather_gradients(sums.gradients, variables, count)
        with tf.device(self.gather_device), tf.name_scope("gather"):
            self._doubt(map(not_put_together, assign_once(sums.scopes, sums.policies)))
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

    def _run(self, fn: Callable, slices: Sequence[Slice], batch: Sequence[Any]) -> list[Any]:
        """Return what `fn` returns for each slice; make the assignments of all once."""
        if slices[0].rows is None:
            return self._copies(lambda _, part: fn(*part.batch), slices)
        rehearsal = self._rehearse(fn, batch)
        exchange = Exchange(len(slices)) if len(slices) > 1 else None
        scopes = []

        def run(tower: int, part: Slice) -> Any:
            with self._inside(tower, exchange and exchange.member(tower)) as scope:
                result = fn(*part.batch)
            scope.close(part.rows.size)
            scopes.append(scope)
            return result

        results = self._copies(run, slices, rehearsal.draws)
        if exchange:
            exchange.join(self.gather_device)
        with tf.device(self.gather_device), tf.name_scope("gather"):
            self._doubt(map(not_put_together, assign_once(scopes, rehearsal.policies)))
        return results

    def _copies(
        self, fn: Callable, slices: Sequence[Slice], draws: Sequence[Drawn] | None = None
    ) -> list[Any]:
        """Return `fn(tower, slice)` for each slice, made on that tower's device."""
        results = []
        for i, (device, part) in enumerate(zip(self.devices, slices, strict=False)):
            drawing = of_rows(part.rows, draws, self.jit_compile)
            with tf.device(device), tf.name_scope(f"tower_{i}"), drawing as drawn:
                results.append(fn(i, part))
                if drawn and drawn.num_guessed and len(slices) > 1:
                    self._doubt([ambiguous(NO_LAYER, "; " + _OTHERWISE)])
        return results

    @contextlib.contextmanager
    def _inside(
        self, tower: int, member: Member | None, own: dict[int, Any] | None = None
    ) -> Iterator[TowerScope]:
        """Let what is called in the block be of one tower among several.

        Args:
            tower: its number.
            member: its part in the exchanges; None if there is one tower.
            own: {id of a variable: what the tower reads in its place}; None if what is called may
                make and assign variables of its own.
        """
        with contextlib.ExitStack() as stack:
            scope = stack.enter_context(TowerScope(own, self.devices[tower]))
            stack.enter_context(batch_norms.over_all_towers(member, self.batch_norm))
            stack.enter_context(tf_private.functions_inlined())
            if own is not None:
                stack.enter_context(tf.variable_creator_scope(refuse_variable))
                stack.enter_context(assignments_refused())
            yield scope

    def _accumulate(
        self, fn: Callable, batch: Sequence[Any], draws: Sequence[Drawn] | None
    ) -> list[Any]:
        """Return the towers' sums of what `fn` returns, taking the batch part by part.

        `fn` gets the tower's number, its part in the exchanges (one tower: None), then its slice.
        A part waits for the one before it, so that only one part's activations are in memory.
        """
        num_towers = len(self.devices)
        slices = self._split(batch, self.accumulate_steps)
        totals: list[Any] = []
        for start in range(0, len(slices), num_towers):
            part = occupied(slices[start : start + num_towers])
            if start and is_empty(part[0]):
                break
            with tf.control_dependencies(_tensors(totals)):
                # Each op of a part waits for this one, and not for every sum: far fewer edges.
                before = [tf.no_op()] if totals else []
            with tf.control_dependencies(before):
                exchange = Exchange(len(part)) if len(part) > 1 else None
                results = self._copies(_with_member(fn, exchange), part, draws)
                if exchange:
                    exchange.join(self.gather_device)
            if not totals:
                totals = results
                continue
            for i, result in enumerate(results):
                with tf.device(self.devices[i]), tf.name_scope(f"tower_{i}"):
                    totals[i] = gather.map_towers(gather.add, [totals[i], result])
        return totals

    def _rehearse(
        self, fn: Callable, batch: Sequence[Any], num_rounds: int = 1, losses: bool = False
    ) -> Rehearsal:
        """Return what is known of a tower function, if there are several slices."""
        whole = all(isinstance(leaf, PerTower | None) for leaf in tf.nest.flatten(batch))
        if len(self.devices) * num_rounds == 1 or whole:
            return Rehearsal()
        found = self.rehearse(fn, *batch)
        if losses and found.by_example is False:
            raise InputError(_NO_LOSSES.format("another shape"))
        return found

    def _gather(self, policy: Callable, results: list[Any]) -> Any:
        """Apply `policy` to the per-tower values, on the gather device."""
        with tf.device(self.gather_device), tf.name_scope("gather"):
            return gather.map_towers(policy, results)

    def _split(self, batch: Sequence[Any], num_rounds: int = 1) -> list[Slice]:
        """Return each tower's slice of `batch`; with rounds, those of one after the other's."""
        with tf.device(self.gather_device), tf.name_scope("split"):
            return split(batch, len(self.devices), num_rounds)


def _with_member(fn: Callable, exchange: Exchange | None) -> Callable:
    """Return `fn` with each tower's part in the exchange as its second argument."""
    return lambda tower, part: fn(tower, exchange and exchange.member(tower), part)


_NUM_KEPT = 3
_OTHERWISE = "it drew otherwise than for a few examples, or could not be traced for those"


def _is_same(a: Any, b: Any) -> bool:
    """Tell whether two parts of a function are the same; tensors cannot be compared by ==."""
    return a is b or (isinstance(a, str | int | float) and type(a) is type(b) and a == b)


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


_NO_LOSSES = (
    "loss_fn must return one loss for each example, shape [b], not {}: reduce all axes but the "
    "first, the builder takes the mean over all towers (a Keras loss: reduction=None)"
)


def _check_losses(losses: Any, part: Slice) -> tf.Tensor:
    """Return `losses` as a tensor [b], in float32 at least: sums in 16 bits lose examples."""
    losses = tf.convert_to_tensor(losses)
    if not losses.dtype.is_floating:
        raise InputError(
            f"loss_fn must return floating-point losses, not {losses.dtype.name}, which have no "
            "gradients: cast what they are computed from to float32"
        )
    if losses.shape.rank not in (None, 1):
        raise InputError(_NO_LOSSES.format(losses.shape))
    size = None if part.rows is None else part.rows.size
    known = tf.compat.dimension_value(losses.shape[0])
    if isinstance(size, int) and known not in (None, size):
        raise InputError(_NO_LOSSES.format(f"{losses.shape} for {size} examples"))
    if size is not None and (known is None or tf.is_tensor(size)):
        tf.debugging.assert_equal(tf.shape(losses)[0], size, _NO_LOSSES.format("fewer or more"))
    return widen(losses)


def _tensors(structure: Any) -> list[tf.Tensor]:
    """Return the tensors of a structure, those of sparse ones too."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]
