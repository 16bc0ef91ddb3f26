"""What makes several towers differ from one device, seen by running a tower function.

A rehearsal tells of draws and of state. Here the function is run on real examples, one of which is
then changed: what follows from that for the others, no tower can know that has not got it.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.draws import OTHERS, PYTHON
from towers.layers import NO_LAYER
from towers.placement import Op
from towers.rehearsal import FEW, MORE, Rehearsal, agrees, join, two_and_both
from towers.stage import Take, run

_EFFECT = 1e-5  # of the largest value: less is rounding


def random_ops(ops: Iterable[Op]) -> list[str]:
    """Return a line for each layer of a tower whose draws do not follow the example.

    Args:
        ops: of the graph of a step.
    """
    found = {}
    for op in ops:
        if op.tower is not None and (op.type in OTHERS or op.type in PYTHON):
            found.setdefault((op.layer, op.type))
    lines = []
    for layer, kind in sorted(found):
        if kind in PYTHON:
            lines.append(
                f"python code: layer {layer} calls Python while it runs ({kind}), of which nothing "
                "is known; write it in TensorFlow or keras.ops"
            )
        else:
            lines.append(
                f"random op: layer {layer} draws by {kind}, whose numbers do not follow the "
                f"example; {OTHERS[kind]}"
            )
    return lines


def of_draws(line: str) -> bool:
    """Tell whether a line is about random draws."""
    return line.startswith(("random op:", "python code:", "ambiguous draw:"))


@tf.autograph.experimental.do_not_convert
def find(rehearsal: Rehearsal, batch: Sequence[Any], thorough: bool = False) -> list[str]:
    """Return in lines what is wrong with the function of a rehearsal, the likeliest cause first.

    Args:
        rehearsal: of the function.
        batch: some real examples: its arguments.
        thorough: look for what depends on the number of examples, too.
    """
    found = rehearsal.doubts()
    if rehearsal.few is None or not rehearsal.by_example:
        return found
    examples = Examples(batch)
    for look in (mixed, added_sums, *([batch_size] if thorough else [])):
        with contextlib.suppress(Exception):  # it cannot be run here: the towers will say why
            found += look(rehearsal, examples)
    return found


class Examples:
    """Real examples, of which there are as many as one likes."""

    def __init__(self, batch: Sequence[Any]):
        """Set the batch, whose leaves have examples along axis 0."""
        self.leaves = tf.nest.flatten(list(batch))

    def take(self, start: int, size: int) -> list[Any]:
        """Return `size` examples, from the number `start` on, and again from the first."""
        return [tf.gather(leaf, np.arange(start, start + size) % len(leaf)) for leaf in self.leaves]


def mixed(rehearsal: Rehearsal, examples: Examples) -> list[str]:
    """Name the layer by which the loss of an example depends on another example."""
    take = rehearsal.few
    inputs, others = examples.take(0, take.size), examples.take(take.size, 1)
    changed = [
        _with_first(leaf, _unlike(other)) for leaf, other in zip(inputs, others, strict=True)
    ]
    before, after = run(take, inputs), run(take, changed)
    if not _differ(before["rows"][1:], after["rows"][1:]):
        return []
    pairs = zip(take.layers, before["layers"], after["layers"], strict=True)
    layer = next((n for n, a, b in pairs if _differ(a[1:], b[1:])), NO_LAYER)
    return [
        f"mixed examples: layer {layer} lets the examples of a batch see each other, and a tower "
        "has only those of its slice; compute each example from itself alone (moments of the whole "
        "batch: keras.layers.BatchNormalization, with --batch_norm=sync)"
    ]


def added_sums(rehearsal: Rehearsal, examples: Examples) -> list[str]:
    """Name the layers that add a loss which is no mean over examples."""
    if not rehearsal.few.adding:
        return []
    takes, results, sizes = _two_and_both(rehearsal, examples)
    lines = []
    for layer, *values in zip(takes[0].adding, *(r["added"] for r in results), strict=True):
        if not agrees("mean", 0.0, values[:2], sizes, values[2]):
            lines.append(
                f"added loss: layer {layer} adds a loss that is no mean over the examples of a "
                "batch, so it depends on how many a tower has; divide by their number "
                "(keras.ops.mean)"
            )
    return lines


def batch_size(rehearsal: Rehearsal, examples: Examples) -> list[str]:
    """Name the layer that depends on the number of examples."""
    takes, results, sizes = _two_and_both(rehearsal, examples)
    few, _, both = results
    if not _differ(few["rows"], both["rows"][: sizes[0]]):
        return []
    pairs = zip(takes[0].layers, few["layers"], both["layers"], strict=True)
    layer = next((n for n, a, b in pairs if _differ(a, b[: sizes[0]])), NO_LAYER)
    return [
        f"batch size: layer {layer} depends on the number of examples that it is called with, and "
        "a tower is called with those of its slice; leave that number out, the mean over all "
        "examples is taken once, after the gather"
    ]


def _two_and_both(rehearsal: Rehearsal, examples: Examples) -> tuple[list[Take], list, tuple]:
    """Run the function on two slices and on the batch that they make."""
    sizes = rehearsal.few.size, rehearsal.few.size // FEW * MORE
    takes = two_and_both(rehearsal.stage, sizes, rehearsal.draws)
    parts = [examples.take(0, sizes[0]), examples.take(*sizes)]
    inputs = [*parts, [join(pair) for pair in zip(*parts, strict=True)]]
    return takes, [run(take, own) for take, own in zip(takes, inputs, strict=True)], sizes


def _with_first(leaf: tf.Tensor, example: tf.Tensor) -> tf.Tensor:
    """Return a leaf with another first example."""
    return tf.concat([example, leaf[1:]], axis=0)


def _unlike(example: tf.Tensor) -> tf.Tensor:
    """Return an example that is like no other: images upside down and darker, numbers moved."""
    if example.dtype.is_floating:
        return example * 1.5 + 0.25
    if example.dtype == tf.uint8:
        return (255 - example) // 2
    return example


def _differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Tell whether two arrays differ by more than rounding; NaN is like NaN."""
    both_nan = np.isnan(a) & np.isnan(b)
    change = np.where(both_nan, 0.0, np.abs(a - b))
    size = np.max(np.abs(np.where(np.isfinite(a), a, 0.0)), initial=0)
    return bool(np.any(~(change <= _EFFECT * size)))
