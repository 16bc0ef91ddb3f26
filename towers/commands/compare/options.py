"""The options of `towers compare`."""

import dataclasses
import math
from typing import ClassVar

from towers.errors import InputError
from towers.options.fields import check_values, copy_field, option
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Options of `towers compare`: the runs, their objective, and the value to reach."""

    EXAMPLES: ClassVar[str] = """\
Examples:
  towers compare runs/a runs/b
  towers compare runs/sweep --accuracy=0.7
  towers compare runs/a runs/b --monitor=val_auc --target_value=0.9
RUN is the folder of a run, or of a sweep, which stands for all its runs. The objective is that of
the moving average where a run has one. Seconds of training are examples by the speed at which they
went, point by point: start, evaluation, saving, and the time between a stop and the next start are
left out."""

    runs: tuple = option(
        (), "Compare", "Folders of runs or of sweeps.", positional="RUN...", required="towers "
        "compare needs the folders of runs: towers compare RUN RUN, or that of a sweep",
    )  # fmt: skip
    monitor: str = option(
        "", "Compare", "Metric by which runs are compared, such as loss or val_auc; max: or min: "
        "before it where that is not known. Default: the runs' own.",
    )  # fmt: skip
    target_value: str = option(
        "", "Compare", "Value of the objective to which times are given; default: the best that "
        "all reached.",
    )  # fmt: skip
    accuracy: float = option(
        0.0, "Compare", "Short for --monitor=accuracy --target_value=X.", minimum=0, maximum=1,
    )  # fmt: skip
    json: bool = copy_field(Options, "json")

    def __post_init__(self) -> None:
        """Raise InputError for a value out of range."""
        check_values(self)
        if self.accuracy:
            if self.monitor or self.target_value:
                other = "monitor" if self.monitor else "target_value"
                raise InputError(f"--accuracy and --{other}: give one of them")
            object.__setattr__(self, "monitor", "accuracy")
            object.__setattr__(self, "target_value", str(self.accuracy))
        try:
            known = math.isfinite(float(self.target_value or 0))
        except ValueError:
            known = False
        if not known:
            raise InputError(f"--target_value={self.target_value}: a number is needed")
