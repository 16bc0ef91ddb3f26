"""Options as fields of frozen dataclasses: default, group, help and range."""

import dataclasses
import difflib
import numbers
from collections.abc import Callable
from typing import Any

from towers.errors import InputError

# Groups of options of which at most one may be set.
EXCLUSIVE = (
    ("clip_norm", "clip_value", "clip_global_norm"),
    ("per_process_gpu_memory_fraction", "gpu_memory_limit_mib", "allow_growth"),
)


def option(default: Any, group: str, help: str, affects: str = "result", **metadata: Any) -> Any:
    """Return the dataclass field of an option.

    Args:
        default: the default value.
        group: heading of its help.
        help: its help text.
        affects: what another value changes. "result": what the run computes, so that it is another
            run. "speed". "machine": the resources it uses. "report": what it shows and keeps, and
            when. "call": only where and how it is called this time.
        **metadata: "minimum", "maximum", "choices", "example" of a value, "alias" of the flag.
            "own" if a module:function is allowed too, "numbers" for a string of comma-separated
            numbers, "required" for the message if there is no value.
    """
    about = dict(group=group, help=help, affects=affects, **metadata)
    return dataclasses.field(default=default, metadata=about)


def group(name: str, **metadata: Any) -> Callable[..., Any]:
    """Return a version of `option` for a group; arguments of a single option replace these."""
    return lambda default, help, **extra: option(default, name, help, **metadata | extra)


def check_values(options: Any) -> None:
    """Raise InputError if a value in a dataclass of options is not allowed."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if "required" in field.metadata and not value:
            raise InputError(field.metadata["required"])
        check_value(field, value)
    for names in EXCLUSIVE:
        flags = [f"--{name}" for name in names if getattr(options, name, None)]
        if len(flags) > 1:
            raise InputError(f"{flags[0]} and {flags[1]} exclude each other; give only one of them")


class CheckedOptions:
    """Base class of dataclasses of options that need no other checks than `check_values`."""

    def __post_init__(self) -> None:
        """Raise InputError for a value that is not allowed."""
        check_values(self)


def check_value(field: dataclasses.Field, value: Any) -> None:
    """Raise InputError if a value is not allowed by a field's metadata, see `option`."""
    choices, takes_function = field.metadata.get("choices"), field.metadata.get("own")
    if choices and value not in choices and not (takes_function and ":" in value):
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        allowed = [*choices, *(["module:function"] if takes_function else [])]
        raise InputError(f"--{field.name}={value}: allowed are {', '.join(allowed)}{hint}")
    if field.type in (int, float):
        _check_number(field, value)
    elif not isinstance(value, field.type):
        kind = "a string" if field.type is str else "True or False"
        if field.name in ("model", "dataset"):
            kind = "a function, or its name as module:function,"
        raise InputError(f"{field.name}={value!r}: {kind} is needed")
    elif field.type is str:
        if field.default and not value:
            raise InputError(
                f"--{field.name}= is empty; give a value, such as --{field.name}={field.default}"
            )
        if value.startswith("--"):  # the next flag: this one has no value
            raise InputError(f"--{field.name} needs a value: --{field.name}=...")
        if value != value.strip() or not value.isprintable():  # flags.cfg could not hold it
            raise InputError(
                f"--{field.name}={value!r}: UTF-8 text in one line without spaces around is needed"
            )
        if field.metadata.get("numbers"):
            parse_numbers(field.name, value)


def _check_number(field: dataclasses.Field, value: Any) -> None:
    kind = "a whole number" if field.type is int else "a number"
    types = (numbers.Integral, field.type)
    if not isinstance(value, types) or isinstance(value, bool) or not abs(value) < float("inf"):
        shown = repr(value) if isinstance(value, str) else value
        raise InputError(f"--{field.name}={shown}: {kind} is needed")
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        example = field.metadata.get("example")
        such_as = f", such as --{field.name}={example}" if example else ""
        raise InputError(f"--{field.name}={value}: {kind} {limits} is needed{such_as}")


def parse_tower_numbers(text: str) -> list[int]:
    """Parse --num_towers: increasing integers of at least 1, separated by commas."""
    numbers = parse_numbers("num_towers", text)
    if not all(number >= 1 and number == int(number) for number in numbers):
        raise InputError(f"--num_towers={text}: type whole numbers of at least 1, such as 1,2,4")
    return [int(number) for number in numbers]


def parse_numbers(name: str, text: str) -> list[float]:
    """Parse increasing, non-negative numbers, separated by commas.

    Args:
        name: of the option, for messages.
        text: its value; "": no numbers.

    Raises:
        InputError: the value is no such list.
    """
    try:
        values = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        values = [float("nan")]
    if not all(0 <= value < float("inf") for value in values):
        raise InputError(f"--{name}={text}: type numbers separated by commas, such as 80,120")
    if values != sorted(set(values)):
        raise InputError(f"--{name}={text}: each number must be larger than the one before")
    return values
