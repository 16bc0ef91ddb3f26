"""`--init_from`: what a new run begins with, and what it says of that."""

import h5py
import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format

from tests import tiny
from towers import cli
from towers.training import manifest
from towers.training.train import train

layers = keras.layers


def classifier(num_classes, image_shape, width=4, head="head"):
    """Names of its own, a frozen layer, and a draw, which has a seed."""
    model = keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(width, 3, name="stem"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.1),
            layers.GlobalAveragePooling2D(),
            layers.Dense(num_classes, name=head),
        ]
    )
    model.get_layer("stem").trainable = False
    return model


def backbone():
    options = dict(include_top=False, alpha=0.35, input_shape=(None, None, 3))
    return keras.applications.MobileNetV2(weights=None, **options)


def mobile(num_classes, image_shape):
    """A frozen backbone below another head, after a layer that takes the first one's place."""
    body = backbone()
    body.trainable = False
    parts = [
        layers.Conv2D(3, 1),
        layers.UpSampling2D(4),
        body,
        layers.GlobalAveragePooling2D(),
        layers.Dense(num_classes),
    ]
    return keras.Sequential([keras.Input(image_shape), *parts])


def start(folder, capsys, source, model="classifier", code=0, **flags):
    """Train no more than a step, and return the lines about the first weights and the variables."""
    given = dict(train_dir=folder, model=f"tests.training.test_initial:{model}", batch_size=7)
    given |= dict(dataset="tests.tiny:images", augment="none", max_steps=1, init_from=source)
    found = cli.main(["train", *(f"--{name}={value}" for name, value in (given | flags).items())])
    out, err = capsys.readouterr()
    assert found == code, err
    if code:
        return err
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("init_from"))
    after = next(i for i in range(first + 1, len(lines)) if not lines[i].startswith("  "))
    return [line.replace(str(source), "SOURCE") for line in lines[first:after]]


def first_weights(folder):
    """Return {path: value} of a model's variables before the first step."""
    saved = tiny.saved(folder, 0)
    return {n[7:].replace(".S", "/"): v for n, v in saved.items() if n.startswith("model.S")}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with averages, of a few steps, and its model's weights in files."""
    folder = tmp_path_factory.mktemp("source")
    options = tiny.options(
        folder / "run", model="tests.training.test_initial:classifier", ema_decay=0.9, seed=3
    )
    train(options)
    keras.utils.set_random_seed(5)
    model = classifier(3, (8, 8, 3))
    model.compile("adam", "mse")
    model.fit(np.ones([4, 8, 8, 3]), np.ones([4, 3]), verbose=0)  # with slots in the file
    model.save(folder / "file.keras")
    model.save_weights(folder / "file.weights.h5")
    return folder, model


def test_a_run_gives_its_averages(source, tmp_path, capsys):
    run = source[0] / "run"
    (line,) = start(tmp_path / "a", capsys, run, ema_decay=0.9, num_towers=2)
    assert line == "init_from   SOURCE, its averages at step 12: 8 of 8 weights"
    there, here = tiny.saved(run), tiny.saved(tmp_path / "a", 0)
    for name in (name for name in here if name.startswith(("model.S", "average.S"))):
        seed = "seed_generator" in name  # the draws are those of the new run
        expected = here if seed else there
        of_run = f"average.S{name.partition('.S')[2]}"
        np.testing.assert_array_equal(here[name], expected[name if seed else of_run], name)
    found = manifest.read(tmp_path / "a")
    assert found["flags"]["init_from"] == str(run)
    assert found["initial_weights"] != manifest.read(run)["initial_weights"]


@pytest.mark.parametrize("file", ["file.keras", "file.weights.h5"])
def test_a_file_of_keras(source, tmp_path, capsys, file):
    folder, model = source
    (line,) = start(tmp_path / "a", capsys, folder / file, variables="replicated", num_towers=2)
    assert line == "init_from   SOURCE: 8 of 8 weights"
    found = first_weights(tmp_path / "a")
    for weight in model.weights:  # of the second model of this process, perhaps
        path = "/".join(["sequential", *weight.path.split("/")[1:]])
        np.testing.assert_array_equal(found[path], weight.numpy(), path)


def test_another_head_and_another_width_are_said(source, tmp_path, capsys):
    folder, _ = source
    lines = start(tmp_path / "a", capsys, folder / "run", model_args="head=other")
    assert lines == [
        "init_from   SOURCE, its averages at step 12: 6 of 8 weights",
        "  not there (2): sequential/other/kernel, sequential/other/bias",
        "  of no use here (2): sequential/head/bias, sequential/head/kernel",
    ]
    lines = start(tmp_path / "b", capsys, folder / "run", model_args="width=5")
    assert lines[0].endswith(": 1 of 8 weights")
    assert lines[1].startswith(
        "  of another shape (7): sequential/stem/kernel [3, 3, 3, 5] here, [3"
    )


def test_weights_in_the_layout_of_keras_2_go_into_a_backbone(tmp_path, capsys):
    keras.utils.set_random_seed(7)
    body = backbone()
    with h5py.File(tmp_path / "no_top.h5", "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, body)
    body.save_weights(tmp_path / "body.weights.h5")
    for name in "no_top.h5", "body.weights.h5":
        lines = start(
            tmp_path / name[:4], capsys, tmp_path / name, "mobile", checkpoint_every_steps=0
        )
        assert (
            lines[0]
            == f"init_from   SOURCE: {len(body.weights)} of {len(body.weights) + 4} weights"
        )
        new = [f"sequential/{weight}" for weight in ("conv2d/kernel", "conv2d/bias")]
        new += [f"sequential/{weight}" for weight in ("dense/kernel", "dense/bias")]
        assert lines[1:] == [f"  not there (4): {', '.join(new)}"]
        found = first_weights(tmp_path / name[:4])
        for weight in body.weights:
            np.testing.assert_array_equal(found[weight.path], weight.numpy(), weight.path)


def test_no_code_in_a_file_runs(source, tmp_path, capsys):
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(5)])
    called = str(tmp_path / "called")
    model.add(layers.Lambda(lambda x: (open(called, "a").close(), x)[1]))
    for name in "a.keras", "a.h5", "a.weights.h5":
        file = tmp_path / name
        (model.save_weights if "weights" in name else model.save)(file)
        tmp_path.joinpath("called").unlink(missing_ok=True)
        start(tmp_path / f"of {name}", capsys, file, code=2)  # nothing fits
        assert not tmp_path.joinpath("called").exists()


def test_a_run_goes_on_without_its_source(source, tmp_path, capsys):
    file = tmp_path / "gone.keras"
    file.write_bytes((source[0] / "file.keras").read_bytes())
    flags = dict(ema_decay=0.9, num_epochs=2)
    start(tmp_path / "once", capsys, file, max_steps=6, **flags)
    start(tmp_path / "twice", capsys, file, max_steps=3, **flags)
    file.unlink()
    folder = tmp_path / "twice"
    again = ["train", f"--flagfile={folder}/flags.cfg", "--max_steps=6"]
    assert cli.main(again) == 0
    assert "init_from" not in capsys.readouterr().out
    tiny.assert_identical(tiny.saved(tmp_path / "once"), tiny.saved(folder))


def test_what_cannot_be_taken_is_one_line(source, tmp_path, capsys):
    folder, _ = source
    (tmp_path / "notes.h5").write_text("no weights")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "none.keras": "--init_from=SOURCE: there is no such file or folder",
        "notes.h5": "--init_from=SOURCE is no file of Keras' weights (.keras, .weights.h5, .h5): ",
        "empty": "--init_from=SOURCE: there is no run; name the folder of a run, or a file that",
    }.items():
        err = start(tmp_path / "a", capsys, tmp_path / name, code=2)
        assert err.startswith("towers: " + message.replace("SOURCE", str(tmp_path / name)))
        assert err.count("\n") == 1
    keras.Sequential([keras.Input([2]), layers.LayerNormalization(name="x")]).save(
        tmp_path / "other.keras"
    )
    err = start(tmp_path / "a", capsys, tmp_path / "other.keras", code=2)
    assert "other.keras has no weight of this model: layers/layer_normalization/vars/0, " in err
    assert not (tmp_path / "a").exists()
