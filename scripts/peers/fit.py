"""Peer: `keras.Model.fit` on one device, whatever `num_devices` is.

    python scripts/peers/fit.py CONFIG_JSON             the lane protocol, see lane.py

Follows Keras' guide "Training & evaluation with the built-in methods": compile, then fit on a
tf.data pipeline, `steps_per_execution` steps in one call, no progress bar. One call of `fit` lasts
for all windows: a callback opens and closes them, so that none pays for an iterator, a shuffle
buffer or a trace. The loss is `fit`'s own, a mean over the steps since the window began.
"""

from collections.abc import Callable

import lane

with lane.package("tensorflow"):
    import keras
    import tensorflow as tf
    import tf_program

MANY_STEPS = 10**9  # of one epoch: more than anybody waits for


class Windows(keras.callbacks.Callback):
    """Asks the lane for its turn before each loop of steps.

    Before, not after: with a callback after each batch, Keras would wait for the batch's metrics.
    """

    def __init__(self, turns: lane.Lane, steps_per_loop: int):
        """Remember the lane."""
        super().__init__()
        self._turns = turns
        self._steps_per_loop = steps_per_loop

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Wait for the next window, or end the training."""
        if batch % self._steps_per_loop:
            return
        if not self._turns.more(self if batch else None):
            self.model.stop_training = True
        elif self._turns.steps == 0:
            self.model.reset_metrics()

    def __float__(self) -> float:
        """Return the mean loss, which the lane reads after each loop."""
        return float(self.model.get_metrics_result()["loss"])


def fit(
    config: lane.Config,
    strategy: tf.distribute.Strategy,
    note: str = "",
    prepare: Callable[[keras.Model], object] = lambda _: None,
) -> None:
    """Train with `fit` in a strategy's scope, as the lane protocol asks, a model made ready."""
    with strategy.scope():
        model = tf_program.make_model(config)
        model.compile(
            optimizer=tf_program.make_optimizer(config, model),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            # Keras 3.15 fails with several steps a call on several replicas: "You must feed a
            # value for placeholder tensor", from its tf.cond around the strategy's run.
            steps_per_execution=1 if strategy.num_replicas_in_sync > 1 else config.steps_per_loop,
            # On a CPU, XLA's convolutions take 2.5 times as long as oneDNN's.
            jit_compile="auto" if config.gpus else False,
        )
    prepare(model)
    with lane.Lane(config, tf_program.versions(), note) as turns:
        model.fit(
            tf_program.make_dataset(config),
            steps_per_epoch=MANY_STEPS // config.steps_per_loop * config.steps_per_loop,
            callbacks=[Windows(turns, config.steps_per_loop)],
            verbose=0,
        )


def program(config: lane.Config) -> None:
    """Train on one device."""
    device, *_ = tf_program.configure_devices(config, 1)
    fit(config, tf.distribute.get_strategy(), f"Model.fit on one device, {device}")


if __name__ == "__main__":
    lane.run(program)
