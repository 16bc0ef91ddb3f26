"""The options of `towers verify`."""

import dataclasses

from towers.options.fields import check_values, option, parse_tower_numbers
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """Options of `towers verify`: a run, numbers of towers, and how many steps of it."""

    run: Options = Options()
    num_towers: str = option(
        "1,2,3,4", "Verify", "Numbers of towers to compare with one device. The default leaves out "
        "numbers for which there are not enough GPUs.", alias="num_gpus",
    )  # fmt: skip
    steps: int = option(10, "Verify", "Training steps to compare.", minimum=1)

    def __post_init__(self) -> None:
        """Raise InputError for a value out of range."""
        check_values(self)
        parse_tower_numbers(self.num_towers)
