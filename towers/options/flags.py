"""The command line's flags: one for each option of a verb, also in flagfiles.

    options = flags.parse(["--flagfile=configs/quickstart.cfg", "--num_gpus=2"])     # of a run
    options = flags.parse(["--steps=3"], Verb("verify", options="mine:VerifyOptions"))

A verb's options are a dataclass of `option` fields. A verb that works on a run has a field
`run: Options`; its flags are its own fields and all other fields of `Options`. With `run: dict`
the run's flags are passed on as {name: value}, unchecked.

absl parses arguments and the lines of flagfiles, with flags that exist for one call only.
TensorFlow is not imported, so help and usage errors are printed at once.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import os
import pkgutil
import re
import stat
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from towers import files
from towers.errors import InputError, RunError, reason
from towers.options import code_trust
from towers.options.fields import EXCLUSIVE, check_value
from towers.options.functions import option_text
from towers.options.parts import MACHINES_OPTION, MANY_MACHINES
from towers.options.run import Options, text_of


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb of the command line, whose code is imported on demand."""

    name: str
    help: str = ""  # one line
    options: str = "towers.options.run:Options"  # "module:class"
    # Allowed options of a run, None: all. In a flagfile all are allowed, so that one file serves
    # training and every later use of the run.
    takes: Sequence[str] | None = None
    # {option that the verb does not take, and ignores in a flagfile: the reason}
    refuses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # When what is not given comes from the flags.cfg of the run in --train_dir: "" never; "always",
    # so that there must be one; "if_any": it may be a new run.
    run_flags: str = ""
    # "module:function", by default `run` in the verb's command.py. It is called with the options
    # and `say`, a function that prints a line, and returns the JSON of the verb.
    function: str = ""
    # How TensorFlow is started before: "" not at all, "import" only imported, "cpu" without GPUs,
    # "options" with the GPU options.
    tensorflow: str = ""
    # Returns exit code and line of an end by a signal, see `signals.Listener`; None: its own.
    stopping: Callable[[int], tuple[int, str]] | None = None

    def fields(self) -> dict[str, dataclasses.Field]:
        """Return {name: field} in the order of the help."""
        fields = {field.name: field for field in dataclasses.fields(self.options_class())}
        if "run" in fields:
            del fields["run"]
            fields |= {name: f for name, f in _RUN_FIELDS.items() if name not in fields}
        return fields

    def options_class(self) -> type:
        """Return the dataclass of the options."""
        return pkgutil.resolve_name(self.options)


_TRAIN = Verb("train")
_RUN_FIELDS = {field.name: field for field in dataclasses.fields(Options)}
_ALIASES = {f.metadata["alias"]: name for name, f in _RUN_FIELDS.items() if "alias" in f.metadata}
_DEFINE = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    tuple: flags.DEFINE_multi_string,
}
MANIFEST, RESULT = "manifest.json", "result.json"  # in the folder of a run
# What other programs call these flags.
_OF_OTHERS = {
    "num_processes": "num_towers", "nproc_per_node": "num_towers", "gpus": "num_gpus",
    "log_dir": "train_dir", "logdir": "train_dir", "output_dir": "train_dir",
    "model_dir": "train_dir", "epochs": "num_epochs", "lr": "learning_rate",
    "gradient_accumulation_steps": "accumulate_steps", "precision": "dtype",
}  # fmt: skip
# Another value of these makes another run, whose checkpoints do not fit.
IDENTITY = ("model", "model_args", "loss", "augment", "dataset")
_MOST_FLAGFILES, _MOST_BYTES = 100, 2**20  # of one command, which may name each other; of each
_OF_MACHINES = {f.name for f in dataclasses.fields(Options) if f.metadata["group"] == MANY_MACHINES}


def parse(argv: Sequence[str], verb: Verb = _TRAIN) -> Any:
    """Parse a verb's command line into its options.

    Args:
        argv: the arguments after the verb.
        verb: the verb; by default "train".

    Raises:
        InputError: for an unknown flag, a value of the wrong type or out of range, a flagfile that
            cannot be read, or an argument that is not a flag.
    """
    flagfiles: list[tuple[str, str]] = []
    values = _read_argv(argv, verb, flagfiles)
    typed = _read_argv(argv, verb, left_out=dict(flagfiles)) if flagfiles else values
    _check_taken(typed, verb)
    if values.get("trust") and not typed.get("trust"):
        path = next(path for path, text in flagfiles if "trust" in text)
        raise InputError(
            f"--flagfile={path} sets --trust, which must be typed; check the code that would run, "
            "then type --trust, or remove it from the file"
        )
    for path, text in flagfiles:
        if code_trust.is_foreign(path, text):
            values = _without_foreign(values, typed, path, text, verb)
    return _complete(values, verb)


def _without_foreign(
    values: dict[str, Any], typed: Mapping[str, Any], path: str, text: str, verb: Verb
) -> dict[str, Any]:
    """Return the values without what the flagfile of somebody else's run may not decide.

    `values` are those of the arguments and their flagfiles, `typed` those of the arguments alone.

    Raises:
        InputError: it sets the folder, moves a run aside, sets what no run has, or names code or
            machines.
    """
    fields = verb.fields()
    set_there = _read_argv([f"--flagfile={path}"], verb)
    theirs = {name: value for name, value in set_there.items() if value != fields[name].default}
    untyped = {name: value for name, value in theirs.items() if name not in typed}
    if not typed.get("trust"):
        code_trust.check(f"--flagfile={path}", text, untyped)
    of_user = fields.keys() - _RUN_FIELDS.keys() | {"train_dir", "overwrite"}
    for name in of_user & theirs.keys() - verb.refuses.keys():
        if name in typed:
            values = values | {name: typed[name]}
        elif os.path.abspath(text_of(theirs[name])) != os.path.dirname(os.path.abspath(path)):
            raise InputError(
                f"--flagfile={path} was not written by your towers on this machine, or was "
                f"changed, and sets --{name}={text_of(theirs[name])}; type --{name} yourself"
            )
    return values


def _complete(values: dict[str, Any], verb: Verb) -> Any:
    # `values` as the verb's options; the rest is as in the run's flags.cfg, if the verb reads it.
    if verb.run_flags and not (verb.run_flags == "if_any" and values.get("overwrite")):
        values = _options_of_run(values, verb) | values
    values = {name: value for name, value in values.items() if name not in verb.refuses}
    kind = verb.options_class()
    kinds = {field.name: field.type for field in dataclasses.fields(kind)}
    if kinds.get("num_towers") is str:  # a list, in place of the number in a run's flags.cfg
        number = text_of(values.pop("num_towers", 0))
        values |= {"num_towers": number} if number != "0" else {}
    if "run" in kinds:
        of_run = {name: values.pop(name) for name in values.keys() - kinds.keys()}
        values["run"] = kinds["run"](**of_run)
    return kind(**values)


def options_from_call(
    options: Options | None, fields: Mapping[str, Any], *, verb: str = "train"
) -> Options:
    """Return the options of a call such as `towers.train(model=build, num_towers=2)`.

    Args:
        options: base options; None: those in the flags.cfg of the run, if it exists.
        fields: {option or alias: value}, which replace them.
        verb: "train", which may start a new run, or another verb, which needs an existing one.

    Raises:
        InputError: an option does not exist, a value is not allowed, or there is no run.
    """
    values = {option_name(name): value for name, value in fields.items()}
    if fields.get("num_gpus"):
        _take_gpus_only(values)
    if isinstance(options, Options):
        options = dataclasses.replace(options, **values)
    elif options is not None:
        raise InputError(
            f"{options!r} is not a towers.Options; give options by name, the run's folder as "
            "train_dir=..."
        )
    else:
        for name, value in values.items():
            if _RUN_FIELDS[name].type is str:
                values[name] = option_text(name, value)
            check_value(_RUN_FIELDS[name], values[name])
        options = _complete(values, Verb(verb, run_flags="if_any" if verb == "train" else "always"))
    if verb == "train" and options.overwrite and _has_begun(options):
        return dataclasses.replace(options, overwrite=False)  # a job that is queued again
    return options


def _has_begun(options: Options) -> bool:
    """Return whether these options, with `--overwrite`, began the run that is there, unfinished."""
    folder = Path(options.train_dir)
    begun = files.read_json(folder / MANIFEST, {}).get("overwrite") == digest_of(options)
    return begun and not (folder / RESULT).exists()


def digest_of(options: Options) -> str:
    """Return a checksum of options."""
    return hashlib.sha256(options.to_flagfile().encode()).hexdigest()


def option_name(flag: str) -> str:
    """Return the option that a flag or alias sets; raise InputError if there is none."""
    name = _ALIASES.get(flag, flag)
    if name not in _RUN_FIELDS:
        close = difflib.get_close_matches(flag, [*_RUN_FIELDS, *_ALIASES], n=1)
        close = [_OF_OTHERS[flag]] if flag in _OF_OTHERS else close
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"there is no option {flag}{hint}")
    return name


def parse_value(name: str, text: str) -> Any:
    """Parse a value of a run's option as it is typed, see `parse`; its range is not checked."""
    return _read_argv([f"--{name}={text}"], _TRAIN)[name]


def _check_taken(typed: Iterable[str], verb: Verb) -> None:
    """Raise InputError for a flag that the verb would ignore; flagfiles may contain it."""
    for name in typed:
        reason = verb.refuses.get(name, "")
        if name in _RUN_FIELDS and name not in (verb.takes or _RUN_FIELDS):
            reason = f"it takes {', '.join(f'--{taken}' for taken in verb.takes)}"
            reason += ", and the rest from the run's flags.cfg" if verb.run_flags else ""
        if reason:
            raise InputError(f"towers {verb.name} takes no --{name}: {reason}")


def _with_flagfiles(
    argv: Iterable[str], flagfiles: list[tuple[str, str]], left_out: Container[str]
) -> Iterator[str]:
    """Yield arguments, with the lines of flagfiles in their places; see `_read_argv`."""
    arguments = iter(argv)
    for argument in arguments:
        match = re.fullmatch(r"--?flagfile(=.*)?", argument, re.DOTALL)
        if not match:
            yield argument
            continue
        path = match[1][1:] if match[1] else next(arguments, "")
        if not path:
            raise InputError("--flagfile needs a value: --flagfile=FILE")
        path = os.path.expanduser(path)
        if path in left_out:
            continue
        if len(flagfiles) == _MOST_FLAGFILES:
            raise InputError(f"--flagfile={path}: more than {_MOST_FLAGFILES} flagfiles")
        text = _read_text(path)
        flagfiles.append((path, text))
        lines = (line.strip() for line in text.split("\n"))
        lines = (line for line in lines if line and not line.startswith(("#", "//")))
        yield from _with_flagfiles(lines, flagfiles, left_out)


def _read_argv(
    argv: Sequence[str],
    verb: Verb,
    flagfiles: list[tuple[str, str]] | None = None,
    left_out: Container[str] = (),
) -> dict[str, Any]:
    """Return {option: value} of arguments and their flagfiles.

    Args:
        argv: the arguments.
        verb: whose flags they are.
        flagfiles: to which (path, text) of each that is read is added.
        left_out: paths of those that are not read.
    """
    fields, defined = verb.fields(), flags.FlagValues()
    positional = _positional(fields)
    defined.set_gnu_getopt()
    for name, field in fields.items():
        if name != positional:
            _DEFINE[field.type](name, None, "", flag_values=defined)
    for alias, name in _ALIASES.items():
        if name in fields:
            flags.DEFINE_alias(alias, name, flag_values=defined)
    flagfiles = [] if flagfiles is None else flagfiles
    try:
        others = defined(["towers", *_with_flagfiles(argv, flagfiles, left_out)])[1:]
    except (flags.Error, ValueError) as error:
        if name := _OF_OTHERS.get(getattr(error, "flagname", "")):
            error = f"there is no flag --{error.flagname}; did you mean --{name}?"
        raise InputError(str(error)) from None
    if others and not positional:
        raise InputError(f"unexpected argument {others[0]!r}; write flags as --name=value")
    given = {name: defined[name].value for name in fields if name != positional}
    values = {n: fields[n].type(value) for n, value in given.items() if value is not None}
    for name in values.keys() & {"train_dir", "sweep_dir"}:
        values[name] = os.path.expanduser(values[name])  # which a shell leaves alone after =
    if (
        "num_gpus" in defined
        and defined["num_gpus"].present
        and text_of(values["num_towers"]) != "0"
    ):
        _take_gpus_only(values)
    if others:
        values[positional] = tuple(map(os.path.expanduser, others))
    return values


def _take_gpus_only(values: dict[str, Any]) -> None:
    """Set the option `devices` as --num_gpus asks for; raise InputError if it names CPUs."""
    if values.get("devices", "any") == "any":
        values["devices"] = "gpu"
    if "cpu" in str(values["devices"]).lower():
        raise InputError(
            f"--num_gpus and --devices={values['devices']} exclude each other; type "
            f"--num_towers={values['num_towers']} for towers on the CPU"
        )


def _positional(fields: Mapping[str, dataclasses.Field]) -> str | None:
    return next((name for name, field in fields.items() if "positional" in field.metadata), None)


def _read_text(path: str) -> str:
    """Return the text of a flagfile; a pipe or a device, for which to wait, is none."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("is not a regular file")
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"is larger than {_MOST_BYTES} bytes")
        return content.decode()
    except (OSError, ValueError) as error:
        raise InputError(f"--flagfile={path}: {reason(error)}") from None


def read_flagfile(path: Path, flagfiles: list[tuple[str, str]] | None = None) -> dict[str, Any]:
    """Return {option: value} of a run's flags.cfg, trusted or not; see `_read_argv`."""
    return _read_argv([f"--flagfile={path}"], _TRAIN, flagfiles)


def _options_of_run(given: Mapping[str, Any], verb: Verb) -> dict[str, Any]:
    """Return {option: value} of the run in --train_dir that `given` does not replace."""
    train_dir = given.get("train_dir", Options.train_dir)
    path = Path(train_dir, "flags.cfg")
    try:
        is_run, has_flags = files.is_run(Path(train_dir)), path.exists()
    except OSError as error:
        raise InputError(f"--train_dir={train_dir}: {error.strerror}") from None
    if not is_run and verb.run_flags != "if_any":
        raise InputError(
            f"--train_dir={train_dir}: there is no run; train first, or name the folder of a run"
        )
    if not has_flags:
        return {}
    try:
        flagfiles: list[tuple[str, str]] = []
        of_run = read_flagfile(path, flagfiles)
        Options(**of_run)
    except InputError as error:
        raise InputError(
            f"{path} is damaged: {error}; repair it, or remove it and type the run's flags yourself"
        ) from None
    of_run = {n: v for n, v in of_run.items() if _RUN_FIELDS[n].metadata["affects"] != "call"}
    replaced = _replaced_options(of_run, given)
    if verb.run_flags == "always":  # the machines and GPUs of training may be gone
        replaced |= _OF_MACHINES | ({"devices"} if of_run.get("devices") == "gpu" else set())
        replaced.add("callbacks")  # whose module need not be there any more
    taken = {name: value for name, value in of_run.items() if name not in replaced}
    (_, text), *_ = flagfiles
    if not given.get("trust"):
        code = {name: value for name, value in taken.items() if name not in given}
        code_trust.check(f"--train_dir={train_dir}: its flags.cfg", text, code)
    elif not code_trust.is_own(text):  # sign what was read, if the folder is writable
        text = Options(**of_run, train_dir=train_dir).to_flagfile()
        with contextlib.suppress(RunError):
            files.write_text(path, code_trust.signed(text))
    return taken


def _replaced_options(of_run: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """Return the names of the run's options that contradict the given ones."""
    names = {n for group in EXCLUSIVE if any(map(given.get, group)) for n in group}
    if given.get("num_epochs"):
        names.add("max_steps")  # an earlier end; schedules follow num_epochs
    if given.get(MACHINES_OPTION):
        names |= {"num_towers", "devices"}
    if given.get("num_towers") or given.get("devices"):
        names |= _OF_MACHINES
    lists = [v.get("devices", "").lower() not in ("", "cpu") for v in (of_run, given)]
    if "num_towers" in given and lists[0] and of_run["devices"] != "any":
        names.add("devices")  # a list of devices sets the number
    if lists[1]:
        names.add("num_towers")
    return names


def main_help(version: str, verbs: Sequence[Verb]) -> str:
    """Return the text of `towers --help`, with the version and the verbs in order; see `Verb`."""
    lines = "\n".join(f"  {verb.name:10} {verb.help}" for verb in verbs)
    return (
        f"towers {version}: data-parallel training, the same results on any number of towers\n\n"
        f"usage: towers COMMAND [--flagfile=FILE] [--flag=value ...]\n\n{lines}\n\n"
        "towers COMMAND --help lists the flags of a command. A first run, in an empty folder:\n\n"
        "  towers init\n  towers train --flagfile=my_run.cfg --num_towers=2\n"
    )


def verb_help(verb: Verb) -> str:
    """Return the text of `towers VERB --help`: flags by group, with defaults."""
    fields = verb.fields()
    positional = fields.pop(_positional(fields), None)
    words = f"{verb.name} {positional.metadata['positional']}" if positional else verb.name
    usage = f"usage: towers {words} [--flagfile=FILE] [--flag=value ...]"
    lines = [f"towers {verb.name}: {verb.help}", "", usage]
    examples = getattr(verb.options_class(), "EXAMPLES", "")
    lines += ["", *examples.splitlines()] if examples else []
    if verb.run_flags == "if_any":
        lines.append(
            "When you resume a run, flags that you leave out keep the values in its flags.cfg."
        )
    elif verb.run_flags:
        lines.append("Flags that you leave out have the values in the run's flags.cfg.")
    groups: dict[str, list[str]] = {}
    for name, field in fields.items():
        if (verb.takes is None or name in verb.takes) and name not in verb.refuses:
            groups.setdefault(field.metadata["group"], []).extend(_flag_help(field))
    for group, of_group in groups.items():
        lines += ["", group, *of_group]
    return "\n".join(lines) + "\n"


def _flag_help(field: dataclasses.Field) -> list[str]:
    default = "" if field.type is tuple else text_of(field.default)
    default = f"{field.default:g}" if field.type is float else default
    name = f"  --{field.name}={default}"
    text, choices = field.metadata["help"], field.metadata.get("choices", ())
    if choices and "\n" not in text:  # else each has a line
        text += f" One of {', '.join(choices)}."
    if "alias" in field.metadata:
        text += f"\nAlso --{field.metadata['alias']}."
    indent, is_long = " " * 34, len(name) > 32
    first = indent if is_long else f"{name:34}"
    opening, *values = text.split("\n")
    lines = textwrap.wrap(opening, 100, initial_indent=first, subsequent_indent=indent)
    for value in values:
        lines += textwrap.wrap(value, 100, initial_indent=indent, subsequent_indent=f"{indent}  ")
    return [name, *lines] if is_long else lines
