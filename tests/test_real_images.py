"""The fast recipe on real CIFAR-10 images, shortened: it learns, and its numbers repeat."""

import json
import os

import pytest

from tests.programs import ROOT
from towers import cli

DATA_DIR = os.environ.get("TOWERS_CIFAR10_DIR")

pytestmark = [
    pytest.mark.run,
    pytest.mark.skipif(
        not DATA_DIR,
        reason="TOWERS_CIFAR10_DIR is not set: it names the folder of the CIFAR-10 files",
    ),
]


def test_the_fast_recipe_learns(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    where = [f"--train_dir={tmp_path / 'run'}", f"--data_dir={DATA_DIR}", "--json"]
    recipe = ["--flagfile=configs/cifar10_cnn_fast.cfg", "--num_epochs=0.25", "--batch_size=128"]
    assert cli.main(["train", *recipe, *where, "--num_towers=2"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["examples"] == 98 * 128
    assert trained["test_accuracy"] > 0.3  # 0.1 is chance

    assert cli.main(["evaluate", *where, "--num_towers=3"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["examples"] == 10_000
    for name in ("accuracy", "accuracy_ema"):
        wrong = abs(evaluated[name] - trained[f"test_{name}"]) * 10_000
        assert wrong <= 2 + 1e-6, name
