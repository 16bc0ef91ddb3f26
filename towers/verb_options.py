"""The options of the verbs that take more than those of a run, or others."""

import dataclasses

from towers.errors import InputError
from towers.fields import option, parse_numbers
from towers.options import Options

PEERS = (
    "mirrored", "mirrored_own_layers", "mirrored_fit", "fit", "torch_ddp", "jax", "session",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ListOptions(Options):
    """The options of a run, but for a list of numbers of towers."""

    num_towers: str = option("1,2,4", "Towers", "Numbers of towers.", alias="num_gpus")

    def __post_init__(self) -> None:
        """Refuse values out of range, by the flag's name.

        Raises:
            InputError: one line: what was given and what is allowed.
        """
        super().__post_init__()
        if self.variables == "auto":
            raise InputError(
                "--variables=auto is a run's own trial: name cpu, sharded or replicated here"
            )
        self.tower_numbers()

    def tower_numbers(self) -> list[int]:
        """Return `num_towers` as numbers.

        Raises:
            InputError: a part is no whole number of at least 1, or they do not rise.
        """
        numbers = parse_numbers("num_towers", self.num_towers)
        if not all(number >= 1 and number == int(number) for number in numbers):
            raise InputError(
                f"--num_towers={self.num_towers}: whole numbers of at least 1 are needed, as 1,2,4"
            )
        return [int(number) for number in numbers]


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


@dataclasses.dataclass(frozen=True)
class PlanOptions(Options):
    """What `towers plan` reckons: the options of a run, and the GPUs that it is meant for."""

    num_towers: int = option(
        0, "Towers", "Towers of the run, each on a GPU that need not be there; 0: 8.", minimum=0,
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
    measure: bool = option(
        True, "Plan", "Make a few steps on this machine, and say how far predicted ones are off."
    )


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
