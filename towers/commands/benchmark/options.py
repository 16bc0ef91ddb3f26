"""The options of `towers benchmark`."""

import dataclasses

from towers.errors import InputError
from towers.options.fields import option
from towers.options.lists import ListOptions

PEERS = (
    "mirrored", "mirrored_own_layers", "mirrored_fit", "fit", "torch_ddp", "jax", "session",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions(ListOptions):
    """What `towers benchmark` measures: the options of a run, beside what, and how long."""

    dataset: str = option(
        "synthetic", "Data", "synthetic (one random batch, nothing is read or augmented), or what "
        "train takes: then its reading and augmentation are measured, too.",
    )  # fmt: skip
    num_towers: str = option(
        "", "Towers", "Numbers of towers, as 1,2,4. None given: 1 and all GPUs, or without any GPU "
        "1,2,4.", alias="num_gpus",
    )  # fmt: skip
    against: str = option(
        "", "Benchmark", "Programs that train the same model beside it, with commas: "
        f"{', '.join(PEERS)}."
    )  # fmt: skip
    windows: int = option(5, "Benchmark", "Turns that each configuration gets.", minimum=1)
    seconds: float = option(
        2.0, "Benchmark", "Length of a turn, at least.", minimum=0.01, maximum=3600
    )
    plot: str = option("", "Benchmark", "PNG file for a picture of the result.")

    def __post_init__(self) -> None:
        """Refuse values out of range, by the flag's name.

        Raises:
            InputError: one line: what was given and what is allowed.
        """
        super().__post_init__()
        self.peers()
        if self.plot and not self.plot.lower().endswith(".png"):
            raise InputError(f"--plot={self.plot}: a name that ends in .png is needed")

    def peers(self) -> list[str]:
        """Return `against` as names.

        Raises:
            InputError: a name is unknown, or given twice.
        """
        names = [name.strip() for name in self.against.split(",")] if self.against else []
        for name in names:
            if name not in PEERS:
                raise InputError(
                    f"--against={self.against}: {name!r} is unknown; allowed are {', '.join(PEERS)}"
                )
        if len(set(names)) < len(names):
            raise InputError(f"--against={self.against}: each name once")
        return names
