"""TF_DETERMINISTIC_OPS=1: all runs, the same bits come out, and no step reads a clock."""

import pytest

from tests import tiny
from tests.programs import python

pytestmark = pytest.mark.process
PROGRAM = """
import sys
import numpy as np, keras
import towers
from towers import cli

run, other = sys.argv[1:]
flags = "--model=tests.tiny:cnn --dataset=tests.tiny:images --augment=tutorial".split()
more = "--batch_size=7 --num_towers=2 --devices=cpu --ema_decay=0.9 --log_every_steps=2".split()
more += ["--schedule=constant"]  # which does not depend on how many steps are asked for
for folder, steps in (run, 4), (run, 9), (other, 9):
    assert cli.main(["train", *flags, *more, f"--max_steps={steps}", f"--train_dir={folder}"]) == 0
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
    folders = [tmp_path / name for name in ("first", "second")]
    done = python("-c", PROGRAM, *folders, variables={"TF_DETERMINISTIC_OPS": "1"})
    assert done.returncode == 0, done.stderr
    tiny.assert_identical(tiny.saved(tmp_path / "first"), tiny.saved(tmp_path / "second"))
    tags = {tag for _, tag, _ in tiny.events(tmp_path / "first" / "train")}
    assert {"loss/total", "tower_1/loss", "speed/examples_per_second"} <= tags
    assert not any(tag.endswith("_seconds") for tag in tags)
