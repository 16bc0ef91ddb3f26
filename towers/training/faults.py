"""What makes several towers differ from one device, seen by running a tower function.

A rehearsal tells of draws and of state. Here the function is run on real examples, one of which is
then changed: what follows from that for the others, no tower can know that has not got it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.builder.doubts import random_ops
from towers.builder.layers import NO_LAYER
from towers.builder.rehearsal import FEW, MORE, Rehearsal
from towers.builder.states import join, two_and_both
from towers.builder.tracing import Trace, run
from towers.graphs.placement import Op

_EFFECT = 1e-5  # of the largest value: less is rounding

_MIXED = (
    "mixed examples: layer {} lets the examples of a batch see each other, and a tower has only "
    "those of its slice; compute each example from itself alone (moments of the whole batch: "
    "keras.layers.BatchNormalization, with --batch_norm=sync)"
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


def random_ops_of(ops: Iterable[Op]) -> list[str]:
    """Return a line for each layer of a tower whose draws do not follow the example."""
    return random_ops((op.name, op.type) for op in ops if op.tower is not None)


def rows_of(outputs: Any) -> tf.Tensor:
    """Return a number for each example, `[b]`, that depends on all of its outputs."""
    rows = [tf.reshape(output, [tf.shape(output)[0], -1]) for output in tf.nest.flatten(outputs)]
    # Weights that are unlike each other: the sum of a softmax would be 1, whatever it sees.
    return sum(tf.linalg.matvec(x, tf.cos(tf.range(tf.shape(x)[1], dtype=x.dtype))) for x in rows)


def of_draws(line: str) -> bool:
    """Tell whether a line is about random draws."""
    return line.startswith(("random op:", "python code:", "ambiguous draw:"))


@tf.autograph.experimental.do_not_convert
def find(rehearsal: Rehearsal, batch: Sequence[Any], thorough: bool = False) -> list[str]:
    """Return in lines what is wrong with the function of a rehearsal, the likeliest cause first.

    Args:
        rehearsal: of the function.
        batch: some real examples: its arguments.
        thorough: look at the backward pass, and for what depends on the number of examples, too.
    """
    doubts = rehearsal.doubts
    if rehearsal.few is None or not rehearsal.by_example:
        return doubts
    if any(doubt.startswith("ambiguous") for doubt in doubts):
        return doubts  # an example may then see others by their draws
    trials, found = _Trials(rehearsal, batch), []
    finders = [trials.mixed, trials.mixed_among_more, trials.batch_size]
    for finder in finders if thorough else [trials.mixed]:
        with contextlib.suppress(Exception):  # the towers themselves will say why
            found += finder()
    first = [line for line in found if line.startswith("mixed")]  # this explains what comes next
    return list(dict.fromkeys([*first, *doubts, *found]))


class _Trials:
    """Runs of a rehearsed function on real examples, of which there are as many as one likes."""

    def __init__(self, rehearsal: Rehearsal, batch: Sequence[Any]):
        self.tracer, self.few, self.draws = rehearsal.tracer, rehearsal.few, rehearsal.draws
        self.sizes = self.few.size, self.few.size // FEW * MORE
        self.leaves = tf.nest.flatten(list(batch))
        self.two_and_both = functools.cache(self._two_and_both)

    def examples(self, start: int, size: int) -> list[Any]:
        """Return `size` examples, from the number `start` on, and again from the first."""
        return [tf.gather(leaf, np.arange(start, start + size) % len(leaf)) for leaf in self.leaves]

    def with_another_first(self, trace: Trace) -> Iterator[tuple[dict, dict]]:
        """Yield the outcome for some examples, and that with another one in the first's place."""
        inputs, others = self.examples(0, trace.size), self.examples(trace.size, 1)
        before, again = run(trace, inputs), run(trace, inputs)
        seen = [[result["rows"], *result["layers"]] for result in (before, again)]
        if any(_differ(once, twice) for once, twice in zip(*seen, strict=True)):
            return  # it draws with a state of its own
        for unlike in _UNLIKE:
            changed = [
                tf.concat([unlike(other), leaf[1:]], axis=0)
                for leaf, other in zip(inputs, others, strict=True)
            ]
            yield before, run(trace, changed)

    def _two_and_both(self, backward: bool) -> tuple[list[Trace], list[dict]]:
        """Return traces of two slices and of the batch that they make, and what these give."""
        traces = two_and_both(self.tracer, self.sizes, self.draws, backward=backward)
        parts = [self.examples(0, self.sizes[0]), self.examples(*self.sizes)]
        inputs = [*parts, [join(pair) for pair in zip(*parts, strict=True)]]
        return traces, [run(trace, own) for trace, own in zip(traces, inputs, strict=True)]

    def mixed(self, trace: Trace | None = None) -> list[str]:
        """Name the layer by which the loss of an example depends on another example."""
        trace = trace or self.few
        for before, after in self.with_another_first(trace):
            if _differ(before["rows"][1:], after["rows"][1:]):
                pairs = zip(trace.layers, before["layers"], after["layers"], strict=True)
                layer = next((n for n, a, b in pairs if _differ(a[1:], b[1:])), NO_LAYER)
                return [_MIXED.format(layer)]
        return []

    def mixed_among_more(self) -> list[str]:
        """Name the layer by which an example's loss or gradient depends on another, among more."""
        forward, backward = (self.tracer.trace(sum(self.sizes), backward=b) for b in (False, True))
        if found := self.mixed(forward):
            return found
        for before, after in self.with_another_first(backward):
            pairs = zip(before["layers"], after["layers"], strict=True)
            if places := [i for i, (a, b) in enumerate(pairs) if _differ(a[1:], b[1:])]:
                return [_MIXED.format(_after(backward, places[-1]))]
        return []

    def batch_size(self) -> list[str]:
        """Name the layer that depends on the number or places of examples, or whose gradient."""
        size = self.sizes[0]
        for backward in (False, True):
            traces, (first, second, both) = self.two_and_both(backward)
            for own, rows, line in (
                (first, slice(0, size), _BATCH_SIZE), (second, slice(size, None), _PLACE),
            ):  # fmt: skip
                pairs = zip(own["layers"], both["layers"], strict=True)
                places = [i for i, (a, b) in enumerate(pairs) if _differ(a, b[rows])]
                if backward and places:
                    return [line.format(_after(traces[0], places[-1]))]
                if not backward and _differ(own["rows"], both["rows"][rows]):
                    return [line.format(traces[0].layers[places[0]] if places else NO_LAYER)]
        return []


def _after(trace: Trace, place: int) -> str:
    """Return the layer that is called after the one whose output's gradient is wrong."""
    return trace.layers[place + 1] if place + 1 < len(trace.layers) else NO_LAYER


def _scaled(factor: float, offset: float) -> Callable:
    """Return a function that makes an example like no other; whole numbers may have a meaning."""

    def unlike(example: tf.Tensor) -> tf.Tensor:
        if example.dtype.is_floating:
            return example * factor + tf.cast(offset, example.dtype)
        if example.dtype == tf.uint8:
            value = 128 + 128 * offset + factor * (tf.cast(example, tf.float32) - 128)
            return tf.cast(tf.clip_by_value(value, 0, 255), tf.uint8)
        return example

    return unlike


_UNLIKE = [_scaled(1.5, 0.25), _scaled(0.0, 0.0), _scaled(-4.0, -1.0)]


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Tell whether two arrays differ by more than rounding; NaN is like NaN."""
    both_nan = np.isnan(a) & np.isnan(b)
    change = np.where(both_nan, 0.0, np.abs(a - b))
    size = np.max(np.abs(np.where(np.isfinite(a), a, 0.0)), initial=0)
    return bool(np.any(~(change <= _EFFECT * size)))
