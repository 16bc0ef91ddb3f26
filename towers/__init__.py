"""Towers: data-parallel training in one explicit pattern.

A tower is one copy of the model function on one device. The builder makes the copies and gathers
what they return with `tf.add_n`; the rest of the package trains with it from the command line.

    import towers

    builder = towers.TowerBuilder(["/gpu:0", "/gpu:1"])
    loss, gradients = builder.gradients(loss_fn, model.trainable_variables, images, labels)

    result = towers.train(model=build, dataset=data, num_towers=2, train_dir="runs/mine")
    model = towers.load("runs/mine", model=build)

Importing this package imports no TensorFlow, defines no flag and touches no device: the names
below, and those of `devices`, are loaded when they are first used.
"""

import os
import sys

if sys.platform != "linux":
    raise ImportError("towers needs Linux. On Windows, use WSL 2; on macOS, use a Linux container.")

from towers import devices as devices  # noqa: E402
from towers.options.lazy import lazily

# Room for all kernels that the driver compiles. CUDA reads it once, when a program makes its first
# tensor, which may be long before it calls towers.
os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 * 2**30))
__version__ = "0.1.0"
_HOME = {
    "InputError": "errors",
    "Options": "options.run",
    "PerTower": "builder.sharding",
    "RunError": "errors",
    "TowerBuilder": "builder.tower",
    "callbacks": "training.callbacks",
    "evaluate": "training.evaluate",
    "load": "training.load",
    "parallelize": "training.parallelize",
    "train": "training.train",
    "verify": "commands.verify.fit",
}
__all__ = sorted([*_HOME, "devices"])
__getattr__ = lazily(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
