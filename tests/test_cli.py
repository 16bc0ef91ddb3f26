"""The command line as its user meets it: what is printed, where, and the exit code."""

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import towers
from tests.programs import ROOT, environment, python
from towers import cli
from towers.commands.doctor.command import Check
from towers.errors import InputError, RunError
from towers.formatting import print_line
from towers.options import flags

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("folder")]

WRITTEN = "write flags as --name=value"
RESULT = {"accuracy": 0.5, "step": 3}


def shell(*argv, **given):
    return python("-m", "towers", *argv, cwd=Path.cwd(), **given)


def call(argv):
    """Run a command line that never gets as far as a verb; return (code, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(cli, "_run", return_value=0),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = cli.main(argv)
    return code, out.getvalue(), err.getvalue()


# Bad command lines.

VERBS = "|".join(cli.VERBS)
MESSAGES = [
    ("tran", "there is no command 'tran': did you mean towers train?"),
    ("xyz", f"there is no command 'xyz': towers {VERBS} --flag=value ..."),
    ("train --learnin_rate=2", "'learnin_rate'. Did you mean: learning_rate ?"),
    ("train --größe=3", "Unknown command line flag 'größe'"),
    ("train --learning_rate=x", "--learning_rate=x: could not convert string to float"),
    ("train --num_towers -1", "--num_towers=-1: a whole number from 0 to 1000 is needed"),
    ("train --train_dir --overwrite", "--train_dir needs a value: --train_dir=..."),
    ("train --overwrite false", f"unexpected argument 'false'; {WRITTEN}"),
    ("sweep --vary=seed:1 --overwrite", "towers sweep takes no --overwrite: runs are in --sweep_"),
    ("train --overwrite=maybe", "--overwrite=maybe: "),
    ("train --nooverwrite=1", "--nooverwrite"), ("train --train_dir", "--train_dir"),
    ("train --flagfile", "--flagfile"), ("train --flagfile=a", "--flagfile=a: No such file"),
    ("evaluate", "--train_dir=runs/train: there is no run; train first"),
    (["train", ""], f"unexpected argument ''; {WRITTEN}"),
    (["train", "--model= a.b:c"], "--model=' a.b:c': UTF-8 text in one line without spaces around"),
    (["train", "--a\nb\r\nc=1"], "Unknown command line flag 'a b c'"),
]  # fmt: skip
LINES = [line.split() if isinstance(line, str) else line for line, _ in MESSAGES]


def test_a_bad_command_line_gets_one_line(folder):
    for argv, (_, message) in zip(LINES, MESSAGES, strict=True):
        code, out, err = call(argv)
        assert (code, out, err.count("\n"), err[:8]) == (2, "", 1, "towers: "), argv
        assert message in err
    assert list(folder.iterdir()) == []


@pytest.mark.process
def test_usage_needs_no_tensorflow(folder):
    lines = [*LINES, [], ["--help"], ["--version"], *([verb, "--help"] for verb in cli.VERBS)]
    (folder / "lines.json").write_text(json.dumps(lines))
    code = """
import json, sys
from towers import cli
import towers.commands.doctor.command  # which examines a TensorFlow that cannot be imported
codes = {cli.main(line) for line in json.load(open("lines.json"))}
assert codes == {0, 2}, codes
assert not {"tensorflow", "keras", "numpy"} & set(sys.modules)
"""
    done = python("-c", code, cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_the_module_is_the_command():
    for bad in (shell("train", "--batch_size=x"), shell("train", b"--train_dir=\xff")):
        assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    good = shell("--version")
    assert (good.returncode, good.stdout, good.stderr) == (0, f"towers {towers.__version__}\n", "")


# Terminals.


@pytest.mark.process
def test_names_are_read_and_shown_in_any_terminal():
    for variables in {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}:
        done = shell("evaluate", "--train_dir=größe", variables=variables)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(r"towers: --train_dir=gr\xf6\xdfe: there is no run")
    stream = io.TextIOWrapper(io.BytesIO(), "latin-1")
    print_line("ü 中 \x1b \udcff", stream)
    assert stream.buffer.getvalue() == b"\xfc \\u4e2d \\x1b \\udcff\n"


@pytest.mark.process
@pytest.mark.parametrize(
    "command, code, shown",
    [
        ("train --lr=1 2>/dev/full", 2, b""),
        ("train --lr=1 >/dev/full 2>&1", 2, b""),
        ("train --lr=1 2>&-", 2, b""),
        ("--help >&- 2>&- <&-", 0, b""),
        ("train --help 2>&1 >/dev/full", 1,
         b"towers: standard output cannot be written: No space left on device\n"),
    ],
)  # fmt: skip
def test_an_exit_code_does_not_depend_on_a_full_or_closed_terminal(command, code, shown):
    line = ["sh", "-c", f'exec "$0" -m towers {command}', sys.executable]
    done = subprocess.run(line, env=environment(), capture_output=True)
    assert (done.returncode, done.stdout + done.stderr) == (code, shown)


# Help.


def test_help():
    out = flags.main_help(towers.__version__, list(cli.VERBS.values()))
    for argv in [], ["--help"], ["-h"], ["help"]:
        assert call(argv) == (0, out, "")
    assert out.startswith(f"towers {towers.__version__}: ") and "towers COMMAND --help" in out
    for verb in cli.VERBS:
        for argv in ["--help"], ["--batch_size=3", "-h"]:
            assert call([verb, *argv]) == (0, flags.verb_help(cli.VERBS[verb]), "")


# Outcomes of a verb.


def run_verb(monkeypatch, verb, outcome, *argv):
    """Run a verb that says a line and then returns, or raises, `outcome`; return the exit code."""

    def end():
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def evaluate(options, say):
        say("a line")
        return end()

    functions = {"train": lambda options, start: end(), "evaluate": evaluate, "doctor": evaluate}
    monkeypatch.setitem(sys.modules, "fake", SimpleNamespace(run=functions[verb]))
    fake = dataclasses.replace(cli.VERBS[verb], function="fake:run")
    monkeypatch.setitem(cli.VERBS, verb, fake)
    monkeypatch.setattr(cli, "_start", lambda options: None)
    Path("run/checkpoints").mkdir(parents=True, exist_ok=True)
    return cli.main([verb, *(["--train_dir=run"] if verb != "doctor" else []), *argv])


@pytest.mark.parametrize("verb", ["train", "evaluate"])
@pytest.mark.parametrize(
    "outcome, code, line",
    [
        (InputError("--model=x: no"), 2, "towers: --model=x: no\n"),
        (InputError("a name\nwith a break"), 2, "towers: a name with a break\n"),
        (RunError("the loss is nan"), 1, "towers: the loss is nan\n"),
        (KeyboardInterrupt(), 130, "towers: interrupted\n"),
        (RESULT, 0, ""),
        (None, 75, ""),  # stopped, after saving
        ({"passed": False}, 1, ""),
        ({"failed": 1, "stopped": 1}, 1, ""),
        ({"failed": 1, "interrupted": True}, 75, ""),
    ],
)
def test_exit_codes(monkeypatch, capsys, verb, outcome, code, line):
    assert run_verb(monkeypatch, verb, outcome) == code
    out, err = capsys.readouterr()
    assert err == line
    assert out == ("a line\n" if verb == "evaluate" else "")


def test_doctor_fails_if_there_is_a_problem(monkeypatch, capsys):
    checks = [Check("disk", status, "full", "empty it") for status in ("problem", "ok")]
    assert run_verb(monkeypatch, "doctor", checks[1:]) == 0
    assert run_verb(monkeypatch, "doctor", checks, "--json") == 1
    assert json.loads(capsys.readouterr().out.partition("\n")[2]) == list(
        map(dataclasses.asdict, checks)
    )


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("theirs"), OSError(28, "No space")),
        *(SystemExit(0), GeneratorExit()),  # is no success
    ],
)
def test_other_errors_have_a_traceback_and_a_line_that_says_whose_code_failed(
    monkeypatch, capsys, error
):
    assert run_verb(monkeypatch, "train", error) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-2].endswith(str(error))
    assert re.fullmatch(
        r"towers: the error comes from your code: \S+py, line \d+, in end", lines[-1]
    )


@pytest.mark.parametrize("verb", ["train", "verify", "benchmark"])
def test_a_name_that_nothing_has_is_told_before_tensorflow_starts(
    folder, monkeypatch, capsys, verb
):
    (folder / "mine.py").touch()
    monkeypatch.setattr(cli, "_start", lambda options: pytest.fail("TensorFlow was started"))
    for flag, message in {
        "--dataset=mien:load": "there is no module mien in the current folder or the installed",
        "--dataset=cifar": "did you mean cifar10?",
        "--dataset=folder": "type --data_dir=DIR",
    }.items():
        assert cli.main([verb, flag]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("argv", ["train --lr=1", "doctor --visible_gpus=none"])
def test_it_is_quiet_when_its_reader_has_ended(argv):
    reading, writing = os.pipe()
    os.close(reading)
    # As in `towers ... 2>&1 | head`, and with standard error apart, where lines may still stand.
    both = shell(*argv.split(), stdout=writing, stderr=writing)
    apart = shell(*argv.split(), stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert both.returncode == 141
    # What says nothing on standard output fails as it does otherwise.
    assert (apart.returncode, apart.stderr.count("\n")) == (2 if "lr" in argv else 141, 1)


# TensorFlow's lines.

NOISE = "I0000 port.cc:153] oneDNN custom operations are on."
INTERRUPT, INTERRUPTED = "raise KeyboardInterrupt", "towers: interrupted\n"


@pytest.mark.process
@pytest.mark.parametrize(
    "ending, level, code, shown",
    [
        ("raise ImportError('libcudart.so is missing')", None, 1,
         [NOISE, "libcudart.so is missing"]),
        ("os.abort()", None, -signal.SIGABRT, ["Fatal Python error: Aborted", "keras.py"]),
        (INTERRUPT, None, 130, [INTERRUPTED]),
        (INTERRUPT, "0", 130, [NOISE, INTERRUPTED]),
    ],
)  # fmt: skip
def test_the_lines_of_a_start_are_shown_if_it_fails(folder, ending, level, code, shown):
    """Importing Keras writes a line in C's way, and then ends so."""
    (folder / "lib").mkdir()
    (folder / "lib/keras.py").write_text(f"import os\nos.write(2, b'{NOISE}\\n')\n{ending}\n")
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "lib")])}
    variables |= {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    ended = shell("train", variables=variables)
    assert ended.returncode == code
    assert all(text in ended.stderr for text in shown), ended.stderr
    assert (NOISE in ended.stderr) == (NOISE in shown)
    assert ended.stdout == "starting    TensorFlow\n"


FAILING = """
import keras, numpy as np
class Bad(keras.layers.Layer):
    def call(self, x, training=None):
        if training:
            return x.nothing  # line 6: AutoGraph reads this function, Keras calls it
        return x
def build(num_classes):
    return keras.Sequential([keras.layers.Flatten(), Bad(), keras.layers.Dense(num_classes)])
"""


@pytest.mark.run
def test_the_users_own_line_is_named_through_keras_and_autograph(folder, monkeypatch, capsys):
    (folder / "mine.py").write_text(FAILING)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    asked = "--model=mine:build --max_steps=2 --batch_size=4 --dataset=tests.tiny:images"
    assert cli.main(["train", *asked.split(), "--num_towers=2", "--train_dir=run"]) == 1
    said = capsys.readouterr().err
    assert "Traceback (most recent" in said and said.splitlines()[-1] == (
        "towers: the error comes from your code: mine.py, line 6, in call"
    )


@pytest.mark.run
@pytest.mark.parametrize("argv", ["train --devices=gpu", "verify --num_gpus=1,2"])
def test_gpus_that_are_asked_for_are_no_cpus(capsys, argv):
    assert cli.main([*argv.split(), "--batch_size=8", "--max_steps=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "sees 0 GPUs" in said
    assert "type --devices=cpu --num_towers=" in said
