"""The options of `towers sweep`, and the runs that they describe, the same after a restart."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from towers.errors import InputError
from towers.options import flags
from towers.options.fields import CheckedOptions, option
from towers.options.run import Options, names_that_affect, text_of

RESERVED = (*names_that_affect("call"), "flagfile")  # which the sweep gives each run
MAX_NAME = 100  # characters, for people; a file system takes 255 bytes


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
      separate values that contain commas with semicolons; end a single one with a semicolon
A run is in sweep_dir/NAME, and its output in sweep_dir/NAME.log. The same command resumes a sweep
that was stopped. It keeps finished runs and tries failed ones again.
Exit codes: 0 all runs have finished; 1 a run failed; 2 bad input; 75 stopped, all is saved."""

    run: dict = dataclasses.field(default_factory=dict)
    vary: tuple = option(
        (), "Sweep", "A flag and its values, such as learning_rate:0.05,0.1. Repeat it to vary "
        "several flags.",
        required="towers sweep needs a flag to vary, such as --vary=learning_rate:0.05,0.1,0.2",
    )  # fmt: skip
    sweep_dir: str = option(
        "runs/sweep", "Sweep", "Folder of the sweep, with a folder for each run and sweep.json."
    )
    json: bool = option(
        False, "The run", Options.__dataclass_fields__["json"].metadata["help"], affects="call"
    )


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep."""

    name: str  # its folder in that of the sweep
    flags: Mapping[str, Any]  # the varied ones
    options: Options


def plan(options: SweepOptions) -> list[PlannedRun]:
    """Return the runs of a sweep, in the order in which to train them."""
    varied = [parse(text) for text in options.vary]
    names = [name for name, _ in varied]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"--vary={twice[0]}:... is given twice; write all values in one --vary")
    products = itertools.product(*(values for _, values in varied))  # the last one changes fastest
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


def parse(text: str) -> tuple[str, tuple[Any, ...]]:
    """Return the flag and the values of one --vary: FLAG:v1,v2 or FLAG:v1;v2."""
    flag, colon, values = (part.strip() for part in text.lstrip(" -").partition(":"))
    try:
        if not colon:
            raise InputError("type FLAG:VALUE,VALUE, such as --vary=learning_rate:0.05,0.1")
        if flag in RESERVED:
            raise InputError(f"the sweep sets --{flag} for each run; vary another flag")
        flag = flags.option_name(flag)
        parts = values.removesuffix(";").split(";" if ";" in values else ",")
        parsed = (flags.parse_value(flag, part.strip()) for part in parts)
        return flag, tuple(dict.fromkeys(parsed))
    except InputError as error:
        raise InputError(f"--vary={text}: {error}") from None


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
