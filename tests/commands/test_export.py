"""`towers export`: what is written computes what the run computes, also without towers."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tiny
from towers import cli, files
from towers.commands.export import command
from towers.data import augment
from towers.training.train import train

RUNS = {
    "tutorial": dict(augment="tutorial", ema_decay=0.9, num_towers=2),
    "resnet": dict(augment="resnet", dtype="float64"),
    "off": dict(augment="off", dtype="mixed_bfloat16"),
}


class Doubled(keras.layers.Layer):
    def call(self, inputs):
        return 2 * inputs


@keras.saving.register_keras_serializable("tests")
class Registered(Doubled):
    pass


def own_layer(num_classes, image_shape, kind="Doubled"):
    own = {"Doubled": Doubled, "Registered": Registered}
    layer = keras.layers.Lambda(lambda x: 2 * x) if kind == "Lambda" else own[kind](name="own")
    head = keras.Sequential([layer, keras.layers.Dense(num_classes)])
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), head])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in RUNS.items():
        train(tiny.options(folder / name, model="tests.tiny:cnn", max_steps=3, **changes))
    return folder


def export(capsys, train_dir, *argv):
    """Return the exit code, standard output and standard error of the command."""
    capsys.readouterr()
    code = cli.main(["export", f"--train_dir={train_dir}", *argv])
    return code, *capsys.readouterr()


def expected(train_dir, images, averages=False):
    """Return what evaluation would compute of stored images."""
    kind, dtype = train_dir.name, "float64" if train_dir.name == "resnet" else "float32"
    model = towers.load(train_dir, averages=averages)
    return model(augment.eval_images(images, kind, dtype), training=False).numpy()


WITHOUT_TOWERS = """
import sys, keras, numpy as np, tensorflow as tf
images = np.load("images.npy")
loaded = keras.models.load_model("model.keras")
assert loaded.input_shape == (None, 8, 8, 3) and loaded.inputs[0].dtype == "uint8"
np.save("keras.npy", np.asarray(loaded.predict(images, verbose=0), "float64"))
saved = tf.saved_model.load("saved_model")
np.save("saved_model.npy", np.asarray(saved.serve(tf.constant(images)), "float64"))
assert "towers" not in sys.modules and "tests" not in sys.modules
"""


@pytest.mark.parametrize("name", RUNS)
def test_files_compute_what_the_run_computes_without_towers(runs, tmp_path, capsys, name):
    averages = ["--averages"] if name == "tutorial" else []
    for form, output in ("keras", "model.keras"), ("saved_model", "saved_model"):
        more = [f"--format={form}", f"--output={tmp_path / output}", *averages]
        code, out, err = export(capsys, runs / name, *more)
        assert (code, err) == (0, "") and "takes       images 8x8x3 uint8, as stored" in out
    images, _ = tiny.arrays(5, seed=9)
    np.save(tmp_path / "images.npy", images)
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    program = [sys.executable, "-c", WITHOUT_TOWERS]
    subprocess.run(program, cwd=tmp_path, env=environment, check=True, capture_output=True)
    outputs = expected(runs / name, images, averages=bool(averages)).astype(np.float64)
    tolerance = {"tutorial": 1e-5, "resnet": 1e-12, "off": 2e-2}[name] * np.abs(outputs).max()
    for form in ("keras", "saved_model"):
        found = np.load(tmp_path / f"{form}.npy")
        np.testing.assert_allclose(found, outputs, rtol=0, atol=tolerance)


def test_weights_are_those_of_the_model_alone(runs, capsys):
    run = runs / "tutorial"
    code, out, _ = export(capsys, run, "--format=weights", "--json")
    found = json.loads(out)
    assert code == 0 and found["output"] == str(run / "model.weights.h5")
    assert (found["passed"], found["step"], found["max_relative_difference"]) == (True, 3, 0.0)
    model = tiny.cnn(3, (6, 6, 3))
    model.load_weights(found["output"])
    for ours, theirs in zip(model.weights, towers.load(run).weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_what_is_there_is_kept_unless_told(runs, tmp_path, capsys):
    run, folder = runs / "tutorial", tmp_path / "served"
    for form, path in ("keras", tmp_path / "a.keras"), ("saved_model", folder):
        argv = [f"--format={form}", f"--output={path}"]
        assert export(capsys, run, *argv)[0] == 0
        before = tiny.files(tmp_path)
        code, out, err = export(capsys, run, *argv)
        assert (code, out) == (2, "")
        assert err == (
            f"towers: --output={path} is there already: type --overwrite to replace it, or name "
            "another with --output\n"
        )
        assert tiny.files(tmp_path) == before
        assert export(capsys, run, *argv, "--overwrite")[0] == 0
        assert tiny.files(tmp_path) != before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/diary").write_text("dear")
    code, _, err = export(
        capsys, run, "--format=saved_model", f"--output={tmp_path}/mine", "--overwrite"
    )
    assert code == 2 and "mine is no saved_model and is not replaced" in err
    code, _, err = export(capsys, run, f"--output={tmp_path}/a.h5")
    assert code == 2 and "a.h5: the name of a file of --format=keras ends in .keras" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.keras", "mine", "served"]


def test_a_run_that_is_training_is_exported(runs, tmp_path, capsys):
    with files.Lock() as lock:
        lock.take(runs / "off")
        assert export(capsys, runs / "off", f"--output={tmp_path}/a.keras")[0] == 0


@pytest.mark.parametrize("kind", ["Doubled", "Lambda"])
def test_a_layer_that_keras_cannot_save_is_named(tmp_path, capsys, kind):
    run = tmp_path / "run"
    model = dict(model="tests.commands.test_export:own_layer", model_args=f"kind={kind}")
    train(tiny.options(run, max_steps=1, **model))
    code, out, err = export(capsys, run)
    named = "own (Doubled)" if kind == "Doubled" else "lambda (Lambda)"
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"towers: --format=keras: layer {named} cannot be loaded again")
    assert "--format=saved_model or --format=weights" in err
    assert not (run / "model.keras").exists()
    for form in "saved_model", "weights":
        assert export(capsys, run, f"--format={form}")[0] == 0
    images, _ = tiny.arrays(2)
    saved = tf.saved_model.load(str(run / "saved_model"))
    inputs = augment.eval_images(images, "none")
    np.testing.assert_allclose(saved.serve(images), towers.load(run)(inputs), rtol=1e-5)


def test_what_a_file_needs_is_said(tmp_path, capsys):
    model = dict(model="tests.commands.test_export:own_layer", model_args="kind=Registered")
    train(tiny.options(tmp_path / "run", max_steps=1, **model))
    code, out, _ = export(capsys, tmp_path / "run")
    assert code == 0 and "import      tests.commands.test_export before loading it" in out


def test_what_computes_something_else_is_not_kept(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "prepared", lambda images, kind, dtype: images[:, 2:, 2:] / 2)
    code, out, _ = export(capsys, runs / "tutorial", f"--output={tmp_path}/a.keras")
    assert code == 1 and out.startswith("failed      nothing is kept")
    assert list(tmp_path.iterdir()) == []
