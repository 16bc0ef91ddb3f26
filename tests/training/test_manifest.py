"""The manifest of a run: what it says, what it survives, and that a run can be repeated from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers.data import ArraySplit
from towers.devices import host
from towers.training import manifest, repository
from towers.training.run import assemble, prepare
from towers.training.train import train

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "format", "time", "step", "command", "folder", "flags", "versions", "git", "devices", "host",
    "environment", "data", "first_batch", "initial_weights", "sessions", "final",
}  # fmt: skip


def run_of(folder, **changes):
    return prepare(tiny.options(folder, **changes))


def start_of(run, folder):
    folder.mkdir(exist_ok=True)
    assert manifest.write(run, folder, None) == []
    return manifest.read(folder)


def of_data(images):
    """Return the start of a manifest that holds the checksum of these images alone."""
    return {"data": {"train": ArraySplit(images, np.zeros(len(images), np.int32)).checksum()}}


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    """Let this checkout stay as it is, whoever edits it while the tests run."""
    monkeypatch.setattr(repository, "root", lambda folder: "here")
    monkeypatch.setattr(repository, "state", lambda folder, without: {"root": "here"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("unused"), num_towers=2, model="tests.tiny:cnn")


# What it says


def test_it_says_what_the_run_is_made_from(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    monkeypatch.setenv("CUDA_SECRET_TOKEN", "hush-hush")
    monkeypatch.setenv("TF_API_PASSWORD", "hush-hush")
    found = start_of(run, tmp_path)
    assert set(found) == PARTS and "hush-hush" not in (tmp_path / "manifest.json").read_text()
    assert found["step"] == 0 and found["final"] is None and found["folder"] == str(Path.cwd())
    assert found["flags"]["batch_size"] == 7 and found["flags"]["model"] == "tests.tiny:cnn"
    assert found["flags"].keys() == run.options.__dataclass_fields__.keys()
    assert found["versions"]["tensorflow"] == tf.__version__
    assert found["environment"]["TF_ENABLE_ONEDNN_OPTS"] == "1"
    assert found["host"]["cores"] == os.cpu_count()
    assert [row["device"] for row in found["devices"]] == ["/cpu:0", "/cpu:1"]
    assert [row["tower"] for row in found["devices"]] == [0, 1]
    assert {"pci_bus_id", "name", "driver_index"} < found["devices"][0].keys()
    assert found["data"]["train"]["shape"] == [60, 8, 8, 3]
    assert found["data"]["test"]["shape"] == [23, 8, 8, 3]
    assert [session["step"] for session in found["sessions"]] == [0]
    assert found["sessions"][0]["changed_flags"] == {}


def test_the_first_batch_is_that_of_step_0(run, tmp_path):
    found = start_of(run, tmp_path)["first_batch"]
    again = start_of(run, tmp_path)["first_batch"]
    other = start_of(run_of(tmp_path, seed=1), tmp_path)["first_batch"]
    assert found == again
    assert all(found[name] != other[name] for name in ("sha256", "images", "labels", "draws"))
    images, labels, draws = next(iter(run.data.train.train_batches(7, seed=0)))
    assert found["images"] == manifest.digest(images) and found["draws"] == manifest.digest(draws)
    assert found["labels"] == manifest.digest(labels)


def test_initial_weights_are_those_of_the_seed(run, tmp_path):
    found = start_of(run, tmp_path)["initial_weights"]
    again = assemble(run.options, ["/cpu:0"], run.data)
    assert manifest.weights_hash(again.masters.variables()) == found
    again.masters.model.trainable_variables[0].value[0, 0, 0, 0].assign(9.0)
    assert manifest.weights_hash(again.masters.variables()) != found


def test_the_repository_of_the_model_is_named_if_it_is_another(run, tmp_path, monkeypatch):
    asked = {Path.cwd(): "here", ROOT / "tests": "there", ROOT / "towers": "there"}
    monkeypatch.setattr(repository, "root", asked.get)
    monkeypatch.setattr(
        repository, "state", lambda folder, without: {"root": asked[folder], "commit": "c"}
    )
    found = start_of(run, tmp_path)["git"]
    assert found == {
        "folder": {"root": "here", "commit": "c"},
        "model": {"root": "there", "commit": "c"},
    }
    monkeypatch.setattr(repository, "root", lambda folder: None)
    monkeypatch.setattr(repository, "state", lambda folder, without: None)
    assert start_of(run, tmp_path)["git"] == {"folder": None}


def test_a_part_that_cannot_be_had_ends_no_run(run, tmp_path, monkeypatch):
    def fail():
        raise KeyError("one\n  two")

    monkeypatch.setattr(host, "versions", fail)
    lines = manifest.write(run, tmp_path, None)
    assert manifest.read(tmp_path)["versions"] is None and len(lines) == 1
    assert lines[0].startswith("warning     manifest.json does without versions: KeyError: ")


def test_data_that_cannot_be_read_are_left_to_the_run_itself(tmp_path):
    broken = run_of(tmp_path, dataset="tests.test_manifest:broken")
    lines = manifest.write(broken, tmp_path, None)
    assert len(lines) == 1 and "does without first_batch: " in lines[0] and "\n" not in lines[0]
    assert manifest.read(tmp_path)["first_batch"] is None


def test_the_pipeline_of_a_user_has_a_first_batch(tmp_path):
    found = start_of(run_of(tmp_path, dataset="tests.test_manifest:pipeline"), tmp_path)
    assert found["data"]["train"]["sha256"] is None and found["data"]["train"]["reason"]
    assert len(found["first_batch"]["sha256"]) == 64


def pipeline():
    """Return a data set as code of a user's would."""
    train, test, num_classes = tiny.images()
    return (
        tf.data.Dataset.from_tensor_slices(train),
        tf.data.Dataset.from_tensor_slices(test),
        num_classes,
    )


def broken():
    """Return a data set whose images have a NaN."""
    (images, labels), test, num_classes = tiny.images()
    train = tf.data.Dataset.from_tensor_slices((images / 255.0 * np.nan, labels))
    return train, tf.data.Dataset.from_tensor_slices((test[0] / 255.0, test[1])), num_classes


# A run that is continued


def test_the_origin_stays_and_each_start_is_added(tmp_path):
    first = start_of(run_of(tmp_path), tmp_path)
    manifest.finish(tmp_path, run_of(tmp_path).masters.variables())
    ended = manifest.read(tmp_path)["final"]
    other = run_of(tmp_path, num_towers=2, learning_rate=0.2)
    other.masters.step.assign(12)
    assert manifest.write(other, tmp_path, 12) == []
    found = manifest.read(tmp_path)
    kept = PARTS - {"sessions", "final"}
    assert {name: found[name] for name in kept} == {name: first[name] for name in kept}
    assert [session["step"] for session in found["sessions"]] == [0, 12]
    assert found["sessions"][1]["changed_flags"] == {"num_towers": 2, "learning_rate": 0.2}
    assert len(found["sessions"][1]["devices"]) == 2
    assert found["final"] is None and found["sessions"][0]["final"] == ended
    assert {"time", "command", "versions", "git"} < found["sessions"][1].keys()


def test_other_data_are_said_when_a_run_is_continued(run, tmp_path, monkeypatch):
    start_of(run, tmp_path)
    other = run_of(tmp_path, num_towers=2, model="tests.tiny:cnn")
    other.data.__dict__["train"] = ArraySplit(*tiny.arrays(60, seed=5))
    monkeypatch.setenv("TF_DETERMINISTIC_OPS", "1")
    lines = manifest.write(other, tmp_path, 3)
    assert len(lines) == 2 and all(line.startswith("warning     ") for line in lines)
    assert "environment.TF_DETERMINISTIC_OPS differs: 1 now, not set at the run's start" in lines[0]
    assert "data.train.sha256 differs: " in lines[1]


def test_a_new_run_in_an_old_folder_has_a_manifest_of_its_own(run, tmp_path):
    start_of(run, tmp_path)
    found = start_of(run_of(tmp_path, seed=3), tmp_path)
    assert len(found["sessions"]) == 1 and found["flags"]["seed"] == 3


DAMAGED = [
    "", "{", "[]", "3", '{"sessions": []}', '{"format": 1}', '{"format": 1, "sessions": 3}',
    '{"format": 1, "sessions": [3]}', '{"format": 99, "sessions": [{}]}', "\udcff",
]  # fmt: skip


@pytest.mark.parametrize("content", [None, *DAMAGED])
def test_a_damaged_manifest_is_replaced(run, tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content.encode(errors="surrogateescape"))
    assert manifest.read(tmp_path) == {}
    continued = assemble(run.options, ["/cpu:0"], run.data)
    continued.masters.step.assign(4)
    assert manifest.write(continued, tmp_path, 4) == []
    found = manifest.read(tmp_path)
    assert set(found) == PARTS and found["step"] == 4
    assert found["first_batch"] is None and found["initial_weights"] is None


def test_parts_of_a_wrong_kind_end_nothing(run, tmp_path):
    found = start_of(run, tmp_path)
    for wrong in None, 3, [], "x", {"x": []}:
        for part in PARTS - {"format", "sessions"}:
            (tmp_path / "manifest.json").write_text(json.dumps(found | {part: wrong}))
            manifest.write(run, tmp_path, 1)
            assert len(manifest.read(tmp_path)["sessions"]) == 2


def test_the_end_is_written_even_if_the_manifest_is_gone(run, tmp_path):
    manifest.finish(tmp_path, run.masters.variables())
    found = json.loads((tmp_path / "manifest.json").read_text())
    assert found["final"]["step"] == 0 and len(found["final"]["state"]) == 64


# Two manifests


def test_what_differs_is_said_in_lines():
    ours = {
        "versions": {"tensorflow": "2.21.0", "keras": "3.15.1", "driver": None},
        "git": {"folder": {"commit": "a" * 40, "branch": "x", "diff": "clean"}},
        "devices": [{"tower": 0, "name": "A100"}, {"tower": 1, "name": "A100"}],
        "host": {"name": "one", "processor": "P", "memory_mib": 1},
        "environment": {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0"},
        "first_batch": {"sha256": "1" * 64, "images": "5" * 64},
        "initial_weights": "3" * 64,
        "flags": {"seed": 1},
    }
    theirs = {
        "versions": {"tensorflow": "2.22.0", "keras": "3.15.1", "driver": "550"},
        "git": {"folder": {"commit": "b" * 40, "branch": "y", "diff": "c" * 64}},
        "devices": [{"tower": 0, "name": "A100"}, {"tower": 1, "name": "L4"}],
        "host": {"name": "two", "processor": "Q", "memory_mib": 2},
        "environment": {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "1"},
        "first_batch": {"sha256": "2" * 64, "images": "6" * 64},
        "initial_weights": "4" * 64,
        "flags": {"seed": 2},
    }
    before = json.dumps([ours, theirs])
    assert manifest.differences(ours, theirs, ("here", "there")) == [
        "versions.tensorflow differs: 2.21.0 here, 2.22.0 there",
        "git.folder.commit differs: aaaaaaaaaaaa... here, bbbbbbbbbbbb... there",
        "git.folder.diff differs: clean here, cccccccccccc... there",
        "devices differs: A100 here, A100 and L4 there",
        "host.processor differs: P here, Q there",
        "environment.OMP_NUM_THREADS differs: 2 here, not set there",
        "environment.PYTHONHASHSEED differs: not set here, 0 there",
        "first_batch.sha256 differs: 111111111111... here, 222222222222... there",
        "initial_weights differs: 333333333333... here, 444444444444... there",
    ]
    assert manifest.differences(ours, ours) == [] and json.dumps([ours, theirs]) == before


def test_what_is_not_known_does_not_differ():
    images, _ = tiny.arrays(4)
    known = of_data(images)
    for unknown in {}, {"data": None}, {"data": {}}, {"data": {"train": {"sha256": None}}}:
        assert manifest.differences(known, unknown) == manifest.differences(unknown, known) == []


def test_other_pixels_are_other_data():
    images, _ = tiny.arrays(4)
    lines = manifest.differences(of_data(images), of_data(images ^ 1))
    assert len(lines) == 1 and lines[0].startswith("data.train.sha256 differs: ")


# A run that is repeated


def towers_train(*flags, **environ):
    """Train in a process of its own, as a user does."""
    given = {n: v for n, v in os.environ.items() if n != "PYTHONHASHSEED"} | environ
    argv = [sys.executable, "-m", "towers", "train", *flags]
    done = subprocess.run(argv, cwd=ROOT, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


GIVEN = """
    --model=tests.tiny:cnn --dataset=tests.tiny:images --num_towers=2 --batch_size=7 --max_steps=12
    --ema_decay=0.9 --optimizer=adamw --learning_rate=0.013 --seed=5
""".split()


@pytest.mark.parametrize("variables", ["cpu", "auto"])
def test_the_flagfile_of_a_run_gives_the_same_weights(tmp_path, variables):
    first, second = tmp_path / "first", tmp_path / "second"
    towers_train(*GIVEN, f"--variables={variables}", f"--train_dir={first}", PYTHONHASHSEED="1")
    # A run of its own, in pieces of another size, in another process with another hash seed.
    again = ("--steps_per_loop=3", "--log_every_steps=5")
    towers_train(
        f"--flagfile={first}/flags.cfg", f"--train_dir={second}", *again, PYTHONHASHSEED="2"
    )
    ours, theirs = manifest.read(first), manifest.read(second)
    for name in "weights", "state", "step":
        assert ours["final"][name] == theirs["final"][name]
    assert ours["final"]["weights"] != ours["initial_weights"] == theirs["initial_weights"]
    tiny.assert_identical(tiny.saved(first), tiny.saved(second))
    assert ours["flags"]["variables"] in ("cpu", "sharded", "replicated")
    lines = [line for line in manifest.differences(ours, theirs) if not line.startswith("git.")]
    assert lines == ["environment.PYTHONHASHSEED differs: 1 here, 2 there"]


def test_a_run_in_two_parts_ends_with_the_same_weights(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = dict(model="tests.tiny:cnn", num_towers=2, num_epochs=1.4, max_steps=12)
    train(tiny.options(whole, **given))
    for last, towers in (5, 2), (12, 2):
        train(tiny.options(parts, **given | {"max_steps": last, "num_towers": towers}))
    ours, theirs = manifest.read(whole), manifest.read(parts)
    assert ours["final"]["weights"] == theirs["final"]["weights"]
    assert ours["final"]["state"] == theirs["final"]["state"]
    assert [session["step"] for session in theirs["sessions"]] == [0, 5]
    assert theirs["sessions"][0]["final"]["step"] == 5 and theirs["final"]["step"] == 12
    assert theirs["sessions"][1]["changed_flags"] == {"max_steps": 12}
    assert theirs["flags"]["max_steps"] == 5
