"""Towers: data-parallel training in one explicit pattern.

A tower is one copy of the model function on one device. The builder makes the copies and gathers
what they return with `tf.add_n`; the rest of the package trains with it from the command line.

    import towers

    builder = towers.TowerBuilder(["/gpu:0", "/gpu:1"])
    loss, gradients = builder.gradients(loss_fn, model.trainable_variables, images, labels)

Importing this package imports no TensorFlow, defines no flag and touches no device: the names
below are loaded when they are first used.
"""

__version__ = "0.1.0"
__all__ = ["PerTower", "TowerBuilder"]


def __getattr__(name: str) -> object:
    """Load the public names on first use, so that `towers --help` need not wait for TensorFlow."""
    if name in __all__:
        from towers import tower

        return getattr(tower, name)
    raise AttributeError(f"module 'towers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
