"""The options of `towers verify`."""

import dataclasses

from towers.options.fields import CheckedOptions, option
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class VerifyOptions(CheckedOptions):
    """Options of `towers verify`: a run, numbers of towers, and how many steps of it."""

    run: Options = Options()
    num_towers: str = option(
        "1,2,3,4", "Verify", "Numbers of towers to compare with one device. The default leaves out "
        "numbers for which there are not enough GPUs.", alias="num_gpus", numbers=True,
    )  # fmt: skip
    steps: int = option(10, "Verify", "Training steps to compare.", minimum=1)
