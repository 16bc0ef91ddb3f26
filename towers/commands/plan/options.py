"""The options of `towers plan`."""

import dataclasses

from towers.options.fields import CheckedOptions, option
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class PlanOptions(CheckedOptions):
    """Options of `towers plan`: the run, and the number and memory of its GPUs."""

    run: Options = Options()
    num_towers: int = option(
        0, "Plan", "Towers of the run, each on a GPU that need not be there; 0: 8.", minimum=0,
        alias="num_gpus",
    )  # fmt: skip
    gpu_memory_gib: float = option(
        16.0, "Plan", "Memory of a GPU.", minimum=0.1, maximum=10**6, example=16
    )
