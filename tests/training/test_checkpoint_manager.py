"""What becomes of a run whose folder or disk goes while it trains."""

import re
import shutil
from pathlib import Path

import pytest
import tensorflow as tf

import towers
from tests import runs, tiny
from towers.errors import InputError, RunError
from towers.training.run import manifest
from towers.training.run.checkpoint import find
from towers.training.run.checkpoint_manager import CheckpointManager
from towers.training.train import train

pytestmark = pytest.mark.run
STEPS = dict(max_steps=12, checkpoint_every_steps=2, log_every_steps=1)


def end_of(folder):
    return manifest.read(folder)["final"]["state"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(tiny.options(folder, **STEPS))
    return folder


def test_a_run_whose_folder_goes_ends_and_writes_nowhere_else(tmp_path, monkeypatch):
    run, before = tmp_path / "all/run", {}

    def act():
        run.rename(run.with_name("moved"))
        before.update(tiny.files(tmp_path))

    runs.at_step(monkeypatch, {5: act})
    with pytest.raises(RunError, match="run/checkpoints was renamed or deleted"):
        train(tiny.options(run, **STEPS))
    assert tiny.saved_steps(run.with_name("moved")) == [0, 2, 4]
    after = tiny.files(tmp_path)
    assert {path: after[path] for path in before} == before and len(after) == len(before)


def test_a_disk_that_fills_up_costs_no_training(tmp_path, monkeypatch, capsys, undisturbed):
    run = tmp_path / "run"
    with runs.small_disk() as limit:
        runs.at_step(monkeypatch, {5: lambda: limit(100)})
        with pytest.raises(RunError, match=r"ckpt-12 cannot be written: File too large$"):
            train(tiny.options(run, **STEPS))
    out = capsys.readouterr().out
    tried = re.findall(r"^warning .*/ckpt-(\d+) cannot be written: File too large; tr", out, re.M)
    assert tried == ["6", "8", "10"]
    assert out.count("curves of train cannot be written") == 1
    assert len(list(tmp_path.iterdir())) == 1  # nothing half-written beside it
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    assert tiny.saved_steps(run) == [0, 2, 4]
    train(tiny.options(run, **STEPS))
    assert end_of(run) == end_of(undisturbed)


@pytest.mark.unit
def test_the_best_is_kept_until_a_better_one_is_on_the_disk(tmp_path):
    variables = {"step": tf.Variable(0, dtype=tf.int64)}
    checkpoints = CheckpointManager(tmp_path, variables, {}, keep=1)
    for step in range(1, 5):
        variables["step"].assign(step)
        checkpoints.best = {1: 1, 2: 1, 3: 99, 4: 4}[step]  # 99 could not be written
        checkpoints.save_now(step)
        kept = [number for number, _ in find(tmp_path)]
        assert kept == ([4] if step == 4 else sorted({1, step}))


def test_what_dead_processes_left_is_cleared(undisturbed, tmp_path):
    run = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    folder = run / "checkpoints"
    for part in "data-00000-of-00001", "index":  # a kill came just before the renaming
        (folder / f"ckpt-12.{part}").rename(folder / f".ckpt-12.99.{part}")
    (folder / "ckpt-8.index").unlink()  # or in deleting the oldest
    (folder / "ckpt-14_temp").mkdir()
    (folder / "ckpt-14_temp/part-00000-of-00001.data-00000-of-00001").write_bytes(b"half")
    for left in ".checkpoint.99", ".ckpt-14.99.data-00000-of-00001.tempstate123":
        (folder / left).write_bytes(b"half")
    for left in ".flags.cfg.99", ".manifest.json.99":
        (run / left).write_bytes(b"half")
    (run / ".mine.99").write_text("a user's own")
    train(tiny.options(run, **STEPS | dict(max_steps=14)))
    assert tiny.saved_steps(run) == [10, 12, 14]
    left = {path.name for path in run.rglob("*") if "tfevents" not in path.name}
    assert not [n for n in left if "99" in n and n != ".mine.99" or "_temp" in n or "ckpt-8" in n]


def test_a_newest_checkpoint_that_cannot_be_read_is_passed_over_by_training_alone(
    undisturbed, tmp_path, capsys
):
    run = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    (run / "checkpoints/ckpt-12.index").write_bytes(b"half")
    said = "ckpt-12 cannot be read ("
    for verb in "evaluate", "export":  # whose results would be taken for those of step 12
        more = [f"--output={tmp_path}/x.keras"] if verb == "export" else []
        code, out, err = runs.command(capsys, verb, f"--train_dir={run}", *more)
        assert (code, out) == (2, "") and said in err and "--step" not in err
    with pytest.raises(InputError, match=r"ckpt-12 cannot be read.*towers.load\(..., step="):
        towers.load(run)
    runs.assert_has(towers.load(run, step=10), run, 10)
    train(tiny.options(run, **STEPS | dict(max_steps=14)))
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and line.endswith("): skipped")
    assert tiny.saved_steps(run)[-1] == 14
