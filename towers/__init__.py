"""Towers: data-parallel training in one explicit pattern.

A tower is one copy of the model function on one device. The builder makes the copies and gathers
what they return with `tf.add_n`; the rest of the package trains with it from the command line.

    import towers

    builder = towers.TowerBuilder(["/gpu:0", "/gpu:1"])
    loss, gradients = builder.gradients(loss_fn, model.trainable_variables, images, labels)

Importing this package imports no TensorFlow, defines no flag and touches no device: the names
below are loaded when they are first used.
"""

import importlib

__version__ = "0.1.0"
_HOME = {
    "InputError": "errors",
    "Options": "options.run",
    "PerTower": "builder.splitting",
    "RunError": "errors",
    "TowerBuilder": "builder.tower",
    "devices": "devices",
    "evaluate": "training.evaluate",
    "train": "training.train",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Load the public names on first use, so that `towers --help` need not wait for TensorFlow."""
    if name in _HOME:
        module = importlib.import_module(f"towers.{_HOME[name]}")
        return module if name == "devices" else getattr(module, name)
    raise AttributeError(f"module 'towers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
