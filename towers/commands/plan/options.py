"""The options of `towers plan`."""

import dataclasses

from towers.options.fields import check_picture, check_values, option
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What `towers plan` reckons: the options of a run, and the GPUs that it is meant for."""

    run: Options = Options()
    num_towers: int = option(
        0, "Plan", "Towers of the run, each on a GPU that need not be there; 0: 8.", minimum=0,
        alias="num_gpus",
    )  # fmt: skip
    gpu_memory_gib: float = option(
        16.0, "Plan", "Memory of a GPU.", minimum=0.1, maximum=10**6, example=16
    )
    gpu_tflops: float = option(
        19.5, "Plan", "10^12 operations a second of a GPU, as its maker says: 19.5 of an A100 in "
        "float32.", minimum=0.001, maximum=10**6,
    )  # fmt: skip
    gpu_utilisation: float = option(
        0.3, "Plan", "Part of that which the model reaches.", minimum=0.001, maximum=1
    )
    step_ms: float = option(
        0.0, "Plan", "Measured time of a step of one tower with its part of the batch, in place of "
        "the two flags above; 0: none.", minimum=0,
    )  # fmt: skip
    network_gbits: float = option(
        0.0, "Plan", "10^9 bits a second of each machine's network card, where towers stand on "
        "workers; 0: as timed copies to --workers tell, or else 1, 10 and 100.", minimum=0,
        example=25,
    )  # fmt: skip
    network_latency_us: float = option(
        0.0, "Plan", "Microseconds that a small tensor takes from a worker to the program; 0: as "
        "copies tell, or else 100.", minimum=0,
    )  # fmt: skip
    straggler_spread: float = option(
        0.05, "Plan", "How unequal the times of towers are, whose slowest all wait for: the "
        "standard deviation of their logarithms, 0.05 about 5 %.", minimum=0, maximum=2,
    )  # fmt: skip
    plot: str = option("", "Plan", "PNG file for a picture of the predictions.")
    measure: bool = option(
        True, "Plan", "Make a few steps on this machine, and say how far predicted ones are off."
    )

    def __post_init__(self) -> None:
        """Refuse values out of range, by the flag's name, in one line."""
        check_values(self)
        check_picture(self.plot)
