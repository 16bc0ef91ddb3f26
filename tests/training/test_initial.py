"""`--init_from`: what a new run begins with, and what it says of that."""

import h5py
import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format

from tests import tiny
from tests.runs import command
from towers.errors import InputError
from towers.training import manifest
from towers.training.initial import init_from
from towers.training.run import prepare

pytestmark = pytest.mark.graph
layers = keras.layers


def classifier(num_classes, image_shape, width=4, stem="stem", norm="norm", head="head"):
    """`tests.tiny:cnn` with names of its own and a frozen layer; draws have a seed."""
    first = [layers.Conv2D(width, 3, name=stem), layers.BatchNormalization(name=norm)]
    first[0].trainable = False
    last = [layers.GlobalAveragePooling2D(), layers.Dense(num_classes, name=head)]
    return keras.Sequential([keras.Input(image_shape), *first, layers.Dropout(0.1), *last])


def backbone():
    inputs = keras.Input((None, None, 3))
    x = layers.DepthwiseConv2D(3, name="depthwise")(layers.Conv2D(5, 1, name="expand")(inputs))
    return keras.Model(inputs, layers.BatchNormalization(name="normal")(x), name="body")


def upon_backbone(num_classes, image_shape):
    """A frozen backbone below another head, after a layer that takes the first one's place."""
    body = backbone()
    body.trainable = False
    last = [layers.GlobalAveragePooling2D(), layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), layers.Conv2D(3, 1), body, *last])


def begun(source, model="classifier", **flags):
    """Return the lines about the first weights, and {path: value} of a model that has them."""
    run = prepare(tiny.options("unused", model=f"{__name__}:{model}", **flags))
    lines = init_from(run.masters, str(source))
    found = {weight.path: weight.numpy() for weight in run.masters.model.weights}
    return [line.replace(str(source), "SOURCE") for line in lines], found


def with_other_weights(model):
    """Let no weight be as it is in a new model."""
    random = np.random.default_rng(5)
    for weight in model.weights:
        weight.assign(random.normal(size=weight.shape))
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model, and the folder with its weights in files."""
    folder, model = tmp_path_factory.mktemp("source"), classifier(3, (8, 8, 3))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)  # slots are in the file, too
    with_other_weights(model).save(folder / "file.keras")
    model.save_weights(folder / "file.weights.h5")
    return folder, model


@pytest.mark.run
def test_a_run_gives_its_averages(trained, tmp_path, capsys):
    source, flags = trained("classes"), ("--model=tests.tiny:cnn", "--model_args=width=3")
    flags = *flags, "--dataset=tests.tiny:images", "--augment=none", "--batch_size=7"
    flags = *flags, f"--init_from={source}", "--ema_decay=0.9", "--num_towers=2", "--max_steps=1"
    code, out, _ = command(capsys, "train", *flags, f"--train_dir={tmp_path}")
    assert code == 0
    assert f"init_from   {source}, its averages at step 18: 8 of 8 weights\n" in out
    there, here = tiny.saved(source), tiny.saved(tmp_path, 0)
    for name in (name for name in here if name.startswith(("model.S", "average.S"))):
        seed = "seed_generator" in name  # the draws are those of the new run
        expected = here if seed else there
        of_run = f"average.S{name.partition('.S')[2]}"
        np.testing.assert_array_equal(here[name], expected[name if seed else of_run], name)
    found = manifest.read(tmp_path)
    assert found["flags"]["init_from"] == str(source)
    assert found["initial_weights"] != manifest.read(source)["initial_weights"]


@pytest.mark.parametrize("file", ["file.keras", "file.weights.h5"])
def test_a_file_of_keras(source, file):
    folder, model = source
    lines, found = begun(folder / file, variables="replicated", num_towers=2)
    assert lines == ["init_from   SOURCE: 8 of 8 weights"]
    for weight in model.weights:  # of the second model of this process, perhaps
        path = "/".join(["sequential", *weight.path.split("/")[1:]])
        np.testing.assert_array_equal(found[path], weight.numpy(), path)


@pytest.mark.run
def test_another_head_and_another_width_are_said(trained):
    names = "stem=conv2d,norm=batch_normalization"
    lines, _ = begun(trained("classes"), model_args=f"width=3,head=other,{names}")
    assert lines == [
        "init_from   SOURCE, its averages at step 18: 6 of 8 weights",
        "  not there (2): sequential/other/kernel, sequential/other/bias",
        "  of no use here (2): sequential/dense/bias, sequential/dense/kernel",
    ]
    lines, _ = begun(trained("classes"), model_args=f"width=5,head=dense,{names}")
    assert lines[0].endswith(": 1 of 8 weights")
    shapes = "sequential/conv2d/kernel [3, 3, 3, 5] here, [3, 3, 3, 3] there"
    assert lines[1].startswith(f"  of another shape (7): {shapes}")


@pytest.mark.parametrize("file", ["keras_2.h5", "body.weights.h5"])
def test_weights_also_in_the_layout_of_keras_2_go_into_a_backbone(tmp_path, file):
    body = with_other_weights(backbone())
    if file == "keras_2.h5":
        with h5py.File(tmp_path / file, "w") as opened:
            legacy_h5_format.save_weights_to_hdf5_group(opened, body)
    else:
        body.save_weights(tmp_path / file)
    lines, found = begun(tmp_path / file, "upon_backbone")
    num = len(body.weights)
    assert lines[0] == f"init_from   SOURCE: {num} of {num + 4} weights"
    new = [f"sequential/{n}/{part}" for n in ("conv2d", "dense") for part in ("kernel", "bias")]
    assert lines[1:] == [f"  not there (4): {', '.join(new)}"]
    for weight in body.weights:
        np.testing.assert_array_equal(found[weight.path], weight.numpy(), weight.path)


def test_no_code_in_a_file_runs(tmp_path):
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(5)])
    called, name = tmp_path / "called", str(tmp_path / "called")
    model.add(layers.Lambda(lambda x: (open(name, "a").close(), x)[1]))
    for file in "a.keras", "a.h5", "a.weights.h5":
        (model.save_weights if "weights" in file else model.save)(tmp_path / file)
        called.unlink(missing_ok=True)
        with pytest.raises(InputError, match="has no weight of this model"):
            begun(tmp_path / file)
        assert not called.exists()


@pytest.mark.run
def test_a_run_goes_on_without_its_source(source, tmp_path, capsys):
    file = tmp_path / "gone.keras"
    file.write_bytes((source[0] / "file.keras").read_bytes())
    flags = f"--model={__name__}:classifier", "--dataset=tests.tiny:images", "--augment=none"
    flags = "train", *flags, "--batch_size=7", "--ema_decay=0.9", "--num_epochs=2"
    for name, steps in ("once", 6), ("twice", 3):
        own = f"--train_dir={tmp_path / name}", f"--max_steps={steps}", f"--init_from={file}"
        assert command(capsys, *flags, *own)[0] == 0
    file.unlink()
    folder = tmp_path / "twice"
    code, out, _ = command(capsys, "train", f"--flagfile={folder}/flags.cfg", "--max_steps=6")
    assert code == 0 and "init_from" not in out
    tiny.assert_identical(tiny.saved(tmp_path / "once"), tiny.saved(folder))


REFUSED = {
    "none.keras": "--init_from=SOURCE: there is no such file or folder",
    "notes.h5": "--init_from=SOURCE is no file of Keras' weights (.keras, .weights.h5, .h5): ",
    "empty": "--init_from=SOURCE: there is no run; name the folder of a run, or a file that",
    "other.keras": "--init_from=SOURCE has no weight of this model: layers/layer_normalization/va",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_one_line(tmp_path, capsys, name):
    (tmp_path / "notes.h5").write_text("no weights")
    (tmp_path / "empty").mkdir()
    other = keras.Sequential([keras.Input([2]), layers.LayerNormalization(name="x")])
    other.save(tmp_path / "other.keras")
    flags = f"--model={__name__}:classifier", "--dataset=tests.tiny:images", "--augment=none"
    flags = *flags, f"--init_from={tmp_path / name}", f"--train_dir={tmp_path}/a"
    code, _, err = command(capsys, "train", *flags)
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("towers: " + REFUSED[name].replace("SOURCE", str(tmp_path / name)))
    assert not (tmp_path / "a").exists()
