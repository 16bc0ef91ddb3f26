"""The options of `towers sweep`, and the runs that they describe, the same after a restart."""

import dataclasses
import hashlib
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from towers.errors import InputError
from towers.options import flags
from towers.options.fields import CheckedOptions, copy_field, option
from towers.options.run import Options, names_that_affect, text_of

RESERVED = (*names_that_affect("call"), "flagfile")  # which the sweep gives each run
MAX_NAME = 100  # characters, for people; a file system takes 255 bytes
_RANGE = re.compile(r"(log\()?(.+?)\.\.(.+)(?(1)\))")


@dataclasses.dataclass(frozen=True)
class SweepOptions(CheckedOptions):
    """Options of `towers sweep`: flags of the runs, which of them to vary, and where.

    `run` holds {flag: value}. It is checked together with each combination, since some flags need
    others, such as --schedule=step and --vary=decay_epochs:...
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
        required="towers sweep needs a flag to vary, as --vary=learning_rate:0.05,0.1,0.2",
    )  # fmt: skip
    samples: int = option(
        0, "Sweep", "Number of random combinations; 0: all combinations, of lists alone.",
        minimum=0, maximum=10**5,
    )  # fmt: skip
    sweep_dir: str = option(
        "runs/sweep", "Sweep", "Folder of the sweep: a folder for each run, and sweep.json."
    )
    parallel: int = option(
        1, "Sweep", "Number of runs at a time. Visible GPUs are dealt out evenly, so that none is "
        "shared; without GPUs the runs share the CPU.", minimum=1, maximum=1000,
    )  # fmt: skip
    json: bool = copy_field(Options, "json")


@dataclasses.dataclass(frozen=True)
class Varied:
    """A flag to vary: over a list of values, or over a range that includes both ends."""

    flag: str
    values: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False  # sample the range uniformly in the logarithm

    def draw(self, where: float) -> Any:
        """Return the value at `where` in [0, 1); floats are rounded to 4 digits, for names."""
        if self.values:
            return self.values[int(where * len(self.values))]
        whole = isinstance(self.low, int)
        low, high = self.low, self.high + whole  # an integer range includes its highest value
        value = low ** (1 - where) * high**where if self.log else low + where * (high - low)
        value = math.floor(value) if whole else float(f"{value:.4g}")
        return min(max(value, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep."""

    name: str  # its folder in that of the sweep
    flags: Mapping[str, Any]  # the varied ones
    options: Options


def plan(options: SweepOptions) -> list[PlannedRun]:
    """Return the runs of a sweep, in the order in which to train them."""
    varied = [parse(text) for text in options.vary]
    names = [v.flag for v in varied]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--vary={twice[0]}:... is given twice: write all its values in one")
    if options.samples:
        combinations = sample(varied, options.samples)
    elif ranges := [v.flag for v in varied if not v.values]:
        raise InputError(
            f"--vary={ranges[0]} is a range: give the number of random combinations too, as "
            "--samples=20"
        )
    else:  # all of them; the last flag changes fastest
        products = itertools.product(*(v.values for v in varied))
        combinations = [dict(zip(names, values, strict=True)) for values in products]
    gpus_asked = any(re.match(r"\s*-*num_gpus:", text) for text in options.vary)
    base = ({"devices": "gpu"} if gpus_asked else {}) | options.run
    runs = []
    for combination in combinations:
        name = name_of(combination)
        fixed = {"train_dir": f"{options.sweep_dir}/{name}", "overwrite": False, "json": False}
        try:
            runs.append(PlannedRun(name, combination, Options(**base | combination | fixed)))
        except InputError as error:
            raise InputError(f"the run {describe(combination)}: {error}") from None
    return runs


def parse(text: str) -> Varied:
    """Parse one --vary: FLAG:v1,v2 or FLAG:v1;v2 or FLAG:LOW..HIGH or FLAG:log(LOW..HIGH)."""
    flag, colon, values = (part.strip() for part in text.partition(":"))
    flag = flag.lstrip("-")
    try:
        if not colon:
            raise InputError("FLAG:VALUE,VALUE is needed, as --vary=learning_rate:0.05,0.1")
        if flag in RESERVED:
            raise InputError(f"the sweep gives each run its own --{flag}")
        flag = flags.option_name(flag)
        kind = flags.option_type(flag)
        match = _RANGE.fullmatch(values) if kind in (int, float) else None
        if match:
            low, high = (flags.parse_value(flag, n) for n in match.group(2, 3))
            if not -math.inf < low < high < math.inf:
                raise InputError("the first end of a range must be less than the second")
            if match[1] and low <= 0:
                raise InputError("the ends of a log range must be greater than 0")
            return Varied(flag, low=low, high=high, log=bool(match[1]))
        parts = values.removesuffix(";").split(";" if ";" in values else ",")
        parsed = (flags.parse_value(flag, part.strip()) for part in parts)
        return Varied(flag, tuple(dict.fromkeys(parsed)))
    except InputError as error:
        raise InputError(f"--vary={text}: {error}") from None


def sample(varied: Sequence[Varied], number: int) -> list[dict[str, Any]]:
    """Return distinct random combinations {flag: value}; a higher `number` keeps the first ones.

    Args:
        varied: flags to vary; a draw depends only on its own number and the flag.
        number: number of combinations.

    Raises:
        InputError: there are not so many combinations.
    """
    combinations: dict[str, dict[str, Any]] = {}
    for draw in range(100 * number + 1000):
        combination = {v.flag: v.draw(random.Random(f"0 {draw} {v.flag}").random()) for v in varied}
        combinations.setdefault(describe(combination), combination)
        if len(combinations) == number:
            return list(combinations.values())
    raise InputError(
        f"--samples={number}: only {len(combinations)} different combinations were found; give "
        f"wider ranges, or --samples={len(combinations)}"
    )


def describe(combination: Mapping[str, Any]) -> str:
    """Return "learning_rate=0.05,seed=1": sorted by name, the seed last."""
    names = sorted(combination, key=lambda name: (name == "seed", name))
    return ",".join(f"{name}={text_of(combination[name])}" for name in names)


def name_of(combination: Mapping[str, Any]) -> str:
    """Return the name of a folder: `describe`, with a digest if that is unsafe or long."""
    text = describe(combination)
    safe = re.sub(r"[^\w.=,+-]", "_", text, flags=re.ASCII)
    if safe == text and len(safe) <= MAX_NAME:
        return safe
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{safe[: MAX_NAME - 9]}-{digest}"
