"""`towers export`: what is written computes what the run computes, also without towers."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import towers
from tests import tiny
from tests.runs import as_trained, command
from towers import files
from towers.commands.export import command as export
from towers.commands.export.options import ExportOptions
from towers.data import augment
from towers.errors import InputError
from towers.options.parts import AUGMENTATIONS
from towers.options.run import Options

pytestmark = pytest.mark.run


class Doubled(keras.layers.Layer):
    def call(self, inputs):
        return 2 * inputs


@keras.saving.register_keras_serializable("tests")
class Registered(Doubled):
    pass


def export_of(capsys, train_dir, *argv):
    """Return the exit code, standard output and standard error of the command."""
    return command(capsys, "export", f"--train_dir={train_dir}", *argv)


WITHOUT_TOWERS = """
import sys, keras, numpy as np, tensorflow as tf
images = np.load("images.npy")
loaded = keras.models.load_model("a.keras")
assert loaded.input_shape == (None, 8, 8, 3) and loaded.inputs[0].dtype == "uint8"
np.save("keras.npy", loaded.predict(images, verbose=0))
loaded.export("saved", verbose=False)
saved = tf.saved_model.load("saved")  # which holds the variables
np.save("saved.npy", saved.serve(tf.constant(images)))
assert "towers" not in sys.modules and "tests" not in sys.modules
"""


@pytest.mark.process
def test_files_compute_what_the_run_computes_without_towers(trained, tmp_path, capsys):
    images, _ = tiny.arrays(5, seed=9)
    np.save(tmp_path / "images.npy", images)
    argv = [f"--output={tmp_path}/a.keras", "--averages"]
    code, out, err = export_of(capsys, trained("classes"), *argv)
    assert (code, err) == (0, "") and f"exported    {tmp_path}/a.keras: the averages" in out
    model = towers.load(trained("classes"), averages=True)
    expected = model(augment.eval_images(images, "tutorial"), training=False).numpy()
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    program = [sys.executable, "-c", WITHOUT_TOWERS]
    subprocess.run(program, cwd=tmp_path, env=environment, check=True, capture_output=True)
    for name in "keras.npy", "saved.npy":
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(np.load(tmp_path / name), expected, rtol=0, atol=atol)


def test_the_file_of_a_run_that_is_training_is_told_as_json(trained, tmp_path, capsys):
    run = trained.copy("classes", tmp_path / "run")
    with files.Lock() as lock:
        lock.take(run)
        code, out, _ = export_of(capsys, run, "--json")
    found = json.loads(out)
    assert code == 0 and found["output"] == str(run / "model.keras")
    assert (found["passed"], found["step"]) == (True, 18)


def test_what_is_there_is_kept_unless_told(trained, tmp_path, capsys):
    run, argv = trained("classes"), [f"--output={tmp_path}/a.keras"]
    assert export_of(capsys, run, *argv)[0] == 0
    before = tiny.files(tmp_path)
    code, out, err = export_of(capsys, run, *argv)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"--output={tmp_path}/a.keras already exists; type --overwrite to replace" in err
    assert tiny.files(tmp_path) == before
    assert export_of(capsys, run, *argv, "--overwrite")[0] == 0
    assert tiny.files(tmp_path) != before
    code, _, err = export_of(capsys, run, f"--output={tmp_path}/a.h5")
    assert code == 2 and "a.h5: name a file that ends in .keras" in err
    assert [p.name for p in tmp_path.iterdir()] == ["a.keras"]


def test_what_computes_something_else_is_not_kept(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export, "_eval_images", lambda images, kind, dtype: images[:, 2:, 2:] / 2)
    code, out, _ = export_of(capsys, trained("classes"), f"--output={tmp_path}/a.keras")
    assert code == 1 and out.startswith("failed      no file was written")
    assert list(tmp_path.iterdir()) == []


def export_layer(monkeypatch, folder, layer, lines):
    """Export an untrained model with that layer inside as if it were a run's."""
    head = keras.Sequential([layer, keras.layers.Dense(3)])
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Flatten(), head])
    images = dict(image_shape=[8, 8, 3], augment="standardize")
    of_run = as_trained(model, "uint8[8, 8, 3]", "int32[]", **images)
    monkeypatch.setattr(export, "load_run", lambda *_, **__: of_run)
    options = ExportOptions(Options(train_dir=str(folder)))
    return export.run(options, lines.append)["passed"]


def doubling(name):
    return keras.layers.Lambda(lambda x: 2 * x, name=name)


@pytest.mark.parametrize("make, kind", [(Doubled, "Doubled"), (doubling, "Lambda")])
def test_a_layer_that_keras_cannot_save_is_named(tmp_path, monkeypatch, make, kind):
    with pytest.raises(InputError, match=f"^Keras cannot load .*{kind}.*export"):
        export_layer(monkeypatch, tmp_path, make(name="own"), [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("kind", [*AUGMENTATIONS, "shift,cutout=2"])
def test_what_is_inside_prepares_images_as_an_evaluation_does(kind, dtype):
    images = tiny.arrays(5, seed=9)[0].astype(dtype)
    model_input = keras.Input(images.shape[1:], dtype=dtype)
    model = keras.Model(model_input, export._eval_images(model_input, kind, "float64"))
    np.testing.assert_allclose(model(images), augment.eval_images(images, kind, "float64"))


def test_what_a_file_needs_is_said(tmp_path, monkeypatch):
    lines = []
    assert export_layer(monkeypatch, tmp_path, Registered(), lines)
    assert any(f"import      {__name__} before loading it" in line for line in lines)
