"""After training, for every kind of task: load, export, predict, and a new run from its weights."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tasks, tiny
from towers import cli

KINDS = "images text table masks two several".split()


def own_loss(true, said):
    return tf.reduce_mean((true - said) ** 4, axis=-1)


def table_with_a_loss_of_its_own():
    model = tasks.table()
    model.compile("adam", own_loss)
    return model


def command(*words):
    assert cli.main(list(map(str, words))) == 0, words


def flat(outputs):
    return np.concatenate([np.ravel(part) for part in tf.nest.flatten(outputs)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_goes_from_training_to_predictions(kind, tmp_path, capsys):
    run = tmp_path / "run"
    given = (f"--model=tests.tasks:{kind}", f"--dataset=tests.tasks:{kind}_data", "--max_steps=2")
    command("train", *given, "--batch_size=8", "--num_towers=2", f"--train_dir={run}")
    model = towers.load(run)
    assert model.compiled
    for variable in model.weights:
        saved = tiny.saved(run)[f"model.S{variable.path.replace('/', '.S')}"]
        np.testing.assert_array_equal(variable.numpy(), saved)

    (x, *_), *_ = getattr(tasks, f"{kind}_data")()[1:]
    x = tf.nest.map_structure(
        lambda a: a[:3].astype("float32") if a.dtype == "float64" else a[:3], x
    )
    expected = model.predict(x, verbose=0)
    for form, output in ("keras", "a.keras"), ("saved_model", "saved"), ("weights", "a.weights.h5"):
        command("export", f"--train_dir={run}", f"--format={form}", f"--output={tmp_path / output}")
    loaded = keras.models.load_model(tmp_path / "a.keras")
    assert not loaded.compiled
    np.testing.assert_allclose(
        flat(loaded.predict(x, verbose=0)), flat(expected), rtol=1e-5, atol=1e-6
    )
    again = getattr(tasks, kind)()
    again.load_weights(tmp_path / "a.weights.h5")
    for one, other in zip(again.weights, model.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    served = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(flat(served.serve(x)), flat(expected), rtol=1e-5, atol=1e-6)

    names = {f"x.{name}": part for name, part in x.items()} if isinstance(x, dict) else {"x": x}
    np.savez(tmp_path / "x.npz", **names)
    capsys.readouterr()
    command("predict", f"--train_dir={run}", tmp_path / "x.npz", "--json", "--num_towers=3")
    found = json.loads(capsys.readouterr().out)
    by_name = (
        [expected[name] for name in sorted(expected)]
        if isinstance(expected, dict)
        else ([expected])
    )
    for i, entry in enumerate(found):
        outputs = [np.ravel(entry["outputs"][name]) for name in sorted(entry["outputs"])]
        expected_row = np.concatenate([np.ravel(part[i]) for part in by_name])
        np.testing.assert_allclose(np.concatenate(outputs), expected_row, rtol=1e-5, atol=1e-6)
        assert (entry["class"] is None) == (kind not in ("images", "text"))

    command(
        "train", *given, f"--init_from={tmp_path / 'a.keras'}", f"--train_dir={tmp_path / 'new'}"
    )
    num = len(model.weights)
    assert f"a.keras: {num} of {num} weights\n" in capsys.readouterr().out


def test_a_file_needs_no_loss_of_one_s_own(tmp_path):
    run = tmp_path / "run"
    model = "--model=tests.test_after_training:table_with_a_loss_of_its_own"
    command(
        "train", model, "--dataset=tests.tasks:table_data", "--max_steps=1", f"--train_dir={run}"
    )
    command("export", f"--train_dir={run}")
    assert keras.models.load_model(run / "model.keras").input_shape == (None, 4)


def test_what_a_program_gave_is_loaded_with_its_function(tmp_path):
    def build():
        inputs = keras.Input([4])
        return keras.Model(inputs, keras.layers.Dense(1)(inputs))

    run = str(tmp_path / "run")
    towers.train(
        model=build, dataset=tasks.table_data(), loss=lambda true, said: own_loss(true, said),
        train_dir=run, max_steps=1, num_towers=1,
    )  # fmt: skip
    model = towers.load(run, model=build)
    assert not model.compiled
    np.testing.assert_array_equal(model.weights[0], tiny.saved(run)["model.Sdense.Skernel"])
    with pytest.raises(towers.InputError, match="give it again"):
        towers.load(run)
