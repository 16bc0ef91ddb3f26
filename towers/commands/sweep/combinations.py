"""Which runs a sweep is made of: pure functions of its options, so that a restart finds the same.

In use:

    varied = parse_all(["learning_rate:0.05,0.1", "seed:1,2"])
    runs = plan(options)        # [PlannedRun("learning_rate=0.05,seed=1", {...}, Options(...)), ..]
"""

import dataclasses
import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towers.commands.sweep.options import SweepOptions
from towers.errors import InputError
from towers.options import flags
from towers.options.run import Options

OWN = ("train_dir", "overwrite", "json", "flagfile")  # which the sweep gives each run
MAX_NAME = 100  # characters, for people; a file system takes 255 bytes
MAX_RUNS = 10**5
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"(log)?(\()?\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(\))?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Varied:
    """A flag that is varied: over a list of values, or a range.

    Attributes:
        flag: its name.
        values: of the list; () for a range.
        low: least value of the range.
        high: greatest value of the range.
        log: whether the range is drawn from evenly in the logarithm.
    """

    flag: str
    values: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False

    def draw(self, where: float) -> Any:
        """Return the value at `where`, from 0 to 1 without 1; floats have 4 digits.

        So few digits that names can be read and typed; what rounding takes out of the range goes
        back to its end.
        """
        if self.values:
            return self.values[int(where * len(self.values))]
        whole = isinstance(self.low, int)
        low, high = self.low, self.high + whole  # whole numbers: the highest has its part, too
        if self.log:
            value = math.exp(math.log(low) + where * (math.log(high) - math.log(low)))
        else:
            value = low + where * (high - low)
        value = math.floor(value) if whole else float(f"{value:.4g}")
        return min(max(value, self.low), self.high)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep.

    Attributes:
        name: of its folder in the sweep's.
        flags: {flag: value} of those that are varied.
        options: all of it.
    """

    name: str
    flags: Mapping[str, Any]
    options: Options


def plan(options: SweepOptions) -> list[PlannedRun]:
    """Return the runs of a sweep, in the order in which they are to be made.

    Raises:
        InputError: one line: a value is not of the flag's kind, or a combination is no valid run.
    """
    varied = parse_all(options.vary)
    if options.samples:
        combinations = sample(varied, options.samples, options.sweep_seed)
    else:
        combinations = grid(varied)
    runs = {}
    for combination in combinations:
        name = name_of(combination)
        try:
            run = options.of_run(
                **combination, train_dir=f"{options.sweep_dir}/{name}", overwrite=False, json=False
            )
        except InputError as error:
            raise InputError(f"the run {describe(combination)}: {error}") from None
        runs[name] = PlannedRun(name, combination, run)
    return list(runs.values())


def parse_all(texts: Sequence[str]) -> list[Varied]:
    """Return what all --vary mean.

    Raises:
        InputError: one of them is malformed, or a flag is varied twice.
    """
    varied = [parse(text) for text in texts]
    names = [v.flag for v in varied]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--vary={name}:... is given twice: write all its values in one")
    return varied


def parse(text: str) -> Varied:
    """Return what one --vary means.

    Args:
        text: FLAG:v1,v2 or FLAG:v1;v2 or FLAG:low..high or FLAG:log(low..high).

    Raises:
        InputError: one line: it is malformed, or a value is not of the flag's kind.
    """
    given = f"--vary={text}"
    flag, colon, values = text.partition(":")
    flag = flag.strip().lstrip("-")
    if not colon:
        raise InputError(f"{given}: FLAG:VALUE,VALUE is needed, as --vary=learning_rate:0.05,0.1")
    if flag in OWN:
        raise InputError(f"{given}: the sweep gives each run its own --{flag}")
    try:
        flag = flags.option_name(flag)
        kind = flags.option_type(flag)
        match = _RANGE.fullmatch(values.strip()) if kind in (int, float) else None
        if match and bool(match[2]) == bool(match[5]) == bool(match[1]):
            return _range(flag, match)
        return Varied(flag, _list(flag, values, kind))
    except InputError as error:
        raise InputError(f"{given}: {error}") from None


def _list(flag: str, text: str, kind: type) -> tuple[Any, ...]:
    """Return the values of a list: between semicolons if there is one, else between commas."""
    separator = ";" if ";" in text else ","
    parts = text.split(separator)
    if separator == ";" and len(parts) > 1 and not parts[-1].strip():
        parts.pop()  # which ends a single value that has commas
    if kind is not str and ".." in text:
        raise InputError("a range is LOW..HIGH or log(LOW..HIGH) alone, of a flag that is a number")
    values = [flags.parse_value(flag, part.strip()) for part in parts]
    for value in values:
        if values.count(value) > 1:
            raise InputError(f"{text_of(value)} is given twice")
    return tuple(values)


def _range(flag: str, match: re.Match) -> Varied:
    """Return the range that `_RANGE` found."""
    low, high = (flags.parse_value(flag, part) for part in match.group(3, 4))
    if not -math.inf < low < high < math.inf:
        raise InputError("the first end of a range must be less than the second")
    if match[1] and low <= 0:
        raise InputError("the ends of a log range must be greater than 0")
    return Varied(flag, low=low, high=high, log=bool(match[1]))


def grid(varied: Sequence[Varied]) -> list[dict[str, Any]]:
    """Return all combinations, that of the last flag changing first.

    Raises:
        InputError: a flag has a range, or there are very many combinations.
    """
    for v in varied:
        if not v.values:
            raise InputError(
                f"--vary={v.flag} is a range: give the number of random combinations too, as "
                "--samples=20"
            )
    number = math.prod(len(v.values) for v in varied)
    if number > MAX_RUNS:
        raise InputError(f"these --vary give {number} combinations: take --samples=20 of them")
    names = [v.flag for v in varied]
    products = itertools.product(*(v.values for v in varied))
    return [dict(zip(names, values, strict=True)) for values in products]


def sample(varied: Sequence[Varied], number: int, seed: int) -> list[dict[str, Any]]:
    """Return different random combinations.

    Each draw depends on `seed`, its own number and the flag alone: a higher `number` keeps the
    first ones, and they are the same whenever the command is given.

    Raises:
        InputError: there are not so many.
    """
    found: dict[str, dict[str, Any]] = {}
    for combination in itertools.islice(_draws(varied, seed), 100 * number + 1000):
        found.setdefault(describe(combination), combination)
        if len(found) == number:
            return list(found.values())
    raise InputError(
        f"--samples={number}: only {len(found)} different combinations were found; give wider "
        f"ranges, or --samples={len(found)}"
    )


def _draws(varied: Sequence[Varied], seed: int) -> Iterator[dict[str, Any]]:
    """Yield random combinations, the same ones for the same seed."""
    for number in itertools.count():
        yield {v.flag: v.draw(random.Random(f"{seed} {number} {v.flag}").random()) for v in varied}


def describe(combination: Mapping[str, Any]) -> str:
    """Return "learning_rate=0.05,seed=1": by name, the seed last, however they were given."""
    names = sorted(combination, key=lambda name: (name == "seed", name))
    return ",".join(f"{name}={text_of(combination[name])}" for name in names)


def name_of(combination: Mapping[str, Any]) -> str:
    """Return the name of a folder: `describe`, if that is safe and short, else made so.

    A number made from the whole of it then tells it from others.
    """
    text = describe(combination)
    safe = re.sub(r"[^\w.=,+-]", "_", text, flags=re.ASCII)
    if safe == text and len(safe) <= MAX_NAME:
        return safe
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{safe[: MAX_NAME - 9]}-{digest}"


def text_of(value: Any) -> str:
    """Return a value as its flag takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
