"""Code that a run names is called only if the run is the user's own, or trusted."""

import dataclasses
import functools
import shutil
import stat
from pathlib import Path

import pytest

import towers
from tests import runs
from towers import cli
from towers.errors import InputError
from towers.options import code_trust
from towers.options.run import Options

pytestmark = pytest.mark.unit

MINE = dict(model="evil:build", dataset="evil:load", model_args="command=x", loss="evil:loss")


@pytest.fixture(autouse=True)
def no_key_yet(folder, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))


def make_run(name, sign=True, **values):
    Path(name).mkdir()
    text = Options(**values).to_flagfile()
    Path(name, "flags.cfg").write_text(code_trust.signed(text) if sign else text)
    return Path(name)


refusal = functools.partial(runs.refusal, cli.parse)


def test_a_run_of_ones_own_is_taken_wherever_it_lies():
    run = make_run("run", **MINE)
    shutil.copytree(run, "copy")
    shutil.move(run, "moved")
    for name in "copy", "moved":
        assert cli.parse("evaluate", [f"--train_dir={name}"]).model == "evil:build"
        assert cli.parse("train", [f"--train_dir={name}"]).dataset == "evil:load"
    (key,) = Path("config/towers").iterdir()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


@pytest.mark.parametrize("verb", ["train", "verify", "benchmark"])
def test_the_flagfile_of_a_foreign_run_names_no_code_that_runs(folder, monkeypatch, verb):
    run = make_run("run", **MINE)
    shutil.copy(run / "flags.cfg", "copy.cfg")
    Path("mine.cfg").write_text("--seed=3\n--flagfile=run/flags.cfg\n")
    cli.parse(verb, ["--flagfile=run/flags.cfg"])  # one's own
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "other"))
    for name in "run/flags.cfg", "copy.cfg", "mine.cfg":
        message = refusal(verb, [f"--flagfile={name}", "--loss=mse"])
        file = name.replace("mine.cfg", "run/flags.cfg")
        assert message.startswith(f"--flagfile={file} was not written by your towers")
        for word in "--model=evil:build", "--model_args=command=x", "--dataset=evil:load":
            assert word in message
        assert "--loss" not in message  # which the user has given
        cli.parse(verb, [f"--flagfile={name}", "--trust"])
        cli.parse(verb, [f"--flagfile={name}", "--model=a:b", "--dataset=a:c", "--loss=mse"])
    Path("theirs.cfg").write_text("--model=evil:build\n")  # a script like any other
    cli.parse(verb, ["--flagfile=theirs.cfg"])


@pytest.mark.parametrize(
    "verb, line, typed",
    [
        ("train", "--train_dir=inner", "--train_dir=mine"),
        ("train", "--overwrite", "--nooverwrite"),
        ("evaluate", "-train_dir=inner", "--train_dir=mine"),
        ("sweep", "--vary=model:evil:build", "--vary=seed:1"),
        ("worker", "--address=0.0.0.0:1", "--address=localhost:1"),
    ],
)
@pytest.mark.parametrize("name", ["flags.cfg", "link.cfg", "mine.cfg"])
def test_what_the_flagfile_of_a_foreign_run_may_not_decide_is_typed(verb, line, typed, name):
    for folder in "mine", "inner":
        make_run(folder)
    Path("flags.cfg").write_text(f"{line}\n")
    Path("link.cfg").symlink_to("flags.cfg")
    Path("mine.cfg").write_text("--flagfile=flags.cfg\n")
    word, path = line.lstrip("-").partition("=")[0], name.replace("mine", "flags")
    trusted = [] if verb == "worker" else ["--trust"]
    said = refusal(verb, [f"--flagfile={name}", *trusted])
    assert said.startswith(f"--flagfile={path} was not written by your towers")
    assert f"sets --{word}=" in said and said.endswith(f"type --{word} yourself")
    for argv in [f"--flagfile={name}", typed], [typed, "--flagfile", name]:
        taken = str(cli.parse(verb, argv))
        assert "inner" not in taken and "evil" not in taken and "overwrite=True" not in taken
    if word == "train_dir":
        cli.parse("verify", [f"--flagfile={name}"])  # has no use for it


@pytest.mark.parametrize("line", ["--trust", "-trust=1", "--flagfile\nnested.cfg"])
def test_trust_is_typed(line):
    make_run("run", model="evil:build")
    Path("nested.cfg").write_text("--notrust\n--trust=true\n")
    Path("mine.cfg").write_text(f"{line}\n")
    for verb in "train", "verify", "export":
        argv = ["--flagfile=mine.cfg", *([] if verb == "verify" else ["--train_dir=run"])]
        assert " sets --trust, which must be typed" in refusal(verb, argv)
        cli.parse(verb, [*argv, "--trust"])


def test_a_run_that_is_trusted_is_signed_as_it_was_read(folder):
    run = make_run("run", sign=False, model="evil:build", train_dir="elsewhere")
    with (run / "flags.cfg").open("a") as file:
        file.write("--overwrite\n--trust\n--flagfile=more.cfg\n")
    Path("more.cfg").write_text("--seed=7\n")
    cli.parse("evaluate", ["--train_dir=run", "--trust"])
    Path("more.cfg").write_text("--model=evil:other\n")
    found = cli.parse("train", ["--flagfile=run/flags.cfg"])
    assert found == Options(model="evil:build", seed=7, train_dir="run")


@pytest.mark.parametrize("verb", [v.name for v in cli.VERBS.values() if v.run_flags])
def test_a_foreign_run_names_no_code_that_runs(folder, monkeypatch, verb):
    make_run("run", **MINE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "other"))  # somebody else's
    argv = ["--train_dir=run", *(["x.png"] if verb == "predict" else [])]
    message = refusal(verb, argv)
    assert message.startswith("--train_dir=run: its flags.cfg was not written by your towers")
    for word in "--model=evil:build", "--model_args=command=x", "--dataset=evil:load", "--trust":
        assert word in message
    cli.parse(verb, [*argv, "--trust"])
    cli.parse(verb, argv)  # it is known from now on


def test_a_foreign_run_connects_to_no_machine(folder, monkeypatch):
    make_run("run", workers="evil:2222,more:2222")
    make_run("slurm", workers="slurm")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "other"))  # somebody else's
    for name in "run", "slurm":
        message = refusal("train", [f"--train_dir={name}"])
        assert "machines to connect to: --workers=" in message and "--trust" in message
        cli.parse("evaluate", [f"--train_dir={name}"])  # is on this machine
        for own in "--workers=", "--workers=mine:1", "--num_towers=2", "--devices=cpu":
            assert "evil" not in cli.parse("train", [f"--train_dir={name}", own]).workers
    cli.parse("train", ["--train_dir=run", "--trust"])


def test_each_option_that_may_name_a_function_is_asked_for():
    fields = dataclasses.fields(Options)
    assert {f.name for f in fields if "module:function" in f.metadata["help"]} == set(
        code_trust.CODE
    )


def test_from_python(folder, monkeypatch):
    make_run("run", model="evil:build")
    (folder / "run/checkpoints").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "other"))  # somebody else's
    for call in towers.load, lambda name: towers.evaluate(train_dir=name):
        with pytest.raises(InputError, match="its flags.cfg was not written by your towers"):
            call("run")
    for more in {"trust": True}, {"model": lambda: None}:
        with pytest.raises(InputError, match="no checkpoint"):
            towers.load("run", **more)


def test_a_run_that_was_changed_is_foreign():
    path = make_run("run", model="mine:build") / "flags.cfg"
    path.write_text(path.read_text().replace("--seed=0", "--seed=1"))
    assert "or was changed" in refusal("evaluate", ["--train_dir=run"])


def test_what_names_no_code_of_somebodys_needs_no_trust():
    make_run("run", sign=False, model="models.resnet:resnet20", dataset="cifar10")
    make_run("given", sign=False, model="given_in_python:build", monitor="max:auc")
    for name in "run", "given":
        cli.parse("evaluate", [f"--train_dir={name}"])
