"""`towers verify`: what passes, what fails, and what is said to be the cause."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from towers.commands.verify.options import VerifyOptions

from tests import tiny
from towers import cli
from towers.commands.verify import command as verify

# ---------------------------------------------------------------------------- Models with a fault


class ReadsItsTower(keras.layers.Layer):
    def call(self, x):
        return x * (1.001 if "tower_1" in tf.get_current_name_scope() else 1.0)


class ReadsItsTowerInEvaluation(keras.layers.Layer):
    def call(self, x, training=False):
        return x if training else ReadsItsTower.call(self, x)


class CountsCalls(keras.layers.Layer):
    number = 0

    def call(self, x):
        CountsCalls.number += 1
        return x + 0.001 * CountsCalls.number


class DrawsInPython(keras.layers.Layer):
    def call(self, x, training=False):
        noise = np.random.default_rng().normal(size=x.shape[1:])
        return x + tf.constant(noise, x.dtype) if training else x


class DrawsByNumpysSeed(keras.layers.Layer):
    def call(self, x, training=False):
        return x + tf.constant(np.random.normal(size=x.shape[1:]), x.dtype) if training else x


class DrawsInTensorFlow(keras.layers.Layer):
    def call(self, x, training=False):
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype) if training else x


class DrawsItsGradient(keras.layers.Layer):
    def call(self, x):
        @tf.custom_gradient
        def noisy(x):
            return tf.identity(x), lambda dy: dy * tf.random.uniform(tf.shape(x), dtype=x.dtype)

        return noisy(x)


class Narrow(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return tf.cast(tf.cast(x, tf.float32) * tf.cast(self.scale, tf.float32), x.dtype)


class NarrowWeight(keras.layers.Layer):
    def build(self, shape):
        initializer = keras.initializers.Constant(1 / 3)
        self.kernel = self.add_weight(shape=(1, 1, 3), dtype="float32", initializer=initializer)

    def call(self, x):
        return x * tf.cast(self.kernel, x.dtype)


class NamesNoType(keras.layers.Layer):
    """Draws and makes constants in Keras' floatx."""

    def call(self, x):
        x = x * keras.random.uniform((1, 1, 1, 3), seed=7) + keras.ops.zeros((3,))
        return keras.remat(lambda x: x + keras.ops.ones((3,)))(x)


class Innocent(keras.layers.Layer):
    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.dropout = keras.layers.Dropout(0.4)
        self.noise = keras.layers.GaussianNoise(0.3)

    def call(self, x, training=False):
        return self.noise(self.dropout(x, training=training), training=training)


class Norm(keras.layers.BatchNormalization):
    pass


LAYERS = {
    kind.__name__: kind
    for kind in (
        ReadsItsTower, ReadsItsTowerInEvaluation, CountsCalls, DrawsInPython, DrawsByNumpysSeed,
        DrawsInTensorFlow, DrawsItsGradient, Narrow, NarrowWeight, NamesNoType,
        Innocent, Norm,
    )
}  # fmt: skip


def net(num_classes, image_shape, layer):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(3, 3, activation="tanh"),
            LAYERS[layer](name="guilty"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(num_classes),
        ]
    )


def command(capsys, *argv):
    capsys.readouterr()
    small = "--dataset=tests.tiny:images --augment=none --batch_size=7 --steps=3 --num_towers=1,2,3"
    code = cli.main(["verify", *small.split(), *argv])
    return code, *capsys.readouterr()


def of_net(layer):
    return [f"--model={__name__}:net", f"--model_args=layer={layer}"]


# ---------------------------------------------------------------------------- What passes

ALL_OPTIONS = (
    "--augment=tutorial --optimizer=momentum --weight_decay=0.01 --ema_decay=0.9 "
    "--clip_global_norm=0.1 --label_smoothing=0.1 --schedule=cosine --learning_rate=0.1"
).split()


@pytest.mark.parametrize("layer", ["Innocent", "Norm"])
def test_a_sound_model_passes_with_all_options(capsys, layer):
    code, out, err = command(capsys, *of_net(layer), *ALL_OPTIONS, "--json")
    result = json.loads(out)
    assert code == 0 and result["passed"] is True and result["first_difference"] is None
    assert list(result["max_relative_difference"]) == ["1", "2", "3"]
    assert all(value < 1e-11 for value in result["max_relative_difference"].values())
    names = set(result["differences"])
    assert {
        "loss",
        "gradient/sequential/conv2d/kernel",
        "model/sequential/dense/bias",
        "average/sequential/conv2d/kernel",
        "evaluation/examples",
        "evaluation/loss",
        "evaluation/loss_ema",
        "evaluation/correct",
        "evaluation/correct_ema",
    } <= names
    assert any(name.startswith("optimizer/") and "momentum" in name for name in names)
    assert ("model/sequential/guilty/moving_mean" in names) == (layer == "Norm")
    assert "passed      the largest relative difference is" in err
    assert "float32" not in err


def guide(num_classes, image_shape):
    """Layers with a precision of their own, by all ways in which Keras takes it."""
    layers = keras.layers
    images = keras.Input(image_shape, dtype="float32")
    x = layers.Flatten()(images)
    x = layers.Dense(6, "tanh", dtype=keras.DTypePolicy("mixed_bfloat16"))(x)
    inner = keras.Input((6,), dtype="float32")  # what comes in is cast
    x = keras.Model(inner, layers.Dense(5, "tanh", dtype="float16")(inner))(x)
    policy = keras.DTypePolicy("float32")
    by_path = keras.dtype_policies.DTypePolicyMap("mixed_float16", {"head": policy})
    x = layers.Dense(4, "tanh", dtype=by_path)(x)
    changed = layers.Dense(4, "tanh")
    changed.dtype_policy = "float32"
    x = layers.Dense(num_classes, dtype=by_path, name="head")(changed(x))
    return keras.Model(images, layers.Activation("linear", dtype="float32")(x))


@pytest.mark.parametrize("model", [[f"--model={__name__}:guide"], of_net("NamesNoType")])
def test_layers_with_a_precision_of_their_own_compute_in_float64(capsys, model):
    code, out, _ = command(capsys, *model, *ALL_OPTIONS, "--json")
    result = json.loads(out)
    assert code == 0 and 0 < result["max_relative_difference"]["3"] < 1e-11
    assert keras.config.floatx() == "float32"


@pytest.mark.parametrize("options", ["--optimizer=adamw", "--accumulate_steps=3 --clip_norm=0.01"])
def test_other_options_pass(capsys, options):
    code, out, _ = command(capsys, *of_net("Innocent"), *options.split())
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    header = next(line for line in lines if line[:3] == ["largest", "relative", "difference,"])
    assert header[-3:] == ["1", "2", "3"]
    assert ["loss"] in [line[:1] for line in lines]


def test_a_loss_scale_is_in_force(capsys):
    code, out, _ = command(capsys, *of_net("Innocent"), "--dtype=mixed_float16", "--json")
    assert code == 0
    assert "loss_scale" in json.loads(out)["differences"]


def test_float32_repeats_it_in_units_of_the_last_place(capsys):
    code, out, err = command(capsys, *of_net("Norm"), "--float32", "--json")
    ulps = json.loads(out)["ulps"]
    assert code == 0 and list(ulps) == ["1", "2", "3"]
    assert 0 < ulps["3"] < 1e4
    assert "float32     3 towers: " in err


# ------------------------------------------------------------------- What is zero in theory


def first_cnn(num_classes, image_shape):
    """A bias in front of BatchNorm: its gradient is nothing but rounding."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(image_shape),
            *(layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()),
            *(layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()),
            *(layers.GlobalAveragePooling2D(), layers.Dense(num_classes)),
        ]
    )


def attention(num_classes, image_shape):
    """A bias of keys: softmax does not see it."""
    layers = keras.layers
    images = keras.Input(image_shape)
    x = layers.Dense(6)(layers.Reshape((-1, image_shape[-1]))(images))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3)(x, x))
    return keras.Model(images, layers.Dense(num_classes)(layers.GlobalAveragePooling1D()(x)))


ZEROS = [
    pytest.param(model, optimizer, id=f"{model}-{optimizer}")
    for model, optimizer in [
        ("first_cnn", "sgd"),
        ("first_cnn", "momentum"),
        ("first_cnn", "adamw"),
        ("attention", "momentum"),
        ("attention", "adamw"),
    ]
]


@pytest.mark.parametrize("model, optimizer", ZEROS)
def test_what_is_zero_in_theory_passes(capsys, model, optimizer):
    flags = [f"--model={__name__}:{model}", f"--optimizer={optimizer}", "--ema_decay=0.9"]
    code, out, _ = command(capsys, *flags, "--json")
    assert code == 0 and json.loads(out)["passed"] is True


@pytest.mark.parametrize("model, optimizer", ZEROS)
def test_an_error_of_a_millionth_is_found_in_every_array(capsys, monkeypatch, model, optimizer):
    results_of = verify.results_of

    def wrong_on_two_towers(lane, *batches):
        found = results_of(lane, *batches)
        if lane.num_towers == 2:
            kinds = {name: name.partition("/")[0] for name in found}
            largest = {
                kind: max(np.abs(found[n].astype(float)).max() for n in found if kinds[n] == kind)
                for kind in kinds.values()
            }
            for name in [n for n in found if found[n].dtype.kind == "f"]:
                found[name] = np.array(found[name])
                found[name].flat[-1] += 1e-6 * largest[kinds[name]]
        return found

    monkeypatch.setattr(verify, "results_of", wrong_on_two_towers)
    flags = [f"--model={__name__}:{model}", f"--optimizer={optimizer}", "--ema_decay=0.9"]
    code, out, _ = command(capsys, *flags, "--json", "--num_towers=2,3")
    result = json.loads(out)
    floats = {
        name: row
        for name, row in result["differences"].items()
        if not name.endswith(("step", "examples", "/iteration", "/correct", "/correct_ema"))
    }
    assert code == 1 and result["first_difference"]["name"] == "loss"
    assert {name.partition("/")[0] for name in floats} == {
        "loss", "gradient", "model", "optimizer", "average", "evaluation"
    }  # fmt: skip
    assert not [name for name, row in floats.items() if row["2"] < 1e-8]
    assert not [name for name, row in floats.items() if row["3"] > 1e-9]


@pytest.mark.parametrize("layer", ["DrawsInTensorFlow", "DrawsItsGradient"])
def test_a_random_layer_does_not_hide_in_its_own_noise(capsys, layer):
    code, out, _ = command(capsys, *of_net(layer), "--json", "--num_towers=2")
    assert code == 1 and json.loads(out)["first_difference"]["relative_difference"] > 1e-3


# ---------------------------------------------------------------------------- What fails


@pytest.mark.parametrize(
    "layer, flags, cause",
    [
        ("ReadsItsTower", "", "tower-dependent branch: layer sequential/guilty"),
        ("CountsCalls", "", "state in Python: layer sequential/guilty"),
        ("DrawsInPython", "", "state in Python: layer sequential/guilty"),
        ("DrawsByNumpysSeed", "", "state in Python: layer sequential/guilty"),
        ("DrawsInTensorFlow", "", "random op: layer sequential/guilty"),
        (
            "Norm",
            "--batch_norm=local",
            "local BatchNorm: sequential/guilty takes its moments over a tower",
        ),
        ("Narrow", "", "rounding: layer sequential/guilty computes in float32"),
    ],
)
def test_a_fault_is_found_and_named(capsys, layer, flags, cause):
    code, out, err = command(capsys, *of_net(layer), *flags.split(), "--json")
    result = json.loads(out)
    assert code == 1 and result["passed"] is False
    first = result["first_difference"]
    assert first["step"] == 0 and first["relative_difference"] > 1e-9
    assert first["cause"].startswith(cause)
    rounds = "gradient/sequential/guilty/variable"  # each example's loss is the same
    assert first["name"] == (rounds if layer == "Narrow" else "loss")
    assert f"likely      {first['cause']}" in err


def test_a_weight_in_float32_is_named(capsys):
    code, out, _ = command(capsys, *of_net("NarrowWeight"), "--json")
    first = json.loads(out)["first_difference"]
    assert code == 1 and first["name"] == "gradient/sequential/guilty/variable"
    assert first["cause"].startswith("rounding: weight sequential/guilty/variable is kept in float")


@pytest.mark.parametrize("flags", ["", "--ema_decay=0.9"])
def test_a_fault_in_evaluation_alone_is_found_and_named(capsys, flags):
    code, out, _ = command(capsys, *of_net("ReadsItsTowerInEvaluation"), *flags.split(), "--json")
    result = json.loads(out)
    first = result["first_difference"]
    assert code == 1 and first["name"] == "evaluation/loss" and first["step"] == 2
    assert first["cause"].startswith("tower-dependent branch: layer sequential/guilty")
    wrong = {name for name, row in result["differences"].items() if row["2"] > 1e-9}
    assert wrong == {"evaluation/loss"} | ({"evaluation/loss_ema"} if flags else set())


def test_padding_that_counts_is_found(capsys, monkeypatch):
    evaluate = verify.Lane.evaluate

    def all_count(lane, batch):
        images, labels, weights = batch
        assert weights.numpy().tolist() == [1] * 6 + [0]
        return evaluate(lane, (images, labels, weights if lane.num_towers < 3 else weights * 0 + 1))

    monkeypatch.setattr(verify.Lane, "evaluate", all_count)
    code, out, _ = command(capsys, *of_net("Innocent"), "--json")
    first = json.loads(out)["first_difference"]
    assert code == 1 and (first["name"], first["num_towers"]) == ("evaluation/examples", 3)


def unseeded(num_classes, image_shape):
    weights = np.random.default_rng().normal(size=[np.prod(image_shape), num_classes])
    layer = keras.layers.Dense(num_classes, kernel_initializer=keras.initializers.Constant(weights))
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), layer])


def test_weights_that_begin_elsewhere_are_found_before_the_first_step(capsys):
    code, out, err = command(capsys, f"--model={__name__}:unseeded", "--json")
    first = json.loads(out)["first_difference"]
    assert code == 1 and (first["step"], first["num_towers"]) == (-1, 1)
    assert first["name"] == "model/sequential/dense/kernel"
    assert first["cause"].startswith("initial weights: ")
    assert "before the first step on 1 towers" in err


@pytest.mark.parametrize(
    "model, line",
    [
        ("zoo.faults:tensorflow_normal", "random op: layer sequential/guilty"),
        ("zoo.faults:gamma_draw", "random op: layer sequential/guilty"),
        ("zoo.faults:noise_by_numpy_function", "python code: layer sequential/guilty"),
        ("zoo.faults:square_draw", "ambiguous draw: layer sequential/guilty"),
        ("zoo.state:last_example", "state: the variable sequential/tracked/value"),
        ("zoo.mixing:minus_mean", "mixed examples: layer sequential/"),
        ("zoo.faults:added_sum", "added loss: layer sequential/"),
        ("zoo.layouts:time_major", None),
        ("zoo.state:histogram", None),
    ],
)
def test_the_run_itself_says_what_depends_on_the_number_of_towers(tmp_path, capsys, model, line):
    flags = ["--dataset=tests.tiny:images", "--augment=none", "--max_steps=1", "--batch_size=7"]
    flags += [f"--model=tests.{model}", f"--train_dir={tmp_path}/run"]
    assert cli.main(["train", "--num_towers=2", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    header = [i for i, text in enumerate(lines) if text.startswith("numbers     may depend")]
    assert len(header) == (line is not None)
    if line:
        assert lines[header[0] + 1].strip().startswith(line)
        assert header[0] < next(i for i, text in enumerate(lines) if ": step 0" in text)
    cli.main(["train", "--num_towers=1", "--overwrite", *flags])
    assert "may depend" not in capsys.readouterr().out


def test_strict_refuses_draws_that_do_not_follow_the_example(tmp_path, capsys):
    flags = "--dataset=tests.tiny:images --augment=none --max_steps=1 --num_towers=2 --draws=strict"
    for model in "tensorflow_normal", "square_draw", "noise_by_numpy_function":
        argv = [*flags.split(), f"--model=tests.zoo.faults:{model}", f"--train_dir={tmp_path}/run"]
        assert cli.main(["train", *argv]) == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith("towers: --draws=strict: ")
        assert not (tmp_path / "run").exists()
    sound = [f"--model={__name__}:net", "--model_args=layer=Innocent"]
    assert cli.main(["train", *flags.split(), *sound, f"--train_dir={tmp_path}/run"]) == 0


# ---------------------------------------------------------------------------- The comparison


def test_differences_are_relative_to_the_array_or_to_its_noise():
    expected = {
        "loss": np.array(2.0),
        "gradient/a": np.array([4.0, 0.0]),
        "gradient/noise": np.array([1e-17, 0.0]),
        "gradient/zero": np.zeros(2),
        "model/nan": np.array([np.nan, 1.0]),
    }
    found = {
        "loss": np.array(2.5),
        "gradient/a": np.array([4.0, 2.0]),
        "gradient/noise": np.array([-1e-17, 0.0]),
        "gradient/zero": np.array([0.0, 4e-16]),
        "model/nan": np.array([np.nan, 1.0]),
    }
    by_name = {d.name: d for d in verify.differences(found, expected, 2, 0)}
    assert by_name["loss"].relative == 0.25
    assert by_name["gradient/a"].relative == 0.5
    assert by_name["gradient/noise"].relative == 2
    assert by_name["gradient/zero"].relative == pytest.approx(1e-10)
    assert by_name["model/nan"].relative == 0
    assert by_name["loss"].ulps == 0.5 / np.spacing(2.0)

    noise = {"loss": 1.0, "gradient/a": 5.0, "gradient/noise": 1e-5, "gradient/zero": 1e-3}
    by_name = {d.name: d for d in verify.differences(found, expected, 2, 0, noise)}
    assert by_name["loss"].relative == 0.25
    assert by_name["gradient/a"].relative == 0.4
    assert by_name["gradient/noise"].relative == pytest.approx(2e-12)
    assert by_name["gradient/zero"].relative == pytest.approx(4e-13)


@pytest.mark.parametrize(
    "array", [np.array([np.nan, 1.0]), np.array([np.inf, 1.0]), np.array([1.0, 1.0, 1.0]), None]
)
def test_what_cannot_be_compared_differs(array):
    found = {} if array is None else {"loss": array}
    (difference,) = verify.differences(found, {"loss": np.array([1.0, 1.0])}, 2, 0)
    assert difference.relative == float("inf")


def test_no_data_is_downloaded(tmp_path):
    said = []
    options = VerifyOptions(dataset="cifar10", data_dir=str(tmp_path / "none"))
    assert verify.load_data(options, said.append).name == "shapes"
    assert said == ["data        cifar10 is not at hand: shapes, drawn in code, stand in for it"]
    assert (
        verify.load_data(VerifyOptions(dataset="tests.tiny:images"), said.append).train.size == 60
    )
    assert len(said) == 1


@pytest.mark.parametrize("numbers", ["0", "1,x", "2,1", "1.5", "-1", "1,,2"])
def test_numbers_of_towers(capsys, numbers):
    code = cli.main(["verify", f"--num_towers={numbers}"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(f"towers: --num_towers={numbers}: ") and len(err.splitlines()) == 1


def test_nothing_is_written(capsys, tmp_path, monkeypatch):
    before = tiny.files(tmp_path)
    command(capsys, *of_net("Innocent"), f"--train_dir={tmp_path}/run")
    assert tiny.files(tmp_path) == before
