"""The check: a function on one device beside the same function on two towers, on the user's rows.

Towers follow rules (README.md here, "What a tower function may do"). Whether they then compute what
one device computes is not inferred from the function: it is tried. Both sides run on copies of the
variables, with the same random numbers, and all that they compute is compared. The trials are on
rows as they are, and changed; from variables as they are, with noise, and as after many steps.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder import diagnostics, rng_layout
from towers.builder.attributes import ROWS, SideOutputs
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.op_names import NO_LAYER
from towers.builder.replica_scope import SEED_STATE, ReplicaScope
from towers.builder.traces import Results, Seen, Trace, Tracer, Values
from towers.builder.variable_aggregation import merge, policy_of
from towers.formatting import first_line

_SECONDS = 60.0  # for all trials
_EFFECTS = re.compile(
    r"LookupTable(Insert|Remove|Import)|Mutable(Dense)?HashTable|Queue|Stage|Unstage|Barrier|"
    r"Write\w*Summary|WriteFile|Save|Restore|Iterator"
)
# By the bytes of the narrowest floats: the relative difference that may be rounding, and one unit
# of the last place.
_EPS = {8: 1e-9, 4: 1e-4, 2: 3e-2, 1: 0.3}
_ULP = {8: 2.0**-52, 4: 2.0**-22, 2: 2.0**-8, 1: 2.0**-2}
# In less than float64 a unit that rounding turns over changes a gradient at once.
_EPS_OF_GRADIENTS = 0.02
_TIMES_ROUNDING = 10.0  # a difference counts if it is above so many times the measured rounding
_SURE = 0.1  # a gradient that differs by less is reported if it differs in two trials
_PERIOD = 4093  # of noise: a prime, so that rows of a weight get different numbers
_GRADIENTS = ("gradient", "rows", "input")
_POLICIES = ("mean", "sum", "max", "min")


@dataclasses.dataclass(frozen=True)
class Trial:
    """What both sides begin from."""

    how: str
    inputs: Sequence[Any]
    values: Values
    scale: float  # of what goes back
    loose: float = 1.0  # times the tolerance: one large example costs the others digits


@dataclasses.dataclass(frozen=True)
class Difference:
    """An array that differs."""

    kind: str  # "output", "gradient", "rows" (of a sparse gradient), "input" or "state"
    name: str
    by: float  # relative to the largest value
    trial: Trial


class Check:
    """Compares a function on one device with the same on two towers."""

    def __init__(
        self, analysis: FunctionAnalysis, make_builder: Callable[..., Any], backward: bool = True
    ):
        """Set the function.

        Args:
            analysis: of the function, with a trace. Its policies and layouts are set to those that
                the trials confirm, and `lines` and `refusal` to what they find.
            make_builder: makes a `TowerBuilder`.
            backward: whether gradients are compared, too.
        """
        self.analysis, self.make_builder, self.backward = analysis, make_builder, backward
        self.tracer: Tracer = analysis.tracer
        self.one: Trace | None = None
        self.towers: Trace | None = None
        self.weights: set[int] | None = None  # ids of those whose gradients are compared; None: all
        self._possible: dict[Any, list[str]] = {}  # policies that all trials so far confirm
        self.needs_other_rows = False  # whether it cannot be called with those of the last trials
        self._is_made = False  # whether there are towers, of the policies that were chosen

    @tf.autograph.experimental.do_not_convert
    def run(self) -> list[str]:
        """Trace both sides and make the trials; return messages on what differs.

        One message says so if the function could not be tried.
        """
        with tf.init_scope(), np.errstate(all="ignore"):  # 16 bits overflow in trials
            return self._run()

    @tf.autograph.experimental.do_not_convert
    def again(self) -> list[str]:
        """Make the trials with the variables of now; return messages as `run`."""
        self._is_made = True
        with tf.init_scope(), np.errstate(all="ignore"):
            return self._try() if self.towers else self._run()  # there may be no traces

    def _run(self) -> list[str]:
        analysis, size = self.analysis, self.analysis.trace.size
        ops = analysis.trace.ops
        known = diagnostics.random_ops(ops) + diagnostics.tables(ops)
        known += [diagnostics.unclear_draw(d.layer) for d in analysis.draws if d.layout is None]
        if known:
            return list(dict.fromkeys(known))
        effects = sorted({kind for _, kind in ops if _EFFECTS.search(kind)})
        if effects:
            return [diagnostics.not_checked(f"it would have effects ({', '.join(effects)})")]
        try:
            self.one = self._trace_on_one_device(size)
            if drawn := diagnostics.random_ops(self.one.ops):  # of a backward pass
                return drawn
            self.towers = self._trace_on_towers()
        except Exception as error:  # any of the user's code, called with a part of the batch
            analysis.refusal = f"towers raise an error ({first_line(error)})"
            return [diagnostics.not_checked(analysis.refusal)]
        lines = self._try()
        if lines and any(drawn.is_folded for drawn in analysis.draws):
            before, analysis.draws = analysis.draws, rng_layout.time_major(analysis.draws)
            self.towers, self._possible = self._trace_on_towers(), {}
            if self._try():
                analysis.draws = before
            else:
                lines = []
        return lines

    def _try(self) -> list[str]:
        try:
            return self._try_all()
        except tf.errors.CancelledError:
            return [diagnostics.not_checked("a run of a few examples takes too long")]
        except tf.errors.OpError as error:
            return [diagnostics.not_checked(first_line(error))]
        finally:
            self.tracer.release()

    def _trace_on_one_device(self, size: int) -> Trace:
        """Return a trace in which layers compute in float32 at least, if their code can do that.

        In 16 bits a CPU adds so roughly that sums of towers have nothing to do with that of one
        device: the gradient of a bias stops growing at 256 terms, a mean over rows at 2048.
        """
        if self.analysis.trace.float_bytes < 4:
            self.tracer.in_float32 = True
            try:
                return self._with_or_without_gradients(size)
            except Exception:  # of any kind: the user's code casts to 16 bits itself
                self.tracer.in_float32 = False
        return self._with_or_without_gradients(size)

    def _with_or_without_gradients(self, size: int) -> Trace:
        try:
            return self.tracer.trace(size, backward=self.backward)
        except LookupError:  # an op has no gradient
            return self.tracer.trace(size)

    def _trace_on_towers(self, named: bool = False) -> Trace:
        analysis, one = self.analysis, self.one
        builder = self.make_builder(["/cpu:0"] * 2, on_warning=lambda _: None, check="off")
        each = [policy if policy == ROWS else "each" for policy in analysis.side_outputs.policies]
        held = dataclasses.replace(
            analysis,
            added=[dataclasses.replace(added, policy="mean") for added in analysis.added],
            side_outputs=SideOutputs(analysis.side_outputs.places, each),
        )

        def call(batch: Any, trace: Trace, seen: Seen) -> Any:
            def observe(scopes: Sequence[ReplicaScope]) -> None:
                found = {id(v): v for scope in scopes for v in scope.assigned()}
                trace.assigned += map(tf_internals.value_of, found.values())
                for variable in found.values():
                    averaged = any(id(variable) in scope.averages for scope in scopes)
                    if variable.name != SEED_STATE and not averaged:
                        trace.states.append(variable)
                        writers = [s for s in scopes if id(variable) in s.updates]
                        values = [tf.cast(s.value_of(variable), variable.dtype) for s in writers]
                        seen.states.append(list(map(tf.identity, values)))

            builder.checks.hold(held, analysis.trace.slice_sizes, observe)
            if not one.is_joined:
                return builder.map(self.tracer.fn, *batch)
            return builder.concat(self.tracer.fn, *batch)

        gradients = (one.function.structured_outputs[kind] for kind in ("weights", "inputs"))
        backward = not named and any(gradients)
        return self.tracer.trace(one.size, one, call, backward=backward, named=named)

    # Trials.

    def _try_all(self) -> list[str]:
        one, start = self.one, time.monotonic()
        rows, found = self._rows_to_try()
        self.needs_other_rows = found is None
        if found is None:
            return [diagnostics.not_checked(rows)]
        self._possible.clear()
        doubtful: set[tuple[str, str]] = set()  # gradients that differ a little, in one trial
        tried, difference = 0, None
        for trial in self._trials(rows):
            if time.monotonic() - start > _SECONDS:
                return [diagnostics.not_checked(f"it takes more than {_SECONDS:.0f} seconds")]
            a = self._result(one, trial)
            if a is None:
                continue
            b = self._result(self.towers, trial)
            if b is None:
                self.analysis.refusal = self.tracer.failure
                return [diagnostics.not_checked(f"towers raise an error ({self.tracer.failure})")]
            tried += 1
            self._fit(trial, a, b)
            if difference := self._difference(trial, a, b):
                key = difference.kind, difference.name
                gradient = one.float_bytes < 8 and difference.kind in _GRADIENTS
                if gradient and difference.by < _SURE and key not in doubtful:
                    doubtful.add(key)
                    difference = None
                    continue
                break
        if not tried:
            return [diagnostics.not_checked("what it computes is not finite")]
        lines = [self._message(difference)] if difference else []
        return list(dict.fromkeys([*lines, *self._choose()]))

    def _rows_to_try(self) -> tuple[Any, Results | None]:
        """Return (rows, their results on one device), or (why there are none, None)."""
        reason = ""
        for kind in range(1 if self.tracer.real else 3):
            rows = self.tracer.inputs(self.one.size, kind=kind)
            trial = Trial("", rows, _as_it_is, self._small_scale())
            found = self._result(self.one, trial)
            if found is None:
                reason = reason or self.tracer.failure
                continue
            if again := self._result(self.one, trial):
                for key in ("outputs", "weights", "inputs"):
                    # Of a gradient that is zero in theory, the order of additions tells.
                    allowed = _EPS[self.one.float_bytes] * max(map(_size, found[key]), default=0.0)
                    if any(map(lambda x, y: _distance(x, y) > allowed, found[key], again[key])):
                        return "one device itself computes something else each time", None
            return kind, found
        return reason, None

    def _trials(self, kind: int) -> Iterator[Trial]:
        def rows(seed: int, change: Callable = lambda x: x) -> list[Any]:
            return list(map(change, self.tracer.inputs(self.one.size, seed, kind)))

        small, big = self._small_scale(), 1e3 if self.one.float_bytes >= 4 else 1.0
        loose = 1.0 if self.one.float_bytes == 8 else 10.0
        yield Trial("on these examples", rows(0), _as_it_is, small)
        yield Trial("with noise on the variables", rows(1), _noisy, small)
        yield Trial("with noise on the variables", rows(2), _noisy, big)
        yield Trial("on these examples", rows(3), _as_it_is, small)  # in another order
        yield Trial("after many steps", rows(0), _late, small)
        for part in range(2):  # a large counter hides what is added to it
            yield Trial("after many steps", rows(0), self._partly_late(part), small)
        for values in (_a_step_before, _in_mode(1, 0.5), _in_mode(2, -0.5)):
            yield Trial("in a later step", rows(0), values, small)
        for share in (1e-3, 1e-2):
            yield Trial("with small gradients", rows(1), _noisy, share * small)
        yield Trial("with one far example", rows(2, _far(100.0)), _noisy, small, loose)
        yield Trial("with one far example", rows(1, _far(-100.0, 0.0)), _noisy, big, loose)
        yield Trial("with missing values (NaN)", rows(0, _with_nan), _noisy, small)
        for seed, factor in enumerate((30.0, 3.0, -3.0, 10.0, -10.0, -30.0), 3):
            yield Trial("with large inputs", rows(seed, _scaled(factor)), _noisy, small, loose)

    def _small_scale(self) -> float:
        """Return that of a mean over examples; 16 bits overflow soon."""
        return (1.0 if self.one.float_bytes >= 4 else 0.05) / self.one.size

    def _partly_late(self, part: int) -> Values:
        states = [id(v.handle) for v in self.one.variables if not v.trainable]

        def values(variable: tf.Variable, value: np.ndarray) -> Any:
            key = id(variable.handle)
            is_late = key in states and states.index(key) % 2 == part
            return _late(variable, value) if is_late else value

        return values

    def _result(self, trace: Trace, trial: Trial, **more: Any) -> Results | None:
        """Return the results of a run; None, with `tracer.failure` set, if it has none to compare.

        A trial may be what the function does not take: no index of a table, or not finite.
        """
        try:
            found = self.tracer.run(trace, trial.inputs, trial.values, trial.scale, **more)
        except tf.errors.CancelledError:  # it takes too long
            raise
        except tf.errors.OpError as error:
            self.tracer.failure = first_line(error)
            return None
        floats = [x for x in (*found["outputs"], *found["weights"]) if x.dtype.kind in "fc"]
        if trace is self.one and not all(np.all(np.isfinite(_wide(x))) for x in floats):
            self.tracer.failure = "what it computes is not finite"
            return None
        return found

    # What several policies are possible for.

    def _fit(self, trial: Trial, a: Results, b: Results) -> None:
        """Drop the policies by which towers' values do not make the one device's."""
        one, many = self.one, self.towers
        after = dict(zip([id(v.handle) for v in one.variables], a["variables"], strict=True))
        for variable, parts in zip(many.states, b["states"], strict=True):
            own, declared = tf_internals.value_of(variable), policy_of(variable)
            if declared in (None, "sum") and len(parts) == 2 and id(own.handle) in after:
                before = np.asarray(trial.values(own, self.tracer.value_of(own)))
                order = dict.fromkeys([declared or "mean", *_POLICIES])
                whole = after[id(own.handle)]
                self._keep_fitting(("state", id(variable)), list(order), before, parts, whole)
        for place, whole in enumerate(a["attributes"]):
            if self.analysis.side_outputs.policies[place] != ROWS:
                parts, key = b["attributes"][place], ("attribute", place)
                self._keep_fitting(key, list(_POLICIES), np.zeros_like(whole), parts, whole)
        number = len(one.losses)
        for place, whole in enumerate(a["losses"]):
            parts = b["losses"][place::number]
            policies = ["mean", "sum"]
            self._keep_fitting(("loss", place), policies, np.zeros_like(whole), parts, whole)

    def _keep_fitting(
        self, key: Any, policies: list[str], before: Any, parts: Sequence[Any], whole: Any
    ) -> None:
        if not np.all(np.isfinite(_wide(whole))):
            return
        known = self._possible.setdefault(key, policies)
        self._possible[key] = [p for p in known if self._fits(p, before, parts, whole)]

    def _fits(self, policy: str, before: Any, parts: Sequence[Any], whole: Any) -> bool:
        if any(part.shape != whole.shape for part in parts) or before.shape != whole.shape:
            return False
        equal = all(np.array_equal(part, parts[0]) for part in parts)
        if policy == "mean" and whole.dtype.kind != "f":
            return equal and np.array_equal(parts[0], whole)
        if policy == "sum" and whole.dtype.kind == "b":
            return False
        sizes = self.analysis.trace.slice_sizes
        merged = merge(policy, before, list(map(tf.constant, parts)), sizes)
        narrow = whole.dtype.itemsize if whole.dtype.kind == "f" else 8
        eps = _EPS[min(self.one.float_bytes, narrow)]
        ulp = np.finfo(whole.dtype).eps if whole.dtype.kind == "f" else 0.0
        allowed = 10 * eps * _distance(whole, before) + 4 * ulp * _size(whole)
        return _distance(merged.numpy(), whole) <= allowed

    def _choose(self) -> list[str]:
        """Set the analysis' policies to the first that all trials confirm; return messages."""
        analysis, lines = self.analysis, []
        for variable in self.towers.states:
            key, used = id(variable), analysis.policies.get(id(variable), policy_of(variable))
            if ("state", key) not in self._possible:
                continue
            if policy := self._first_possible(("state", key), used or "mean"):
                analysis.policies[key] = policy
            else:
                lines.append(diagnostics.unknown_aggregation(variable))
        added = list(analysis.added)
        for place, loss in enumerate(added):
            possible = self._possible.get(("loss", place))
            if possible is None:
                reason = f"the loss that layer {loss.layer} adds is not finite on the rows tried"
                lines.append(diagnostics.not_checked(reason))
                possible = ["mean"]
            if loss.by_example and self._uses_rows(place):
                possible = ["rows"]
            added[place] = dataclasses.replace(loss, policy=next(iter(possible), None))
            if not possible:
                lines.append(diagnostics.added_loss(loss.layer))
        analysis.added = added
        policies = list(analysis.side_outputs.policies)
        for place, policy in enumerate(policies):
            if policy != ROWS:
                policies[place] = self._first_possible(("attribute", place), policy)
        analysis.side_outputs.policies = policies
        return lines

    def _first_possible(self, key: Any, used: str | None) -> str | None:
        """Return the first policy that all trials confirm: that of towers, if there are any."""
        possible = self._possible.get(key, ())
        return next((p for p in possible if p == used or not self._is_made), None)

    def _uses_rows(self, place: int) -> bool:
        """Return whether the function uses each row of an added loss for that example alone."""
        rows = self.tracer.inputs(self.one.size)
        trial = Trial("", rows, _noisy, 1.0 / self.one.size)
        runs = [
            self._result(trace, trial, counted=counted)
            for trace in (self.one, self.towers)
            for counted in (-1, place)
        ]
        if None in runs:
            return False
        change, of_towers = (
            [_wide(y) - _wide(x) for x, y in zip(p["outputs"], q["outputs"], strict=True)]
            for p, q in (runs[:2], runs[2:])
        )
        # Towers have added it unscaled, each the rows of its slice.
        eps = _EPS[self.one.float_bytes]
        return any(map(np.any, change)) and all(
            np.isclose(np.mean(x), np.mean(y), rtol=10 * eps, atol=eps * _size(x))
            for x, y in zip(change, of_towers, strict=True)
        )

    # Comparison.

    def _arrays(self, trace: Trace, found: Results) -> dict[tuple[str, str, int], np.ndarray]:
        """Return {(kind, name, id): array} of what is compared, in the order of reports."""
        one, names = self.one, [_name(v) for v in self.one.weights]
        arrays: dict[tuple[str, str, int], np.ndarray] = {}
        if not one.is_joined:
            found = found | {"outputs": [], "weights": [], "squares": [], "inputs": []}
        arrays |= {("output", str(i), i): x for i, x in enumerate(found["outputs"])}
        for kind, key in (("gradient", "weights"), ("rows", "squares")):
            triples = list(zip(names, one.weights, found[key], strict=False))
            for name, weight, x in reversed(triples):  # the last layers first
                if self.weights is None or id(weight) in self.weights:
                    arrays[kind, name, id(weight)] = x
        arrays |= {("input", str(i), i): x for i, x in enumerate(found["inputs"])}
        fitted = {id(tf_internals.value_of(v).handle) for v in self.towers.states}
        shared = {id(v.handle) for v in one.variables} & {
            id(v.handle) for v in self.towers.variables
        }  # others stand in for variables in loops
        for variable, x in zip(trace.variables, found["variables"], strict=True):
            if id(variable.handle) in shared - fitted:
                arrays["state", _name(variable), id(variable.handle)] = x
        return arrays

    def _difference(self, trial: Trial, a: Results, b: Results) -> Difference | None:
        """Return the first array that differs by more than rounding."""
        one, eps = self.one, _EPS[self.one.float_bytes] * trial.loose
        expected, actual = self._arrays(one, a), self._arrays(self.towers, b)
        # A gradient, or a mean of what is normalized, may be zero in theory.
        gradients, states = a["weights"], [x for x in a["variables"] if x.dtype.kind == "f"]
        largest = dict.fromkeys(("gradient", "input"), max(map(_size, gradients), default=0.0))
        largest["state"] = max(map(_size, states), default=0.0)
        jittered: list[dict] = []
        for key, x in expected.items():
            kind, name, _ = key
            y, allowed = actual[key], eps
            if x.shape != y.shape:
                return Difference(kind, name, np.inf, trial)
            if one.float_bytes < 8 and kind in _GRADIENTS:
                if trial.loose > 1:
                    continue  # far from where it learns, such a gradient is rounding
                allowed = max(eps, _EPS_OF_GRADIENTS)
            floor = 1e-3 * largest.get(kind, 0.0)
            change = _distance(x, y)
            if change <= allowed * max(_size(x), floor):
                continue
            jittered = jittered or list(self._jittered(trial))
            moves = [_distance(x, other[key]) for other in jittered]
            if change > _TIMES_ROUNDING * max(moves, default=0.0):
                return Difference(kind, name, change / max(_size(x), 1e-300), trial)
        return None

    def _jittered(self, trial: Trial) -> Iterator[dict]:
        """Yield what the one device computes if its weights change in the last digits.

        Without weights its inputs do. A function may ask whether these are equal to something.
        """
        ulp, has_weights = _ULP[self.one.float_bytes], bool(self.one.weights)
        steps = {8: (ulp,), 4: (ulp, -4 * ulp, 16 * ulp)}.get(self.one.float_bytes, (ulp, -4 * ulp))
        for step in steps:
            moves = [_is_dense_float(x) and not has_weights for x in trial.inputs]
            pairs = zip(trial.inputs, moves, strict=True)
            inputs = [_jitter(x, step) if is_moved else x for x, is_moved in pairs]

            def values(variable: tf.Variable, value: np.ndarray, step: float = step) -> Any:
                value = trial.values(variable, value)
                return _jitter(value, step) if variable.dtype.is_floating else value

            moved = dataclasses.replace(trial, inputs=inputs, values=values)
            if found := self._result(self.one, moved):
                yield self._arrays(self.one, found)

    def _message(self, difference: Difference) -> str:
        kind, name, by, how = difference.kind, difference.name, difference.by, difference.trial.how
        if kind == "output":
            return self._message_of_layer(difference)
        where = {
            "gradient": f"the gradient of the weight {name}",
            "rows": f"the number of rows in the sparse gradient of the weight {name}",
            "input": f"the gradient of argument {name}",
            "state": f"the variable {name}",
        }[kind]
        return diagnostics.inexact(kind, where, by, how)

    def _message_of_layer(self, difference: Difference) -> str:
        """Return the message that names the first layer whose outputs differ."""
        trial, where = difference.trial, f"output {difference.name} of {NO_LAYER}"
        eps = _EPS[self.one.float_bytes] * trial.loose
        first, again = (self.tracer.trace(self.one.size, named=True) for _ in range(2))
        a, other = self._result(first, trial), self._result(again, trial)
        number = len(first.layers)
        if a is None or other is None or len(again.layers) != number:
            return diagnostics.state_in_python(NO_LAYER)
        for layer, x, y in zip(first.layers, a["layers"], other["layers"], strict=True):
            if _distance(x, y) > eps * _size(x):
                return diagnostics.state_in_python(f"layer {layer}")
        b = self._result(self._trace_on_towers(named=True), trial)
        for i, layer in enumerate(first.layers if b else ()):
            x, parts = a["layers"][i], b["layers"][i::number]
            joined = np.concatenate(parts, axis=0) if len(parts) == 2 else x
            if joined.shape != x.shape or _distance(x, joined) > eps * _size(x):
                where = f"layer {layer}"
                break
        return diagnostics.inexact("output", where, difference.by, trial.how)


# What a copy of a variable begins from.


def _as_it_is(_: tf.Variable, value: np.ndarray) -> Any:
    """Return the variable's value."""
    return value


def _noisy(variable: tf.Variable, value: np.ndarray) -> Any:
    """Return a float's value with noise: a weight of zero would hide what it is the weight of."""
    if not variable.dtype.is_floating:
        return value
    waves = _waves(1.0, 12.9898, value.shape)
    # Others than weights stay positive, as a variance must be.
    noise = 0.1 * waves if variable.trainable else 0.05 + 0.05 * np.abs(waves)
    return (np.asarray(value, np.float64) + noise).astype(value.dtype)


def _late(variable: tf.Variable, value: np.ndarray) -> Any:
    """Return what a counter, an average or a flag may be after many steps."""
    value = _noisy(variable, value)
    if (variable.trainable and variable.dtype.is_floating) or SEED_STATE in variable.name:
        return value
    if value.dtype == bool:
        return ~value
    if variable.dtype.is_floating:
        more = 100.0 if value.shape else 1000.0
        return (np.asarray(value, np.float64) + more).astype(value.dtype)
    more = 1000 if variable.dtype.size >= 4 else 50
    return value if value.shape else value + np.asarray(more, value.dtype)


def _a_step_before(variable: tf.Variable, value: np.ndarray) -> Any:
    """Return a counter's value from which the next step is a round number."""
    if not _is_number(variable, value) or (variable.trainable and variable.dtype.is_floating):
        return _noisy(variable, value)
    return np.asarray(999 if variable.dtype.size >= 4 else 99, value.dtype)


def _in_mode(number: int, amount: float) -> Values:
    """Return values with each single number a little more: a stage, or how far a gate is open."""

    def values(variable: tf.Variable, value: np.ndarray) -> Any:
        if not _is_number(variable, value):
            return _noisy(variable, value)
        more = amount if variable.dtype.is_floating else number
        return (_wide(value) + more).astype(value.dtype)

    return values


def _is_number(variable: tf.Variable, value: np.ndarray) -> bool:
    return not (value.shape or value.dtype == bool or SEED_STATE in variable.name)


# Rows that are changed. Whole numbers stay: they may be classes or indices.


def _scaled(factor: float) -> Callable:
    return lambda x: x * tf.cast(factor, x.dtype) if _is_dense_float(x) else x


def _with_nan(x: Any) -> Any:
    """Make one number of the first example and one of the last NaN."""
    if not _is_dense_float(x):
        return x
    array = x.numpy()
    flat = array.reshape(len(array), -1)
    flat[[0, -1], :1] = np.nan
    return tf.constant(array)


def _far(factor: float, rest: float = 1.0) -> Callable:
    """Return a change that moves the first example far away, and multiplies the others."""

    def far(x: Any) -> Any:
        if not _is_dense_float(x):
            return x
        first = x[:1] * tf.cast(factor, x.dtype) + tf.cast(1.0, x.dtype)
        return tf.concat([first, x[1:] * tf.cast(rest, x.dtype)], axis=0)

    return far


def _jitter(value: Any, step: float) -> Any:
    """Return a value with other last digits. Whole numbers stay: they may be marks, as of -1."""
    array = np.asarray(value)
    moved = _wide(array) * (1 + step * np.sign(_waves(7.0 + 1e6 * step, 78.233, array.shape)))
    return np.where(np.rint(array) == array, array, moved).astype(array.dtype)


def _waves(phase: float, frequency: float, shape: Sequence[int]) -> np.ndarray:
    """Return numbers from -1 to 1, which repeat: many sines would take longer than a trial."""
    size = int(np.prod(shape))
    waves = np.sin(phase + frequency * np.arange(min(size, _PERIOD)))
    return np.resize(waves, size).reshape(shape)


def _is_dense_float(x: Any) -> bool:
    return isinstance(x, tf.Tensor) and x.dtype.is_floating


# Arrays.


def _wide(x: Any) -> np.ndarray:
    """Return an array in which differences can be computed."""
    x = np.asarray(x)
    is_wide = x.dtype.kind == "c" or (x.dtype.kind == "f" and x.dtype.itemsize >= 4)
    return x if is_wide else x.astype(np.float64)


def _size(x: Any) -> float:
    """Return the largest finite absolute value, 0 for none."""
    x = np.abs(_wide(x))
    return float(np.max(x, initial=0.0, where=np.isfinite(x)))


def _distance(a: Any, b: Any) -> float:
    """Return the largest absolute difference; infinity if only one of two is NaN."""
    a, b = _wide(a), _wide(b)
    if a.shape != b.shape:
        return np.inf
    change = np.abs(a - b)
    largest = float(np.max(change, initial=0.0))
    if np.isfinite(largest):
        return largest
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    change = np.where(alike, 0.0, change)
    return float(np.max(np.where(np.isnan(change), np.inf, change), initial=0.0))


def _name(variable: tf.Variable) -> str:
    return variable.name.removesuffix(":0")
