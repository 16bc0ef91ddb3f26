"""Towers that XLA compiles: the same numbers, and one line where it cannot."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers import cli
from towers.builder import kinds, philox
from towers.builder.tower import TowerBuilder
from towers.commands.verify.command import run as verify
from towers.commands.verify.options import VerifyOptions
from towers.data import augment
from towers.graphs.placement import read_placement, traced_ops
from towers.options.run import Options
from towers.training.train import train

layers = keras.layers
DEVICES = ["/cpu:1", "/cpu:2", "/cpu:3"]  # where no master is


class Text(layers.Layer):
    """Does what XLA cannot."""

    def call(self, inputs):
        return inputs + tf.cast(tf.strings.length(tf.strings.as_string(inputs)), inputs.dtype)


class Python(layers.Layer):
    def call(self, inputs):
        return tf.ensure_shape(tf.numpy_function(np.sin, [inputs], inputs.dtype), inputs.shape)


def image_model(num_classes, image_shape, *rest):
    first = [keras.Input(image_shape), layers.Flatten()]
    return keras.Sequential([*first, *rest, layers.Dense(num_classes)])


def text(num_classes, image_shape):
    return image_model(num_classes, image_shape, Text(name="text"))


def python(num_classes, image_shape):
    return image_model(num_classes, image_shape, Python(name="python"))


def draws(num_classes, image_shape):
    """Draws of both kinds, and weights that are read in a loop."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Reshape([8, -1]),
            layers.GaussianNoise(0.3, seed=1),
            layers.GRU(3),
            layers.Dropout(0.4, seed=2),
            layers.Dense(num_classes),
        ]
    )


@pytest.mark.parametrize(
    "changes",
    [
        dict(model="tests.tiny:dense", model_args="l2=0.1", variables="sharded"),
        dict(model="tests.tiny:dense", variables="replicated", accumulate_steps=2, batch_size=5),
        dict(model="tests.tiny:cnn", num_towers="1"),  # one tower's BatchNorm is over all of them
        dict(model="tests.builder.test_xla:draws", dtype="mixed_float16", num_towers="3"),
        dict(model="tests.training.test_variables:embedding", weight_decay=0.01, augment="resnet"),
    ],
    ids=["sharded", "replicated in parts", "BatchNorm", "draws", "embedding"],
)
def test_compiled_towers_compute_what_one_device_computes(changes):
    """That device is not compiled: a number that XLA makes otherwise would be seen."""
    given = dict(dataset="tests.tiny:images", augment="none", batch_size=7, num_towers="1,2,3")
    given |= changes
    num_towers = given.pop("num_towers")
    options = VerifyOptions(Options(jit_compile=True, **given), num_towers, steps=2)
    result = verify(options, lambda _: None)
    assert result["passed"], result["first_difference"]


def test_xla_gets_no_op_that_is_good_for_gpus_alone():
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 9, 3), np.uint8)
    draws = np.random.default_rng(1).random((5, augment.NUM_DRAWS), np.float32)
    weight = tf.Variable(2.0)

    def loss_fn(images, draws):
        return tf.reduce_sum(
            weight * augment.train_images(images, draws, "tutorial") ** 3, [1, 2, 3]
        )

    def gradient(**options):
        step = TowerBuilder(DEVICES[:2], **options).gradients
        return tf.function(lambda *batch: step(loss_fn, [weight], *batch)[1][0])(images, draws)

    with kinds.cpus_for_gpus():
        np.testing.assert_allclose(gradient(jit_compile=True), gradient(), rtol=1e-4)


def one_step(model, num_towers, jit_compile, dtype):
    """Return loss, gradients and the model's variables after a step, its towers apart."""
    before = [v.numpy() for v in model.variables]
    images, labels = tiny.arrays(7)
    builder = TowerBuilder(DEVICES[:num_towers], jit_compile=jit_compile)

    @tf.function(autograph=False)
    def step(images, labels):
        def loss_fn(images, labels):
            logits = model(images, training=True)
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)

        return builder.gradients(loss_fn, model.trainable_variables, images, labels)

    loss, gradients = step(images.astype(dtype) / 255, labels)
    found = {"loss": loss.numpy()}
    found |= {v.path: g.numpy() for v, g in zip(model.trainable_variables, gradients, strict=True)}
    found |= {f"after/{v.path}": v.numpy() for v in model.variables}
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)
    return found


@pytest.mark.parametrize("num_towers", [1, 3])
def test_local_batch_norm_and_dropout(num_towers, float64):
    model = tiny.cnn(3, tiny.IMAGE_SHAPE)
    found = one_step(model, num_towers, True, "float64")
    tiny.assert_close(found, one_step(model, num_towers, False, "float64"), 1e-12)
    assert any("moving_mean" in name for name in found)


def test_the_fused_kernels_of_batch_norm():
    """They take float32 alone."""
    model = tiny.cnn(3, tiny.IMAGE_SHAPE)
    found, expected = (one_step(model, 2, compiled, "float32") for compiled in (True, False))
    for name in [name for name in found if "bias" in name]:
        del found[name], expected[name]  # before BatchNorm they are zero but for rounding
    tiny.assert_close(found, expected, 1e-4)


# The builder alone.


@pytest.mark.parametrize("eager", [True, False])
def test_variables_of_every_kind(eager):
    """A tf.Variable with a sparse gradient, a Keras one, one unused and one that is not trained."""
    with tf.device("/cpu:0"):
        table, scale = tf.Variable(tf.ones([4, 2])), tf.Variable(3.0, trainable=False)
        unused, offset = tf.Variable(1.0), keras.Variable(np.array([1.0, 2.0], "float32"))
    builder = TowerBuilder(DEVICES[:2], jit_compile=True)

    def loss_fn(rows):
        return scale * tf.reduce_sum(tf.gather(table, rows) * offset, axis=1)

    def step(rows):
        return builder.gradients(loss_fn, [table, unused, offset], rows)

    step = step if eager else tf.function(step, autograph=False)
    loss, (sparse, none, dense) = step(tf.constant([0, 2]))
    assert float(loss) == 9.0 and none is None and isinstance(sparse, tf.IndexedSlices)
    expected = [[1.5, 3], [0, 0], [1.5, 3], [0, 0]]
    np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected, rtol=1e-6)
    np.testing.assert_allclose(dense, [3.0, 3.0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["recomputed", "in a loop", "gradient of a gradient"])
def test_gradients_find_every_use_of_a_weight(kind):
    weight, free = keras.Variable(np.array([[0.5], [2.0]], "float32")), tf.Variable(0.7)
    recomputed = tf.recompute_grad(lambda x: tf.sin(x @ weight.value * free))

    def loss_fn(x):
        if kind == "recomputed":
            return recomputed(x)[:, 0] + free
        if kind == "in a loop":
            more = lambda i, y: (i + 1, tf.sin(y + x @ weight.value * free))  # noqa: E731
            start = (0, x @ weight.value)
            return tf.while_loop(lambda i, _: i < 3, more, start, maximum_iterations=3)[1][:, 0]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(x @ weight.value * free)
        return tf.reduce_sum(tape.gradient(y, x) ** 2, axis=1)

    def gradients(jit_compile):
        builder = TowerBuilder(DEVICES[:2], jit_compile=jit_compile)
        batch = tf.reshape(tf.range(6.0) / 6, [3, 2])
        step = lambda x: builder.gradients(loss_fn, [weight, free], x)  # noqa: E731
        return tf.function(step, autograph=False)(batch)[1]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert np.all(np.abs(expected) > 1e-3)
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_tf_function_becomes_a_part_of_each_tower():
    weight = keras.Variable(np.ones([2, 1], "float32"))
    inner = tf.function(lambda x: tf.reduce_sum(x @ weight.value, axis=1), autograph=False)
    builder = TowerBuilder(DEVICES[:2], jit_compile=True)
    step = tf.function(lambda x: builder.gradients(inner, [weight], x), autograph=False)
    loss, [gradient] = step(tf.constant([[1.0, 2], [3, 4], [5, 6], [7, 8]]))
    assert loss.numpy() == 9
    np.testing.assert_allclose(gradient.numpy()[:, 0], [4, 5])


def test_a_batch_of_unknown_size():
    """Rows of an example are known at run time alone; the last tower gets none."""
    weight = keras.Variable(2.0)

    def losses(jit_compile):
        builder = TowerBuilder(DEVICES, jit_compile=jit_compile)

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, 3], tf.float64)])
        def step(batch):
            def loss_fn(batch):
                noise = tf.random.stateless_normal(tf.shape(batch), [1, 2], dtype=batch.dtype)
                return tf.cast(weight, batch.dtype) * tf.reduce_sum(noise * batch, axis=1)

            return builder.gradients(loss_fn, [weight], batch)

        return [step(tf.ones([size, 3], tf.float64)) for size in (2, 7)]

    for found, expected in zip(losses(True), losses(False), strict=True):
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
        np.testing.assert_allclose(found[1][0], expected[1][0], rtol=1e-6)


def test_towers_that_meet_midway_are_refused():
    model = tiny.cnn(3, tiny.IMAGE_SHAPE)
    builder = TowerBuilder(DEVICES[:2], batch_norm="sync", jit_compile=True)
    images, labels = tiny.arrays(4)

    def loss_fn(images, labels):
        return keras.losses.sparse_categorical_crossentropy(labels, model(images, training=True))

    with pytest.raises(ValueError, match=r"jit_compile: .*compiled as a whole.*'local'"):
        builder.gradients(loss_fn, model.trainable_variables, images.astype("float32"), labels)


def test_a_variable_that_is_not_read_is_refused():
    variable = tf.Variable(tf.ones([4, 2]))
    builder = TowerBuilder(DEVICES[:1], jit_compile=True)
    with pytest.raises(ValueError, match=r"jit_compile: .*can do nothing else with.*tf.gather"):
        builder.gradients(
            lambda rows: tf.nn.embedding_lookup(variable, rows)[:, 0], [variable], tf.constant([0])
        )


def test_what_xla_draws_otherwise_is_refused():
    weight = tf.Variable(1.0)
    builder = TowerBuilder(DEVICES[:1], jit_compile=True)
    noise = lambda x: weight * tf.random.stateless_truncated_normal([4], [1, 2])  # noqa: E731
    with pytest.raises(ValueError, match="truncated normal"):
        builder.gradients(noise, [weight], tf.ones(4))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_numbers_are_those_of_tensorflows_kernels(name, dtype):
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 4])
    operation = dict(key=key, counter=counter, alg=1, dtype=tf.as_dtype(dtype), shape=[7, 3, 5])
    op = {"uniform": "StatelessRandomUniformV2", "normal": "StatelessRandomNormalV2"}[name]
    expected = getattr(tf.raw_ops, op)(**operation)
    draw = getattr(philox, f"stateless_random_{name}_v2")
    found = tf.function(lambda: draw(**operation), jit_compile=True, autograph=False)()
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if name == "uniform":
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(
            tf.cast(found, tf.float64), tf.cast(expected, tf.float64), rtol=1e-5, atol=1e-6
        )


# Runs.


def options(train_dir, **changes):
    return tiny.options(train_dir, **(dict(num_towers=2, jit_compile=True, max_steps=3) | changes))


def test_each_tower_is_one_program(tmp_path):
    """Read from the executed graph: no op of the model runs by itself."""
    loop = tiny.Loop(options(tmp_path))
    placement = read_placement(loop.loop, loop.batches, tf.constant(0))
    assert "MatMul" not in {op.type for op in placement.ops}
    for tower in (0, 1):
        inside = [op for op in placement.compiled if op.tower == tower]
        assert {op.device for op in inside} == {f"/cpu:{tower}"}
        assert [op.type for op in inside].count("MatMul") == 5  # of two layers, forth and back
    concrete = loop.loop.get_concrete_function(loop.batches, tf.constant(0))
    calls = [op for _, op in traced_ops(concrete.graph) if "Call" in op.type]
    assert [op.get_attr("_XlaMustCompile") for op in calls] == [True, True]


def test_strict_placement_and_what_the_run_says(tmp_path, capsys):
    train(options(tmp_path, placement="strict", log_device_placement=True))
    out = capsys.readouterr().out
    assert "placement   2 towers, each compiled by XLA on its tower's device\n" in out
    rows = [line.split("\t") for line in (tmp_path / "placement.tsv").read_text().splitlines()]
    assert {(row[2], row[5]) for row in rows if row[1] == "MatMul"} >= {
        ("0", "/cpu:0"), ("1", "/cpu:1"),
    }  # fmt: skip
    assert "--jit_compile=true" in (tmp_path / "flags.cfg").read_text()


def towers_train(folder, *flags):
    given = "--num_towers=2 --dataset=tests.tiny:images --augment=none --batch_size=7 --max_steps=2"
    return cli.main(["train", "--jit_compile", *given.split(), f"--train_dir={folder}", *flags])


def test_batch_norm_over_all_towers_is_one_line(tmp_path, capsys):
    folder = tmp_path / "run"
    assert towers_train(folder, "--model=tests.tiny:cnn") == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"towers: jit_compile: .* BatchNorm .*--batch_norm=local.*\n", error)
    assert not Path(folder).exists()


@pytest.mark.parametrize("layer, op", [("text", "AsString"), ("python", "PyFunc")])
def test_what_xla_cannot_compile_is_one_line(tmp_path, capsys, layer, op):
    assert towers_train(tmp_path, f"--model=tests.builder.test_xla:{layer}") == 1
    line = r"towers: --jit_compile: XLA cannot compile {}, of layer \S*{}: leave the flag out.*\n"
    assert re.search(line.format(op, layer), capsys.readouterr().err)
