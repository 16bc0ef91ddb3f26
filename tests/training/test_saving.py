"""What becomes of a run whose folder or disk goes while it trains."""

import json
import re
import resource
import shutil
import threading
from pathlib import Path

import pytest
import tensorflow as tf

import towers
from tests import tiny
from towers.errors import InputError, RunError
from towers.monitoring import events
from towers.training.checkpoint import find
from towers.training.saving import Checkpoints
from towers.training.train import train

STEPS = dict(max_steps=12, checkpoint_every_steps=2, log_every_steps=1)


@pytest.fixture
def at_step(monkeypatch):
    """Return a function that has `action` called before the loop's call that begins at a step."""
    from towers.training import train as module

    def arrange(actions):
        original = module.Monitor.progress

        def progress(self, step, values):
            original(self, step, values)
            if step in actions:
                for thread in threading.enumerate():
                    if thread.name == "checkpoint":  # the save before is to be over
                        thread.join()
                actions.pop(step)()

        monkeypatch.setattr(module.Monitor, "progress", progress)

    return arrange


def end_of(folder):
    return json.loads((folder / "manifest.json").read_text())["final"]["state"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(tiny.options(folder, **STEPS))
    return end_of(folder)


def delete(run):
    shutil.rmtree(run)


def rename(run):
    run.rename(run.with_name("moved"))


def empty(run):
    delete(run)
    run.mkdir()


def delete_parent(run):
    delete(run.parent)


def delete_parts(run):
    (run / "flags.cfg").unlink()
    delete(run / "checkpoints")
    delete(run / "train")


@pytest.mark.parametrize("go", [delete, rename, empty, delete_parent, delete_parts])
def test_a_folder_that_goes_is_made_again_with_all_that_a_run_needs(
    tmp_path, at_step, capsys, undisturbed, go
):
    run = tmp_path / "all/run"
    at_step({5: lambda: go(run)})
    train(tiny.options(run, **STEPS))
    out = capsys.readouterr().out
    assert len(re.findall("^warning .*(made again|written again)", out, re.MULTILINE)) == 1
    if go is rename:
        assert f"the folder that was {run} is {run.with_name('moved')} now" in out
    assert {"flags.cfg", "manifest.json", "result.json", "checkpoints"} < {
        path.name for path in run.iterdir()
    }
    assert end_of(run) == undisturbed
    assert tiny.saved_steps(run) == [8, 10, 12]
    assert list(events.read(run / "train")) == list(range(4, 12))


def another_run(run):
    delete(run)
    (run / "checkpoints").mkdir(parents=True)
    (run / "flags.cfg").write_text("--model=other:model")


def a_file(run):
    delete(run)
    run.write_text("somebody's own")


@pytest.mark.parametrize("go", [another_run, a_file])
def test_where_a_run_cannot_go_on_it_is_saved_beside_and_ends(
    tmp_path, at_step, capsys, undisturbed, go
):
    run, before = tmp_path / "run", {}

    def act():
        go(run)
        before.update(tiny.files(tmp_path))

    at_step({5: act})
    with pytest.raises(RunError, match=r"ckpt-12 cannot be written: .*; it is saved in") as caught:
        train(tiny.options(run, **STEPS))
    assert capsys.readouterr().out.count("; training goes on, and the next save tries again") == 3
    beside = re.search(r"where --train_dir=(\S+) goes on", str(caught.value))[1]
    assert run.parent == Path(beside).parent and len(list(tmp_path.iterdir())) == 2
    after = tiny.files(tmp_path)
    assert {path: after[path] for path in before if path.name} == {
        path: content for path, content in before.items() if path.name
    }
    train(tiny.options(beside, **STEPS))
    assert end_of(Path(beside)) == undisturbed


@pytest.mark.parametrize("again", [False, True])
def test_a_disk_that_fills_up_costs_no_training(tmp_path, at_step, capsys, undisturbed, again):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes):
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    run = tmp_path / "run"
    at_step({5: limit(500)} | ({9: limit(soft)} if again else {}))
    try:
        if again:
            train(tiny.options(run, **STEPS))
        else:
            with pytest.raises(RunError, match=r"ckpt-12 cannot be written: File too large$"):
                train(tiny.options(run, **STEPS))
    finally:
        limit(soft)()
    out = capsys.readouterr().out
    tried = re.findall(r"^warning .*/ckpt-(\d+) cannot be written: File too large; tr", out, re.M)
    assert tried == (["6", "8"] if again else ["6", "8", "10"])
    assert out.count("curves of train cannot be written") == 1
    assert len(list(tmp_path.iterdir())) == 1  # nothing half-written beside it
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
    if not again:
        assert tiny.saved_steps(run) == [0, 2, 4]
        train(tiny.options(run, **STEPS))
    assert end_of(run) == undisturbed


def test_the_best_is_kept_until_a_better_one_is_on_the_disk(tmp_path):
    variables = {"step": tf.Variable(0, dtype=tf.int64)}
    checkpoints = Checkpoints(tmp_path, variables, {}, keep=1)
    for step in range(1, 5):
        variables["step"].assign(step)
        checkpoints.best = {1: 1, 2: 1, 3: 99, 4: 4}[step]  # 99 could not be written
        checkpoints.save_now(step)
        kept = [number for number, _ in find(tmp_path)]
        assert kept == ([4] if step == 4 else sorted({1, step}))


def test_what_dead_processes_left_is_cleared_and_a_whole_checkpoint_gets_its_name(tmp_path):
    run = tmp_path / "run"
    train(tiny.options(run, **STEPS))
    folder, names = run / "checkpoints", {path.name for path in run.rglob("*")}
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
    assert left <= {re.sub(r"ckpt-\d+", "ckpt-12", n) for n in names} | left - {
        n for n in left if n.endswith("99") and n != ".mine.99"
    }
    assert not [n for n in left if "99" in n and n != ".mine.99" or "_temp" in n or "ckpt-8" in n]


@pytest.mark.parametrize("index", [b"", b"half of one"])
def test_a_first_checkpoint_that_a_full_disk_left_blocks_nothing(
    tmp_path, capsys, undisturbed, index
):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/ckpt-0.index").write_bytes(index)
    train(tiny.options(tmp_path, **STEPS))
    assert "ckpt-0 cannot be read and is passed over" in capsys.readouterr().err
    assert end_of(tmp_path) == undisturbed


def test_a_newest_checkpoint_that_is_not_there_is_told(tmp_path, capsys):
    train(tiny.options(tmp_path, **STEPS))
    (tmp_path / "checkpoints/ckpt-12.index").unlink()
    for suffix in "index", "data-00000-of-00001":  # and one under another step's name
        path = tmp_path / f"checkpoints/ckpt-8.{suffix}"
        path.rename(path.with_name(f"ckpt-11.{suffix}"))
    told = [
        "ckpt-12.index is missing, though its data are there: passed over",
        "ckpt-11 cannot be read and is passed over: it is that of step 8: name its files ckpt-8",
    ]
    with pytest.warns(UserWarning) as warned:
        towers.load(tmp_path)
    assert [str(w.message).rpartition("/")[2] for w in warned] == told
    train(tiny.options(tmp_path, **STEPS))
    assert [line.rpartition("/")[2] for line in capsys.readouterr().err.splitlines()] == told


def test_data_without_any_index_are_no_new_run(tmp_path):
    train(tiny.options(tmp_path, **STEPS))
    for path in (tmp_path / "checkpoints").glob("*.index"):
        path.unlink()
    with pytest.raises(InputError, match="none of the 3 checkpoints in .* can be read"):
        train(tiny.options(tmp_path, **STEPS))
