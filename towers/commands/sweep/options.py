"""The options of `towers sweep`: those of a run, and which of them are varied."""

import dataclasses
from typing import ClassVar

from towers.errors import InputError
from towers.options.fields import check_values, option, same_option
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """What `towers sweep` runs: flags of the runs, what is varied of them, and where.

    `run` holds {flag: value}, which is checked with each combination: --schedule=step is whole only
    together with --vary=decay_epochs:...
    """

    EXAMPLES: ClassVar[str] = """\
Examples:
  towers sweep --flagfile=configs/quickstart.cfg --vary=learning_rate:0.05,0.1,0.2 --vary=seed:1,2
      a run for each of the 6 combinations, then a table, best first
  ... '--vary=model_args:depth=20,width=8;depth=32,width=8'
      values that contain commas stand between semicolons; one such value alone ends with one
  ... --samples=20 '--vary=learning_rate:log(0.01..0.3)' --vary=batch_size:64,128
      20 random combinations: of ranges LOW..HIGH, evenly or evenly in the logarithm, of whole
      numbers for a flag that takes those, and of lists. More --samples keep the first 20.
Runs lie in sweep_dir/NAME, with their output in sweep_dir/NAME.log. The same command goes on where
a sweep was stopped: what is finished is kept, what failed is tried again.
Exit codes: 0 all runs are finished; 1 a run failed; 2 bad input; 75 stopped, runs were saved."""

    run: dict = dataclasses.field(default_factory=dict)
    vary: tuple = option(
        (), "Sweep", "A flag of the run and its values, as learning_rate:0.05,0.1; give it once "
        "for each flag that is varied.",
    )  # fmt: skip
    samples: int = option(
        0, "Sweep", "Number of random combinations; 0: all combinations, of lists alone.",
        minimum=0, maximum=10**5,
    )  # fmt: skip
    sweep_seed: int = option(
        0, "Sweep", "Seed of the random combinations; the runs' own is --seed.", minimum=0
    )
    sweep_dir: str = option(
        "runs/sweep", "Sweep", "Folder of the sweep: a folder for each run, and sweep.json."
    )
    parallel: int = option(
        1, "Sweep", "Number of runs at a time. Visible GPUs are dealt out evenly, so that none is "
        "shared; without GPUs the runs share the CPU.", minimum=1, maximum=1000,
    )  # fmt: skip
    json: bool = same_option(Options, "json")

    def __post_init__(self) -> None:
        """Refuse values of the sweep's own options that are out of range, by an InputError."""
        check_values(self)
        if not self.vary:
            raise InputError(
                "towers sweep needs a flag to vary, as --vary=learning_rate:0.05,0.1,0.2"
            )
