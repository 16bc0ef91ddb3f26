"""Steps that are not finite: no update is made of them, they are named, and can be made again."""

import contextlib
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import runs, tiny
from tests.runs import command
from towers.builder import device_types
from towers.errors import InputError, RunError
from towers.training.train import train

pytestmark = pytest.mark.run

BAD_ROW, MARK = 41, 77.0
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


def too_large_for_half():
    return rows(bad=BAD_ROW, column=2, value=1e5), rows(1, 20)


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


def own(num_classes, where="output", schedule=False):
    model = network(num_classes, where, Own)
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9) if schedule else 0.1
    model.other = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer=keras.optimizers.Adam(rate))
    return model


NAME = __name__
OWN = dict(model=f"{NAME}:own", learning_rate=0.05)  # the flag's default: it has its own


NORM: list[keras.layers.Layer] = []


def normalized(num_classes):
    """Its last layer is called again by the loss: a step assigns its state twice."""
    NORM[:] = [keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input([6]), Refusing(), keras.layers.Dense(num_classes), *NORM])


class Shrinking(keras.layers.Dense):
    """Assigns its own kernel at each call, as SpectralNormalization does."""

    def call(self, inputs):
        self.kernel.assign(0.5 * self.kernel)
        return super().call(inputs)


def shrinking(num_classes):
    layers = [Refusing("output"), Shrinking(5), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input([6]), *layers])


def of_normalized(y, outputs):
    return cross_entropy(y, NORM[0](outputs, training=True))


def options(folder, **changes):
    given = dict(model=f"{NAME}:network", dataset=f"{NAME}:marked", ema_decay=0.9, num_towers=2)
    given |= dict(augment="auto", max_steps=14, log_every_steps=100, checkpoint_every_steps=2)
    return tiny.options(folder, **given | changes)


KINDS = {
    "cpu": {},
    "gradient": dict(model_args="where=gradient"),
    "replicated": dict(variables="replicated", model_args="where=gradient"),
    "accumulate": dict(accumulate_steps=2),
    "XLA": dict(jit_compile=True, batch_norm="local"),
    "compiled, a layer called again": dict(
        model=f"{NAME}:normalized", loss=f"{NAME}:of_normalized"
    ),
    "a kernel that its layer assigns": dict(model=f"{NAME}:shrinking", variables="replicated"),
    "own step, gradient": OWN | dict(model_args="where=gradient", variables="sharded"),
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
    "cpu", "own step, gradient", "a kernel that its layer assigns",
)  # fmt: skip


def on_devices(name):
    return device_types.cpus_for_gpus() if name.startswith("GPUs") else contextlib.nullcontext()


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
        batch = loop.loop(loop.batches, tf.constant(12)).get("batch")
        assert name.startswith("GPUs") or MARK in batch[0][0].numpy()  # that of this very step
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


OF_NAMED = ("cpu", "gradient", "own step, gradient", "GPUs")


@pytest.mark.parametrize("name", runs.released(OF_NAMED, "cpu", "gradient"))
def test_the_step_is_named_written_and_made_again(tmp_path, capsys, name):
    with on_devices(name), pytest.raises(RunError) as caught:
        train(options(tmp_path, batch_size=4, max_steps=15, **KINDS[name]))
    report = json.loads((tmp_path / "nan/report.json").read_text())
    line, (tower,) = str(caught.value), report["towers"]
    place = report["devices"][0]
    assert f"at step {report['step']} (epoch 0." in line and f", tower {tower} ({place}): " in line
    assert f"for {BAD_ROW} (rows of the training set): " in line and report["rows"] == [BAD_ROW]
    assert line.endswith(f"; `towers replay --train_dir={tmp_path}` makes it again")
    part = {
        "cpu": "the loss is nan at step ",
        "GPUs": "layer sequential/refusing is the first whose output is not finite",
    }
    assert part.get(name, "/refusing/scale is not for ") in line
    assert name != "gradient" or line.startswith("a gradient is not finite at step ")
    place = report["places_in_batch"][0]
    assert np.load(tmp_path / "nan/batch.npz")["0"][place, 0] == MARK
    assert max(tiny.saved_steps(tmp_path)) <= report["step"]

    code, out, err = command(capsys, "replay", f"--train_dir={tmp_path}", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["again"] and not found["inputs_at_fault"]
    assert (found["step"], found["name"]) == (report["step"], report["name"])
    kinds_of = {entry["kind"] for entry in found["ranges"]}
    assert kinds_of == {"data", "layer", "loss", "gradient", "variable"}
    layer = next(e for e in found["ranges"] if e["name"].endswith("batch_normalization"))
    assert (layer["not_finite"] > 0) == (report["fault"] == "layer")


def infinite(num_classes, image_shape):
    parts = [keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *parts, keras.layers.Rescaling(np.inf)])


def test_there_may_be_nothing_to_replay(trained, capsys):
    code, out, err = command(capsys, "replay", flag := f"--train_dir={trained('classes')}")
    assert (code, out) == (2, "")
    assert err.startswith(f"towers: {flag}: there is nothing to replay: ")


@pytest.mark.parametrize("dtype", runs.released(["float32", "mixed_float16"], "float32"))
def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path, dtype):
    step = 15 if dtype == "mixed_float16" else 0  # a loss scale is halved as often before
    with pytest.raises(RunError) as caught:
        train(options(tmp_path, dataset=f"{NAME}:all_marked", dtype=dtype, max_steps=40))
    assert str(caught.value) == (
        f"the loss is nan at step {step} (epoch {step * 7 / 60:.2f}), towers 0 (/cpu:0), 1 "
        "(/cpu:1): layer sequential/refusing is the first whose output is not finite for all 7 "
        "examples: try a lower --learning_rate or --clip_global_norm=1, or --on_nan=rollback; "
        f"`towers replay --train_dir={tmp_path}` makes it again"
    )
    assert max(tiny.saved_steps(tmp_path)) <= step
    for value in tiny.saved(tmp_path).values():
        assert np.all(np.isfinite(value))
    assert not (tmp_path / "result.json").exists()


INPUTS = {
    "float32": dict(dataset=f"{NAME}:too_large"),
    "float16": dict(dataset=f"{NAME}:too_large_for_half", dtype="mixed_float16", max_steps=60),
}


@pytest.mark.parametrize("dtype", runs.released(INPUTS, "float32"))
def test_inputs_that_overflow_are_no_divergence(tmp_path, dtype):
    given = dict(batch_size=60, num_towers=1, on_nan="rollback")  # which would not help
    with pytest.raises(RunError) as caught:
        train(options(tmp_path, **given | INPUTS[dtype]))
    rows = {"float32": r"\d+ \(examples of the run", "float16": rf"{BAD_ROW} \(rows of the tr"}
    words = rf": inputs are not finite in {dtype} for {rows[dtype]}.*\): leave these examples out"
    assert re.search(words, str(caught.value))
    assert json.loads((tmp_path / "nan/report.json").read_text())["inputs_at_fault"]


BROKEN = {1: r"model/\S+ is infinite or NaN after 1 steps: ", 0: "the variable model/.* is not fin"}


@pytest.mark.parametrize("every", runs.released(BROKEN, 1))
def test_weights_that_an_update_broke_are_named_and_not_saved(tmp_path, every):
    given = dict(learning_rate=1e38, optimizer="sgd", max_steps=8, checkpoint_every_steps=every)
    with pytest.raises(RunError, match=BROKEN[every]):
        train(tiny.options(tmp_path, model_args="scale=1000,activation=linear", **given))
    assert tiny.saved_steps(tmp_path) == [0]


class Limit(keras.layers.Layer):
    """Gives NaN when its weight has moved far."""

    def build(self, shape):
        self.weight = self.add_weight(shape=[], initializer="zeros", name="weight")

    def call(self, inputs):
        nan = tf.constant(np.nan, inputs.dtype)
        return inputs[:, :3] + tf.where(self.weight > 1.7, nan, self.weight)


def limited(num_classes):
    return keras.Sequential([keras.Input([6]), Limit()])


def toward(y, outputs):
    return tf.reduce_mean(10.0 - outputs, axis=-1)


ROLLS = dict(
    model=f"{NAME}:limited", loss=f"{NAME}:toward", optimizer="sgd", learning_rate=0.3,
    schedule="constant", on_nan="rollback", num_epochs=1.0, max_steps=0, monitor="loss",
)  # fmt: skip


@pytest.mark.extended
def test_a_run_that_was_rolled_back_is_the_same_when_it_is_resumed(tmp_path, capsys):
    """At 0.3 a step it is too far after 6; at 0.15 from step 4 on, after 8; at 0.075 never."""
    whole = train(options(tmp_path / "whole", **ROLLS))
    out = capsys.readouterr().out
    assert re.findall(r"; back to step (\d), with 0.5 times the learning rate", out) == ["4", "6"]
    rolled = json.loads((tmp_path / "whole/nan/rollbacks.json").read_text())["rollbacks"]
    assert [(entry["step"], entry["to"]) for entry in rolled] == [(6, 4), (8, 6)]
    assert whole["steps"] == 9 and tiny.saved_steps(tmp_path / "whole") == [6, 8, 9]
    for steps in 7, 0:
        train(options(tmp_path / "parts", **ROLLS | dict(max_steps=steps)))
    tiny.assert_identical(tiny.saved(tmp_path / "parts"), tiny.saved(tmp_path / "whole"))


def test_a_schedule_of_its_own_cannot_be_rolled_back(tmp_path):
    given = OWN | dict(on_nan="rollback", model_args="schedule=true", num_towers=1)
    with pytest.raises(InputError, match="--on_nan=rollback lowers the learning rate, and an opti"):
        train(options(tmp_path / "new", **given))
    assert list(tmp_path.iterdir()) == []
