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

The pattern is all in this file. What makes N towers compute what one device computes is apart:
`splitting`, `backward` (of a slice), `inside` (what a tower meets in place of Keras' own ways),
`rehearsal` (what a function does with its examples); and so is `xla` (towers as XLA's programs).
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_private
from towers.builder import added_losses, backward, doubts, faults, gather, joined, machines, xla
from towers.builder.assignments import TowerScope
from towers.builder.backward import TowerSums
from towers.builder.batch_norm import check_mode
from towers.builder.draws import Drawn, Draws
from towers.builder.exchange import Exchange, Member
from towers.builder.inside import inside_of_tower
from towers.builder.kinds import HOST, is_gpu
from towers.builder.merging import assign_once, with_new_values
from towers.builder.rehearsal import Rehearsal, Rehearsals
from towers.builder.splitting import (
    PerTower,
    Slice,
    as_devices,
    check_devices,
    is_empty,
    is_split,
    occupied,
    split,
)

_NUM_TRIED = 8  # functions, whose trials are not made again


class Copies:
    """Makes copies of functions, one on each tower's device, for the same slices of a batch.

    What runs later, as a backward pass does, meets and draws where the one before has ended.
    """

    def __init__(self, builder: "TowerBuilder", slices: Sequence[Slice], draws: Any):
        """Set the slices, and what is known of the draws."""
        check_devices([*builder.devices, builder.gather_device])
        self.builder, self.slices = builder, slices
        self._exchange = None
        if len(slices) > 1:
            counts = [part.count for part in slices]
            self._exchange = Exchange(counts, builder.devices[: len(slices)])
        self._draws = [
            Draws(part.rows, draws, builder.jit_compile, device)
            for part, device in zip(slices, builder.devices, strict=False)  # the last may have none
        ]
        self._members = [
            self._exchange.member(i) if self._exchange else None for i in range(len(slices))
        ]
        self._names = [f"tower_{i}" for i in range(len(slices))]
        self._reads = machines.Reads(builder.devices)

    def run(self, fn: Callable) -> list[Any]:
        """Return `fn(tower, slice, its part in exchanges)` for each, made on the tower's device."""
        results = []
        if self._exchange:
            self._exchange.is_open = True
        for i, part in enumerate(self.slices):
            drawing, device = self._draws[i], self.builder.devices[i]
            with tf.device(device), tf.name_scope(self._names[i]) as name, drawing.drawing():
                with self._reads.on(device):
                    results.append(fn(i, part, self._members[i]))
            self._names[i] = name
            if drawing.num_guessed and self._exchange:
                self.builder.tell([doubts.UNFORESEEN_DRAW])
        if self._exchange:
            self._exchange.join(self.builder.gather_device)
        self._reads.join()
        return results


class TowerBuilder:
    """Copies functions onto devices and gathers their results.

    Every tensor of a `batch` (any `tf.nest` structure) is split along axis 0, one slice for each
    tower; where the number of examples does not divide, the first towers get one more. A `PerTower`
    is not split. Without a batch the function is just copied.

        builder = towers.TowerBuilder(["/cpu:0", "/cpu:1"])
        norm = builder.sum(lambda x: tf.reduce_sum(x * x), tf.ones([3, 2]))
    """

    def __init__(
        self,
        devices: Sequence[str],
        gather_device: str = "/cpu:0",
        *,
        batch_norm: str = "sync",
        accumulate_steps: int = 1,
        gather_at_variables: bool = False,
        jit_compile: bool = False,
        on_doubt: Callable[[str], None] = warnings.warn,
    ):
        """Set where the towers run and where their results are gathered.

        Args:
            devices: one TensorFlow device for each tower; a device may hold several towers.
            gather_device: the device of splitting, summing and joining.
            batch_norm: what the moments of Keras' BatchNorm layers are taken over: "sync" all
                towers' examples, in a `tf.function` (else each tower's, with a warning); "local"
                the tower's own slice.
            accumulate_steps: `gradients`, and `concat` under a tape, take the batch in so many
                parts, one after the other, each split over the towers: less memory, the same sums.
            gather_at_variables: gather each gradient where its variable lies.
            jit_compile: XLA compiles what these compute in a tower; BatchNorm must be local.
            on_doubt: is told of what several towers may not compute as one device does.

        Raises:
            ValueError: an argument is out of range, or `devices` a string.
        """
        self.devices = as_devices(devices)
        check_mode(batch_norm)
        if accumulate_steps < 1:
            raise ValueError(f"accumulate_steps={accumulate_steps} must be at least 1")
        self.gather_device = gather_device
        self.batch_norm = batch_norm
        self.accumulate_steps = accumulate_steps
        self.gather_at_variables = gather_at_variables
        self.jit_compile = jit_compile
        self.num_slices = len(self.devices) * accumulate_steps  # that `gradients` makes of a batch
        # Told, while the gradient of `concat` is traced, of each tower's own: (examples [towers],
        # [(what each tower starts from, what it ends with)] forward and backward if the batch is
        # taken in one part, gradients [towers][variables], their sums [variables]).
        self.on_gradients: Callable[..., None] | None = None
        # Told, before towers' assignments are made, of the Keras variables that these are to.
        self.on_assign: Callable[[list[Any]], None] | None = None
        self._rehearsals = Rehearsals(on_doubt)
        self._tried: list[Rehearsal] = []  # the last ones
        self.tell = self._rehearsals.tell

    def map(self, fn: Callable, *batch: Any) -> list[Any]:
        """Return what `fn` returns for each tower, in tower order."""
        return self._run(fn, self.split(batch), batch)

    def sum(self, fn: Callable, *batch: Any) -> Any:
        """Return the sum over towers of what `fn` returns, by `add_n` on the gather device.

        `fn` may return any structure; `IndexedSlices` stay sparse, and `None` counts as nothing.
        """
        results = self._run(fn, occupied(self.split(batch)), batch)

        def add(values: Sequence[Any]) -> Any:
            return gather.add(machines.sums(values, self.devices, gather.add))

        return self._gather(add, results)

    def concat(self, fn: Callable, *batch: Any) -> Any:
        """Return what the towers return, joined along axis 0 in tower order: that of the batch.

        A `tf.GradientTape` around it takes it for one op: each gradient goes back to the towers,
        and theirs are summed by `add_n`. So a loss of the joined outputs is exact, whatever it is:

            with tf.GradientTape() as tape:
                loss = any_loss(labels, builder.concat(model, images))
            gradients = tape.gradient(loss, model.trainable_variables)
        """
        if is_split(batch) and tf_private.is_recording():
            return joined.concat(self, fn, batch)
        if is_split(batch):
            self.try_out(self.rehearse(fn, *batch, num_slices=len(self.devices)))
        slices = occupied(self.split(batch, never_empty=True))
        if slices[0].rows is None:
            return self._gather(gather.join, self._run(fn, slices, batch))
        scopes: list[TowerScope] = []
        results = self._run(fn, slices, batch, joined=scopes)
        whole, added = self._gather(gather.join, results)
        added_losses.add_to_layers(scopes[0], added)
        return whole

    def gradients(
        self, loss_fn: Callable, variables: Iterable[Any], *batch: Any
    ) -> tuple:
        """Return the mean loss over all examples and its gradients.

        Towers return sums, the gather adds them, one division ends it: uneven slices weigh what
        they should. Keras variables that `loss_fn` assigns are assigned once, after all towers:
        as their `aggregation` says ("sum" of the towers' changes: metrics; "mean", weighted by
        examples; "only_first_replica"); the others as a rehearsal finds it (sums, means, running
        maxima and minima, counters of steps). What cannot be told goes to `on_doubt`.

        Args:
            loss_fn: maps a tower's slice of the batch to its losses, one for each example, `[b]`,
                or to `(losses, outputs)`, a tuple.
            variables: `keras.Variable`s, `tf.Variable`s or a mix. A `PerTower` of `keras.Variable`s
                is one variable with a copy for each tower: `loss_fn` uses the first, and each tower
                reads its own in its place.
            *batch: the global batch.

        Returns:
            The loss, a scalar, and a list like `variables`; then, if `loss_fn` returns any, the
            outputs, joined as by `concat`. The list holds tensors, `IndexedSlices` where all
            towers gave them, or None for a variable that no tower uses; `PerTower`s of these for
            copies, summed by collectives.

        Raises:
            ValueError: `variables` holds something else, or `loss_fn` breaks a rule (see above).
        """
        variables = list(variables)
        self.try_out(self.rehearse(loss_fn, *batch))
        sums = self.tower_sums(loss_fn, variables, *batch)
        loss, gradients = self.gather_sums(sums, variables)
        if sums.outputs[0] == ():
            return loss, gradients
        return loss, gradients, self._gather(gather.join, sums.outputs)

    def tower_sums(self, loss_fn: Callable, variables: Sequence[Any], *batch: Any) -> TowerSums:
        """Return what towers compute for `gradients`; `gather_sums` must follow: it assigns."""
        rehearsal = self.rehearse(loss_fn, *batch)
        backward.check_rehearsed(rehearsal.by_example)
        sides = rehearsal.side_outputs
        scopes, outputs, left = [], [], []
        masters, _ = backward.variables_and_copies(variables, 0)

        def on_tower(tower: int, part: Slice, member: Member | None) -> tuple:
            own, copies = backward.variables_and_copies(variables, tower)
            inside = self.inside(tower, member, copies)
            scope, sums, (rest, beside) = backward.sums_of_slice(
                sides.around(loss_fn), own, part, inside, self.jit_compile, rehearsal.added
            )
            scopes.append(scope)
            outputs.append(rest)
            left.append(beside)
            *losses, found = sums
            found = scope.without_new_values(found, masters)
            return *losses, gather.fix_rows(found, masters, rehearsal.fixed_rows)

        sums = zip(*self._in_parts(on_tower, batch, rehearsal.draws), strict=True)
        losses, counts, gradients = map(list, sums)
        losses = machines.sent_last(losses, gradients, self.devices)
        sides.leave(self._gather(gather.join, left), batch)
        return TowerSums(losses, counts, gradients, scopes, rehearsal.policies, outputs)

    def gather_sums(self, sums: TowerSums, variables: Sequence[Any]) -> tuple[tf.Tensor, list[Any]]:
        """Return the mean loss and its gradients, as `gradients` does, from the towers' sums."""
        with tf.name_scope("gather"):
            loss, gradients = gather.means(
                sums.losses, sums.counts, sums.gradients, variables, self.places(variables)
            )
            masters, _ = backward.variables_and_copies(variables, 0)
            gradients = with_new_values(gradients, masters, sums.scopes)
            gradients = [
                PerTower([g] * len(v.values))
                if isinstance(v, PerTower) and not isinstance(g, PerTower)
                else g
                for g, v in zip(gradients, variables, strict=True)
            ]
        self.assign(sums.scopes, sums.policies)
        return loss, gradients

    def places(self, variables: Sequence[Any]) -> gather.Places:
        """Return where gradients of these variables, or tensors, are gathered."""
        of_variables = None
        if self.gather_at_variables:
            home = self.gather_device
            of_variables = [
                home if isinstance(v, tf.Tensor) else backward.devices_of([v])[0] for v in variables
            ]
        return gather.Places(self.devices, self.gather_device, of_variables)

    def rehearse(
        self, fn: Callable, *batch: Any, num_slices: int | None = None, silent: bool = False
    ) -> Rehearsal:
        """Find out what a tower function does with its examples; doubts go to `on_doubt`, once.

        The other methods do so by themselves, and what was found is kept. Of a batch that is one
        slice (`num_slices`; None: as `gradients` splits it) nothing need be known. Values that are
        known are tried, else made-up ones of their type and shape. If it is `silent`, nothing is
        told yet: the function may not come to run on towers.
        """
        if (num_slices or self.num_slices) == 1 or not is_split(batch):
            return Rehearsal()
        found = self._rehearsals.find(fn, batch)
        if not silent:
            self.tell(found.doubts)
        return found

    def try_out(self, found: Rehearsal) -> None:
        """Tell what a rehearsed function's examples have from others, or from their place."""
        if not any(found is other for other in self._tried):
            self._tried = [found, *self._tried[:_NUM_TRIED]]
            self.tell(faults.seen_by_trials(found))

    def _run(
        self,
        fn: Callable,
        slices: Sequence[Slice],
        batch: Sequence[Any],
        joined: list[TowerScope] | None = None,
    ) -> list[Any]:
        """Return what `fn` returns for each slice; make the assignments of all once.

        With `joined`, which gets the towers' scopes, return what is to be joined of each: with the
        losses that layers add, and without what stands in for no example.
        """
        if slices[0].rows is None:
            fn = tf_private.converted_as_here(fn)
            return self.copies(slices).run(lambda _tower, part, _member: fn(*part.batch))
        rehearsal = self.rehearse(fn, *batch, num_slices=len(self.devices))
        known = () if joined is None else rehearsal.added
        scopes = [] if joined is None else joined
        sides, left = rehearsal.side_outputs, []
        fn = sides.around(fn)

        def run(tower: int, part: Slice, member: Member | None) -> Any:
            with inside_of_tower(self.devices[tower], member, self.moments()) as scope:
                with added_losses.noted(scope, part.rows, known):
                    result, own = fn(*part.batch)
                if joined is not None:
                    result = result, added_losses.left_in(scope, part.rows, known)
                    result = tf.nest.map_structure(part.kept, result)
            scope.close(part.count)
            scopes.append(scope)
            left.append(tf.nest.map_structure(part.kept, own))
            return result

        results = self.copies(slices, rehearsal.draws).run(run)
        self.assign(scopes, rehearsal.policies)
        sides.leave(self._gather(gather.join, left), batch)
        return results

    def _in_parts(
        self, fn: Callable, batch: Sequence[Any], draws: Sequence[Drawn] | None
    ) -> list[Any]:
        """Return the towers' sums of what `fn` returns, for one part of the batch at a time."""
        num_towers = len(self.devices)
        slices = self.split(batch, self.accumulate_steps, never_empty=True)
        totals = self.copies(occupied(slices[:num_towers]), draws).run(fn)
        for start in range(num_towers, len(slices), num_towers):
            part = occupied(slices[start : start + num_towers])
            if is_empty(part[0]):
                break
            with gather.after(totals):
                results = self.copies(part, draws).run(fn)
            totals = self.add_to(totals, results)
        return totals

    def add_to(self, totals: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Return each tower's total with its result added on its device; the last may have none."""
        added = list(totals)
        for i, result in enumerate(results):
            places = gather.Places([self.devices[i]] * 2, self.devices[i])
            with tf.name_scope(f"tower_{i}"):
                sums = gather.sum_at([tf.nest.flatten(own) for own in (totals[i], result)], places)
            added[i] = tf.nest.pack_sequence_as(result, sums)
        return added

    def inside(self, tower: int, member: Member | None, own: dict[int, Any]) -> Any:
        """Return what a tower is called in whose gradients are taken, perhaps as XLA's program."""
        member = xla.NO_EXCHANGE if self.jit_compile and member else member
        return inside_of_tower(self.devices[tower], member, self.moments(), own)

    def moments(self) -> str:
        """Return what BatchNorm's moments can be taken over: eager towers wait for no other."""
        alone = tf.executing_eagerly() and not self.jit_compile
        return "local" if alone else self.batch_norm

    def copies(self, slices: Sequence[Slice], draws: Sequence[Drawn] | None = None) -> "Copies":
        """Return what makes copies of functions for these slices, one after the other."""
        return Copies(self, slices, draws)

    def assign(self, scopes: Sequence[TowerScope], policies: dict[int, str]) -> None:
        """Make the assignments that the towers' scopes keep, one for each variable."""
        found = {id(v): v for scope in scopes for v in scope.assigned()}
        if self.on_assign:
            self.on_assign(list(found.values()))
        if self.moments() != self.batch_norm and len(self.devices) > 1:
            if any(found.keys() & scope.averages for scope in scopes):
                self.tell([doubts.LOCAL_BATCH_NORM])
        with tf.device(self.gather_device), tf.name_scope("gather"):
            unknown = assign_once(scopes, policies)
        self.tell(map(doubts.not_put_together, unknown))

    def _gather(self, policy: Callable, results: list[Any]) -> Any:
        """Apply `policy` to the per-tower values, on the gather device."""
        with tf.device(self.gather_device), tf.name_scope("gather"):
            return gather.map_towers(policy, results)

    def split(
        self, batch: Sequence[Any], num_parts: int = 1, never_empty: bool = False
    ) -> list[Slice]:
        """Return each tower's slice of `batch`; with parts, those of one after the other's."""
        # Towers get their slices from where the batch is, which is not sent to a GPU as a whole.
        device = HOST if is_gpu(self.gather_device) else self.gather_device
        with tf.device(device), tf.name_scope("split"):
            return split(batch, len(self.devices), num_parts, never_empty)
