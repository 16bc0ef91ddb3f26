"""Checks that each example is computed independently of the others, by trial runs.

The function is run on real examples, and again with one of them changed. If that changes results of
other examples, towers would differ from one device, since each has only its slice.
"""

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.builder.diagnostics import random_ops
from towers.builder.function_analysis import FunctionAnalysis
from towers.builder.gather import join
from towers.builder.instrumentation import FEW, Trace, run
from towers.builder.op_names import NO_LAYER, tower_of
from towers.builder.rng_layout import nudged

_MANY = 16  # examples of a batch of unknown size
_EFFECT = 1e-5  # relative to the largest value: less is rounding
_EFFECT_IN_16_BITS = 0.02  # the same, where each tower's sum is rounded to 16 bits
_ORDERS = 8  # number of orders of the examples, which differ in rounding
_OTHERS = slice(1, None)  # where the first example of a batch was changed
_ROUNDING = 1e-6  # relative to the largest gradient of any weight

_MIXED = (
    "mixed examples: layer {} lets the examples of a batch see each other, and a tower has only "
    "those of its slice; compute each example from itself alone (moments of the whole batch: "
    "keras.layers.BatchNormalization, with --batch_norm=sync)"
)
_MIXED_BACKWARD = (
    "mixed examples: in the backward pass of layer {} the gradient of an example depends on that "
    "of others, as where it is clipped or normalised over the batch, and a tower has only those of "
    "its slice; clip what is gathered instead, by the optimizer's clipnorm or global_clipnorm"
)
_BRANCH = re.compile(r"(Stateless)?(If|Case|While)$")
_NO_SUM = (
    "backward pass: the gradient of the weight {} is no sum over examples, as where it is clipped "
    "or normalised by tf.custom_gradient, and a tower has only that of its slice; clip what is "
    "gathered instead, by the optimizer's clipnorm, clipvalue or global_clipnorm"
)
_BATCH_SIZE = (
    "batch size: layer {} depends on the number of examples that it is called with, and a tower is "
    "called with those of its slice; leave that number out, the mean over all examples is taken "
    "once, after the gather"
)
_PLACE = (
    "place in the batch: layer {} depends on the places of examples in the batch, as by tf.range "
    "or by draws inside of a map over examples, and a tower counts from the first of its slice; "
    "hand such numbers over with the examples, draw for all of them at once"
)
_READ_AGAIN = (
    "state: the variable {} is read after it was assigned, when it holds what a tower makes of its "
    "own slice alone; read it before it is assigned: what all towers make of it is there in the "
    "next step"
)
_IN_PYTHON = (
    "state in Python: layer {} computes something else each time that it is traced, as by "
    "random.random(), numpy's draws or a counter, and towers are traced one by one; take "
    "keras.random with a SeedGenerator, or a keras.Variable"
)


def random_ops_of(ops: Iterable[Any]) -> list[str]:
    """Return a line for each layer of a tower whose random numbers do not depend on the example."""
    return random_ops((op.name, op.type) for op in ops if tower_of(op.name) is not None)


def rows_of(outputs: Any) -> tf.Tensor:
    """Return a number for each example, `[b]`, that depends on all outputs of the example."""
    rows = [tf.reshape(output, [tf.shape(output)[0], -1]) for output in tf.nest.flatten(outputs)]
    # Weights that all differ: the plain sum of a softmax would always be 1.
    return sum(tf.linalg.matvec(x, tf.cos(tf.range(tf.shape(x)[1], dtype=x.dtype))) for x in rows)


def is_about_draws(line: str) -> bool:
    """Return whether a line is about random draws."""
    return line.startswith(("random op:", "python code:", "ambiguous draw:"))


@tf.autograph.experimental.do_not_convert
def check(analysis: FunctionAnalysis, batch: Sequence[Any], thorough: bool = False) -> list[str]:
    """Return lines on why towers would differ from one device, the likeliest cause first.

    Args:
        analysis: of the function.
        batch: some real examples: its arguments.
        thorough: check each backward pass, and draws for other numbers of examples, too.
    """
    lines = _run_all(analysis, batch, thorough)
    first = [line for line in lines if line.startswith("mixed")]  # it explains the others
    return list(dict.fromkeys([*first, *analysis.warnings, *lines]))


@tf.autograph.experimental.do_not_convert
def check_on_samples(analysis: FunctionAnalysis, backward: bool = True) -> list[str]:
    """Return lines on results that depend on other examples, on their number or order.

    Args:
        analysis: of the function.
        backward: whether something goes back through the function: check its custom gradients.
    """
    if analysis.trace is None:
        return []
    with tf.init_scope():
        # Enough for the largest run: an example that comes twice would hide a maximum.
        number = analysis.trace.size // FEW * _MANY
        return _run_all(analysis, analysis.tracer.examples(number), backward=backward)


def _run_all(
    analysis: FunctionAnalysis, batch: Sequence[Any], thorough: bool = False, backward: bool = True
) -> list[str]:
    few = analysis.trace
    if few is None or not analysis.by_example:
        return []
    if any(line.startswith("ambiguous") for line in analysis.warnings):
        return []  # an example may then depend on others by their random numbers
    trials, lines = _Trials(analysis, batch, thorough), []
    checks = [trials.mixed, trials.mixed_draws]
    if thorough:
        checks += [lambda: trials.mixed(trials.traces[2]), trials.batch_size]
    elif not any(map(is_about_draws, analysis.warnings)):  # these depend on the order, too
        checks += [trials.places, trials.numbers]
    for check_one in checks:
        if not lines:  # the first explains the others
            with contextlib.suppress(Exception):  # the towers will raise the error
                lines += check_one()
    with contextlib.suppress(Exception):
        lines += trials.backward() if backward else []
    if lines:
        with contextlib.suppress(Exception):
            lines = trials.in_python() or lines
    if lines and few.read_again:
        with contextlib.suppress(Exception):
            # The cause if all is well with variables that keep their values while it runs.
            tracer = copy.copy(analysis.tracer)
            tracer.reads_before = True
            before = dataclasses.replace(tracer.trace(few.size), read_again=[])
            before = dataclasses.replace(analysis, tracer=tracer, trace=before)
            if not _run_all(before, batch, thorough, backward):
                lines = [_READ_AGAIN.format(few.read_again[0])]
    return list(dict.fromkeys(lines))


class _Trials:
    """Runs of an analyzed function on real examples, repeated as often as needed."""

    def __init__(self, analysis: FunctionAnalysis, batch: Sequence[Any], thorough: bool):
        self.analysis, self.tracer = analysis, analysis.tracer
        self.few, self.draws = analysis.trace, analysis.draws
        self.leaves, self.thorough = tf.nest.flatten(list(batch)), thorough

    def examples(self, start: int, size: int) -> list[Any]:
        """Return `size` examples, from the number `start` on, and again from the first."""
        return [tf.gather(leaf, np.arange(start, start + size) % len(leaf)) for leaf in self.leaves]

    @functools.cached_property
    def by_place(self) -> bool:
        """True if results depend on the order of examples, as by random numbers."""
        draws = self.few.draws or any("Random" in kind for _, kind in self.few.ops)
        return bool(draws) or not self.is_steady(self.few)

    def is_steady(self, trace: Trace) -> bool:
        """Return whether two runs on the same examples have the same results."""
        inputs = self.examples(0, trace.size)
        results = [run(trace, inputs) for _ in range(2)]
        kinds = "layers", "gradients", "weights"
        seen = [[r["rows"], *(x for kind in kinds for x in r[kind])] for r in results]
        return not any(_differ(once, twice) for once, twice in zip(*seen, strict=True))

    def with_another_first(self, trace: Trace) -> Iterator[tuple[dict, dict]]:
        """Yield the results for some examples, and those with the first example replaced.

        Some replacements hold special values of the arguments.
        """
        if not self.is_steady(trace):
            return
        inputs, others = self.examples(0, trace.size), self.examples(trace.size, 1)
        special = [values.special for values in self.tracer.values]
        far, rounds = [], []
        if any(_BRANCH.match(kind) for _, kind in trace.ops):
            far = [[change(other) for other in others] for change in _FAR]
            # One far example among zeros: the only one that takes a branch.
            rounds = [(list(map(_scaled(0.0, 0.0), inputs)), far)]
        unlike = far + [[change(other) for other in others] for change in _UNLIKE]
        unlike += [
            [tf.fill(x.shape, tf.cast(v[i], x.dtype)) if v[i:] else x
             for x, v in zip(others, special, strict=True)]
            for i in range(max(map(len, special), default=0))
        ]  # fmt: skip
        rounds.append((inputs, unlike))
        if any(special):
            inputs = self.tracer.with_special(inputs, np.random.default_rng(0))
            rounds.append((inputs, [others, *unlike]))
        for inputs, firsts in rounds:
            before = run(trace, inputs)
            for first in firsts:
                pairs = zip(inputs, first, strict=True)
                changed = [tf.concat([example, leaf[1:]], axis=0) for leaf, example in pairs]
                with contextlib.suppress(tf.errors.OpError):  # the function rejects the value
                    yield before, run(trace, changed)

    @functools.cached_property
    def traces(self) -> list[Trace]:
        """Traces of two slices and of the batch of both."""
        return self.tracer.slice_traces(self.few, self.draws, self.thorough)

    @functools.cached_property
    def inputs(self) -> list[list[Any]]:
        """Inputs of the traces."""
        few, more, _ = (trace.size for trace in self.traces)
        parts = [self.examples(0, few), self.examples(few, more)]
        return [*parts, [join(pair) for pair in zip(*parts, strict=True)]]

    @functools.cached_property
    def results(self) -> list[dict]:
        """Results of the traces."""
        return [run(trace, inputs) for trace, inputs in zip(self.traces, self.inputs, strict=True)]

    def mixed(self, trace: Trace | None = None) -> list[str]:
        """Name the layer that makes an example's loss or gradient depend on other examples."""
        trace, backward = trace or self.few, []
        for before, after in self.with_another_first(trace):
            if lines := _unlike(trace, before, after, _OTHERS, _OTHERS, _MIXED):
                return lines
            pairs = zip(before["gradients"], after["gradients"], strict=True)
            if places := [i for i, (a, b) in enumerate(pairs) if _differ(a[1:], b[1:])]:
                backward.append(_MIXED_BACKWARD.format(_after(trace, places[-1])))
        return backward[:1]

    def mixed_draws(self) -> list[str]:
        """Name the layer that lets examples see each other's random numbers."""
        trace = self.analysis.more
        by_example = {
            place: drawn
            for place, drawn in enumerate(self.draws or ())
            if drawn.layout and drawn.layout.axis is not None
        }
        if trace is None or not by_example or not self.is_steady(trace):
            return []
        low, high = nudged(trace, self.examples(0, trace.size), by_example, 0)
        return _unlike(trace, low, high, _OTHERS, _OTHERS, _MIXED)

    def in_python(self) -> list[str]:
        """Name the layer that computes something else when it is traced again."""
        few, inputs = self.few, self.examples(0, self.few.size)
        if not self.is_steady(few):
            return []
        again = run(self.tracer.trace(few.size), inputs)
        every = slice(None)
        return _unlike(few, run(few, inputs), again, every, every, _IN_PYTHON)

    def places(self) -> list[str]:
        """Name the layer that depends on the order of examples."""
        if self.by_place:
            return []
        order, inputs = np.roll(np.arange(self.few.size), 1), self.examples(0, self.few.size)
        before = run(self.few, inputs)
        after = run(self.few, [tf.gather(leaf, order) for leaf in inputs])
        return _unlike(self.few, before, after, order, slice(None), _PLACE)

    def numbers(self) -> list[str]:
        """Name the layer that depends on the number of examples."""
        if self.by_place:
            return []
        size, many = self.few.size, self.tracer.size_of_batch(self.few.size // FEW * _MANY)
        inputs = self.examples(0, many)
        few = run(self.few, [leaf[:size] for leaf in inputs])
        before = run(self.tracer.trace(many), inputs)
        return _unlike(self.few, before, few, slice(size), slice(None), _BATCH_SIZE)

    def backward(self) -> list[str]:
        """Name a weight whose gradient is no sum over examples because of a custom gradient.

        TensorFlow's own gradients are sums: they are not checked.
        """
        if not self.few.custom_gradients or not self.is_steady(self.traces[0]):
            return []
        both = self.traces[2]
        if lines := self.mixed(both):
            return lines
        gradients = [result["weights"] for result in self.results]
        largest = max((np.max(np.abs(g), initial=0) for g in gradients[2]), default=0)
        effect = _EFFECT_IN_16_BITS if self.few.in_16_bits else _EFFECT
        for place, (a, b, ab) in enumerate(zip(*gradients, strict=True)):
            # A gradient that is 0 but for rounding, as of a bias before a softmax, is no fault: it
            # differs for other orders of the examples, too.
            small = np.max(np.abs(ab - a - b), initial=0) <= _ROUNDING * largest
            orders = (np.random.default_rng(seed).permutation(both.size) for seed in range(_ORDERS))
            inputs = ([tf.gather(leaf, order) for leaf in self.inputs[2]] for order in orders)
            if _differ(ab, a + b, effect) and not (
                small and any(_differ(ab, run(both, leaves)["weights"][place]) for leaves in inputs)
            ):
                return [_NO_SUM.format(both.weights[place])]
        return []

    def batch_size(self) -> list[str]:
        """Name the layer whose outputs or gradients depend on the number or order of examples."""
        (first, second, both), few = self.results, self.traces[0]
        slices = [
            (first, slice(0, few.size), _BATCH_SIZE), (second, slice(few.size, None), _PLACE),
        ]  # fmt: skip

        def unlike(of_slice: dict, rows: slice, kind: str) -> list[int]:
            pairs = zip(of_slice[kind], both[kind], strict=True)
            return [i for i, (a, b) in enumerate(pairs) if _differ(a, b[rows])]

        for part, rows, line in slices:
            if _differ(part["rows"], both["rows"][rows]):
                places = unlike(part, rows, "layers")
                return [line.format(few.layers[places[0]] if places else NO_LAYER)]
        for part, rows, line in slices:
            if places := unlike(part, rows, "gradients"):
                return [line.format(_after(few, places[-1]))]
        return []


def _unlike(
    trace: Trace, before: dict, after: dict, of_before: Any, of_after: Any, line: str
) -> list[str]:
    # A line with the first layer whose outputs for these examples differ between two runs.
    if not _differ(before["rows"][of_before], after["rows"][of_after]):
        return []
    pairs = zip(trace.layers, before["layers"], after["layers"], strict=True)
    unlike = (name for name, a, b in pairs if _differ(a[of_before], b[of_after]))
    return [line.format(next(unlike, NO_LAYER))]


def _after(trace: Trace, place: int) -> str:
    # The layer called after that one has the wrong backward pass.
    return trace.layers[place + 1] if place + 1 < len(trace.layers) else NO_LAYER


def _scaled(factor: float, offset: float) -> Callable:
    # Whole numbers but uint8 stay: they may be classes or indices.
    def unlike(example: tf.Tensor) -> tf.Tensor:
        if example.dtype.is_floating:
            return example * factor + tf.cast(offset, example.dtype)
        if example.dtype == tf.uint8:
            value = 128 + 128 * offset + factor * (tf.cast(example, tf.float32) - 128)
            return tf.cast(tf.clip_by_value(value, 0, 255), tf.uint8)
        return example

    return unlike


_UNLIKE = [_scaled(1.5, 0.25), _scaled(0.0, 0.0), _scaled(-4.0, -1.0)]
_FAR = [_scaled(100.0, 1.0), _scaled(-100.0, -1.0)]  # one example takes a branch for all


def _differ(a: np.ndarray, b: np.ndarray, effect: float = _EFFECT) -> bool:
    """Return whether two arrays differ by more than rounding; NaN is like NaN."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    alike = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities, too
    change = np.abs(np.subtract(a, b, out=np.zeros_like(a), where=~alike))
    size = np.max(np.abs(np.where(np.isfinite(a), a, 0.0)), initial=0)
    return bool(np.any(~(change <= effect * size)))
