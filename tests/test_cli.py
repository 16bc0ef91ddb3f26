"""The command line as its user meets it: what is printed, where, and the exit code."""

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import towers
from towers import cli
from towers.commands.doctor.check import Check
from towers.errors import InputError, RunError
from towers.options import flags
from towers.options.run import Options

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = "flags are written --name=value"
RESULT = {"accuracy": 0.5, "step": 3}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Stand in an empty folder, and leave the search path as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def shell(*argv, **environment):
    """Run `python -m towers` in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.run(
        [sys.executable, "-m", "towers", *argv],
        env=kept | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


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


# ---------------------------------------------------------------------------- Bad command lines

MESSAGES = {
    "tran": "there is no verb 'tran': "
    "towers train|evaluate|verify|benchmark|plan|doctor|sweep|compare|tensorboard "
    "--flag=value ...",
    "--num_towers=2 train": "there is no verb '--num_towers=2': "
    "towers train|evaluate|verify|benchmark|plan|doctor|sweep|compare|tensorboard "
    "--flag=value ...",
    "train --learnin_rate=2": "there is no flag --learnin_rate; did you mean --learning_rate?",
    "train --batch-size=2": "there is no flag --batch-size; did you mean --batch_size?",
    "train --num_gpu=2": "there is no flag --num_gpu; did you mean --num_gpus?",
    "train --xyz": "there is no flag --xyz; see towers train --help",
    "train -flag": "there is no flag --flag; did you mean --flagfile?",
    "train --größe=3": "there is no flag --größe; see towers train --help",
    "train --undefok=foo --foo": "there is no flag --undefok; see towers train --help",
    "train --helpfull": "there is no flag --helpfull; see towers train --help",
    "train --no-json": "there is no flag --no-json; did you mean --nojson?",
    "train --batch_size=x": "--batch_size=x: a whole number is needed",
    "train --batch_size=1.5": "--batch_size=1.5: a whole number is needed",
    "train --batch_size=1e3": "--batch_size=1e3: a whole number is needed",
    "train --batch_size=": "--batch_size=: a whole number is needed",
    "train --num_gpus=x": "--num_gpus=x: a whole number is needed",
    "train --learning_rate=x": "--learning_rate=x: a number is needed",
    "train --learning_rate=": "--learning_rate=: a number is needed",
    "train --overwrite=maybe": "--overwrite=maybe: true or false is needed",
    "train --nooverwrite=1": "--nooverwrite takes no value; did you mean --overwrite=...?",
    "train --overwrite false": f"unexpected argument 'false': {WRITTEN}",
    "train --num_towers=-1": "--num_towers=-1: a whole number of at least 0 is needed",
    "train --num_towers -1": "--num_towers=-1: a whole number of at least 0 is needed",
    "train --batch_size=0": "--batch_size=0: a whole number of at least 1 is needed",
    "train --momentum=2": "--momentum=2.0: a number from 0 to 1 is needed",
    "train --num_epochs=nan": "--num_epochs=nan: a number is needed",
    "train --num_epochs=inf": "--num_epochs=inf: a number is needed",
    "train --num_epochs=-inf": "--num_epochs=-inf: a number is needed",
    "train --dtype=half": "--dtype=half: allowed are float32, float64, mixed_bfloat16, "
    "mixed_float16",
    "train --optimizer=": "--optimizer=: allowed are sgd, momentum, nesterov, adamw",
    "train --clip_norm=1 --clip_value=2": "--clip_norm and --clip_value exclude each other: give "
    "one of them, 0 is off",
    "train --schedule=step": "--schedule=step needs --decay_epochs, such as --decay_epochs=80,120",
    "train --decay_epochs=80,x": "--decay_epochs=80,x: numbers with commas are needed, as 80,120",
    "train --decay_epochs=120,80": "--decay_epochs=120,80: each number must be greater than the "
    "one before",
    "train --model_args=depth": "--model_args=depth: 'depth' is not name=value, as in "
    "--model_args=depth=20,width=16",
    "train --train_dir": "--train_dir needs a value: --train_dir=...",
    "train --train_dir --overwrite": "--train_dir needs a value: --train_dir=...",
    "train --flagfile": "--flagfile needs a value: --flagfile=...",
    "train --train_dir=": "--train_dir= is empty: give a value, as --train_dir=runs/train",
    "train --flagfile=a.cfg": "--flagfile=a.cfg cannot be read: No such file or directory",
    "train depth=20": f"unexpected argument 'depth=20': {WRITTEN}",
    "train --seed=1 evaluate": f"unexpected argument 'evaluate': {WRITTEN}",
    "train --=3": f"unexpected argument '--=3': {WRITTEN}",
    "train -": f"unexpected argument '-': {WRITTEN}",
    "train --per_process_gpu_memory_fraction=1.7": "--per_process_gpu_memory_fraction=1.7: a "
    "number from 0 to 1 is needed, as --per_process_gpu_memory_fraction=0.4",
    "train --gpu_memory_limit_mib=-5": "--gpu_memory_limit_mib=-5: a whole number of at least 0 is "
    "needed, as --gpu_memory_limit_mib=4096",
    "train --visible_gpus=0,,2": "--visible_gpus=0,,2: '' is not the number of a GPU; write them "
    "as --visible_gpus=0,2, or --visible_gpus=none",
    "train --allow_growth --gpu_memory_limit_mib=9": "--gpu_memory_limit_mib and --allow_growth "
    "exclude each other in TensorFlow: give one of them",
    "train --visible_gpus=1,1": "--visible_gpus=1,1 names a GPU twice; type --visible_gpus=1",
    "train --placement=maybe": "--placement=maybe: allowed are report, strict",
    "train --": f"unexpected argument '--': {WRITTEN}",
    "train ---": f"unexpected argument '---': {WRITTEN}",
    "train ---seed=1": f"unexpected argument '---seed=1': {WRITTEN}",
    "evaluate --momentum=0": "towers evaluate takes no --momentum: it takes --train_dir, --json, "
    "--dataset, --data_dir, --image_size, --batch_size, --dtype, --num_towers, --devices, "
    "--visible_gpus, --per_process_gpu_memory_fraction, --gpu_memory_limit_mib, --allow_growth, "
    "--allow_soft_placement, and the rest from the run's flags.cfg",
    "sweep": "towers sweep needs a flag to vary, as --vary=learning_rate:0.05,0.1,0.2",
    "sweep --vary=seed:1 --overwrite": "towers sweep takes no --overwrite: runs lie in --sweep_dir",
    "sweep --vary": "--vary needs a value: --vary=...",
    "compare": "towers compare needs the folders of runs: towers compare RUN RUN, or that of a "
    "sweep",
    "compare a --plot=x.jpg": "--plot=x.jpg: a name that ends in .png is needed, or none",
    "evaluate": "--train_dir=runs/train: there is no run; train first, or name the folder of a run",
}
WITH_SPACES = [
    (["train", ""], f"unexpected argument '': {WRITTEN}"),
    (["train", "--dtype= float32"], "--dtype= float32: allowed are float32, float64, "
     "mixed_bfloat16, mixed_float16"),
    (["train", "--model= a.b:c"], "--model=' a.b:c': text in one line, without spaces at its ends, "
     "is needed"),
    (["train", "--batch_size 3"], "there is no flag --batch_size 3; did you mean --batch_size?"),
    (["train", "--a\nb\r\nc=1"], "there is no flag --a b c; see towers train --help"),
    (["train", "--seed=\n\n1\nx"], "--seed=  1 x: a whole number is needed"),
]  # fmt: skip


@pytest.mark.parametrize(
    "argv, message",
    [(line.split(), message) for line, message in MESSAGES.items()] + WITH_SPACES,
    ids=lambda value: None if isinstance(value, str) else " ".join(value).replace("\n", "_"),
)
def test_a_bad_command_line_gets_one_line(folder, argv, message):
    assert call(argv) == (2, "", f"towers: {message}\n")
    assert list(folder.iterdir()) == []


def test_usage_needs_no_tensorflow(folder):
    lines = [line.split() for line in MESSAGES] + [argv for argv, _ in WITH_SPACES]
    lines += [[], ["--help"], ["--version"], ["train", "--help"], ["evaluate", "-h"]]
    (folder / "lines.json").write_text(json.dumps(lines))
    code = """
import json, sys
from towers import cli
codes = {cli.main(line) for line in json.load(open("lines.json"))}
assert codes == {0, 2}, codes
assert not {"tensorflow", "keras", "numpy"} & set(sys.modules)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)


def test_the_module_is_the_command():
    bad = shell("train", "--batch_size=x")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "towers: --batch_size=x: a whole number is needed\n"
    good = shell("--version")
    assert (good.returncode, good.stdout, good.stderr) == (0, f"towers {towers.__version__}\n", "")


def test_bytes_that_are_no_text_are_refused_in_one_line():
    bad = subprocess.run(
        [sys.executable, "-m", "towers", "train", b"--train_dir=\xff"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    assert (bad.returncode, bad.stdout, bad.stderr.count(b"\n")) == (2, b"", 1)


FLAG_NAMES = [f.name for f in Options.__dataclass_fields__.values()]
ARGUMENTS = st.one_of(
    st.builds(
        "{}{}{}{}".format,
        st.sampled_from(["--", "-", "", "---", "--no"]),
        st.sampled_from([*FLAG_NAMES, "num_gpus", "flagfile", "undefok", "help", "h", ""])
        | st.text(max_size=5),
        st.sampled_from(["=", "=", "", " "]),
        st.sampled_from(["", "1", "-1", "0.5", "1e400", "true", "nan", "80,120", "a=1", "a:b", "."])
        | st.text(max_size=5),
    ),
    st.text(max_size=8),
    st.sampled_from(["--", "-", "1", "--help", "-h", "--dtype=float64", "9" * 5000]),
)


@settings(deadline=None, max_examples=400)
@given(
    verb=st.sampled_from(["train", "train", "evaluate", "evaluate", "--version", ""])
    | st.text(max_size=5),
    arguments=st.lists(ARGUMENTS, max_size=6),
)
def test_no_command_line_brings_it_down(verb, arguments):
    code, out, err = call([verb, *arguments])
    assert code in (0, 2)
    if code == 0:
        assert err == ""
    else:
        assert out == ""
        assert err.startswith("towers: ") and err.endswith("\n") and len(err.splitlines()) == 1


# ---------------------------------------------------------------------------- Help


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["-help"], ["help"], ["--help", "x"]])
def test_help(argv):
    code, out, err = call(argv)
    assert (code, err) == (0, "")
    assert out == flags.main_help(towers.__version__, list(cli.VERBS.values()))
    assert out.startswith(f"towers {towers.__version__}: ") and "towers VERB --help" in out


@pytest.mark.parametrize("verb", list(cli.VERBS))
@pytest.mark.parametrize("before", [[], ["--batch_size=3"], ["--nonsense", "x"]])
@pytest.mark.parametrize("flag", ["--help", "-h", "-help"])
def test_help_of_a_verb(verb, before, flag):
    assert call([verb, *before, flag]) == (0, flags.verb_help(cli.VERBS[verb]), "")


def test_version():
    for flag in ("--version", "-version"):
        assert call([flag]) == (0, f"towers {towers.__version__}\n", "")


def test_the_command_line_is_that_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["towers", "--version"])
    assert cli.main() == 0
    assert capsys.readouterr().out == f"towers {towers.__version__}\n"


# ---------------------------------------------------------------------------- Outcomes of a verb


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
    return cli.main([verb, "--train_dir=run", *argv])


@pytest.mark.parametrize("verb", ["train", "evaluate"])
@pytest.mark.parametrize(
    "outcome, code, line",
    [
        (InputError("--model=x: no"), 2, "towers: --model=x: no\n"),
        (InputError("a name\nwith a break"), 2, "towers: a name with a break\n"),
        (RunError("the loss is nan"), 1, "towers: the loss is nan\n"),
        (KeyboardInterrupt(), 130, "towers: interrupted\n"),
        (RESULT, 0, ""),
    ],
)
def test_exit_codes(monkeypatch, capsys, verb, outcome, code, line):
    assert run_verb(monkeypatch, verb, outcome) == code
    out, err = capsys.readouterr()
    assert err == line
    assert out == ("a line\n" if verb == "evaluate" else "")


def test_a_run_that_was_stopped_has_an_exit_code_of_its_own(monkeypatch, capsys):
    assert run_verb(monkeypatch, "train", None, "--json") == 75
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("found, code", [(["ok"], 0), (["ok", "note"], 0), (["problem", "ok"], 1)])
def test_doctor_fails_if_there_is_a_problem(monkeypatch, capsys, found, code):
    checks = [Check("disk", status, "full", "empty it") for status in found]
    assert run_verb(monkeypatch, "doctor", checks, "--json") == code
    out, err = capsys.readouterr()
    assert json.loads(out) == [
        {"name": "disk", "status": status, "detail": "full", "remedy": "empty it"}
        for status in found
    ]
    assert err == "a line\n"
    assert run_verb(monkeypatch, "doctor", checks) == code
    assert capsys.readouterr().out == "a line\n"


@pytest.mark.parametrize(
    "error", [ValueError("theirs"), OSError(28, "No space left"), SystemExit(3)]
)
def test_other_errors_come_through(monkeypatch, error):
    with pytest.raises(type(error)) as raised:
        run_verb(monkeypatch, "train", error)
    assert raised.value is error


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_json_stands_alone_on_standard_output(monkeypatch, capsys, verb):
    assert run_verb(monkeypatch, verb, RESULT, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == RESULT
    assert err == ("a line\n" if verb == "evaluate" else "")


def test_modules_in_the_current_folder_are_found(monkeypatch, folder):
    run_verb(monkeypatch, "train", RESULT)
    assert sys.path[0] == str(folder)


# ---------------------------------------------------------------------------- TensorFlow's lines

NOISE = "I0000 port.cc:153] oneDNN custom operations are on."
LOG_LINE = re.compile(r"^[IWEF]\d{4} |^WARNING: All log messages|^To enable the following", re.M)


def start_with(folder, ending, **environment):
    """Start a run where importing Keras writes a line in C's way, and then ends so."""
    (folder / "keras.py").write_text(f"import os\nos.write(2, b'{NOISE}\\n')\n{ending}\n")
    return shell("train", **environment)


def test_the_lines_are_shown_if_the_start_fails(folder):
    failed = start_with(folder, "raise ImportError('libcudart.so is missing')")
    assert failed.returncode == 1
    assert NOISE in failed.stderr and "ImportError: libcudart.so is missing" in failed.stderr


def test_a_start_that_kills_the_process_says_where(folder):
    failed = start_with(folder, "os.abort()")
    assert failed.returncode < 0
    assert "Fatal Python error: Aborted" in failed.stderr and "keras.py" in failed.stderr


def test_the_lines_are_not_shown_at_ctrl_c(folder):
    stopped = start_with(folder, "raise KeyboardInterrupt")
    assert (stopped.returncode, stopped.stderr) == (130, "towers: interrupted\n")


def test_the_user_gets_the_lines_that_are_asked_for(folder):
    stopped = start_with(folder, "raise KeyboardInterrupt", TF_CPP_MIN_LOG_LEVEL="0")
    assert (stopped.returncode, stopped.stderr) == (130, f"{NOISE}\ntowers: interrupted\n")


@pytest.mark.parametrize(
    "argument, words",
    [
        (
            "--visible_gpus=7",
            "there is no GPU 7: no NVIDIA driver answers here; leave the flag out",
        ),
        (
            "--devices=/gpu:9",
            "there is no /gpu:9; TensorFlow sees /cpu:0, no NVIDIA driver answers",
        ),
        (
            "--num_towers=4 --devices=/gpu:0",
            "--num_towers=4 and --devices=/gpu:0 disagree: 1 device",
        ),
        ("--per_process_gpu_memory_fraction=0.4 --visible_gpus=0", "there is no GPU 0: no NVIDIA"),
    ],
)
def test_a_device_that_is_not_there_is_one_line_and_nothing_is_written(folder, argument, words):
    refused = shell("train", "--train_dir=run", *argument.split())
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("towers: ") and len(refused.stderr.splitlines()) == 1
    assert words in refused.stderr
    assert list(folder.iterdir()) == []


def test_a_healthy_run_shows_its_own_lines_only(folder):
    (folder / "mine.py").write_text(
        "import keras, numpy as np, tensorflow as tf\n"
        "def build(num_classes):\n"
        "    layers = [keras.layers.Flatten(), keras.layers.Dense(num_classes)]\n"
        "    return keras.Sequential(layers)\n"
        "def load():\n"
        "    tf.function(lambda x: x + 1, jit_compile=True)(tf.ones(2))  # XLA says a line\n"
        "    images, labels = np.zeros([8, 4, 4, 1], np.uint8), np.arange(8) % 2\n"
        "    return (images, labels), (images, labels)\n"
    )
    asked = "--model=mine:build --dataset=mine:load --augment=none --batch_size=4 --max_steps=2"
    trained = shell("train", *asked.split(), "--num_towers=2", "--train_dir=run", "--json")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["steps"] == 2
    assert not LOG_LINE.search(trained.stderr), trained.stderr

    evaluated = shell("evaluate", "--train_dir=run")
    assert evaluated.returncode == 0, evaluated.stderr
    assert evaluated.stdout and evaluated.stderr == ""
