"""The manifest of a run: what it says, what it survives, and what a resumed run says of changes."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import tensorflow as tf

from tests import tiny
from towers import files
from towers.data import ArraySplit
from towers.training.run import manifest
from towers.training.run.setup import prepare

pytestmark = pytest.mark.graph

PARTS = {
    "format", "time", "step", "folder", "flags", "versions", "code", "data",
    "task", "overwrite", "sessions", "final",
}  # fmt: skip


def write(run, folder, recorded):
    content, lines = manifest.extended(run, recorded)
    files.write_json(folder / "manifest.json", content)
    return lines


def run_of(folder, **changes):
    return prepare(tiny.options(folder, **changes))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("unused"), num_towers=2)


def test_it_says_what_the_run_is_made_from(run, tmp_path):
    assert write(run, tmp_path, {}) == []
    found = manifest.read(tmp_path)
    assert set(found) == PARTS
    assert found["step"] == 0 and found["final"] is None and found["folder"] == str(Path.cwd())
    assert found["flags"] == dataclasses.asdict(run.options)
    assert found["versions"]["tensorflow"] == tf.__version__
    assert found["data"]["train"]["examples"] == 60
    assert found["data"]["test"]["examples"] == 23
    assert [session["step"] for session in found["sessions"]] == [0]
    assert found["task"] == {
        "num_classes": 3, "class_names": ["0", "1", "2"], "image_shape": [8, 8, 3],
        "augment": "standardize", "spec": ["uint8[8, 8, 3]", "int32[]"],
    }  # fmt: skip


def test_the_first_record_stays_and_each_start_is_added(tmp_path):
    run = run_of(tmp_path)
    write(run, tmp_path, {})
    first = manifest.read(tmp_path)
    files.update_json(
        tmp_path / "manifest.json", final=manifest.finish(run.train_state.variables())
    )
    assert len(manifest.read(tmp_path)["final"]["weights"]) == 64
    other = run_of(tmp_path, num_towers=2, learning_rate=0.2)
    other.train_state.step.assign(12)
    assert write(other, tmp_path, manifest.read(tmp_path)) == []
    found = manifest.read(tmp_path)
    kept = PARTS - {"sessions", "final"}
    assert {name: found[name] for name in kept} == {name: first[name] for name in kept}
    assert [session["step"] for session in found["sessions"]] == [0, 12]
    assert [session["flags"]["learning_rate"] for session in found["sessions"]] == [0.1, 0.2]
    assert found["final"] is None
    images, labels = tiny.arrays(60)
    data = dataclasses.replace(run.data, train=ArraySplit(images ^ 1, labels))
    (line,) = write(dataclasses.replace(run, data=data), tmp_path, found)
    assert line.startswith("the training set (data.train) differs: ")


def test_a_changed_model_function_is_reported(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    source = "from tests import tiny\ndef build(**given):\n    return tiny.dense(**given)\n"
    (folder / "changed_net.py").write_text(source)
    run = run_of(folder, model="changed_net:build")
    assert write(run, folder, {}) == []
    assert write(run, folder, found := manifest.read(folder)) == []
    (folder / "changed_net.py").write_text(source + "# another\n")
    (line,) = write(run_of(folder, model="changed_net:build"), folder, found)
    assert line.startswith("the file of the model function (code.model) differs: ")
    given = run_of(folder, model=lambda **given: tiny.dense(**given))
    assert given.code == {"model": None}  # which has no file of its own


DAMAGES = [  # {part: value}, also of parts of parts
    {"format": 99}, {"sessions": []}, {"sessions": [3]}, {"sessions": [{"flags": "--seed=1"}]},
    {"code": None}, {"data": {"train": 3}}, {"task": {}}, {"task.class_names": [0, 1, 2]},
    {"task.class_names": ["a"]}, {"task.num_classes": 10**400}, {"task.image_shape": ["8"]},
    {"task.spec": []}, {"task.spec": ["nope[3]"]}, {"task.spec": [{"x": 1}]},
    {"task.image_shape": [], "task.spec": ["uint8[]"]},
]  # fmt: skip


def test_a_damaged_manifest_is_replaced(run, tmp_path, capsys):
    write(run, tmp_path, {})
    path = tmp_path / "manifest.json"
    whole = json.loads(path.read_text())
    for damage in DAMAGES:
        changed = copy.deepcopy(whole)
        for name, value in damage.items():
            part, _, below = name.rpartition(".")
            (changed[part] if part else changed)[below] = value
        path.write_text(json.dumps(changed))
        assert manifest.read(tmp_path) == {}, damage
        line = f"warning     {tmp_path}/manifest.json is damaged and is ignored\n"
        assert capsys.readouterr().err == line
    run.train_state.step.assign(4)
    assert write(run, tmp_path, manifest.read(tmp_path)) == []
    run.train_state.step.assign(0)
    found = manifest.read(tmp_path)
    assert set(found) == PARTS and found["step"] == 4
