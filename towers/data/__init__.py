"""Data sets: found, checked, and given out in batches.

    data = towers.data.load("cifar10", data_dir="~/data")
    for images, labels, draws in data.train.train_batches(128, seed=1): ...

The names are loaded when they are first used: files can be looked for without TensorFlow.
"""

import importlib

_HOME = {
    "ArraySplit": "pipeline",
    "Data": "pipeline",
    "DatasetSplit": "pipeline",
    "Split": "pipeline",
    "load": "registry",
    "locate": "registry",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'towers.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"towers.data.{_HOME[name]}"), name)
