"""--deterministic: all runs, the same bits come out, and no step reads a clock."""

import pytest

from tests import tiny
from tests.programs import python
from tests.runs import points
from tests.worker_processes import started
from towers.training.run import manifest

pytestmark = pytest.mark.process
PROGRAM = """
import sys
import numpy as np, keras
import towers
from towers import cli

run, other, *given = sys.argv[1:]
flags = "--model=tests.tiny:cnn --dataset=tests.tiny:images --augment=tutorial".split()
more = "--batch_size=7 --num_towers=2 --devices=cpu --ema_decay=0.9 --log_every_steps=2".split()
more += ["--schedule=constant", *given]  # which does not depend on how many steps are asked for
for folder, steps in (run, 5), (run, 9), (other, 9):
    assert cli.main(["train", *flags, *more, f"--max_steps={steps}", f"--train_dir={folder}"]) == 0
assert cli.main(["evaluate", f"--train_dir={run}", "--num_towers=1", *given]) == 0

towers.devices.configure(deterministic=bool(given))
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
    done = python("-c", PROGRAM, *folders, "--deterministic")
    assert done.returncode == 0, done.stderr
    tiny.assert_identical(tiny.saved(tmp_path / "first"), tiny.saved(tmp_path / "second"))
    assert set(points(folders[0] / "train")) >= set(points(folders[1] / "train"))
    tags = {tag for _, tag, _ in tiny.events(tmp_path / "first" / "train")}
    assert {"loss/total", "tower_1/loss", "speed/examples_per_second"} <= tags
    assert not any(tag.endswith("_seconds") for tag in tags)
    flags = (tmp_path / "first/flags.cfg").read_text().splitlines()
    assert {"--deterministic=true", "--max_steps=9"} <= set(flags)
    assert "determinism ops give the same bits" in done.stdout
    found = manifest.read(tmp_path / "first")
    assert found["flags"]["deterministic"] is True
    assert [session["flags"]["max_steps"] for session in found["sessions"]] == [5, 9]


@pytest.mark.extended
def test_workers_and_the_program_are_both_deterministic_or_neither(tmp_path):
    task = "--model=tests.tiny:dense --dataset=tests.tiny:images --augment=none --batch_size=8"
    with started(1, "--deterministic") as (worker,):
        run = f"train {task} --max_steps=2 --workers={worker.address}".split()
        own = f"--train_dir={tmp_path}/own"
        refused = python("-m", "towers", *run, own)
        assert refused.returncode == 2 and "type --deterministic here" in refused.stderr
        done = python("-m", "towers", *run, own, "--deterministic")
        assert done.returncode == 0, done.stderr
