"""Variables that a model assigns in its call: what towers can put together, and what they cannot.

Each layer but the last few changes nothing but its variables, or uses them as they were before.
"""

import keras

from tests.zoo.entry import SAME
from tests.zoo.parts import kept, layer, on_features, on_maps, own

layers, ops = keras.layers, keras.ops


def tracked(shape, update, **keywords):
    """Return a layer with a variable of `shape` that `update(value, x)` gives in training."""

    class Tracked(layers.Layer):
        def build(self, _):
            self.value = self.add_weight(
                shape=shape, trainable=False, name="value", **({"initializer": "zeros"} | keywords)
            )

        def call(self, x, training=False):
            if training:
                before = ops.convert_to_tensor(self.value)
                self.value.assign(ops.cast(update(before, x), before.dtype))
            return x

    return Tracked()


@own(on_features, SAME, "added up over towers; read before",
     seen=kept(), number=kept(dtype="int64"))  # fmt: skip
def counters_of_examples(self, x, training):
    """Counts examples, in a float and in an integer, and cools down as it has seen more."""
    y = x / (1 + 0.05 * self.seen)
    if training:
        self.seen.assign_add(ops.cast(ops.shape(x)[0], self.seen.dtype))
        self.number.assign_add(ops.cast(ops.shape(x)[0], "int64"))
    return y


@own(on_features, SAME, "one more each step, not each tower",
     calls=kept(), number=kept(dtype="int32"))  # fmt: skip
def counters_of_calls(self, x, training):
    if training:
        self.calls.assign_add(1)
        self.number.assign_add(1)
    return x * (1 - 0.5 ** (1 + self.calls))


@layer(mean=kept(shape=(None,)))
def centered(self, x, training):
    """Subtracts a moving average of the mean, as it was before this batch."""
    y = x - self.mean
    if training:
        mean = ops.mean(x, axis=tuple(range(len(x.shape) - 1)))
        self.mean.assign(0.8 * self.mean + 0.2 * mean)
    return y


moving_mean = on_maps(
    SAME, "the mean of the towers", lambda: [centered(), layers.Conv2D(4, 3), centered()]
)
given_policies = on_features(
    SAME,
    "aggregation says how",
    lambda: [
        tracked((), lambda v, x: v + ops.sum(ops.cast(x > 0, v.dtype)), aggregation="sum"),
        tracked((6,), lambda v, x: 0.9 * v + 0.1 * ops.mean(x, axis=0), aggregation="mean"),
        tracked((), lambda v, x: 2 * v + 1, aggregation="only_first_replica"),
    ],
)


@own(on_features, "inexact", "a tower has put in its own slice alone", seen=kept())
def seen_read_again(self, x, training):
    if training:
        self.seen.assign_add(ops.cast(ops.shape(x)[0], self.seen.dtype))
    return x / (1 + self.seen)


last_example = on_features(
    "inexact", "one tower alone has it", lambda: tracked((6,), lambda value, x: x[-1]), quick=True
)
moving_variance = on_maps(
    "inexact",
    "a variance is not the mean of variances",
    lambda: tracked((4,), lambda v, x: 0.9 * v + 0.1 * ops.var(x, axis=(0, 1, 2))),
)
