"""Five kinds of tasks through all of a run: trained, killed, evaluated, loaded, exported."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tasks, tiny, trained_runs
from tests.runs import assert_has, done, forget_after, points, released, result_of

pytestmark = pytest.mark.run


@pytest.mark.parametrize("name", released(tasks.TASKS, "two"))
def test_a_killed_run_goes_on_bit_for_bit(trained, tmp_path, capsys, name):
    before, train_dir = trained(name), trained.copy(name, tmp_path / "run")
    forget_after(train_dir, 4)
    done(capsys, "train", train_dir)
    tiny.assert_identical(tiny.saved(train_dir), tiny.saved(before))
    again, result = result_of(train_dir), result_of(before)
    assert points(train_dir / "train") == points(before / "train")  # each once
    figures = [figure for figure in result if figure.startswith("test_")]
    assert figures and [again[figure] for figure in figures] == [result[f] for f in figures]


@pytest.mark.parametrize("name", released(tasks.TASKS, "two"))
def test_figures_are_those_of_the_run_evaluated_on_more_towers_and_by_keras(trained, capsys, name):
    result = result_of(trained(name))
    assert result["steps"] == trained_runs.STEPS and np.isfinite(result["test_loss"])
    found = json.loads(done(capsys, "evaluate", trained(name), "--json", "--num_towers=3"))
    figures = {k.removeprefix("test_"): v for k, v in result.items() if k.startswith("test_")}
    for figure, value in figures.items():
        assert found[figure] == pytest.approx(value, rel=1e-5), figure
    model = towers.load(str(trained(name)))
    assert model.compiled
    data = towers.data.load(f"tests.tasks:{name}_data")
    example, _ = next(iter(data.test.eval_batches(data.test.size)))
    batches = tf.data.Dataset.from_tensors(example).unbatch().batch(8)
    found = model.evaluate(batches, verbose=0, return_dict=True)
    assert found.keys() <= figures.keys()
    assert result["monitor"].removeprefix("test_") in found
    for figure, value in found.items():
        if not figure.endswith("_loss"):  # of an output: Keras weighs the last batch as the others
            assert value == pytest.approx(figures[figure], rel=1e-4), figure


# After training.


def flat(outputs):
    return np.concatenate([np.ravel(part) for part in tf.nest.flatten(outputs)])


@pytest.mark.process  # which looks through a file of weights
@pytest.mark.parametrize("kind", released(tasks.TASKS, "two"))
def test_a_task_goes_from_training_to_predictions(trained, kind, tmp_path, capsys):
    run = trained(kind)
    model = towers.load(run)
    assert model.compiled
    assert_has(model, run)
    (x, *_), *_ = getattr(tasks, f"{kind}_data")()[1:]
    x = tf.nest.map_structure(
        lambda a: a[:3].astype("float32") if a.dtype == "float64" else a[:3], x
    )
    expected = model.predict(x, verbose=0)
    done(capsys, "export", run, f"--output={tmp_path / 'a.keras'}")
    loaded = keras.models.load_model(tmp_path / "a.keras")
    assert not loaded.compiled  # so it needs no loss of one's own
    loaded.export(tmp_path / "saved", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "saved"))
    for outputs in loaded.predict(x, verbose=0), served.serve(x):
        np.testing.assert_allclose(flat(outputs), flat(expected), rtol=1e-5, atol=1e-6)

    found = []
    if not isinstance(x, dict):
        np.savez(tmp_path / "x.npz", x=x)
        flags = tmp_path / "x.npz", "--json", "--num_towers=3"
        found = json.loads(done(capsys, "predict", run, *flags))
    rows = [tf.nest.map_structure(lambda part, i=i: part[i], expected) for i in range(3)]
    for entry, row in zip(found, rows, strict=False):
        outputs = {name: np.asarray(output) for name, output in entry["outputs"].items()}
        np.testing.assert_allclose(flat(outputs), flat(row), rtol=1e-5, atol=1e-6)
        assert (entry["class"] is None) == (kind not in ("images", "text"))
