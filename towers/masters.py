"""The master variables: the one true copy of weights, slots and averages, on the gather device."""

import keras
import tensorflow as tf

INITIAL_LOSS_SCALE = 2.0**15


class Masters:
    """All that a step changes and a checkpoint holds; it knows nothing of towers.

    Attributes:
        model: the Keras model, built once.
        optimizer: the Keras optimizer, its slots built.
        averages: list of (variable, its moving average); empty without EMA.
        step: int64, updates so far.
        examples: int64, examples seen so far: the clock of every schedule.
        loss_scale: float32, or None where the precision needs none.
        good_steps: int64, steps since the loss scale last changed.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        *,
        ema: bool = False,
        loss_scaling: bool = False,
        device: str = "/cpu:0",
    ):
        """Build the optimizer's slots, the averages (equal to the weights) and the counters."""
        self.model, self.optimizer = model, optimizer
        with tf.device(device):
            optimizer.build(model.trainable_variables)
            # BatchNorm statistics are averaged, too: they belong to the weights of their time.
            self.averages = [
                (v, tf.Variable(v.value, trainable=False, name="average"))
                for v in model.variables
                if ema and v.value.dtype.is_floating
            ]
            self.step = tf.Variable(0, trainable=False, dtype=tf.int64, name="step")
            self.examples = tf.Variable(0, trainable=False, dtype=tf.int64, name="examples")
            self.loss_scale = self.good_steps = None
            if loss_scaling:
                self.loss_scale = tf.Variable(INITIAL_LOSS_SCALE, trainable=False)
                self.good_steps = tf.Variable(0, trainable=False, dtype=tf.int64)

    def statistics(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return (variable, its value now) of what towers assign, such as BatchNorm statistics."""
        variables = self.model.non_trainable_variables
        return [(v, tf.identity(v.value)) for v in variables if v.value.dtype.is_floating]

    def finite(self) -> bool:
        """Tell whether no master variable holds an infinity or NaN."""
        values = [v for v in self.variables().values() if v.dtype.is_floating]
        return all(bool(tf.reduce_all(tf.math.is_finite(v))) for v in values)

    def variables(self) -> dict[str, tf.Variable]:
        """Return every master variable by a name that does not depend on towers or devices."""
        named = [(f"model/{v.path}", v.value) for v in self.model.variables]
        named += [(f"optimizer/{v.path}", v.value) for v in self.optimizer.variables]
        named += [(f"average/{v.path}", average) for v, average in self.averages]
        named += [("step", self.step), ("examples", self.examples)]
        if self.loss_scale is not None:
            named += [("loss_scale", self.loss_scale), ("good_steps", self.good_steps)]
        result: dict[str, tf.Variable] = {}
        for name, variable in named:
            unique, count = name, 1
            while unique in result:  # two layers may bear one name
                count += 1
                unique = f"{name}~{count}"
            result[unique] = variable
        return result
