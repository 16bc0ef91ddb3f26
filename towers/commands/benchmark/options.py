"""The options of `towers benchmark`."""

import dataclasses

from towers.options.fields import check_values, option, parse_tower_numbers
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions:
    """Options of `towers benchmark`: a run, its numbers of towers, seconds."""

    run: Options = Options()
    dataset: str = option(
        "synthetic", "Benchmark",
        "synthetic (one random batch), or what train takes: reading and augmentation count, too.",
    )  # fmt: skip
    num_towers: str = option(
        "", "Benchmark", "Numbers of towers, as 1,2,4. None given: 1 and all GPUs, or without any "
        "GPU 1,2,4.", alias="num_gpus",
    )  # fmt: skip
    windows: int = option(5, "Benchmark", "Turns that each configuration gets.", minimum=1)
    seconds: float = option(
        2.0, "Benchmark", "Length of a turn, at least.", minimum=0.01, maximum=3600
    )

    def __post_init__(self) -> None:
        """Raise InputError for a value out of range."""
        check_values(self)
        parse_tower_numbers(self.num_towers)
