"""Peer: `keras.Model.fit` over towers, by `towers.parallelize`.

    python scripts/peers/towers_fit.py CONFIG_JSON      the lane protocol, see lane.py

All but that one call is fit.py. The model is that of the other peers, not of our own lanes.
"""

import lane

with lane.package("tensorflow"):
    import tensorflow as tf
    import tf_program
    from fit import fit

    import towers


def program(config: lane.Config) -> None:
    """Train on all devices."""
    devices = tf_program.configure_devices(config, config.num_devices)
    note, strategy = f"Model.fit over {len(devices)} towers", tf.distribute.get_strategy()
    fit(config, strategy, note, lambda model: towers.parallelize(model, devices=devices))


if __name__ == "__main__":
    lane.run(program)
