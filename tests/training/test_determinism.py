"""TF_DETERMINISTIC_OPS=1: all runs, the same bits come out, and no step reads a clock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import numpy as np, keras
import towers
from towers import cli

run = sys.argv[1]
flags = "--model=tests.tiny:cnn --dataset=tests.tiny:images --augment=tutorial".split()
more = "--batch_size=7 --num_towers=2 --devices=cpu --ema_decay=0.9 --log_every_steps=2".split()
for steps in 4, 9:
    assert cli.main(["train", *flags, *more, f"--max_steps={steps}", f"--train_dir={run}"]) == 0
assert cli.main(["evaluate", f"--train_dir={run}", "--num_towers=1"]) == 0

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
towers.parallelize(model, num_towers=2)
model.fit(
    np.ones([9, 2]), np.ones([9, 1]), batch_size=4,
    callbacks=[towers.callbacks.TowerBoard(f"{run}/fit", every_steps=1)],
)
"""


def test_runs_evaluations_and_fit_need_no_clock(tmp_path):
    for name in "first", "second":
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, tmp_path / name], cwd=ROOT,
            env=os.environ | {"TF_DETERMINISTIC_OPS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    tiny.assert_identical(tiny.saved(tmp_path / "first"), tiny.saved(tmp_path / "second"))
    tags = {tag for _, tag, _ in tiny.events(tmp_path / "first" / "train")}
    assert {"loss/total", "tower_1/loss", "speed/examples_per_second"} <= tags
    assert not any(tag.endswith("_seconds") for tag in tags)
