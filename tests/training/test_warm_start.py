"""`--init_from`: the initial weights of a run, and the line about them."""

import re
import shutil

import keras
import numpy as np
import pytest

from tests import tiny
from tests.programs import ROOT
from tests.runs import command, refusal
from towers.training.load import init_from
from towers.training.run import manifest
from towers.training.run.setup import prepare
from towers.training.train import train

pytestmark = pytest.mark.run
layers = keras.layers
PAGE = (ROOT / "towers/training/RUNNING.md").read_text(encoding="utf-8")
FLAGS = "--dataset=tests.tiny:images", "--augment=standardize", "--batch_size=7"


def test_a_run_gives_its_averages(trained, tmp_path, capsys):
    source, flags = trained("classes"), ("--model=tests.tiny:cnn", "--model_args=width=3", *FLAGS)
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


def with_another_head(num_classes, image_shape):
    """`tests.tiny:cnn` of width 3, frozen, with a layer more."""
    model = tiny.cnn(5, image_shape, width=3)
    model.trainable = False
    return keras.Sequential([*model.layers, layers.Dense(num_classes, name="more")])


@pytest.mark.parametrize("variables", ["cpu", "replicated"])
def test_layers_that_do_not_fit_are_named_and_frozen_ones_loaded(trained, variables):
    source, given = trained("classes"), dict(model=with_another_head, variables=variables)
    run = prepare(tiny.options("unused", num_towers=2, **given))
    line = init_from(run.train_state, str(source))
    new = "sequential/dense", "sequential_1/more"
    missing = [f"{layer}/{part}" for layer in new for part in ("kernel", "bias")]
    assert line.endswith(f"step 18: 6 of 10 weights; not loaded: {', '.join(missing)}")
    average = tiny.saved(source)["average.Ssequential.Sconv2d.Skernel"]
    np.testing.assert_array_equal(run.train_state.model.layers[0].kernel.numpy(), average)


def test_a_resumed_run_does_not_read_its_source(trained, tmp_path, capsys):
    source, folder = trained.copy("classes", tmp_path / "source"), tmp_path / "run"
    given = dict(model="tests.tiny:cnn", model_args="width=3", init_from=str(source))
    train(tiny.options(folder, **given, max_steps=3))
    shutil.rmtree(source)
    code, out, _ = command(capsys, "train", f"--flagfile={folder}/flags.cfg", "--max_steps=6")
    assert code == 0 and f"{source} is not read: the resumed run has its own" in out


def test_weights_of_a_file_are_loaded_in_the_model_function(tmp_path, monkeypatch):
    """The guide's snippet, with a backbone that needs no download."""
    saved = tiny.cnn(3, (8, 8, 3))
    saved.set_weights([np.full(v.shape, 0.25) for v in saved.weights])
    saved.save_weights(tmp_path / "file.weights.h5")

    def backbone(include_top, weights, pooling):
        assert (include_top, weights, pooling) == (False, "imagenet", "avg")
        model = tiny.cnn(3, (8, 8, 3))
        model.load_weights(tmp_path / "file.weights.h5", skip_mismatch=True)
        return model

    monkeypatch.setattr(keras.applications, "MobileNetV2", backbone)
    snippet = re.search(
        r"```python\n(def build\(num_classes\):\n    backbone.*?)```", PAGE, re.DOTALL
    )
    exec(snippet[1], named := {"keras": keras})
    run = prepare(tiny.options("unused", model=named["build"]))
    assert np.all(run.train_state.model.layers[0].weights[0].numpy() == 0.25)


def test_what_cannot_be_loaded_is_one_line(trained, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    for source, says in {
        tmp_path / "none": "is not the folder of a run",
        tmp_path / "notes.txt": "model.load_weights(FILE, skip_mismatch=True)",
        tmp_path / "empty": "no checkpoint in",
        trained("two"): "has none of the weights of this model",
    }.items():
        said = refusal(train, tiny.options(tmp_path / "a", model=tiny.dense, init_from=str(source)))
        assert f"--init_from={source}" in said and says in said
        assert not (tmp_path / "a").exists()
