"""A newcomer with an empty folder outside of the checkout types what README says, word for word."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PATH = README.partition("## Your own model and data\n")[2].partition("## The pattern")[0]
BLOCKS = [block for _, block in re.findall(r"```(\w+)\n(.*?)```", PATH, re.DOTALL)]

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stand in an empty folder, from where `towers` is found and no model of the checkout is."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/towers").symlink_to(ROOT / "towers")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)  # set by the tests' own TensorFlow
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")


def program(words):
    """Start what a person types; `towers` is that of this interpreter."""
    line = [sys.executable, *(["-m", *words] if words[0] == "towers" else words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=dict(os.environ))


def typed(*words):
    """Return what a command that succeeds prints, without a word of TensorFlow's."""
    out, err = (process := program(words)).communicate()
    assert process.returncode == 0, f"{words}: {out}{err}"
    assert words[0] != "towers" or not re.search(r"^[IWE]\d{4} |WARNING|Traceback", err, re.M), err
    return out


def block(start):
    """Return README's block that begins so."""
    return next(block for block in BLOCKS if block.startswith(start))


def lines(start):
    return [shlex.split(line, comments=True) for line in block(start).splitlines()]


def test_own_images_from_the_first_command_to_fine_tuning(folder):
    init, train, go_on, evaluate, predict, export, tune, verify = lines("towers init")
    typed(*init)
    Path("my_net.py").write_text(block("# my_net.py"))

    process = program([*train, "--num_epochs=1000"])
    shown = ""
    while ": step 0, " not in shown:
        assert (line := process.stdout.readline()), process.communicate()
        shown += line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 75 and "towers      2: /cpu:0, /cpu:1" in shown
    (line,) = err.splitlines()
    assert "saved; the same command continues the run" in line

    out = typed(*go_on)
    assert "continuing  runs/mine at step " in out
    accuracy = re.search(r"test_accuracy +([\d.]+)", out)[1]
    assert re.search(r"accuracy +([\d.]+)", typed(*evaluate))[1] == accuracy

    image = np.random.default_rng(0).integers(0, 256, [16, 16, 1], np.uint8)
    keras.utils.save_img("photo.png", image, scale=False)
    said = typed(*predict).split()[-5:]
    assert said[0] == "photo.png"
    typed(*export)
    logits = keras.models.load_model("mine.keras").predict(image[None], verbose=0)
    assert str(logits.argmax()) == said[1]

    assert re.search(r"init_from   runs/mine, .* 4 of 4 weights", typed(*tune))
    assert "\npassed " in typed(*verify)

    Path("use.py").write_text(block("import keras\nimport towers") + "print(model.output_shape)\n")
    assert typed("use.py").endswith("(None, 3)\n")


def test_a_table_and_a_compiled_model(folder):
    """The other commands are those above, as README says."""
    (train,) = lines("towers train --model=my_price:build")
    Path("my_price.py").write_text(block("# my_price.py"))
    rows = np.random.default_rng(0).normal(size=[400, 3])
    table = np.column_stack([rows, rows @ [1.0, 2.0, 3.0]])
    header = {"header": "area,rooms,age,price", "comments": ""}
    np.savetxt("prices.csv", table, delimiter=",", **header)
    np.savetxt("new.csv", rows[:2], delimiter=",", header="area,rooms,age", comments="")

    assert "task        compiled: loss mse; mae" in typed(*train)
    run = "--train_dir=runs/prices"
    assert re.search(r"\nmae +\d", typed("towers", "evaluate", run))
    said = typed("towers", "predict", run, "new.csv").splitlines()[-2:]
    typed("towers", "export", run, "--output=price.keras")
    prices = keras.models.load_model("price.keras").predict(rows[:2], verbose=0)[:, 0]
    np.testing.assert_allclose([float(line.split()[-1]) for line in said], prices, rtol=1e-3)
    model, data = "--model=my_price:build", "--dataset=prices.csv"
    tuned = typed("towers", "train", model, data, "--init_from=price.keras", "--max_steps=1")
    assert "price.keras: 4 of 4 weights" in tuned
    assert "\npassed " in typed("towers", "verify", model, data, "--steps=2")
