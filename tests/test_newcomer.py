"""A newcomer with an empty folder outside of the checkout types what README says, word for word."""

import json
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

from tests.data.test_snippets import snippet
from tests.programs import ROOT

pytestmark = pytest.mark.process

README = (ROOT / "README.md").read_text(encoding="utf-8")
PATH = README.partition("## `towers train`\n")[2].partition("\n## ")[0]
BLOCKS = [block for _, block in re.findall(r"```(\w+)\n(.*?)```", PATH, re.DOTALL)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stand in an empty folder, from where `towers` is found and no model of the checkout is."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/towers").symlink_to(ROOT / "towers")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)  # set by the tests' own TensorFlow
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")


SEVERAL = """
import json, runpy, sys
from towers import cli
for words in json.loads(sys.argv[1]):
    print("typed:", *words)
    if words[0] == "towers":
        assert cli.main(words[1:]) == 0, words
    else:
        runpy.run_path(words[0])
"""


def program(words):
    """Start what a person types; `towers` is that of this interpreter."""
    line = [sys.executable, *(["-m", *words] if words[0] == "towers" else words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=dict(os.environ))


def typed(*words):
    """Return what a command that succeeds prints, without a word of TensorFlow's."""
    out, err = (process := program(words)).communicate()
    assert process.returncode == 0, f"{words}: {out}{err}"
    assert not re.search(r"^[IWE]\d{4} |WARNING|Traceback", err, re.M), err
    return out


def typed_one_by_one(*commands):
    """Return what each prints, in one process: TensorFlow starts once."""
    out = typed("-c", SEVERAL, json.dumps(commands))
    return [part.partition("\n")[2] for part in out.split("typed: ")[1:]]


def block(start):
    """Return README's block that begins so."""
    return next(block for block in BLOCKS if block.startswith(start))


def lines(start):
    return [shlex.split(line, comments=True) for line in block(start).splitlines()]


def test_from_the_first_command_to_a_sweep_and_a_table(folder):
    init, train, go_on, evaluate, predict, export, sweep, verify = lines("towers init")
    typed(*init)
    Path("my_net.py").write_text(block("# my_net.py"))
    image = np.random.default_rng(0).integers(0, 256, [16, 16, 1], np.uint8)
    keras.utils.save_img("photo.png", image, scale=False)

    process = program([*train, "--num_epochs=1000"])
    shown = ""
    while ": step 0 of" not in shown:
        assert (line := process.stdout.readline()), process.communicate()
        shown += line
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 75 and "towers      2: /cpu:0, /cpu:1" in shown
    (line,) = err.splitlines()
    assert "saved; the same command resumes the run" in line

    Path("my_price.py").write_text(snippet("my_price.py"))
    Path("my_prices.py").write_text(snippet("my_prices.py"))
    rows = [f"{i % 7}.5,{['Oslo', 'Rome'][i % 2]},{i / 9}" for i in range(400)]
    Path("prices.csv").write_text("\n".join(["area,city,price", *rows]))
    (more,) = re.findall(r"`(--model_args=.*?)`", PATH)
    prices = "towers train --model=my_price:build --dataset=my_prices:load --train_dir=p".split()
    shorter = [*verify, more, "--num_towers=2"]
    sweep += ["--max_steps=2"]
    gone_on, verified, evaluated, predicted, _, swept, of_prices = typed_one_by_one(
        go_on, shorter, evaluate, predict, export, sweep, prices
    )
    assert "continuing  runs/mine at step " in gone_on and "\npassed " in verified
    accuracy = re.search(r"test_accuracy +([\d.]+)", gone_on)[1]
    assert re.search(r"accuracy +([\d.]+)", evaluated)[1] == accuracy
    assert all(f"learning_rate={rate}" in swept for rate in ("0.01", "0.03", "0.1"))
    assert "task        loss mse; mae" in of_prices and "test_mae" in of_prices
    name, _, kind, *_ = predicted.splitlines()[-1].split(",")
    logits = keras.models.load_model("mine.keras").predict(image[None], verbose=0)
    assert (name, kind) == ("photo.png", str(logits.argmax()))
