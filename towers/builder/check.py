"""The check: a function on one device beside the same function on two towers, on the user's rows.

Towers follow rules (README.md here, "What a tower function may do"). Whether they then compute what
one device computes is not inferred from the function: it is tried. Both sides run on copies of the
variables, with the same random numbers, and all that they compute is compared. `trials` says what
they begin from.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder import function_analysis
from towers.builder.attributes import ROWS, SideOutputs
from towers.builder.device_names import NO_LAYER
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.replica_scope import SEED_STATE, ReplicaScope, assigned, merge, policy_of
from towers.builder.traces import Results, Seen, Trace
from towers.builder.trials import Trial, as_it_is, jittered, noisy, small_scale, trials
from towers.errors import first_line

_SECONDS = 60.0  # for all trials
# By the bytes of the narrowest floats: the relative difference that may be rounding, and one unit
# of the last place.
_EPS = {8: 1e-9, 4: 1e-4, 2: 3e-2, 1: 0.3}
_ULP = {8: 2.0**-52, 4: 2.0**-22, 2: 2.0**-8, 1: 2.0**-2}
# In less than float64 a unit that rounding turns over changes a gradient at once.
_EPS_OF_GRADIENTS = 0.02
_TIMES_ROUNDING = 10.0  # a difference counts if it is above so many times the measured rounding
_SURE = 0.1  # a gradient that differs by less is reported if it differs in two trials
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile"}
_GRADIENTS = ("gradient", "rows", "input")
_POLICIES = ("mean", "sum", "max", "min")


@dataclasses.dataclass(frozen=True)
class Difference:
    """An array that differs."""

    kind: str  # "output", "gradient", "rows" (of a sparse gradient), "input" or "state"
    name: str
    by: float  # relative to the largest value
    trial: Trial


class Check:
    """Compares a function on one device with the same on two towers."""

    def __init__(self, analysis: FunctionAnalysis, builder: Any, backward: bool = True):
        """Set the function.

        Args:
            analysis: of the function, with a trace. Its policies and layouts are set to those that
                the trials confirm, and `refusal` to what they find.
            builder: the `TowerBuilder`.
            backward: whether gradients are compared, too.
        """
        self.analysis, self.builder, self.backward = analysis, builder, backward
        self.tracer = analysis.tracer
        self.one: Trace | None = None
        self.towers: Trace | None = None
        self._kind = 0  # of made-up rows, see `trials.sample`
        self.weights: set[int] | None = None  # ids of those whose gradients are compared; None: all
        # {key in `FunctionAnalysis.policies`: policies that all trials so far confirm}.
        self._possible: dict[Any, list[str]] = {}
        self._is_made = False  # whether there are towers, of the policies that were chosen
        self._whole_size: int | None = None  # of the batch that was tried
        self._most_trials: int | None = None

    @tf.autograph.experimental.do_not_convert
    def run(self, is_made: bool = False) -> list[str]:
        """Make the trials with the variables of now; return messages on what differs.

        The first call traces both sides. If the function could not be tried, one message says so.

        Args:
            is_made: whether there are towers, of the policies that an earlier call has chosen.
        """
        self._is_made = is_made
        with tf.init_scope(), np.errstate(all="ignore"):  # 16 bits overflow in trials
            if not self.towers and (lines := self._trace_both()):
                return lines
            start, lines = time.monotonic(), self._try()
            if lines and not is_made and any(drawn.is_folded for drawn in self.analysis.draws):
                lines = self._try_time_major(lines)
            return lines or self._try_whole_batch(time.monotonic() - start)

    def _trace_both(self) -> list[str]:
        """Trace the function on one device and on towers; return why that cannot be tried."""
        trace, draws = self.analysis.trace, self.analysis.draws
        lines = function_analysis.untried(trace.ops)
        lines += [
            function_analysis.UNCLEAR_DRAW.format(d.layer, "") for d in draws if d.layout is None
        ]
        if lines:
            return list(dict.fromkeys(lines))
        try:
            self.one = self._trace_on_one_device(trace.size)
            if lines := function_analysis.untried(self.one.ops):  # of a backward pass
                return lines
            self.towers = self._trace_on_towers()
        except Exception as error:  # any of the user's code, called with a part of the batch
            return self._refused(first_line(error))
        return []

    def _try_time_major(self, lines: list[str]) -> list[str]:
        """Try the other layout of several numbers of an example; keep it if it passes."""
        before = self.analysis.draws
        self.analysis.draws = [d.time_major() if d.is_folded else d for d in before]
        self.towers = self._trace_on_towers()
        if not self._try():
            return []
        self.analysis.draws = before
        return lines

    def _try_whole_batch(self, seconds: float) -> list[str]:
        """Make two trials of as many examples as in the batch, if the function asks for the number.

        It may if it has other ops then, or branches. It is left out if it would take long, by the
        seconds of the other trials.
        """
        few, size = self.analysis.trace, self.tracer.batch_size or 0  # 0: it is not known
        part, is_long = size // self.builder.num_slices, seconds * size > _SECONDS * few.size
        if part in (0, size) or size in (few.size, self._whole_size) or is_long:
            return []
        self._whole_size = size
        whole = self.tracer.traced_or_none(size, size - part)
        if whole is None or (few.kinds == whole.kinds and not _BRANCHES & set(few.kinds)):
            return []
        check = Check(dataclasses.replace(self.analysis, trace=whole), self.builder, backward=False)
        check.one, check._is_made, check._most_trials = whole, True, 2
        try:
            check.towers = check._trace_on_towers()
        except Exception as error:  # as in `_trace_both`
            return self._refused(first_line(error))
        return check._try()

    def _refused(self, why: str) -> list[str]:
        self.analysis.refusal = f"towers raise an error ({why})"
        return [function_analysis.not_checked(self.analysis.refusal)]

    def _try(self) -> list[str]:
        try:
            return self._try_all()
        except tf.errors.CancelledError:
            return [function_analysis.not_checked("a run of a few examples takes too long")]
        except tf.errors.OpError as error:
            return [function_analysis.not_checked(first_line(error))]
        finally:
            self.tracer.release()

    def _trace_on_one_device(self, size: int) -> Trace:
        """Return a trace in which layers compute in float32 at least, if their code can do that.

        In 16 bits a CPU adds so roughly that sums of towers have nothing to do with that of one
        device. The gradient of a bias stops growing at 256 terms, a mean over rows at 2048.
        """

        def traced() -> Trace:
            try:
                return self.tracer.trace(size, backward=self.backward)
            except LookupError:  # an op has no gradient
                return self.tracer.trace(size)

        if self.analysis.trace.float_bytes < 4:
            self.tracer.in_float32 = True
            try:
                return traced()
            except Exception:  # of any kind: the user's code casts to 16 bits itself
                self.tracer.in_float32 = False
        return traced()

    def _trace_on_towers(self, named: bool = False) -> Trace:
        analysis, one = self.analysis, self.one
        builder = type(self.builder)(["/cpu:0"] * 2, on_warning=lambda _: None, check="off")
        policies = {k: p if p == ROWS else "each" for k, p in analysis.policies.items()}
        sides = SideOutputs(analysis.side_outputs.places, policies)
        held = dataclasses.replace(analysis, policies={}, side_outputs=sides)

        def call(batch: Any, trace: Trace, seen: Seen) -> Any:
            def observe(scopes: Sequence[ReplicaScope]) -> None:
                trace.assigned += map(tf_internals.value_of, assigned(scopes))
                for variable in assigned(scopes):
                    averaged = any(id(variable) in scope.averages for scope in scopes)
                    if variable.name != SEED_STATE and not averaged:
                        trace.states.append(variable)
                        writers = [s for s in scopes if id(variable) in s.updates]
                        values = [tf.cast(s.value_of(variable), variable.dtype) for s in writers]
                        seen["states"].append(list(map(tf.identity, values)))

            builder.checks.hold(held, analysis.trace.slice_sizes, observe)
            if not one.is_joined:
                return builder.map(self.tracer.fn, *batch)
            return builder.concat(self.tracer.fn, *batch)

        gradients = (one.function.structured_outputs[kind] for kind in ("weights", "inputs"))
        backward = not named and any(gradients)
        return self.tracer.trace(one.size, one, call, backward=backward, named=named)

    # Trials.

    def _try_all(self) -> list[str]:
        start = time.monotonic()
        if reason := self._find_rows():
            return [function_analysis.not_checked(reason)]
        self._possible.clear()
        doubtful: set[tuple[str, str]] = set()  # gradients that differ a little, in one trial
        tried, difference = 0, None
        rows_of = lambda seed: self.tracer.inputs(self.one.size, seed, self._kind)  # noqa: E731
        for trial in itertools.islice(trials(self.one, rows_of), self._most_trials):
            if time.monotonic() - start > _SECONDS:
                if tried >= 2:
                    break
                reason = f"the check takes more than {_SECONDS:.0f} seconds"
                return [function_analysis.not_checked(reason)]
            a = self._result(self.one, trial)
            if a is None:
                continue
            b = self._result(self.towers, trial)
            if b is None:
                return self._refused(self.tracer.failure)
            tried += 1
            self._fit(trial, a, b)
            if found := self._difference(trial, a, b):
                key, is_gradient = (found.kind, found.name), found.kind in _GRADIENTS
                is_narrow = is_gradient and self.one.float_bytes < 8
                if is_narrow and found.by < _SURE and key not in doubtful:
                    doubtful.add(key)
                    continue
                if not is_gradient:  # an output tells the layer
                    difference = found
                    break
                difference = difference or found
        if not tried:
            return [function_analysis.not_checked("its results are not finite")]
        lines = [self._message(difference)] if difference else []
        return list(dict.fromkeys([*lines, *self._choose()]))

    def _find_rows(self) -> str:
        """Set the kind of rows that the function takes; return why there are none, or ""."""
        reasons = []
        for kind in range(1 if self.tracer.real else 3):
            self._kind, rows = kind, self.tracer.inputs(self.one.size, kind=kind)
            if self._result(self.one, Trial("", rows, as_it_is, small_scale(self.one))):
                return ""
            reasons.append(self.tracer.failure)
        return reasons[0]

    def _result(self, trace: Trace, trial: Trial, **more: Any) -> Results | None:
        """Return the results of a run; None, with `tracer.failure` set, if it has none to compare.

        A trial may be what the function does not take: no index of a table, or not finite.
        """
        try:
            found = self.tracer.run(trace, trial, **more)
        except tf.errors.CancelledError:  # it takes too long
            raise
        except tf.errors.OpError as error:
            self.tracer.failure = first_line(error)
            return None
        floats = [x for x in (*found["outputs"], *found["weights"]) if x.dtype.kind in "fc"]
        if trace is self.one and not all(np.all(np.isfinite(_wide(x))) for x in floats):
            self.tracer.failure = "its results are not finite"
            return None
        return found

    # What several policies are possible for.

    def _fit(self, trial: Trial, a: Results, b: Results) -> None:
        """Drop the policies by which towers' values do not make the one device's."""
        one, many = self.one, self.towers
        after = dict(zip([id(v.handle) for v in one.variables], a["variables"], strict=True))
        found = []  # (key, policies, the value before, those of towers, that of one device)
        for variable, parts in zip(many.states, b["states"], strict=True):
            own, declared = tf_internals.value_of(variable), policy_of(variable)
            if declared in (None, "sum") and len(parts) == 2 and id(own.handle) in after:
                before = np.asarray(trial.values(own, self.tracer.value_of(own)))
                order = dict.fromkeys([declared or "mean", *_POLICIES])
                found.append((id(variable), order, before, parts, after[id(own.handle)]))
        for place, whole in enumerate(a["attributes"]):
            key = "attribute", place
            if self.analysis.policies[key] != ROWS:
                parts = b["attributes"][place]
                found.append((key, _POLICIES, np.zeros_like(whole), parts, whole))
        for place, whole in enumerate(a["losses"]):
            parts, key = b["losses"][place :: len(one.losses)], ("loss", place)
            found.append((key, _POLICIES[:2], np.zeros_like(whole), parts, whole))
        for key, policies, before, parts, whole in found:
            if np.all(np.isfinite(_wide(whole))):
                known = self._possible.get(key, policies)
                fitting = [p for p in known if self._fits(p, before, parts, whole)]
                self._possible[key] = fitting

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
        """Set the analysis' policies to the first that all trials confirm; return messages.

        If there are towers, theirs must be among these.
        """
        policies, lines, unknown = self.analysis.policies, [], {}
        for variable in self.towers.states:
            unknown[id(variable)] = function_analysis.UNKNOWN_AGGREGATION.format(variable.path)
            policies.setdefault(id(variable), policy_of(variable) or "mean")
        for place, (layer, has_rows) in enumerate(self.one.losses):
            key, unknown[key] = ("loss", place), function_analysis.ADDED_LOSS.format(layer)
            if key not in self._possible:
                reason = f"the loss that layer {layer} adds is not finite on the rows tried"
                lines.append(function_analysis.not_checked(reason))
                continue
            possible = self._possible[key]
            possible = ["rows", *possible] if has_rows and "sum" in possible else possible
            self._possible[key] = [p for p in possible if self._adds_up(place, p)]
        for key, possible in self._possible.items():
            used = policies[key]
            policy = next((p for p in possible if p == used or not self._is_made), None)
            if policy or key not in unknown:
                policies[key] = policy
            else:
                lines.append(unknown[key])
        return lines

    def _adds_up(self, place: int, policy: str) -> bool:
        """Return whether an added loss changes the outputs' mean as on one device.

        It does not change them, unless they are the losses of examples.
        """
        one, sizes = self.one, self.analysis.trace.slice_sizes
        rows = self.tracer.inputs(one.size, kind=self._kind)
        trial = Trial("", rows, noisy, small_scale(one))
        means = []
        for trace, parts in (one, [one.size]), (self.towers, sizes):
            counted = np.zeros([len(parts), len(one.losses)])
            counted[:, place] = [one.size / part if policy == "sum" else 1.0 for part in parts]
            runs = [self._result(trace, trial, counted=x.ravel()) for x in (0 * counted, counted)]
            if None in runs:
                return True
            means.append([[np.mean(_wide(x), axis=0) for x in run["outputs"]] for run in runs])
        eps, ulp = 10 * _EPS[one.float_bytes], 16 * _ULP[one.float_bytes]
        return all(
            _distance(b - a, y - x) <= eps * _size(b - a) + ulp * (_size(a) + _size(b))
            for a, b, x, y in zip(*means[0], *means[1], strict=False)
        )

    # Comparison.

    def _arrays(self, trace: Trace, found: Results) -> dict[tuple[str, str, int], np.ndarray]:
        """Return {(kind, name, id): array} of what is compared, in the order of reports."""
        one, arrays = self.one, {}
        if one.is_joined:
            arrays |= {("output", str(i), i): x for i, x in enumerate(found["outputs"])}
            for kind, key in (("gradient", "weights"), ("rows", "squares")):
                pairs = list(zip(one.weights, found[key], strict=False))
                for weight, x in reversed(pairs):  # the last layers first
                    if self.weights is None or id(weight) in self.weights:
                        arrays[kind, _name(weight), id(weight)] = x
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
        moved: list[dict] = []
        for key, x in expected.items():
            kind, name, _ = key
            y, allowed = actual[key], eps
            if x.shape != y.shape:
                return Difference(kind, name, np.inf, trial)
            if one.float_bytes < 8 and kind in _GRADIENTS:
                if trial.loose > 1:
                    continue  # far from where it learns, such a gradient is rounding
                allowed = max(eps, _EPS_OF_GRADIENTS)
            change = _distance(x, y)
            if change <= allowed * max(_size(x), 1e-3 * largest.get(kind, 0.0)):
                continue
            moved = moved or list(self._moved(trial))
            rounding = max((_distance(x, other[key]) for other in moved), default=0.0)
            if change > _TIMES_ROUNDING * rounding:
                return Difference(kind, name, change / max(_size(x), 1e-300), trial)
        return None

    def _moved(self, trial: Trial) -> Iterator[dict]:
        """Yield what the one device computes if something changes in the last digits."""
        ulp, number = _ULP[self.one.float_bytes], {8: 1, 4: 3}.get(self.one.float_bytes, 2)
        for step in (ulp, -4 * ulp, 16 * ulp)[:number]:
            if found := self._result(self.one, jittered(trial, step, bool(self.one.weights))):
                yield self._arrays(self.one, found)

    def _message(self, difference: Difference) -> str:
        kind, name = difference.kind, difference.name
        where = {
            "gradient": f"the gradient of the weight {name}",
            "rows": f"the number of rows in the sparse gradient of the weight {name}",
            "input": f"the gradient of argument {name}",
            "state": f"the variable {name}",
            "output": f"output {name} of {NO_LAYER}",
        }[kind]
        if kind == "output":
            layer, is_same = self._layer_that_differs(difference.trial)
            if not is_same:
                return function_analysis.STATE_IN_PYTHON.format(layer)
            where = layer or where
        return function_analysis.inexact(kind, where, difference.by, difference.trial.how)

    def _layer_that_differs(self, trial: Trial) -> tuple[str, bool]:
        """Return the first layer whose outputs differ, and whether it is the same in each trace."""
        eps = _EPS[self.one.float_bytes] * trial.loose
        first, again = (self.tracer.trace(self.one.size, named=True) for _ in range(2))
        a, other = self._result(first, trial), self._result(again, trial)
        number = len(first.layers)
        if a is None or other is None or len(again.layers) != number:
            return NO_LAYER, False
        for layer, x, y in zip(first.layers, a["layers"], other["layers"], strict=True):
            if _distance(x, y) > eps * _size(x):
                return f"layer {layer}", False
        b = self._result(self._trace_on_towers(named=True), trial)
        for i, layer in enumerate(first.layers if b else ()):
            x, parts = a["layers"][i], b["layers"][i::number]
            joined = np.concatenate(parts, axis=0) if len(parts) == 2 else x
            if _distance(x, joined) > eps * _size(x):
                return f"layer {layer}", True
        return "", True


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
    """Return the largest absolute difference; infinity for other shapes, or if one is NaN."""
    a, b = _wide(a), _wide(b)
    if a.shape != b.shape:
        return np.inf
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    change = np.where(alike, 0.0, np.abs(a - b))
    return float(np.max(np.where(np.isnan(change), np.inf, change), initial=0.0))


def _name(variable: tf.Variable) -> str:
    return variable.name.removesuffix(":0")
