"""The options of `towers benchmark`."""

import dataclasses

from towers.options.fields import CheckedOptions, option
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions(CheckedOptions):
    """Options of `towers benchmark`: a run, its numbers of towers, seconds."""

    run: Options = Options()
    dataset: str = option(
        "synthetic", "Benchmark",
        "synthetic: one random batch. Any other data set of train adds reading and augmentation.",
    )  # fmt: skip
    num_towers: str = option(
        "", "Benchmark", "Numbers of towers, such as 1,2,4. Default: 1 and the number of GPUs, or "
        "1,2,4 if there is no GPU.", alias="num_gpus", numbers=True,
    )  # fmt: skip
    windows: int = option(5, "Benchmark", "How often to measure each configuration.", minimum=1)
    seconds: float = option(
        2.0, "Benchmark", "Shortest time of one measurement.", minimum=0.01, maximum=3600
    )
