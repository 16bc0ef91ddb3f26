"""`towers predict`: the user's own files, one line for each example, the same on any towers."""

import contextlib
import csv
import dataclasses
import io
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import towers
from tests import tiny
from tests.data import image_files
from tests.runs import as_trained, command
from towers.commands.predict import command as of_predict
from towers.commands.predict import inputs
from towers.commands.predict.options import PredictOptions
from towers.data import augment
from towers.devices import xla_trial
from towers.errors import InputError
from towers.training.train import train

pytestmark = pytest.mark.run

layers = keras.layers
NAMES = ["bird", "cat", "dog"]
PHOTOS = ["a.png", "b.bmp", "c.PNG", "more/d.gif"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on image files of 6x5, resized to 8x8."""
    top = tmp_path_factory.mktemp("predict")
    image_files.write_folder(top / "data", range(12))
    image_files.write_folder(top / "data", range(3), split="test")
    flags = dict(dataset="folder", data_dir=str(top / "data"), image_size="8", ema_decay=0.5)
    flags |= dict(model="tests.tiny:cnn", batch_size=4, max_steps=4)
    train(tiny.options(top / "run", **flags))
    return top / "run"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of images, with one in a folder below, and the same images as arrays."""
    top = tmp_path_factory.mktemp("files")
    (top / "photos/more").mkdir(parents=True)
    images = np.stack([image_files.image(number, (8, 8, 3)) for number in range(7)])
    for image, name in zip(images, PHOTOS, strict=False):  # d.gif is a PNG, whatever it is called
        kind = "bmp" if name == "b.bmp" else "png"
        Image.fromarray(image).save(top / "photos" / name, format=kind)
    (top / "photos/.hidden.png").write_text("no image")
    (top / "photos/notes.txt").write_text("no image")
    np.save(top / "x.npy", images)
    np.savez(top / "x.npz", x_test=images, y_test=np.zeros(7))
    return top, images


def predict(capsys, train_dir, *argv):
    return command(capsys, "predict", f"--train_dir={train_dir}", *argv)


def chances(run, images, averages=False):
    model = towers.load(run, averages=averages)
    return tf.nn.softmax(model(augment.eval_images(images, "standardize"), training=False)).numpy()


def rows_of(out):
    return list(csv.DictReader(io.StringIO(out)))


def test_a_folder_and_arrays_on_any_towers_as_csv_and_json(run, files, capsys):
    top, images = files
    argv = top / "photos", top / "x.npz", "--averages"
    code, out, err = predict(capsys, run, *argv, "--num_towers=1")
    assert code == 0 and "step 4, averages, 11 examples, 1 tower\n" in err
    expected = chances(run, images[[0, 1, 2, 3, *range(7)]], averages=True)
    places = [(f"photos/{name}", 0) for name in PHOTOS] + [("x.npz", i) for i in range(7)]
    for found, (name, index), row in zip(rows_of(out), places, expected, strict=True):
        best, second = np.argsort(-row)[:2]
        assert (found["file"], found["index"]) == (str(top / name), str(index))
        assert (found["class"], found["second"]) == (NAMES[best], NAMES[second])
        shares = [float(found["probability"]), float(found["second_probability"])]
        np.testing.assert_allclose(shares, row[[best, second]], atol=1e-5)
    more = "--num_towers=3", "--batch_size=100"
    assert predict(capsys, run, *argv, *more)[1] == out

    entries = json.loads(predict(capsys, run, top / "x.npy", "--averages", "--json")[1])
    for entry, found, row in zip(entries, rows_of(out)[4:], expected[4:], strict=True):
        assert list(entry) == ["file", "index", "class", "probability", "outputs"]
        assert (entry["file"], str(entry["index"])) == (str(top / "x.npy"), found["index"])
        assert entry["class"] == found["class"]
        assert entry["probability"] == pytest.approx(row.max(), abs=1e-5)
        assert tf.nn.softmax(entry["outputs"]["output"]).numpy() == pytest.approx(row, abs=1e-5)


def test_what_cannot_be_read_is_one_line_and_nothing_is_printed(run, files, tmp_path, capsys):
    top, images = files
    (tmp_path / "broken.png").write_bytes((top / "photos/a.png").read_bytes()[:60])
    (tmp_path / "broken.npz").write_text("PK")
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "empty/.thumbnails").mkdir(parents=True)
    shutil.copy(top / "photos/a.png", tmp_path / "empty/.thumbnails")
    np.save(tmp_path / "small.npy", images[:, :4])
    np.save(tmp_path / "floats.npy", images / 255)
    np.savez(tmp_path / "other.npz", pictures=images)
    takes = "this model takes uint8[8, 8, 3]"
    for name, message in {
        "broken.png": " cannot be read: ",
        "broken.npz": " cannot be read: ",
        "note.txt": ": only .png, .jpg, .jpeg, .bmp, .gif, .npy and .npz files can be read",
        "empty": " has no images",
        "none.png": ": no such file or folder",
        "small.npy": f" is uint8[7, 4, 8, 3]: {takes}",
        "floats.npy": f" is float64[7, 8, 8, 3]: {takes}",
        "other.npz": f" has pictures, but no x: {takes}",
    }.items():
        code, out, err = predict(capsys, run, top / "photos", tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1), name
        assert err.startswith(f"towers: {tmp_path / name}{message}")
    code, _, err = predict(capsys, run)
    needed = "towers predict needs files or folders: towers predict --train_dir=RUN FILE"
    assert (code, err) == (2, f"towers: {needed}\n")


# Other models: what is read, and what is printed.


def printed(monkeypatch, capsys, of_run, *names):
    """Return what the command prints for a model."""
    monkeypatch.setattr(of_predict, "load_run", lambda *_, **__: of_run)
    monkeypatch.setattr(
        xla_trial, "try_xla", None
    )  # nothing is compiled, as for GPUs unknown to it
    of_run_options = dataclasses.replace(of_run.options, jit_compile=True)
    options = PredictOptions(of_run_options, tuple(map(str, names)))
    of_predict.run(options, lambda line: None)
    return capsys.readouterr().out.splitlines()


@pytest.mark.graph
def test_several_outputs_are_printed_and_several_inputs_refused(tmp_path, monkeypatch, capsys):
    size = keras.Input([1], name="size")
    outputs = {n: layers.Lambda(lambda t: t * 1.0, name=n)(size) for n in ("price", "length")}
    model = keras.Model(size, outputs)
    np.save(tmp_path / "a.npy", np.arange(5.0)[:, None])
    of_run = as_trained(model, "float32[1]", "float32[]")
    lines = printed(monkeypatch, capsys, of_run, tmp_path / "a.npy")
    of_bytes = as_trained(model, "uint8[1]", "float32[]")
    for values, fit in ([[255]], True), ([[256]], False):  # which would become 0
        np.save(tmp_path / "wide.npy", np.array(values, np.uint64))
        with contextlib.nullcontext() if fit else pytest.raises(InputError, match="is uint64"):
            inputs.find([str(tmp_path / "wide.npy")], of_bytes)
    assert lines[0] in ("file,index,price.0,length.0", "file,index,length.0,price.0")
    assert lines[5] == f"{tmp_path}/a.npy,4,4.0,4.0"
    of_run = as_trained(model, {"text": "int32[3]", "size": "float32[1]"}, "float32[]")
    with pytest.raises(InputError, match="models with one input, .* towers.load"):
        inputs.find([str(tmp_path / "a.npy")], of_run)


@pytest.mark.graph
@pytest.mark.parametrize(
    "loss, said", [("binary_crossentropy", "1,yes,0.8,no,0.2"), ("mse", "1,0.8")]
)
def test_one_number_may_be_the_probability_of_the_second_class(
    tmp_path, monkeypatch, capsys, loss, said
):
    bias = keras.initializers.Constant(np.log(0.8 / 0.2))
    model = keras.Sequential([keras.Input([2]), layers.Dense(1, "sigmoid", bias_initializer=bias)])
    model.compile("sgd", loss)
    of_run = as_trained(model, "float32[2]", "int32[]", num_classes=2, class_names=["no", "yes"])
    np.save(tmp_path / "x.npy", np.zeros([2, 2]))
    line = printed(monkeypatch, capsys, of_run, tmp_path / "x.npy")[-1]
    assert line == f"{tmp_path}/x.npy,{said}"
