"""The options of `towers benchmark`."""

import dataclasses

from towers.errors import InputError
from towers.options.fields import check_values, option, parse_tower_numbers
from towers.options.run import Options

PEERS = "mirrored mirrored_own_layers mirrored_fit fit towers_fit torch_ddp session".split()


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions:
    """Options of `towers benchmark`: a run, its numbers of towers, other programs, seconds."""

    run: Options = Options()
    dataset: str = option(
        "synthetic", "Benchmark", "synthetic (one random batch, nothing is read or augmented), or "
        "what train takes: then its reading and augmentation are measured, too.",
    )  # fmt: skip
    num_towers: str = option(
        "", "Benchmark", "Numbers of towers, as 1,2,4. None given: 1 and all GPUs, or without any "
        "GPU 1,2,4.", alias="num_gpus",
    )  # fmt: skip
    against: str = option(
        "", "Benchmark", "Programs that train the same model beside it, with commas: "
        f"{', '.join(PEERS)}."
    )  # fmt: skip
    windows: int = option(5, "Benchmark", "Turns that each configuration gets.", minimum=1)
    seconds: float = option(
        2.0, "Benchmark", "Length of a turn, at least.", minimum=0.01, maximum=3600
    )

    def __post_init__(self) -> None:
        """Raise InputError for a value out of range."""
        check_values(self)
        parse_tower_numbers(self.num_towers)
        for name in self.peers():
            if name not in PEERS:
                raise InputError(
                    f"--against={self.against}: {name!r} is unknown; allowed are {', '.join(PEERS)}"
                )

    def peers(self) -> list[str]:
        """Return the names in `against`, each once."""
        names = self.against.split(",") if self.against else []
        return list(dict.fromkeys(map(str.strip, names)))
