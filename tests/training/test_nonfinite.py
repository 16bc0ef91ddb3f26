"""Steps that are not finite: no update is made of them, and they are named."""

import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import runs, tiny
from tests.programs import ROOT
from towers.builder import device_names
from towers.errors import RunError
from towers.training.train import train

pytestmark = pytest.mark.run

BAD_ROW, MARK = 41, 77.0
PAGE = (ROOT / "towers/training/RUNNING.md").read_text(encoding="utf-8")
SIZE = 60


def rows(seed=0, size=SIZE, bad=slice(0), column=0, value=MARK):
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(size, 6)), random.integers(0, 3, size)
    x[bad, column] = value
    return x, y


def marked():
    """Data of which one row has a mark that a layer cannot take."""
    return rows(bad=BAD_ROW), rows(1, 20)


def all_marked():
    return rows(bad=slice(None)), rows(1, 20)


def too_large():
    """A pipeline of finite numbers, of which one is none in float32."""
    train = rows(bad=BAD_ROW, column=2, value=1e300)
    return tf.data.Dataset.from_tensor_slices(train), rows(1, 20)


class Refusing(keras.layers.Layer):
    """Has a weight; gives NaN, or only a gradient that is NaN, for an example with the mark."""

    def __init__(self, where="output", **given):
        super().__init__(**given)
        self.where = where

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones", name="scale")

    def call(self, inputs):
        bad = inputs[:, :1] == tf.constant(MARK, inputs.dtype)
        scaled = inputs * tf.cast(self.scale, inputs.dtype)
        nan = tf.constant(np.nan, inputs.dtype)
        if self.where == "output":
            return tf.where(bad, nan, scaled)

        @tf.custom_gradient
        def refuse(values):
            return values, lambda upstream: upstream * tf.where(bad, nan, 1.0)

        return refuse(scaled)


def network(num_classes, where="output", kind=keras.Sequential):
    layers = keras.layers
    rest = [layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(num_classes)]
    return kind([keras.Input([6]), Refusing(where, name="refusing"), *rest])


def cross_entropy(y, outputs):
    return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


class Own(keras.Sequential):
    """Two optimizers, the first of which has made its update before the second's is NaN."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(cross_entropy(y, self(x, training=True)))
        *first, kernel, bias = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, [kernel, bias]), [kernel, bias])
        self.other.apply(tape.gradient(loss, first), first)
        return {"loss": loss}

    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_mean(cross_entropy(y, self(x, training=False)))}


def own(num_classes, where="output"):
    model = network(num_classes, where, Own)
    model.other = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer=keras.optimizers.Adam(0.1))
    return model


NAME = __name__
OWN = dict(model=f"{NAME}:own", learning_rate=0.05)  # the flag's default: it has its own


def of_means(num_classes):
    """Return a model whose loss is no mean of examples' losses, so that its outputs are joined."""
    model = network(num_classes)
    model.compile("adam", lambda y, outputs: tf.reduce_mean(cross_entropy(y, outputs)))
    return model


def shrinking(num_classes):
    spectral = keras.layers.SpectralNormalization(keras.layers.Dense(5))
    layers = [Refusing("output"), spectral, keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input([6]), *layers])


def options(folder, **changes):
    given = dict(model=f"{NAME}:network", dataset=f"{NAME}:marked", ema_decay=0.9, num_towers=2)
    given |= dict(augment="auto", max_steps=14, log_every_steps=100, checkpoint_every_steps=2)
    return tiny.options(folder, **given | changes)


KINDS = {
    "cpu": {},
    "gradient": dict(model_args="where=gradient"),
    "accumulate": dict(accumulate_steps=2),
    "XLA": dict(jit_compile=True, batch_norm="local"),
    "a kernel that its layer assigns": dict(model=f"{NAME}:shrinking", variables="replicated"),
    "own step, gradient": OWN | dict(model_args="where=gradient", variables="replicated"),
    "one tower": dict(num_towers=1, model=f"{NAME}:of_means", learning_rate=0.05),
    "GPUs": dict(devices="/cpu:1,/cpu:2", variables="replicated"),
}


class Loop(tiny.Loop):
    def start_again(self, state):
        for name, variable in self.train_state.variables().items():
            variable.assign(state[name])
        self.train_state.set_copies()
        for in_a_row in self.train_state.in_a_row:
            in_a_row.assign(0)
        self.batches = iter(self.run.data.train.train_batches(7, seed=self.run.options.seed))


RELEASE = (
    "cpu", "one tower", "own step, gradient", "a kernel that its layer assigns",
)  # fmt: skip


def on_devices(name):
    return device_names.cpus_for_gpus() if name.startswith("GPUs") else contextlib.nullcontext()


@pytest.mark.parametrize("name", runs.released(KINDS, *RELEASE))
def test_after_a_bad_step_all_is_as_before_it(name):
    with on_devices(name):
        loop = Loop(options("unused", **KINDS[name]))
        states, values = [loop.state()], {"stuck": False}
        while not bool(values["stuck"]):
            values = loop.loop(loop.batches, tf.constant(1))
            states.append(loop.state())
        number = len(states) - 2
        assert 0 < number < 9  # it is in the first epoch
        tiny.assert_identical(states[-1], states[-2])
        assert states[-1]["step"] == number and states[-1]["examples"] == 7 * number

        loop.start_again(states[0])  # now in one call
        loop.loop(loop.batches, tf.constant(12))
        loop.loop(loop.batches, tf.constant(3))  # what comes after it changes nothing
        tiny.assert_identical(loop.state(), states[-1])
        first, *others = loop.train_state.replicas
        for replica in others:
            for copy, master in zip(replica.weights, first.weights, strict=True):
                np.testing.assert_array_equal(copy.numpy(), master.numpy())


def test_a_skipped_step_counts_and_training_goes_on(tmp_path, capsys):
    given = dict(on_nan="skip", max_steps=18, log_every_steps=4, num_towers=1)
    result = train(options(tmp_path, **given))
    assert result["skipped_steps"] == 2  # one in each epoch
    assert "skipped     2 of 18 steps" in (out := capsys.readouterr().out)
    assert re.search(r"skipped     1 step before step \d: the loss or a gradient was not", out)
    shown = [v for _, tag, v in tiny.events(tmp_path / "train") if tag == "skipped_steps"]
    assert shown[0] == 0 and shown[-1] == 2
    saved = tiny.saved(tmp_path)
    assert all(np.all(np.isfinite(v)) for v in saved.values() if v.dtype.kind == "f")
    assert saved["step"] == 18 and saved["optimizer.Ssgd.Siteration"] == 16


@pytest.mark.extended
def test_skipping_is_bounded(tmp_path):
    given = dict(on_nan="skip", model_args="where=gradient", max_steps=40, batch_size=60)
    with pytest.raises(RunError, match="at step 9 "):  # the tenth in a row
        train(options(tmp_path, **given))


NAMED = {
    "cpu": f"is that of layer sequential/refusing for {BAD_ROW} (rows of the training set); ",
    "GPUs": f"is that of layer sequential/refusing for {BAD_ROW} (rows of the training set); ",
    "gradient": "the first non-finite gradient is that of sequential/refusing/scale; ",
    "own step, gradient": "the outputs of all layers are finite on one device; ",
}


@pytest.mark.parametrize("name", runs.released(NAMED, "cpu", "gradient"))
def test_the_step_is_named_and_its_batch_saved(tmp_path, name):
    with on_devices(name), pytest.raises(RunError) as caught:
        train(options(tmp_path, batch_size=4, max_steps=15, **KINDS[name]))
    line, (path,) = str(caught.value), (tmp_path / "nan").iterdir()
    with np.load(path) as file:
        saved = dict(file)
    (place,) = np.flatnonzero(saved["x"][:, 0] == MARK)
    assert NAMED[name] in line and line.endswith(f"; the batch is in {path}")
    assert f" at {path.stem.replace('_', ' ')} (epoch 0." in line
    assert max(tiny.saved_steps(tmp_path)) <= int(path.stem.removeprefix("step_"))
    if "gradient" not in name:  # the row of the example, and the tower that had it
        device = KINDS[name].get("devices", "/cpu:0,/cpu:1").split(",")[tower := place // 2]
        assert saved["rows"].tolist() == [place] and f", tower {tower} ({device}): " in line


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path, capsys):
    with pytest.raises(RunError) as caught:
        train(options(tmp_path, dataset=f"{NAME}:all_marked", max_steps=40))
    said = str(caught.value)
    assert " at step 0 (epoch 0.00), towers 0 (/cpu:0), 1 (/cpu:1): " in said
    assert "layer sequential/refusing for all 7 examples;" in said
    for remedy in "--learning_rate", "--clip_global_norm=1", "--on_nan=skip":
        assert remedy in said
    assert tiny.saved_steps(tmp_path) == [0]
    for value in tiny.saved(tmp_path).values():
        assert np.all(np.isfinite(value))
    assert not (tmp_path / "result.json").exists()
    (snippet,) = re.findall(r"^with np.load.*?(?=^```)", PAGE, re.DOTALL | re.MULTILINE)
    saved = snippet.replace("runs/mine/nan/step_812.npz", f"{tmp_path}/nan/step_0.npz")
    capsys.readouterr()
    with np.printoptions(suppress=True):
        exec(saved, {"np": np})
    assert capsys.readouterr().out.count("[77.") == 7


def test_inputs_that_overflow_are_no_divergence(tmp_path):
    with pytest.raises(RunError, match=r": the batch is not finite for \d+ .*remove these ex"):
        train(options(tmp_path, batch_size=60, num_towers=1, dataset=f"{NAME}:too_large"))


def test_weights_that_an_update_broke_are_named_and_not_saved(tmp_path):
    given = dict(learning_rate=1e38, optimizer="sgd", max_steps=8, checkpoint_every_steps=1)
    with pytest.raises(RunError, match=r"model/\S+ is infinite or NaN after 1 steps; "):
        train(tiny.options(tmp_path, model_args="scale=1000,activation=linear", **given))
    assert tiny.saved_steps(tmp_path) == [0]
