"""The command line's flags: one for each field of `Options`, parsed by absl.

They live in a `FlagValues` of their own, so that importing this module defines no flag in anybody's
program; and it imports no TensorFlow, so that help and usage errors answer at once.
"""

import dataclasses
import difflib
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from towers import files
from towers.commands.benchmark.options import BenchmarkOptions
from towers.commands.compare.options import CompareOptions
from towers.commands.plan.options import PlanOptions
from towers.commands.sweep.options import SweepOptions
from towers.commands.tensorboard.options import TensorboardOptions
from towers.commands.verify.options import VerifyOptions
from towers.errors import InputError
from towers.options.gpu import GpuOptions
from towers.options.run import Options

# Which flags a verb takes on its command line. In a flagfile each verb takes all, so that one file
# serves training and whatever is done with the run afterwards.
VERBS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "train": ("train a model over towers, or continue a run", None),
    "evaluate": (
        "evaluate the newest checkpoint of a run on the test set",
        tuple("train_dir json dataset data_dir image_size batch_size dtype".split())
        + ("num_towers", "devices")
        + tuple(field.name for field in dataclasses.fields(GpuOptions)),
    ),
    "verify": ("prove on your model that N towers compute what one device computes", None),
    "benchmark": ("measure speed, scaling and where a step's time goes, also beside others", None),
    "plan": ("say before a run how it would scale on GPUs: bytes, memory, step times", None),
    "doctor": (
        "check this machine: versions, GPUs, memory, computing, data, folders",
        tuple("train_dir json dataset data_dir visible_gpus".split()),
    ),
    "sweep": (
        "train a run for each combination of flags, and say which is best",
        tuple(
            field.name
            for field in dataclasses.fields(SweepOptions)
            if field.name not in ("train_dir", "overwrite")
        ),
    ),
    "compare": ("show what runs differ in: flags, results, time to an accuracy, curves", None),
    "tensorboard": ("show a run, or a folder of runs, in TensorBoard", ("train_dir", "port")),
}

_FIELDS = {field.name: field for field in dataclasses.fields(Options)}
# More than, or other than, the options of a run.
_OF_VERB = {
    "verify": VerifyOptions,
    "benchmark": BenchmarkOptions,
    "plan": PlanOptions,
    "tensorboard": TensorboardOptions,
    "sweep": SweepOptions,
    "compare": CompareOptions,
}
_ALIASES = {f.metadata["alias"]: n for n, f in _FIELDS.items() if "alias" in f.metadata}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def parse(verb: str, argv: Sequence[str]) -> Options:
    """Return the options that a verb's command line gives.

    Args:
        verb: one of VERBS.
        argv: what stands after the verb.

    Raises:
        InputError: one line, for an unknown flag, a value of the wrong kind or out of range, a
            flagfile that cannot be read, or an argument that is no flag.
    """
    values = _define(verb)
    _set(values, argv, verb)
    if verb == "evaluate":  # what the run was trained with, then what is given now
        train_dir, values = values["train_dir"].value, _define(verb)
        _set(values, [*_flags_of_run(train_dir), f"--train_dir={train_dir}", *argv], verb)
    given = {name: values[name].value for name in _fields(verb)}
    return _class_of(verb)(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    )


def option_name(flag: str) -> str:
    """Return the name of the option of a run that a flag sets, an alias or not.

    Raises:
        InputError: there is no such flag.
    """
    if flag not in _FIELDS and flag not in _ALIASES:
        raise InputError(_unknown("train", flag))
    return _ALIASES.get(flag, flag)


def option_type(name: str) -> type:
    """Return what the values of an option of a run are: int, float, bool or str."""
    return _FIELDS[name].type


def parse_value(name: str, text: str) -> Any:
    """Return the value that `text` means for an option of a run; its range is not checked.

    Raises:
        InputError: it is not of the option's kind.
    """
    values = _define("train")
    _set(values, [f"--{name}={text}"], "train")
    return values[name].value


def _class_of(verb: str) -> type[Options]:
    return _OF_VERB.get(verb, Options)


def _fields(verb: str) -> dict[str, dataclasses.Field]:
    """Return the options of a verb by name."""
    return {field.name: field for field in dataclasses.fields(_class_of(verb))}


def _positional(verb: str) -> dataclasses.Field | None:
    """Return the option that arguments without a flag go to, if there is one."""
    return next((f for f in _fields(verb).values() if "positional" in f.metadata), None)


def _negations(verb: str) -> dict[str, str]:
    """Return {"nojson": "json"} for each option that is true or false."""
    return {f"no{name}": name for name, field in _fields(verb).items() if field.type is bool}


def _define(verb: str) -> flags.FlagValues:
    """Return the flags of a verb with their defaults."""
    values = flags.FlagValues()
    for field in _fields(verb).values():
        define = {
            bool: flags.DEFINE_boolean,
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            str: flags.DEFINE_string,
            tuple: flags.DEFINE_multi_string,  # may be given several times
        }[field.type]
        define(field.name, field.default, field.metadata["help"], flag_values=values)
    for alias, name in _ALIASES.items():
        if name in values:
            flags.DEFINE_alias(alias, name, flag_values=values)
    return values


def _set(
    values: flags.FlagValues, argv: Sequence[str], verb: str, opened: tuple[str, ...] = ()
) -> None:
    """Set flags from arguments, those of a flagfile in its place: what comes later wins.

    absl reads the values. Its own reading of arguments would ignore a flagfile that includes itself
    and whatever --undefok says, and take the next flag for a value that is missing.

    Args:
        values: what is set.
        argv: the arguments.
        verb: which flags are allowed, and for messages.
        opened: the flagfiles that the arguments stand in, outermost first; none: the command line.
    """
    waiting, positional = list(argv), _positional(verb)
    while waiting:
        argument = waiting.pop(0)
        match = re.fullmatch(r"--?([^-=][^=]*)(?:=(.*))?", argument, re.DOTALL)
        if positional and not opened and argument[:1] not in ("", "-"):
            values[positional.name].parse(os.path.expanduser(argument))
            continue
        if not match:
            raise InputError(f"unexpected argument {argument!r}: flags are written --name=value")
        name, value = match.groups()
        if name in _negations(verb) and value is None:
            name, value = _negations(verb)[name], "false"
        if (name not in values and name != "flagfile") or (positional and name == positional.name):
            raise InputError(_unknown(verb, name))
        if not opened:
            _check_taken(verb, name)
        if value is None and name in values and values[name].boolean:
            value = "true"
        if value is None:
            if not waiting or waiting[0].startswith("--"):
                raise InputError(f"--{name} needs a value: --{name}=...")
            value = waiting.pop(0)
        if name == "flagfile":
            _set_from_file(values, value, verb, opened)
            continue
        if name in ("train_dir", "sweep_dir"):
            value = os.path.expanduser(value)  # a shell leaves the ~ of --train_dir=~/runs alone
        try:
            values[name].parse(value)
        except flags.IllegalFlagValueError:
            kind = _KINDS[_fields(verb)[_ALIASES.get(name, name)].type]
            raise InputError(f"--{name}={value}: {kind} is needed") from None


def _set_from_file(values: flags.FlagValues, name: str, verb: str, opened: tuple[str, ...]) -> None:
    """Set flags from the lines of a flagfile; messages name the file and the line."""
    path = os.path.expanduser(name)
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.readlines()
    except OSError as error:
        raise InputError(f"--flagfile={name} cannot be read: {error.strerror}") from None
    except ValueError:
        raise InputError(f"--flagfile={name} cannot be read: it is no text in UTF-8") from None
    path = os.path.realpath(path)
    if path in opened:
        raise InputError(f"--flagfile={name}: a flagfile cannot include itself")
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith(("#", "//")):
            try:
                _set(values, [line], verb, (*opened, path))
            except InputError as error:
                raise InputError(f"{name}, line {number}: {error}") from None


def _flags_of_run(train_dir: str) -> list[str]:
    """Return the flag that reads the run's flags.cfg.

    Raises:
        InputError: the folder holds no run.
    """
    folder = Path(train_dir)
    try:
        if files.is_run(folder):
            path = folder / "flags.cfg"
            return [f"--flagfile={path}"] if path.exists() else []
    except OSError as error:
        raise InputError(f"--train_dir={train_dir}: {error.strerror}") from None
    raise InputError(
        f"--train_dir={train_dir}: there is no run; train first, or name the folder of a run"
    )


def _check_taken(verb: str, name: str) -> None:
    """Refuse a flag that the verb would ignore."""
    allowed = VERBS[verb][1]
    name = _ALIASES.get(name, name)
    if allowed is not None and name in _FIELDS and name not in allowed:
        if verb == "sweep":
            raise InputError(f"towers sweep takes no --{name}: runs lie in --sweep_dir")
        rest = ", and the rest from the run's flags.cfg" if verb == "evaluate" else ""
        takes = ", ".join(f"--{a}" for a in allowed)
        raise InputError(f"towers {verb} takes no --{name}: it takes {takes}{rest}")


def _unknown(verb: str, name: str) -> str:
    """Return the message for an unknown flag, with the nearest that exists."""
    negations = _negations(verb)
    if name in negations:
        return f"--{name} takes no value; did you mean --{negations[name]}=...?"
    names = [name for name, field in _fields(verb).items() if field != _positional(verb)]
    known = [*names, *_ALIASES, *negations, "flagfile"]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean --{close[0]}?" if close else f"see towers {verb} --help"
    return f"there is no flag --{name}; {hint}"


def main_help(version: str) -> str:
    """Return what `towers --help` prints."""
    verbs = "\n".join(f"  {verb:10} {text}" for verb, (text, _) in VERBS.items())
    return (
        f"towers {version}: data-parallel training, the same numbers at any number of towers\n\n"
        f"usage: towers VERB [--flagfile=FILE] [--flag=value ...]\n\n{verbs}\n\n"
        "towers VERB --help lists the flags of a verb. A first run:\n\n"
        "  towers train --num_towers=2 --num_epochs=1 --train_dir=runs/first\n"
    )


def verb_help(verb: str) -> str:
    """Return what `towers VERB --help` prints: the flags in groups, with their defaults."""
    text, allowed = VERBS[verb]
    positional = _positional(verb)
    words = f"{verb} {positional.metadata['positional']}" if positional else verb
    usage = f"usage: towers {words} [--flagfile=FILE] [--flag=value ...]"
    lines = [f"towers {verb}: {text}", "", usage]
    examples = getattr(_class_of(verb), "EXAMPLES", "")
    lines += ["", *examples.splitlines()] if examples else []
    if verb == "evaluate":
        lines.append("What is not given is as in the run's flags.cfg.")
    groups: dict[str, list[dataclasses.Field]] = {}
    for name, field in _fields(verb).items():
        if (allowed is None or name in allowed) and field != positional:
            groups.setdefault(field.metadata["group"], []).append(field)
    for group, fields in groups.items():
        lines += ["", group]
        for field in fields:
            lines += _flag_help(field)
    return "\n".join(lines) + "\n"


def _flag_help(field: dataclasses.Field) -> list[str]:
    """Return the lines of one flag: name and default, then what it means."""
    default = str(field.default).lower() if field.type is bool else field.default
    default = f"{default:g}" if field.type is float else default
    default = "" if field.type is tuple else default
    name = f"  --{field.name}={default}"
    text = field.metadata["help"]
    if field.metadata.get("choices"):
        text += f" One of {', '.join(field.metadata['choices'])}."
    if "alias" in field.metadata:
        text += f" Also --{field.metadata['alias']}."
    wrapped = textwrap.wrap(text, 100 - 34)
    if len(name) > 32:
        return [name, *(" " * 34 + line for line in wrapped)]
    return [f"{name:34}{wrapped[0]}", *(" " * 34 + line for line in wrapped[1:])]
