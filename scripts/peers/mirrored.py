"""Peer: `tf.distribute.MirroredStrategy` with a custom training loop.

    python scripts/peers/mirrored.py CONFIG_JSON        the lane protocol, see lane.py

Follows TensorFlow's guides "Custom training with tf.distribute.Strategy" and "Distributed input":
variables and optimizer in the strategy's scope, losses divided by the global batch,
`experimental_distribute_dataset`, several steps in one `tf.function`.
"""

from collections.abc import Callable

import lane

with lane.package("tensorflow"):
    import tensorflow as tf
    import tf_program


def make_loop(config: lane.Config) -> Callable:
    """Return a function that makes `steps_per_loop` steps and returns the last loss."""
    strategy = tf.distribute.MirroredStrategy(
        tf_program.configure_devices(config, config.num_devices)
    )
    with strategy.scope():
        model = tf_program.make_model(config)
        optimizer = tf_program.make_optimizer(config, model)
    variables = model.trainable_variables

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = tf.cast(model(images, training=True), tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=config.batch_size)
            if model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function
    def steps(iterator: tf.distribute.DistributedIterator) -> tf.Tensor:
        loss = tf.zeros([])
        for _ in tf.range(config.steps_per_loop):
            losses = strategy.run(step, args=next(iterator))
            loss = strategy.reduce("SUM", losses, axis=None)
        return loss

    iterator = iter(strategy.experimental_distribute_dataset(tf_program.make_dataset(config)))
    return lambda: steps(iterator)


def program(config: lane.Config) -> None:
    """Train as the lane protocol asks."""
    loop = make_loop(config)
    note = "with models.cnn's own local response normalization" if config.own_layers else ""
    with lane.Lane(config, tf_program.versions(), note) as turns:
        loss = None
        while turns.more(loss):
            loss = loop()


if __name__ == "__main__":
    lane.run(program)
