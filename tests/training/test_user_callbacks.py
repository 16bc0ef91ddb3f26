"""Callbacks of Keras in a run: the hooks of `fit`, with its numbers, at any number of towers."""

import collections

import keras
import numpy as np
import pytest

import towers
from tests import fits, tiny
from tests.runs import rare
from towers import cli
from towers.options import code_trust
from towers.training.callbacks import saved_attributes

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
    train(tmp_path / "uneven", ours := Recorder(), batch_size=5)  # the last batch goes beyond
    ends = [call for call in ours.calls if call[0] == "on_epoch_end"]
    assert len(ends) == 3 and {call[-1] for call in ends} == {3}


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
    assert "early, at step 4: a callback has set stop_training" in capsys.readouterr().out
    trained = towers.load(tmp_path / "run", model=build)
    assert all((w == 0.25).all() for w in trained.get_weights())
    expected = np.mean(np.abs(trained.predict(X[14:], verbose=0) - Y[14:]))
    assert result["test_mae"] == pytest.approx(expected, rel=1e-5)
    before = tiny.files(tmp_path)
    assert train(tmp_path, Ends(), num_epochs=9) == result and tiny.files(tmp_path) == before
    said = capsys.readouterr().out
    assert "ended early, at step 4 of 18" in said
    assert "an empty or another --callbacks=, or more --num_epochs" in said
    for _ in "ab":  # another goes on, and stops at the next epoch; the second time it is over
        named = dict(callbacks=f"{__name__}:stopping", train_dir=tmp_path / "run", num_epochs=9)
        assert towers.train(**GIVEN | named)["steps"] == 6
    assert train(tmp_path, num_epochs=9)["steps"] == 18  # without callbacks it goes on


class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


def stopping():
    return Stops()


def test_only_train_needs_them(folder, capsys):
    (folder / "own_callbacks.py").write_text("def make():\n    return []\n")
    given = dict(model="own_model:build", dataset=DATA, train_dir="run", max_steps=1)
    source = f"from {__name__} import build as made\ndef build():\n    return made()\n"
    (folder / "own_model.py").write_text(source)
    towers.train(**given, callbacks="own_callbacks:make")
    (folder / "own_callbacks.py").unlink()
    towers.evaluate(train_dir="run", dataset=DATA)
    assert "differs" not in capsys.readouterr().out
    (folder / "own_model.py").write_text(f"{source}# edited\n")
    towers.load("run")
    assert "(code.model) differs" in capsys.readouterr().err


def test_callbacks_go_on_with_other_examples(tmp_path, capsys):
    """What was best on another test set is not compared with; a log loses no row."""

    def run(training, test, steps):
        log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
        early = keras.callbacks.EarlyStopping("val_loss", patience=2)
        train(tmp_path, log, early, dataset=(training, test), max_steps=steps, num_epochs=0)
        rows = (tmp_path / "log.csv").read_text().splitlines()[1:]
        out = capsys.readouterr().out
        told = "EarlyStopping begins anew" in out, "an epoch has 21 examples, and had 14" in out
        return [int(row.partition(",")[0]) for row in rows], early.best, told

    assert run(*DATA, 6)[::2] == ([0, 1, 2], (False, False))
    harder = DATA[1][0], DATA[1][1] + 9  # no evaluation is as good as those before
    epochs, best, told = run(DATA[0], harder, 12)  # it would stop at 10
    assert epochs == [0, 1, 2, 3, 4, 5] and best > 9 and told == (True, False)
    assert run((X, Y), harder, 15)[::2] == ([0, 1, 2, 3, 4, 5, 4], (False, True))


def test_of_a_classifier_too_keras_knows_what_is_better_and_its_accuracy_is_that_of_fit(tmp_path):
    def plain():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])

    class Accuracies(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([logs["accuracy"], logs["loss"]])

    names = "accuracy", "val_accuracy", "val_loss"
    kept = [
        keras.callbacks.ModelCheckpoint(
            tmp_path / f"{name}.keras", monitor=name, save_best_only=True
        )
        for name in names
    ]
    stops = [keras.callbacks.EarlyStopping(name, patience=1, min_delta=9.0) for name in names]
    seen, labels = [], [(x, (y > 0).ravel().astype("int32")) for x, y in DATA]
    losses, given = Losses(), dict(dataset=labels, max_steps=8, batch_size=7, log_every_steps=100)
    given |= dict(num_towers=2, learning_rate=1e-9)
    result = towers.train(
        train_dir=tmp_path / "run", model=plain, **given,
        callbacks=lambda: [losses, Accuracies(), *kept, *stops],
    )  # fmt: skip
    assert result["steps"] == 4 and [each.stopped_epoch for each in stops] == [1] * 3
    assert all((tmp_path / f"{name}.keras").exists() for name in names)
    assert result["train_loss"] == pytest.approx(losses.steps[-1])  # nothing was logged there
    model, loss = plain(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.0), loss, metrics=["accuracy"])
    model.fit(*labels[0], batch_size=7, callbacks=[Accuracies()], verbose=0)
    np.testing.assert_allclose(seen[0], seen[-1], rtol=1e-6)


@pytest.mark.parametrize("lost_to", [4, rare(5), rare(3), rare(0)])
def test_what_callbacks_hold_goes_on_with_the_run(tmp_path, lost_to):
    """Whether it was stopped in an epoch or killed, when its newest checkpoint was an older one."""

    def hold(folder, steps):
        losses, best = Losses(), folder / "best.keras"
        log = keras.callbacks.CSVLogger(folder / "log.csv")
        kept = keras.callbacks.ModelCheckpoint(best, "loss", save_best_only=True)
        given = dict(restore_best_weights=lost_to < 5)  # as the first run does at its end
        early = keras.callbacks.EarlyStopping("loss", 9.0, 3, **given)
        options = dict(num_epochs=20, max_steps=steps, checkpoint_every_steps=1, keep_checkpoints=9)
        rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.75)
        result = train(folder, losses, log, kept, early, rate, **options)
        assert losses.params["epochs"] == -(-steps // 2)
        return [losses.steps, losses.epochs, losses.numbers], kept.best, early.best, result["steps"]

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = hold(tmp_path / "whole", 20)
    hold(tmp_path / "parts", 5)
    for path in (tmp_path / "parts/run/checkpoints").glob("ckpt-*"):
        if int(path.stem.partition("-")[2]) > lost_to:
            path.unlink()
    (tmp_path / "parts/run/checkpoints/checkpoint").unlink()
    assert hold(tmp_path / "parts", 20) == whole
    logs = [(tmp_path / part / "log.csv").read_text() for part in ("whole", "parts")]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) == 1 + len(whole[0][1])


class Holder:
    def __init__(self, given=0, **values):
        self.given = given
        vars(self).update(values)


def test_what_is_saved_of_an_object():
    kept = dict(
        number=np.float32(0.5), flag=np.bool_(True), none=None, infinite=float("inf"),
        pairs=[(1, "a"), (2, "b")], seen={3, 4}, last=collections.deque([1.5, 2.5], maxlen=2),
        by_epoch={0: {"loss": np.int64(3)}, "best": [np.arange(3), np.float16([[0.5]])]},
    )  # fmt: skip
    of_kinds = collections.defaultdict(list)
    lost = dict(of_kinds=of_kinds, layers=[keras.layers.Dense(1)], file=print, _private=1)
    lost["itself"] = lost["itself_below"] = []
    lost["itself"].append(lost["itself"])
    packed = saved_attributes.pack([Holder(given=7, **kept, **lost), object()])
    again = Holder(given=8)
    unsaved = saved_attributes.unpack(packed, [again, object()])
    assert unsaved == [f"Holder.{n}" for n in ("of_kinds", "layers", "itself", "itself_below")]
    assert "Holder.layers" in saved_attributes.unsaved_note(unsaved)
    arrays = again.by_epoch.pop("best"), kept["by_epoch"].pop("best")
    for array, before in zip(*arrays, strict=True):
        np.testing.assert_array_equal(array, before, strict=True)
    assert vars(again) == kept | {"given": 8} and again.last.maxlen == 2


def tiny_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])


def sets_rate():
    class SetsRate(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.5

    return SetsRate()


def hooked(hook, function):
    callback = keras.callbacks.Callback()
    setattr(callback, hook, function)
    return callback


@pytest.mark.parametrize(
    "given, says",
    [
        (lambda: ["csv"], "returned a list with 'csv'; a list of keras.callbacks.Callback is"),
        (lambda: 7, "returned 7; a list of keras.callbacks.Callback is needed"),
        (lambda: [keras.callbacks.CSVLogger], r"with the class CSVLogger; .*CSVLogger\(...\)"),
        (lambda: keras.callbacks.BackupAndRestore("b"), "leave BackupAndRestore out"),
        (lambda: [keras.callbacks.ReduceLROnPlateau()], "ReduceLROnPlateau sets the learning rate"),
        (lambda: keras.callbacks.EarlyStopping("val_maes"), "val_maes; did you mean val_mae?"),
        (
            lambda: keras.callbacks.ModelCheckpoint("b.keras", "f1", save_best_only=True),
            "there are loss, mae, val_loss, val_mae",
        ),
        (sets_rate, "on_train_batch_begin sets the learning rate"),
        (lambda a: [], "is called without arguments, .* default values"),
        (lambda: hooked("on_train_batch_end", lambda b, x: 0), r"\(self, batch, logs=None\)"),
        (lambda: hooked("on_epoch_end", lambda logs: 0), r"on_epoch_end\(self, epoch, logs=None\)"),
        (lambda: hooked("on_train_end", lambda: 0), r"on_train_end\(self, logs=None\)"),
        ([3], "callbacks"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_line(tmp_path, given, says):
    in_a_step = given is sets_rate  # nobody knows before the run has begun
    given = dict(callbacks=given, model=tiny_model, loss="mse", metrics="mae")
    with pytest.raises(towers.RunError if in_a_step else towers.InputError, match=says) as error:
        towers.train(train_dir=tmp_path / "run", dataset=DATA, max_steps=2, **given)
    assert len(str(error.value).splitlines()) == 1
    assert (tmp_path / "run").exists() == in_a_step


def test_one_that_fails_loses_no_step_and_no_end_of_an_epoch(tmp_path, capsys):
    def of_batch(batch, logs):
        if (when := "in an epoch") in failing:
            raise KeyError(when)

    def of_epoch(epoch, logs):
        if epoch == 1 and (when := "at its end") in failing:
            raise KeyError(when)

    failing, log = ["in an epoch", "at its end"], tmp_path / "log.csv"
    for saved in 1, 4:
        calls = [keras.callbacks.CSVLogger(log), hooked("on_train_batch_end", of_batch)]
        with pytest.raises(KeyError, match=failing[0]):
            train(tmp_path, *calls, hooked("on_epoch_end", of_epoch), Losses())
        assert f"saved       step {saved}: the same command" in capsys.readouterr().out
        calls[0].csv_file.close()
        failing.pop(0)
    calls = [keras.callbacks.CSVLogger(log), hooked("on_train_batch_end", of_batch)]
    assert train(tmp_path, *calls, hooked("on_epoch_end", of_epoch), own := Losses())["steps"] == 6
    assert "continuing" in capsys.readouterr().out
    assert own.numbers == [0, 1, 2] and len(log.read_text().splitlines()) == 4


def test_a_function_is_named_by_its_flag_and_that_of_a_foreign_run_is_asked_for(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_callbacks.py").write_text(
        "import keras\n"
        "class Rate(keras.callbacks.Callback):\n"
        "    def on_train_batch_end(self, batch, logs):\n"
        "        print('rate', float(self.model.optimizer.learning_rate))\n"
        "def log():\n"
        "    kept = keras.callbacks.ModelCheckpoint('best.keras')\n"
        "    return [keras.callbacks.CSVLogger('log.csv'), Rate(), kept]\n"
    )
    run = ["--train_dir=run", "--max_steps=2", "--batch_size=7", "--evaluate_every_epochs=0"]
    names = ["--model=tests.tiny:dense", "--dataset=tests.tiny:images"]
    assert cli.main(["train", *run, *names, "--callbacks=my_callbacks:log"]) == 0
    out = capsys.readouterr().out
    assert "\nrate 0.05" in out  # of a model that is not compiled, too
    assert "ModelCheckpoint takes images as they are prepared" in out
    first, second = (tmp_path / "log.csv").read_text().splitlines()[:2]
    assert first == "epoch,accuracy,loss,val_accuracy,val_loss" and second.startswith("0,")
    flags = tmp_path / "run/flags.cfg"
    flags.write_text(flags.read_text().partition(code_trust._MARK)[0])
    assert cli.main(["train", "--train_dir=run", "--max_steps=3", *names]) == 2
    assert "--callbacks=my_callbacks:log; look at that, and type --tr" in capsys.readouterr().err
    assert cli.main(["train", *run, *names, "--callbacks=my_callbacks:logs"]) == 2
