"""The options of `towers tensorboard`."""

import dataclasses

from towers.options.fields import option
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class TensorboardOptions(Options):
    """What `towers tensorboard` shows, and where."""

    train_dir: str = option(
        "runs/train", "The run", "Folder of a run, or of several: that of a sweep."
    )
    port: int = option(
        6006, "TensorBoard", "Of its address on this machine; if 6006 is taken and none is given, "
        "the next free one; 0: any free one.", minimum=0, maximum=65535,
    )  # fmt: skip
