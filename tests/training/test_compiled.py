"""Compiled models in a run: what they say is done, and what flags say of others."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import runs, tiny
from towers.devices.selection import tower_devices
from towers.errors import InputError
from towers.options.functions import option_text
from towers.training.run.setup import prepare
from towers.training.step import train_state

pytestmark = pytest.mark.run
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 4))
Y = X @ [[1.0], [2.0], [0.5], [-1.0]]


def numbers():
    return (X[:30], Y[:30]), (X[30:], Y[30:])


def of_all(y, outputs):
    return tf.reduce_mean((y - outputs) ** 2)


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


def options_of(**given):
    """Return options as `towers.train` makes them."""
    given = dict(model=plain, dataset=numbers, batch_size=10, num_towers=2, max_steps=6) | given
    return towers.Options(**{name: option_text(name, value) for name, value in given.items()})


def loop_of(**given):
    return tiny.Loop(options_of(**given))


def weights(loop):
    return {n: v for n, v in loop.state().items() if n.startswith("model")}


def test_flags_compile_what_code_would():
    flags = dict(loss="mse", metrics="mae", optimizer="adam", learning_rate=0.02, num_towers=1)
    by_flags = loop_of(**flags, schedule="constant", clip_norm=0.1)
    adam = lambda: keras.optimizers.Adam(0.02, clipnorm=0.1)  # noqa: E731
    by_code = loop_of(model=compiled(adam, metrics=["mae"]), num_towers=1)
    metrics = by_flags(6)
    assert "batch/mae" in metrics and metrics == by_code(6)
    tiny.assert_identical(weights(by_flags), weights(by_code))


def test_slots_of_an_optimizer_that_is_built_lie_beside_their_weights():
    """As that of a model which was loaded from a file; some update weight and slot in one op."""
    tower_devices(2, "cpu")

    def built():
        model = compiled(lambda: keras.optimizers.SGD(0.1, momentum=0.9))()
        model.optimizer.build(model.trainable_variables)
        return model

    loop = loop_of(model=built, devices="/cpu:1,/cpu:0", variables="replicated")
    assert np.isfinite(loop()["loss"])
    for replica, device in zip(loop.train_state.replicas, ("CPU:1", "CPU:0"), strict=True):
        pairs = train_state.slots_of(replica.optimizer)
        assert all(device in v.value.device for pair in pairs for v in pair)


class Adversarial(keras.Model):
    """Two nets with an optimizer each, in a list, and no call."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.Input([4]), keras.layers.Dense(4)])
        self.judge = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])

    def compile(self, optimizers):
        super().compile()
        self.optimizers = optimizers

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            real, made = self.judge(x, training=True), self.judge(self.maker(x, training=True))
            judged = tf.reduce_mean(tf.nn.softplus(-real) + tf.nn.softplus(made))
            fooled = tf.reduce_mean(tf.nn.softplus(-made))
        of_nets = (judged, self.judge), (fooled, self.maker)
        for (loss, net), optimizer in zip(of_nets, self.optimizers, strict=True):
            optimizer.apply(tape.gradient(loss, net.trainable_weights), net.trainable_weights)
        return {"judge_loss": judged, "maker_loss": fooled}


class Evaluated(Adversarial):
    def test_step(self, data):
        x, _ = data
        return {"judge_loss": tf.reduce_mean(tf.nn.softplus(-self.judge(x)))}


def adversarial(kind=Evaluated):
    model = kind()
    of_judge = keras.optimizers.Adam(0.01, use_ema=True)  # whose averages are left to the step
    model.compile([of_judge, keras.optimizers.RMSprop(0.01)])
    return model


def masks():
    """A model whose outputs are images."""
    return keras.Sequential([keras.Input(tiny.IMAGE_SHAPE), keras.layers.Conv2D(1, 3)])


def recomputed():
    with keras.RematScope(mode="full"):
        return plain()


@pytest.mark.graph
@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(), "--loss="),
        (dict(model=compiled("adam", None)), "is compiled without a loss; give one"),
        (dict(loss="none_such"), "--loss=none_such"),
        (dict(loss="keras.losses:Loss"), "--loss=keras.losses:Loss: its loss or a metric cannot"),
        (dict(loss="mse", metrics="keras.metrics:MeanIoU"), "missing a required argument"),
        (dict(loss="mse", label_smoothing=0.1), "--label_smoothing"),
        (dict(loss="mse", monitor="auc"), "--monitor=auc"),
        (
            dict(loss="mse", test_time_flip=True, model=masks, dataset=tiny.images),
            "--test_time_flip needs one row of numbers for each image",
        ),
        (dict(loss="mse", keep_best=True), "--keep_best ... --validation_fraction"),
        (
            dict(loss="mse", early_stopping_epochs=1),
            "--early_stopping_epochs ... --validation_fraction",
        ),
        (dict(loss="mse", validation_fraction=0.2, keep_best=True), "--evaluate_every_epochs"),
        (dict(model=recomputed, loss="mse"), "keras.remat does not work here"),
        (dict(model=lambda: adversarial(Adversarial)), "give it a test_step that returns a dict"),
        (dict(model=adversarial, monitor="maker_loss"), "maker_loss: allowed are judge_loss"),
        (dict(model=Adversarial), "its own train_step but is not compiled; call its compile"),
        (dict(model=compiled(), optimizer="adam"), "--optimizer=adam ... compiled"),
        (
            dict(model=compiled(), learning_rate=0.3),
            "compiled ... --model_args=lr=0.3 ... --vary=model_args:lr=0.3,",
        ),
    ],
)
def test_what_cannot_be_had_is_said_in_a_line(tmp_path, changes, words):
    said = runs.refusal(run, tmp_path, **changes)
    assert all(part in said for part in words.split(" ... "))
    assert not list(tmp_path.iterdir())


def test_what_is_reported_is_of_the_weights_that_are_kept(tmp_path, capsys):
    """Also where the last evaluation came before the optimizer put its averages in place."""
    rising = compiled(lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5))
    given = dict(validation_fraction=0.3, early_stopping_epochs=1, evaluate_every_epochs=1)
    result = run(tmp_path, rising, **given, max_steps=60, num_towers=1)
    found = towers.evaluate(train_dir=str(tmp_path), model=rising, dataset=numbers)
    assert result["steps"] < 60
    assert found["loss"] == result["test_loss"]
    model = towers.load(str(tmp_path), model=rising)
    held = prepare(options_of(model=rising, validation_fraction=0.3)).data.validation
    (((x, y), _),) = held.eval_batches(held.size)
    expected = float(tf.reduce_mean((model(x) - y) ** 2))
    assert result["validation_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_train_step_of_the_models_own_is_made_on_towers_and_resumed(tmp_path, capsys):
    run(tmp_path, adversarial, max_steps=4)
    result = run(tmp_path, adversarial, max_steps=7)
    assert np.isfinite(result["test_judge_loss"]) and result["direction"] == "min"
    assert "checkpoints do not hold" not in capsys.readouterr().out
    saved = tiny.saved(tmp_path)
    assert any("rm_sprop" in name for name in saved) and any("adam" in name for name in saved)
    whole = loop_of(model=adversarial, max_steps=7)  # of one device: test_parallelize
    whole(7)
    state = {name.replace("/", ".S"): value for name, value in whole.state().items()}
    tiny.assert_identical(state, saved)


@runs.by_the_clock
def test_a_step_of_outputs_on_one_tower_is_measured():
    def build():
        model = plain()
        model.compile("sgd", of_all)
        return model

    loop = loop_of(model=build, num_towers=1)
    ((x, y), _) = next(iter(loop.run.data.train.train_batches(10, seed=loop.run.options.seed)))
    model = loop.train_state.model
    with tf.GradientTape() as tape:
        loss = of_all(tf.cast(y, tf.float32), model(tf.cast(x, tf.float32)))
    norm = tf.linalg.global_norm(tape.gradient(loss, model.trainable_variables))
    values = loop.loop(loop.batches, tf.constant(1))
    assert values["tower_examples"].numpy().tolist() == [10]
    np.testing.assert_allclose(values["tower_gradient_norm"], [norm], rtol=1e-5)
    assert float(values["data_gradient_norm"]) == pytest.approx(float(norm), rel=1e-5)
    # The clock of a step that is Keras' own may be read too late, but not always.
    more = [loop.loop(loop.batches, tf.constant(1)) for _ in range(9)]
    assert max(float(each["compute_seconds"]) for each in (values, *more)) > 0


def test_a_test_step_that_runs_on_one_device_is_told_by_train_and_evaluate(tmp_path, capsys):
    class Mapped(keras.Sequential):
        def test_step(self, data):
            x, y = data
            return {"slope": tf.reduce_mean(tf.gradients(self(x, training=True), x)[0] ** 2)}

    def build():
        norm = keras.layers.BatchNormalization()
        model = Mapped([keras.Input([4]), norm, keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    run(tmp_path, build)
    (line,) = [ln for ln in capsys.readouterr().out.splitlines() if "runs on one device" in ln]
    assert "test_step" in line and "batch_norm" in line
    given = dict(train_dir=str(tmp_path), model=build, dataset=numbers, num_towers=2)
    towers.evaluate(**given)
    assert line in capsys.readouterr().out


def test_the_loss_of_an_output_is_that_of_all_examples_alike(trained):
    """Of the 23 examples of the test set the last batch of 8 has 7."""
    result = runs.result_of(trained("two"))
    total = 0.5 * result["test_value_loss"] + result["test_kind_loss"]
    assert total == pytest.approx(result["test_loss"], rel=1e-6)


def test_each_number_of_a_metric_is_reported(tmp_path):
    def build():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(name="f1")])
        return model

    labels = np.eye(3)[np.arange(40) % 3]
    data = (X[:30], labels[:30]), (X[30:], labels[30:])
    result = run(tmp_path, build, dataset=data, monitor="f1_2", num_towers=1)
    model = towers.load(str(tmp_path), model=build)
    expected = keras.metrics.F1Score()
    expected.update_state(labels[30:], model(X[30:]))
    found = [result[f"test_f1_{i}"] for i in range(3)]
    np.testing.assert_allclose(found, expected.result(), rtol=1e-5)
    assert (result["monitor"], result["direction"]) == ("test_f1_2", "max")


def test_the_monitored_metric_and_its_direction_are_known():
    def monitored(metrics, **given):
        options = options_of(model=compiled(metrics=metrics), num_towers=1, **given)
        return prepare(options).monitored

    def own(y, outputs):
        return tf.abs(y - outputs)

    assert monitored(["mae"]) == ("mae", "min")
    assert monitored(["r2_score"]) == ("r2_score", "max")
    assert monitored(["MAE"], monitor="val_mae") == ("MAE", "min")
    assert monitored([own]) == ("loss", "min")
    assert monitored([own], monitor="max:own") == ("own", "max")
    with pytest.raises(InputError, match="min:own"):
        monitored([own], monitor="own")


class OwnTest(keras.Sequential):
    """Evaluates by a step of its own."""

    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_max(self.compute_loss(x, y, self(x, training=False)))}


@pytest.mark.parametrize("own", [False, True], ids=["keras", "own test_step"])
def test_averages_are_evaluated_beside_the_weights(own):
    """In one pass, with a last batch that is smaller; twice the same, and no variable changes."""

    def build():
        parts = keras.Input([4]), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)
        model = (OwnTest if own else keras.Sequential)(parts)
        model.compile("sgd", "mse", metrics=None if own else ["mae"])
        return model

    loop = loop_of(model=build, ema_decay=0.5, batch_size=7)
    for variable, average in loop.train_state.averages:
        average.assign(0.5 * variable)
    before = loop.state()
    evaluator = loop.run.task.make_evaluator(loop.run.data.test)
    found = evaluator().metrics
    assert evaluator().metrics == found
    tiny.assert_identical(loop.state(), before)
    plain, (x, y) = build(), numbers()[1]
    x, y = x.astype("float32"), y.astype("float32")
    of_averages = {id(v): average for v, average in loop.train_state.averages}
    for ending in "", "_ema":
        weights = loop.train_state.model.trainable_variables
        values = [of_averages[id(v)] if ending else v for v in weights]
        for variable, value in zip(plain.trainable_variables, values, strict=True):
            variable.assign(value)
        expected = plain.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
        for name, value in expected.items():
            assert found[f"{name}{ending}"] == pytest.approx(value, rel=1e-5), name
