"""Compiled models in a run: what they say is done, and what flags say of others."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tiny
from towers.errors import InputError
from towers.training.run import prepare
from towers.training.train import train

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 4))
Y = X @ [[1.0], [2.0], [0.5], [-1.0]]


def numbers():
    return (X[:30], Y[:30]), (X[30:], Y[30:])


def plain():
    dense = keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)
    return keras.Sequential([keras.Input([4]), *dense])


def compiled(optimizer="sgd", loss="mse", **more):
    def build():
        model = plain()
        model.compile(optimizer() if callable(optimizer) else optimizer, loss, **more)
        return model

    return build


def run(train_dir, model=plain, **changes):
    given = dict(batch_size=10, num_towers=2, max_steps=6, evaluate_every_epochs=0)
    given |= dict(dataset=numbers, train_dir=str(train_dir), model=model)
    return towers.train(**given | changes)


def weights(train_dir):
    return {n: v for n, v in tiny.saved(train_dir).items() if n.startswith("model")}


def test_flags_compile_what_code_would(tmp_path):
    flags = dict(loss="mse", metrics="mae", optimizer="adam", learning_rate=0.02)
    by_flags = run(tmp_path / "flags", **flags, schedule="constant", clip_norm=0.1)
    adam = lambda: keras.optimizers.Adam(0.02, clipnorm=0.1)  # noqa: E731
    by_code = run(tmp_path / "code", compiled(adam, metrics=["mae"]))
    tiny.assert_identical(weights(tmp_path / "flags"), weights(tmp_path / "code"))
    assert by_flags["test_mae"] == by_code["test_mae"]


def test_weight_decay_by_flags_is_a_regulariser_of_kernels(tmp_path):
    def regularised():
        l2 = keras.regularizers.L2(0.05)  # the square's half is what is decayed
        model = keras.Sequential([
            keras.Input([4]),
            keras.layers.Dense(5, "tanh", kernel_regularizer=l2),
            keras.layers.Dense(1, kernel_regularizer=l2),
        ])  # fmt: skip
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    flags = dict(loss="mse", optimizer="sgd", learning_rate=0.1, schedule="constant")
    run(tmp_path / "flags", **flags, weight_decay=0.1)
    run(tmp_path / "code", regularised)
    tiny.assert_close(weights(tmp_path / "flags"), weights(tmp_path / "code"), 1e-6)
    points = {tag: v for step, tag, v in tiny.events(tmp_path / "code" / "train") if step == 0}
    assert points["loss/regularisation"] > 0
    total = points["loss/data"] + points["loss/regularisation"]
    assert points["loss/total"] == pytest.approx(total)


@pytest.mark.parametrize("name", ["optimizer", "loss", "learning_rate", "clip_norm", "metrics"])
def test_a_flag_that_contradicts_a_compiled_model_is_named(tmp_path, name):
    value = {"learning_rate": 0.3, "clip_norm": 1.0, "optimizer": "adam"}.get(name, "mae")
    with pytest.raises(InputError, match=f"--{name}={value}.*compiled"):
        run(tmp_path, compiled(), **{name: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(), "--loss="),
        (dict(loss="mae", metrics="none_such"), "--metrics=none_such"),
        (dict(loss="none_such"), "--loss=none_such"),
        (dict(loss="keras.losses:Loss"), "--loss=keras.losses:Loss: its loss cannot be computed"),
        (dict(loss=lambda: 3), "returned int; a function of targets and outputs"),
        (dict(loss="mse", metrics="keras.metrics:MeanIoU"), "missing a required argument"),
        (dict(loss="mse", label_smoothing=0.1), "--label_smoothing"),
        (dict(loss="mse", variables="replicated"), "--variables=replicated"),
        (dict(loss="mse", objective="auc"), "--objective=auc"),
        (dict(loss="mse", optimizer=lambda: 3), "--optimizer="),
        (dict(optimizer=lambda: keras.optimizers.SGD(), learning_rate=0.3), "--learning_rate"),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(tmp_path, changes, words):
    with pytest.raises(InputError) as error:
        run(tmp_path, **changes)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_what_keras_cannot_recompute_in_a_graph_is_said_in_a_line(tmp_path):
    def recomputed():
        with keras.RematScope(mode="full"):
            return plain()

    with pytest.raises(InputError, match="Keras cannot recompute Sequential in a graph"):
        run(tmp_path, recomputed, loss="mse")


def test_a_schedule_of_the_optimizers_own_goes_on_after_a_stop(tmp_path):
    def decaying():
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        return keras.optimizers.SGD(rate, momentum=0.9)

    build = compiled(decaying)
    run(tmp_path / "whole", build, max_steps=8, log_every_steps=1)
    run(tmp_path / "parts", build, max_steps=3, log_every_steps=1)
    run(tmp_path / "parts", build, max_steps=8, log_every_steps=1)
    tiny.assert_identical(tiny.saved(tmp_path / "whole"), tiny.saved(tmp_path / "parts"))
    rates = [v for _, tag, v in tiny.events(tmp_path / "whole/train") if tag == "learning_rate"]
    np.testing.assert_allclose(rates, 0.1 * 0.5 ** (np.arange(8) / 2), rtol=1e-6)


def test_averages_of_the_optimizers_own_are_the_weights_at_the_end(tmp_path):
    build = compiled(lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
    run(tmp_path / "own", build)
    run(tmp_path / "none", compiled(lambda: keras.optimizers.SGD(0.1)))
    own, none = weights(tmp_path / "own"), weights(tmp_path / "none")
    slots = tiny.saved(tmp_path / "own")
    for name, value in own.items():
        assert not np.array_equal(value, none[name])
    averages = [v for n, v in slots.items() if "average" in n.lower() and n.startswith("optimizer")]
    assert any(np.array_equal(next(iter(own.values())), average) for average in averages)


def test_what_is_reported_is_of_the_weights_that_are_kept(tmp_path, capsys):
    """Also where the last evaluation came before the optimizer put its averages in place."""
    build = compiled(lambda: keras.optimizers.SGD(0.0, use_ema=True))
    given = dict(validation_fraction=0.3, early_stopping_epochs=1, evaluate_every_epochs=1)
    rising = compiled(lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5))
    for i, model in enumerate((build, rising)):
        result = run(tmp_path / str(i), model, **given | {"max_steps": 60})
        found = towers.evaluate(train_dir=str(tmp_path / str(i)), model=model, dataset=numbers)
        assert result["steps"] < 60
        assert found["loss"] == result["test_loss"]
        model = towers.load(str(tmp_path / str(i)), model=model)
        held = prepare(towers.Options(**{
            "model": towers.options.given.as_text("model", build), "num_towers": 1,
            "dataset": towers.options.given.as_text("dataset", numbers), "validation_fraction": 0.3,
        })).data.validation  # fmt: skip
        ((x, y), _), = held.eval_batches(held.size)
        expected = float(tf.reduce_mean((model(x) - y) ** 2))
        assert result["validation_loss"] == pytest.approx(expected, rel=1e-5)


class Adversarial(keras.Model):
    """Two nets with an optimizer each, and no call."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.Input([4]), keras.layers.Dense(4)])
        self.judge = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])

    def compile(self, of_maker, of_judge):
        super().compile()
        self.of_maker, self.of_judge = of_maker, of_judge

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            real, made = self.judge(x, training=True), self.judge(self.maker(x, training=True))
            judged = tf.reduce_mean(tf.nn.softplus(-real) + tf.nn.softplus(made))
            fooled = tf.reduce_mean(tf.nn.softplus(-made))
        for loss, net, optimizer in (
            (judged, self.judge, self.of_judge), (fooled, self.maker, self.of_maker),
        ):  # fmt: skip
            optimizer.apply(tape.gradient(loss, net.trainable_weights), net.trainable_weights)
        return {"judge_loss": judged, "maker_loss": fooled}

    def test_step(self, data):
        x, _ = data
        return {"judge_loss": tf.reduce_mean(tf.nn.softplus(-self.judge(x)))}


def adversarial():
    model = Adversarial()
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01))
    return model


def test_a_train_step_of_the_models_own_is_made_on_towers_and_resumed(tmp_path):
    result = run(tmp_path / "one", adversarial, num_towers=1, max_steps=7)
    assert np.isfinite(result["test_judge_loss"]) and result["direction"] == "min"
    run(tmp_path / "two", adversarial, max_steps=4)
    run(tmp_path / "two", adversarial, max_steps=7)
    one, two = tiny.saved(tmp_path / "one"), tiny.saved(tmp_path / "two")
    assert sum("rm_sprop" in name for name in one) > 0 and sum("adam" in name for name in one) > 0
    tiny.assert_close(one, two, 1e-4)
    run(tmp_path / "whole", adversarial, max_steps=7)
    tiny.assert_identical(tiny.saved(tmp_path / "whole"), two)


def test_a_train_step_of_its_own_in_a_model_that_is_not_compiled_is_told(tmp_path):
    with pytest.raises(InputError, match="train_step of its own.*compile"):
        run(tmp_path, Adversarial)


def test_an_optimizer_of_ones_own_trains_a_classifier(tmp_path):
    def own():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    one = train(tiny.options(tmp_path / "flags", schedule="constant"))
    names = ("model", "dataset", "augment", "batch_size")
    given = {name: getattr(tiny.options("x"), name) for name in names}
    two = towers.train(**given, max_steps=12, evaluate_every_epochs=0, num_towers=1, optimizer=own,
                       checkpoint_every_steps=0, train_dir=str(tmp_path / "own"))  # fmt: skip
    assert one["test_loss"] == two["test_loss"]


def test_each_number_of_a_metric_is_reported(tmp_path):
    def build():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
        return model

    labels = np.eye(3)[np.arange(40) % 3]
    data = (X[:30], labels[:30]), (X[30:], labels[30:])
    result = run(tmp_path, build, dataset=data, objective="f1_2")
    model = towers.load(str(tmp_path), model=build)
    expected = keras.metrics.F1Score()
    expected.update_state(labels[30:], model(X[30:]))
    found = [result[f"test_f1_{i}"] for i in range(3)]
    np.testing.assert_allclose(found, expected.result(), rtol=1e-5)
    assert (result["objective"], result["direction"]) == ("test_f1_2", "max")


@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16", "mixed_float16"])
def test_precisions(tmp_path, dtype):
    result = run(tmp_path, compiled("adam"), dtype=dtype, max_steps=20)
    assert result["test_loss"] < 20


def test_the_objective_is_a_metric_and_its_direction_is_known(tmp_path):
    def objective(metrics, **given):
        options = towers.Options(
            model=towers.options.given.as_text("model", compiled(metrics=metrics)),
            dataset=towers.options.given.as_text("dataset", numbers), num_towers=1, **given,
        )  # fmt: skip
        return prepare(options).task.objective()

    def own(y, outputs):
        return tf.abs(y - outputs)

    assert objective(["mae"]) == ("mae", "min")
    assert objective(["r2_score"]) == ("r2_score", "max")
    assert objective(["MAE"], objective="val_mae") == ("MAE", "min")
    assert objective([own]) == ("loss", "min")
    assert objective([own], objective="max:own") == ("own", "max")
    with pytest.raises(InputError, match="min:own"):
        objective([own], objective="own")
