"""Data sets: found, checked, and given out in batches.

    data = towers.data.load("cifar10", data_dir="~/data")
    for (images, labels), draws in data.train.train_batches(128, seed=1): ...

The names are loaded when they are first used: files can be looked for without TensorFlow.
"""

from towers.options.lazy import lazily

_HOME = {
    "ArraySplit": "pipeline",
    "Data": "pipeline",
    "DatasetSplit": "tfdata_splits",
    "Split": "pipeline",
    "load": "registry",
    "locate": "registry",
}
__all__ = sorted(_HOME)
__getattr__ = lazily(__name__, _HOME)
