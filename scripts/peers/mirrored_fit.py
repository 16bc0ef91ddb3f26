"""Peer: `keras.Model.fit` under `tf.distribute.MirroredStrategy`.

    python scripts/peers/mirrored_fit.py CONFIG_JSON    the lane protocol, see lane.py

Follows TensorFlow's guide "Distributed training with Keras": model and optimizer are created and
compiled in the strategy's scope, then `fit` distributes the pipeline. Everything else is that of
fit.py.
"""

import lane

with lane.package("tensorflow"):
    import tensorflow as tf
    import tf_program
    from fit import fit


def program(config: lane.Config) -> None:
    """Train on all devices."""
    devices = tf_program.configure_devices(config, config.num_devices)
    note = "one step a call: Keras fails with more on several replicas" if len(devices) > 1 else ""
    fit(config, tf.distribute.MirroredStrategy(devices), note)


if __name__ == "__main__":
    lane.run(program)
