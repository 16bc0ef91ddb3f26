"""`towers.load`: the model of a run, from its folder alone."""

import json
import shutil

import numpy as np
import pytest

import towers
from tests import tiny
from towers.errors import InputError
from towers.options import trust
from towers.training.train import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that has checkpoints of steps 0, 5 and 10, and averages."""
    folder = tmp_path_factory.mktemp("runs")
    changes = dict(model="tests.tiny:cnn", model_args="width=3", ema_decay=0.9, max_steps=10)
    train(tiny.options(folder / "one", num_towers=2, checkpoint_every_steps=5, **changes))
    return folder


@pytest.fixture
def run(runs, tmp_path):
    """A copy of it, to be changed."""
    return shutil.copytree(runs / "one", tmp_path / "copy")


def assert_has(model, train_dir, step=None, averages=False):
    """Compare the variables of a model with those in a checkpoint, bit for bit."""
    saved = tiny.saved(train_dir, step)
    kind = "average" if averages else "model"
    for variable in model.variables:
        name = variable.path.replace("/", ".S")
        of_kind = saved.get(f"{kind}.S{name}", saved[f"model.S{name}"])
        np.testing.assert_array_equal(variable.numpy(), of_kind, err_msg=name)


def test_weights_or_averages_of_any_checkpoint(runs):
    assert_has(towers.load(runs / "one"), runs / "one", 10)
    assert_has(towers.load(str(runs / "one"), step=5), runs / "one", 5)
    averaged = towers.load(runs / "one", averages=True)
    assert_has(averaged, runs / "one", 10, averages=True)
    assert np.any(averaged.weights[0].numpy() != towers.load(runs / "one").weights[0].numpy())
    assert averaged(np.zeros([2, 8, 8, 3], np.float32)).shape == (2, 3)


def test_the_best_checkpoint_is_taken_where_the_run_names_it(run):
    (run / "best.json").write_text('{"step": 5}')
    assert_has(towers.load(run), run, 5)
    assert_has(towers.load(run, step=10), run, 10)


def test_a_damaged_checkpoint_is_passed_over(run):
    (run / "checkpoints/ckpt-10.data-00000-of-00001").write_bytes(b"short")
    with pytest.warns(UserWarning, match="ckpt-10 cannot be read and is passed over"):
        assert_has(towers.load(run), run, 5)


def test_a_run_of_before_asks_its_data_set(run):
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["task"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert_has(towers.load(run), run, 10)


def test_no_data_are_needed(run):
    flags = (run / "flags.cfg").read_text()
    (run / "flags.cfg").write_text(trust.signed(flags.replace("tests.tiny:images", "gone:images")))
    assert_has(towers.load(run), run, 10)


def test_the_function_may_be_given(run):
    flags = (run / "flags.cfg").read_text()
    (run / "flags.cfg").write_text(trust.signed(flags.replace("tests.tiny:cnn", "__main__:build")))
    assert_has(towers.load(run, model=tiny.cnn), run, 10)


def test_what_cannot_be_loaded_is_one_line(runs, run, tmp_path):
    def refusal(*arguments, **keywords):
        with pytest.raises(InputError) as error:
            towers.load(*arguments, **keywords)
        return str(error.value)

    assert refusal(tmp_path / "none").startswith(f"--train_dir={tmp_path}/none: there is no run")
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    assert "there is no checkpoint in" in refusal(tmp_path / "empty")
    assert "of step 7; there are those of 0, 5, 10" in refusal(run, step=7)
    other = refusal(run, model=lambda num_classes, image_shape, width: tiny.dense(3, (8, 8, 3)))
    assert "another model than given_in_python:lambda is now: sequential/dense/kernel is " in other
    train(tiny.options(tmp_path / "plain", max_steps=1))
    assert "has no moving averages" in refusal(tmp_path / "plain", averages=True)
