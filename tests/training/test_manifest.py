"""The manifest of a run: what it says, what it survives, and that a run can be repeated from it."""

import dataclasses
import functools
import json
import os
from pathlib import Path

import pytest
import tensorflow as tf

from tests import programs, tiny
from towers.data import ArraySplit
from towers.training.run import manifest
from towers.training.run.setup import assemble, prepare
from towers.training.train import train

pytestmark = pytest.mark.graph

PARTS = {
    "format", "time", "step", "command", "folder", "flags", "versions", "git", "devices", "host",
    "environment", "data", "code", "first_batch", "initial_weights", "sessions", "final", "task",
}  # fmt: skip


def run_of(folder, **changes):
    return prepare(tiny.options(folder, **changes))


def write(run, folder, restored=None):
    step = int(run.train_state.step.numpy())
    batch = next(iter(run.data.train.train_batches(7, seed=run.options.seed, step=step)))
    return manifest.write(run, folder, restored, batch)


def start_of(run, folder):
    folder.mkdir(exist_ok=True)
    assert write(run, folder) == []
    return manifest.read(folder)


@pytest.fixture
def committed(monkeypatch):
    """Let this checkout stay as it is, whoever edits it while the tests run."""
    monkeypatch.setattr(manifest, "repository", lambda folder: {"root": "here"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("unused"), num_towers=2)


# What it says


def test_it_says_what_the_run_is_made_from(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    monkeypatch.setenv("CUDA_SECRET_TOKEN", "hush-hush")
    monkeypatch.setenv("TF_API_PASSWORD", "hush-hush")
    found = start_of(run, tmp_path)
    assert set(found) == PARTS and "hush-hush" not in (tmp_path / "manifest.json").read_text()
    assert found["step"] == 0 and found["final"] is None and found["folder"] == str(Path.cwd())
    assert found["flags"] == dataclasses.asdict(run.options)
    assert found["versions"]["tensorflow"] == tf.__version__
    assert found["environment"]["TF_ENABLE_ONEDNN_OPTS"] == "1"
    assert found["host"]["cores"] == os.cpu_count()
    assert [row["device"] for row in found["devices"]] == ["/cpu:0", "/cpu:1"]
    assert {"tower", "pci_bus_id", "name", "driver_index"} < found["devices"][0].keys()
    assert found["data"]["train"]["shape"] == [60, 8, 8, 3]
    assert found["data"]["test"]["shape"] == [23, 8, 8, 3]
    assert [session["step"] for session in found["sessions"]] == [0]
    assert found["task"] == {
        "num_classes": 3, "class_names": ["0", "1", "2"], "image_shape": [8, 8, 3],
        "augment": "none", "spec": ["uint8[8, 8, 3]", "int32[]"],
    }  # fmt: skip


def test_first_batch_and_initial_weights_are_those_of_the_seed(run, tmp_path):
    found = start_of(run, tmp_path)
    batch = next(iter(run.data.train.train_batches(7, seed=0)))
    assert found["first_batch"]["sha256"] == manifest.digest(*tiny.flat(batch))
    other = start_of(run_of(tmp_path, seed=1), tmp_path)
    assert other["first_batch"] != found["first_batch"]
    assert other["initial_weights"] != found["initial_weights"]
    again = assemble(run.options, ["/cpu:0"], run.data)
    assert manifest.weights_hash(again.train_state.variables()) == found["initial_weights"]


def test_the_state_of_a_repository(tmp_path):
    git = functools.partial(programs.git, tmp_path)
    assert manifest.repository(tmp_path) is None
    git("init")
    assert manifest.repository(tmp_path) is None  # there is no commit
    (tmp_path / "below").mkdir()
    (tmp_path / "net.py").write_text("one\n")
    git("add", ".")
    git("commit", "-m", "first")
    first = manifest.repository(tmp_path / "below")
    assert (first["root"], first["diff"]) == (str(tmp_path.resolve()), "clean")
    (tmp_path / "net.py").write_text("two\n")
    changed = manifest.repository(tmp_path)
    assert changed["commit"] == first["commit"] and len(changed["diff"]) == 64
    git("commit", "-am", "second")
    second = manifest.repository(tmp_path)
    assert second["commit"] != first["commit"] and second["diff"] == "clean"


# A run that is continued


def test_the_origin_stays_and_each_start_is_added(committed, tmp_path):
    run = run_of(tmp_path)
    first = start_of(run, tmp_path)
    manifest.finish(tmp_path, run.train_state.variables())
    assert manifest.read(tmp_path)["final"]["weights"] == first["initial_weights"]
    other = run_of(tmp_path, num_towers=2, learning_rate=0.2)
    other.train_state.step.assign(12)
    assert write(other, tmp_path, 12) == []
    found = manifest.read(tmp_path)
    kept = PARTS - {"sessions", "final"}
    assert {name: found[name] for name in kept} == {name: first[name] for name in kept}
    assert [session["step"] for session in found["sessions"]] == [0, 12]
    assert [session["flags"]["learning_rate"] for session in found["sessions"]] == [0.1, 0.2]
    assert len(found["sessions"][1]["devices"]) == 2 and found["final"] is None
    images, labels = tiny.arrays(60)
    data = dataclasses.replace(run.data, train=ArraySplit(images ^ 1, labels))
    (line,) = write(dataclasses.replace(run, data=data), tmp_path, 3)
    assert line.startswith("warning     the training set (data.train.sha256) differs: ")


def test_a_model_function_that_was_changed_is_told(committed, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    source = "from tests import tiny\ndef build(**given):\n    return tiny.dense(**given)\n"
    (folder / "changed_net.py").write_text(source)
    run = run_of(folder, model="changed_net:build")
    start_of(run, folder)
    assert write(run, folder, 0) == []
    (folder / "changed_net.py").write_text(source + "# another\n")
    (line,) = write(run, folder, 0)
    assert line.startswith("warning     the file of the model function (code.model) differs: ")
    given = run_of(folder, model=lambda **given: tiny.dense(**given))
    assert manifest.code(given.options) == {"model": None}  # which has no file of its own


DAMAGED = [
    "", "{", "[]", '{"format": 1, "sessions": []}', '{"format": 1, "sessions": 3}',
    '{"format": 99}', "[" * 100_000, '{"format": 1, "sessions": [3]}',
    '{"format": 1, "sessions": [], "task": 3}',
]  # fmt: skip
WRONG = {
    "spec": ["uint8", 3, [], {}, ["uint8[8"], ["gone[8]"], [3], ["uint8[x]"]], "augment": [None, 3],
    "image_shape": ["8x8", ["8"]], "num_classes": ["three"], "class_names": [None, 3],
}  # fmt: skip


def test_a_damaged_manifest_is_replaced(committed, run, tmp_path, capsys):
    start_of(run, tmp_path)
    whole = json.loads((tmp_path / "manifest.json").read_text())
    task = whole["task"]
    wrong = [{**task, name: value} for name in WRONG for value in WRONG[name]]
    wrong += [{other: task[other] for other in task if other != name} for name in task]
    for content in [json.dumps(whole | {"task": task}) for task in wrong] + DAMAGED:
        (tmp_path / "manifest.json").write_text(content)
        assert manifest.read(tmp_path) == {}
        line = f"warning     {tmp_path}/manifest.json is damaged, and taken as absent\n"
        assert capsys.readouterr().err == line
    run.train_state.step.assign(4)
    assert write(run, tmp_path, 4) == []
    run.train_state.step.assign(0)
    found = manifest.read(tmp_path)
    assert set(found) == PARTS and found["step"] == 4
    assert found["first_batch"] is None and found["initial_weights"] is None


def test_the_end_is_written_even_if_the_manifest_is_gone(run, tmp_path):
    manifest.finish(tmp_path, run.train_state.variables())
    found = json.loads((tmp_path / "manifest.json").read_text())
    assert found["final"]["step"] == 0 and len(found["final"]["state"]) == 64


COMPARED = [  # what, now, at the run's start, what is said
    ("versions.tensorflow", "2.21.0", "2.22.0", "2.21.0 now, 2.22.0"),
    ("versions.keras", "3.15.1", "3.15.1", None),
    ("versions.driver", None, "550", None),
    ("git.folder.commit", "a" * 40, "b" * 40, "aaaaaaaaaaaa... now, bbbbbbbbbbbb..."),
    ("git.folder.diff", "clean", "c" * 64, "clean now, cccccccccccc..."),
    ("git.model", None, {"commit": "d" * 40}, None),
    ("devices", [{"tower": 0, "name": "A100"}], [{"tower": 0, "name": "L4"}], None),
    ("host.name", "one", "two", None),
    ("host.processor", "P", "Q", "P now, Q"),
    ("data.train.sha256", "1" * 64, "2" * 64, "111111111111... now, 222222222222..."),
    ("data.train.path", "/a", "/b", None),
    ("data.test", None, {"sha256": "3" * 64}, None),
    ("flags.seed", 1, 2, None),
]


def test_what_differs_is_said_in_lines():
    now, before = ({row[0]: row[i] for row in COMPARED} for i in (1, 2))
    said = {name: words for name, *_, words in COMPARED if words}
    assert manifest.differences(now, before) == [
        f"{manifest._NAMES.get(name, name)} differs: {words} at the run's start"
        for name, words in said.items()
    ]
    assert manifest.differences(now, now) == manifest.differences(now, {}) == []


# A run that is repeated by its flagfile: test_train.


@pytest.mark.run
@pytest.mark.extended
def test_nothing_remains_of_a_trial(tmp_path, monkeypatch):
    """A run that chose the place of its variables is the run that was told it."""
    monkeypatch.setattr("towers.training.run.prepare_run._TRIAL_SECONDS", 0.0)
    monkeypatch.setattr("towers.training.run.prepare_run.TRIALS", 1)
    given = dict(num_towers=2, max_steps=4, ema_decay=0.9, optimizer="adamw", seed=5)
    train(tiny.options(tmp_path / "tried", **given, variables="auto"))
    chosen = manifest.read(tmp_path / "tried")["flags"]["variables"]
    train(tiny.options(tmp_path / "told", **given, variables=chosen))
    tried, told = (manifest.read(tmp_path / name) for name in ("tried", "told"))
    for name in "weights", "state", "step":
        assert tried["final"][name] == told["final"][name]
    assert tried["final"]["weights"] != tried["initial_weights"] == told["initial_weights"]
