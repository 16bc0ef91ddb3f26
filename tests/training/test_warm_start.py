"""`--init_from`: the initial weights of a run, and the line about them."""

import re

import h5py
import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format

from tests import tiny
from tests.programs import ROOT
from tests.runs import command, refusal
from towers.errors import InputError
from towers.training.run import manifest
from towers.training.run.setup import prepare
from towers.training.run.warm_start import init_from
from towers.training.train import train

pytestmark = pytest.mark.graph
layers = keras.layers
PAGE = (ROOT / "towers/training/GUIDE.md").read_text(encoding="utf-8")


def classifier(num_classes, image_shape, width=4, stem="stem", norm="norm", head="head", more=0):
    """`tests.tiny:cnn` with names of its own, a frozen layer, a seed, and perhaps a layer more."""
    first = [layers.Conv2D(width, 3, name=stem), layers.BatchNormalization(name=norm)]
    first[0].trainable = False
    last = [layers.GlobalAveragePooling2D(), layers.Dense(more or num_classes, name=head)]
    last += [layers.Dense(num_classes, name="more")] if more else []
    return keras.Sequential([keras.Input(image_shape), *first, layers.Dropout(0.1), *last])


def begun(source, **flags):
    """Return the line about the first weights, and {path: value} of a model that has them."""
    run = prepare(tiny.options("unused", model=f"{__name__}:classifier", **flags))
    line = init_from(run.train_state, str(source))
    found = {weight.path: weight.numpy() for weight in run.train_state.model.weights}
    return line.replace(str(source), "SOURCE"), found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model without an initial value, and the folder with its weights in files."""
    folder, model = tmp_path_factory.mktemp("source"), classifier(3, (8, 8, 3))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)  # slots are in the file, too
    random = np.random.default_rng(5)
    for weight in model.weights:
        weight.assign(random.normal(size=weight.shape))
    model.save(folder / "file.keras")
    model.save_weights(folder / "file.weights.h5")
    with h5py.File(folder / "keras_2.h5", "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, model)
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
        seed = "seed_generator" in name  # random numbers are those of the new run
        expected = here if seed else there
        of_run = f"average.S{name.partition('.S')[2]}"
        np.testing.assert_array_equal(here[name], expected[name if seed else of_run], name)
    found = manifest.read(tmp_path)
    assert found["flags"]["init_from"] == str(source)


@pytest.mark.parametrize("file", ["file.keras", "file.weights.h5", "keras_2.h5"])
def test_a_file_of_keras(source, file):
    folder, model = source
    line, found = begun(folder / file, variables="replicated", num_towers=2)
    assert line == "init_from   SOURCE: 8 of 8 weights"
    for weight in model.weights:  # of the second model of this process, perhaps
        path = "/".join(["sequential", *weight.path.split("/")[1:]])
        np.testing.assert_array_equal(found[path], weight.numpy(), path)


def test_layers_of_a_file_that_do_not_fit_are_named(source):
    folder, model = source
    line, found = begun(folder / "file.weights.h5", model_args="more=5")
    missing = [f"sequential/{n}/{part}" for n in ("head", "more") for part in ("kernel", "bias")]
    assert line == f"init_from   SOURCE: 6 of 10 weights; not loaded: {', '.join(missing)}"
    np.testing.assert_array_equal(found["sequential/stem/kernel"], model.weights[0].numpy())


@pytest.mark.parametrize("file", ["a.keras", "a.h5"])
def test_no_code_in_a_file_runs(tmp_path, file):
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(5)])
    called, name = tmp_path / "called", str(tmp_path / "called")
    model.add(layers.Lambda(lambda x: (open(name, "a").close(), x)[1]))
    model.save(tmp_path / file)
    called.unlink(missing_ok=True)
    with pytest.raises(InputError, match="has no weight of this model|Layer count mismatch"):
        begun(tmp_path / file)
    assert not called.exists()


@pytest.mark.run
def test_a_resumed_run_does_not_read_its_source(source, tmp_path, capsys):
    file = tmp_path / "gone.keras"
    file.write_bytes((source[0] / "file.keras").read_bytes())
    folder, flags = tmp_path / "run", dict(ema_decay=0.9, num_epochs=2.0, init_from=str(file))
    given = dict(model=f"{__name__}:classifier", **flags)
    whole = tiny.Loop(tiny.options("unused", **given))
    init_from(whole.train_state, str(file))
    whole(6)
    train(tiny.options(folder, **given, max_steps=3))
    file.unlink()
    code, out, _ = command(capsys, "train", f"--flagfile={folder}/flags.cfg", "--max_steps=6")
    assert code == 0 and f"has its own weights: {file} is not read" in out
    state = {name.replace("/", ".S"): value for name, value in whole.state().items()}
    tiny.assert_identical(tiny.saved(folder), state)


def test_a_backbone_loads_its_own_weights_in_the_model_function(source, monkeypatch):
    """The guide's snippet, with a backbone that needs no download."""

    def backbone(include_top, weights, pooling):
        assert (include_top, weights, pooling) == (False, "imagenet", "avg")
        model = classifier(3, (8, 8, 3))
        model.load_weights(source[0] / "file.weights.h5")
        return model

    monkeypatch.setattr(keras.applications, "MobileNetV2", backbone)
    snippet = re.search(
        r"```python\n(def build\(num_classes\):\n    backbone.*?)```", PAGE, re.DOTALL
    )
    exec(snippet[1], named := {"keras": keras})
    run = prepare(tiny.options("unused", model=named["build"]))
    kernel = run.train_state.model.layers[0].weights[0]
    np.testing.assert_array_equal(kernel.numpy(), source[1].weights[0].numpy())


REFUSED = {
    "none.keras": "there is no such file or folder",
    "cut.keras": "is no file of Keras' weights (.keras, .weights.h5, .h5): ",
    "notes.txt": "is no file of Keras' weights (.keras, .weights.h5, .h5): ",
    "empty": "there is no checkpoint in",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_is_one_line(source, tmp_path, name):
    (tmp_path / "notes.txt").write_text("no weights")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.keras").write_bytes((source[0] / "file.keras").read_bytes()[:-900])
    given = dict(model=f"{__name__}:classifier", init_from=str(tmp_path / name))
    said = refusal(train, tiny.options(tmp_path / "a", **given))
    assert f"--init_from={tmp_path / name}" in said and REFUSED[name] in said
    assert not (tmp_path / "a").exists()
