"""README.md: what it says can be typed, and does what it says."""

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from towers import cli, flags
from towers.options import Options

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    """Return the code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands():
    """Return the lines of the shell blocks, without comments."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


TOWERS = [words for words in commands() if words[0] == "towers"]


def test_the_first_command_is_the_quickstart():
    assert commands()[0] == ["scripts/quickstart"]
    assert commands()[1] == ["scripts/test"]


def test_the_scripts_are_there():
    for words in commands():
        if words[0].startswith("scripts/"):
            assert (ROOT / words[0]).stat().st_mode & 0o111, words


@pytest.mark.parametrize("words", TOWERS, ids=" ".join)
def test_the_commands_are_understood(words, monkeypatch, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs/fast").mkdir(parents=True)
    (tmp_path / "runs/fast/flags.cfg").write_text(Options().to_flagfile())
    monkeypatch.chdir(tmp_path)
    flags.parse(words[1], words[2:])


def test_no_other_program_is_called_for():
    first = {words[0] for words in commands()}
    assert first <= {"towers", "scripts/quickstart", "scripts/test", "source", "python"}


@pytest.mark.parametrize(
    "name", re.findall(r"configs/\w+\.cfg", README) + [p.name for p in (ROOT / "configs").iterdir()]
)
def test_the_flagfiles_are_there_and_named(name):
    assert (ROOT / "configs" / Path(name).name).is_file()
    assert f"configs/{Path(name).name}" in README


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.cfg")), ids=lambda p: p.name)
def test_a_flagfile_opens_with_command_hardware_time_and_accuracy(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    opening = re.match(r"(#.*\n)+", path.read_text())[0]
    for word in ("towers train --flagfile=configs/", "hardware:", "time:", "accuracy:"):
        assert word in opening, f"{path.name} opens without {word}"
    flags.parse("train", [f"--flagfile={path}"])


def test_every_flag_that_is_named_exists():
    for name in set(re.findall(r"--(\w+)", README)) - {"flagfile", "help", "logdir", "version"}:
        assert name in flags._FIELDS or name in flags._ALIASES or name in SCRIPT_FLAGS, name


SCRIPT_FLAGS = {
    name
    for path in (ROOT / "scripts").glob("*.py")
    for name in re.findall(r'"--(\w+)"', path.read_text())
}


def test_the_program_that_uses_the_builder_runs(monkeypatch, tmp_path, capsys):
    program = next(block for block in blocks("python") if "TowerBuilder" in block)
    (tmp_path / "program.py").write_text(program)
    runpy.run_path(str(tmp_path / "program.py"))
    assert "[[ 44.  56.]\n [ 98. 128.]]" in capsys.readouterr().out


def test_the_model_of_your_own_trains(monkeypatch, tmp_path, capsys):
    net = next(block for block in blocks("python") if "my_net.py" in block)
    (tmp_path / "my_net.py").write_text(net)
    (tmp_path / "my_data.py").write_text(
        "import numpy as np\n\n\ndef load():\n"
        "    images = np.zeros([20, 32, 32, 3], np.uint8)\n"
        "    return (images, np.arange(20) % 4), (images, np.arange(20) % 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    words = next(words for words in TOWERS if "--model=my_net:build" in words)
    assert cli.main([*words[1:], "--dataset=my_data:load", "--max_steps=2", "--batch_size=8"]) == 0
    assert "128" not in capsys.readouterr().err
    width = tf.train.load_checkpoint("runs/mine/checkpoints").get_variable_to_shape_map()
    assert [3, 3, 3, 64] in width.values()  # --model_args=width=64 has arrived
    shutil.rmtree(tmp_path / "runs")


def test_what_the_quickstart_prints_is_what_readme_shows():
    """The figures differ from machine to machine; the words do not."""
    shown = next(block for block in blocks("text") if "test_accuracy" in block)
    for words in ("batch size", "rules, the same", "watch it", "step 0", "tensorboard --logdir"):
        assert words in shown
