"""`towers.load`: the model of a run, from its folder alone."""

import functools

import numpy as np
import pytest

import towers
from tests import runs, tiny
from tests.runs import assert_has

pytestmark = pytest.mark.run


@pytest.fixture
def run(trained, tmp_path):
    """A run that has averages and checkpoints of steps 0, 6, 12 and 18, to be changed."""
    return trained.copy("classes", tmp_path / "copy")


def test_weights_or_averages_of_any_checkpoint(trained):
    run = trained("classes")
    model = towers.load(run)
    assert_has(model, run, 18)
    assert_has(towers.load(str(run), step=6), run, 6)
    averaged = towers.load(run, averages=True)
    assert_has(averaged, run, 18, averages=True)
    assert np.any(averaged.weights[0].numpy() != model.weights[0].numpy())
    assert averaged(np.zeros([2, 8, 8, 3], np.float32)).shape == (2, 3)


def test_the_best_checkpoint_is_taken_where_the_run_names_it(run):
    (run / "best.json").write_text('{"step": 6}')
    assert_has(towers.load(run), run, 6)
    assert_has(towers.load(run, step=18), run, 18)


def test_what_cannot_be_loaded_is_one_line(trained, run, tmp_path):
    refusal = functools.partial(runs.refusal, towers.load)
    assert refusal(tmp_path / "none").startswith(f"--train_dir={tmp_path}/none: there is no run")
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    assert "no checkpoint in" in refusal(tmp_path / "empty")
    assert "of step 7; it has those of steps 0, 6, 12, 18" in refusal(run, step=7)
    other = refusal(run, model=lambda num_classes, image_shape, width: tiny.dense(3, image_shape))
    assert (
        "does not fit given_in_python:lambda, which has changed: sequential/dense/kernel is "
        in other
    )
    assert "has no moving averages" in refusal(trained("two"), averages=True)
