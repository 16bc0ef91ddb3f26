"""Callbacks of Keras in a run: the hooks of `fit`, with its numbers, at any number of towers."""

import keras
import numpy as np
import pytest

import towers
from tests import fits, tiny
from towers.training.run import checkpoint

pytestmark = pytest.mark.run

X, Y = np.random.default_rng(0).integers(-8, 8, size=(2, 21, 4)) / 8
Y = Y[:, :1]
DATA = (X[:14], Y[:14]), (X[14:], Y[14:])
HOOKS = [
    f"on_{what}_{when}"
    for what in ("train", "epoch", "train_batch", "test")
    for when in ("begin", "end")
]


def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "tanh")])
    model.add(keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.125)))
    model.compile(keras.optimizers.SGD(0.125), "mse", metrics=["mae"])
    return model


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []


def _recording(name):
    def hook(self, *place, logs=None):
        if place and isinstance(place[-1], dict | None):
            *place, logs = place
        self.calls.append((name, *place, sorted(logs or {}), self.params["epochs"]))

    return hook


for each in HOOKS:
    setattr(Recorder, each, _recording(each))


class Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps, self.epochs, self.numbers = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.numbers.append(epoch)
        self.epochs.append([logs["loss"], logs.get("mae", 0.0), logs.get("val_mae", 0.0)])


GIVEN = dict(model=build, dataset=DATA, batch_size=7, num_epochs=3, dtype="float64")


def train(folder, *callbacks, **options):
    given = dict(train_dir=folder / "run", callbacks=list(callbacks))
    return towers.train(**GIVEN | given | options)


def fit(*callbacks, **options):
    with fits.in_float64():
        model = build()
        model.fit(*DATA[0], validation_data=DATA[1], verbose=0, callbacks=callbacks, **options)
    return model


def assert_trained_as(model, folder):
    trained = towers.load(folder / "run", model=build)
    for one, other in zip(trained.weights, model.weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_each_hook_is_called_where_fit_calls_it(tmp_path):
    ours, theirs = Recorder(), Recorder()
    fit(theirs, batch_size=7, epochs=3)
    train(tmp_path, ours)
    without_logs = [call[:-2] for call in theirs.calls]
    assert [call[:-2] for call in ours.calls] == without_logs and len(without_logs) == 26
    last = "on_train_batch_end", "on_test_end", "on_epoch_end", "on_train_end"
    assert [c for c in ours.calls if c[0] in last] == [c for c in theirs.calls if c[0] in last]
    assert {call[-1] for call in ours.calls} == {3}


def test_the_numbers_are_those_of_fit(tmp_path):
    """Of all examples in one batch, in whatever order; with a learning rate that one sets.

    As after `fit`, the weights are the best ones, whatever the run had come to.
    """
    rates = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.125 / 2**epoch) for _ in "ab"]
    early = [
        keras.callbacks.EarlyStopping("mae", 9.0, patience=2, restore_best_weights=True)
        for _ in "ab"
    ]
    ours, theirs = Losses(), Losses()
    model = fit(theirs, rates[0], early[0], batch_size=14, epochs=9)
    given = dict(batch_size=14, num_epochs=9, num_towers=2)
    assert train(tmp_path, ours, rates[1], early[1], **given)["steps"] == len(theirs.steps) == 3
    np.testing.assert_allclose(ours.epochs, theirs.epochs, rtol=1e-6)
    np.testing.assert_allclose(ours.steps, theirs.steps, rtol=1e-6)
    assert_trained_as(model, tmp_path)


def test_one_that_stops_training_ends_the_run_and_its_weights_are_saved(tmp_path, capsys):
    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

        def on_train_end(self, logs=None):
            self.model.set_weights([np.full_like(w, 0.25) for w in self.model.get_weights()])

    result = train(tmp_path, Ends(), num_epochs=9)
    assert result["steps"] == 4
    assert "early, at step 4: a callback set stop_training" in capsys.readouterr().out
    trained = towers.load(tmp_path / "run", model=build)
    assert all((w == 0.25).all() for w in trained.get_weights())
    expected = np.mean(np.abs(trained.predict(X[14:], verbose=0) - Y[14:]))
    assert result["test_mae"] == pytest.approx(expected, rel=1e-5)
    before = tiny.files(tmp_path)
    assert train(tmp_path, Ends(), num_epochs=9) == result and tiny.files(tmp_path) == before
    said = capsys.readouterr().out
    assert "ended early, at step 4 of 18" in said
    assert "change --callbacks (empty: none) or raise --num_epochs" in said
    assert train(tmp_path, num_epochs=9)["steps"] == 18  # without callbacks it goes on


def test_they_start_from_scratch_after_a_resume_and_change_no_number(tmp_path, capsys):
    """Stopped within an epoch. A schedule acts once an epoch. No checkpoint sets an attribute."""

    def add_state(folder):
        step, prefix = checkpoint.find(folder / "checkpoints")[-1]
        with checkpoint.open_reader(prefix) as reader:
            values = {n: reader.get_tensor(key) for n, key in checkpoint.keys_of(reader).items()}
            identity = checkpoint.identity_of(reader)
        state = [{"filename": str(folder / "theirs"), "losses": 3}] * 3
        identity |= {"callbacks": state, "filename": state[0]["filename"]}
        checkpoint.write(folder / "checkpoints", step, values, identity)

    def run(folder, *steps):
        folder.mkdir()
        for max_steps in steps:
            losses, log = Losses(), keras.callbacks.CSVLogger(folder / "log.csv")
            rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.75)
            train(folder, losses, log, rate, num_epochs=20, max_steps=max_steps)
            resumed = "callbacks start from scratch after a resume" in capsys.readouterr().out
            assert resumed == (max_steps != steps[0])
            add_state(folder / "run")
        assert log.filename == str(folder / "log.csv")
        return losses, tiny.saved(folder / "run"), (folder / "log.csv").read_text().splitlines()

    whole, weights, _ = run(tmp_path / "whole", 10)
    losses, again, rows = run(tmp_path / "parts", 5, 10)
    tiny.assert_identical(again, weights)
    assert losses.steps == whole.steps[5:] and losses.numbers == [2, 3, 4]
    assert [row.partition(",")[0] for row in rows] == ["epoch", *"012234"]


def tiny_model():
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])


@pytest.mark.parametrize(
    "given, says",
    [
        (lambda: ["csv"], "keras.callbacks.Callback"),
        (lambda: keras.callbacks.BackupAndRestore("b"), "without BackupAndRestore"),
        (lambda: [keras.callbacks.ReduceLROnPlateau()], "--schedule"),
        (lambda: keras.callbacks.EarlyStopping("val_maes"), "mae"),
        (lambda a: [], "default values"),
    ],
)
def test_what_cannot_be_had_is_one_line(tmp_path, given, says):
    given = dict(callbacks=given, model=tiny_model, loss="mse", metrics="mae")
    with pytest.raises(towers.InputError, match=f"callbacks.*{says}") as error:
        towers.train(train_dir=tmp_path / "run", dataset=DATA, max_steps=2, **given)
    assert len(str(error.value).splitlines()) == 1 and not (tmp_path / "run").exists()


def test_one_that_fails_loses_no_step_and_is_called_again(tmp_path, capsys):
    """Of epochs whose last batch goes beyond."""

    def fails(epoch, logs):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        train(tmp_path, keras.callbacks.LambdaCallback(on_epoch_end=fails), batch_size=5)
    assert "saved       step 3: the same command" in capsys.readouterr().out
    assert train(tmp_path, own := Losses(), batch_size=5)["steps"] == 9
    assert own.numbers == [0, 1, 2]  # of all epochs: that of the first was not over


@pytest.mark.parametrize(
    "options, named",
    [
        ({}, "test set"), ({"evaluate_every_epochs": 0}, "--evaluate_every_epochs=0"),
        ({"validation_fraction": 0.2}, None),
    ],
)  # fmt: skip
def test_what_watches_validation_without_any_gets_a_note(tmp_path, capsys, options, named):
    stop = [keras.callbacks.EarlyStopping("val_loss", patience=9)]
    given = dict(model=build, dataset=DATA, batch_size=7, max_steps=2, train_dir=tmp_path / "run")
    towers.train(**given, callbacks=lambda: stop, num_towers=1, **options)
    notes = [line for line in capsys.readouterr().out.splitlines() if "EarlyStopping" in line]
    assert len(notes) == bool(named) and all(named in line for line in notes)
