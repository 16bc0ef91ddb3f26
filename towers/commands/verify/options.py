"""The options of `towers verify`."""

import dataclasses

from towers.options.fields import option
from towers.options.lists import ListOptions


@dataclasses.dataclass(frozen=True)
class VerifyOptions(ListOptions):
    """What `towers verify` compares: the options of a run, and how much of it."""

    num_towers: str = option(
        "1,2,3,4", "Towers", "Numbers of towers that are compared with one device.",
        alias="num_gpus",
    )  # fmt: skip
    steps: int = option(10, "Verify", "Steps that are made and compared.", minimum=1)
    float32: bool = option(
        False, "Verify", "Compare in the run's own precision too, in units of its last place."
    )
