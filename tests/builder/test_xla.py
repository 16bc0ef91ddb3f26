"""Towers that XLA compiles: the same numbers, and one line where it cannot."""

import dataclasses
import functools
import re
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import runs, tiny
from tests.fake_gpus import A100, RTX5090
from towers import cli, parallelize
from towers.builder import philox, xla
from towers.builder.tower import TowerBuilder
from towers.graphs.placement import read_placement, traced_ops
from towers.options.run import Options
from towers.training.run import setup
from towers.training.train import train

pytestmark = pytest.mark.run
layers = keras.layers
DEVICES = ["/cpu:1", "/cpu:2", "/cpu:3"]  # where no master is


class Text(layers.Layer):
    """Does what XLA cannot."""

    def call(self, inputs):
        return inputs + tf.cast(tf.strings.length(tf.strings.as_string(inputs)), inputs.dtype)


def text(num_classes, image_shape):
    body = layers.Flatten(), Text(name="text"), layers.Dense(num_classes)
    return keras.Sequential([keras.Input(image_shape), *body])


def losses_of(model):
    return lambda images, labels: tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels, model(images, training=True)
    )


# The builder alone.


def towers_that_meet_midway():
    model = tiny.cnn(3, tiny.IMAGE_SHAPE)
    images, labels = tiny.arrays(4)
    return losses_of(model), model.trainable_variables, images.astype("float32"), labels


def a_variable_that_is_not_read():
    table = tf.Variable(tf.ones([4, 2]))
    rows = lambda rows: tf.nn.embedding_lookup(table, rows)[:, 0]  # noqa: E731
    return rows, [table], tf.constant([0, 1])


def a_draw_that_is_another():
    weight = tf.Variable(1.0)
    noise = lambda x: weight * x * tf.random.stateless_truncated_normal([1], [1, 2])  # noqa: E731
    return noise, [weight], tf.ones(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (towers_that_meet_midway, r"jit_compile: .*compiled as a whole.*'local'"),
        (a_variable_that_is_not_read, r"jit_compile: .*can do nothing else with.*tf.gather"),
        (a_draw_that_is_another, "truncated normal"),
    ],
)
def test_what_a_program_of_xla_cannot_do_is_refused(make, message):
    builder = TowerBuilder(DEVICES[:2], batch_norm="sync", jit_compile=True)
    with pytest.raises(ValueError, match=message):
        builder.gradients(*make())


def test_numbers_are_those_of_tensorflows_kernels():
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 4])
    types = tf.float16, tf.bfloat16, tf.float32, tf.float64
    given = [dict(key=key, counter=counter, alg=1, dtype=t, shape=[7, 3, 5]) for t in types]

    @functools.partial(tf.function, jit_compile=True, autograph=False)
    def drawn():
        uniform, normal = philox.stateless_random_uniform_v2, philox.stateless_random_normal_v2
        return [uniform(**own) for own in given], [normal(**own) for own in given]

    for uniform, normal, own in zip(*drawn(), given, strict=True):
        expected = tf.raw_ops.StatelessRandomNormalV2(**own)
        assert normal.dtype == expected.dtype
        np.testing.assert_array_equal(uniform, tf.raw_ops.StatelessRandomUniformV2(**own))
        np.testing.assert_allclose(
            tf.cast(normal, tf.float64), tf.cast(expected, tf.float64), rtol=1e-5, atol=1e-6
        )


# Runs.


def options(train_dir, **changes):
    return tiny.options(train_dir, num_towers=2, jit_compile=True, max_steps=3, **changes)


def test_each_tower_is_one_program_and_the_run_says_so(tmp_path, capsys):
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
    train(options(tmp_path, placement="strict", log_device_placement=True))
    out = capsys.readouterr().out
    assert "placement   2 towers, each compiled by XLA on its tower's device\n" in out


@pytest.mark.parametrize(
    ("model", "code", "line"),
    [
        ("tests.tiny:cnn", 2, "jit_compile: .* BatchNorm .*--batch_norm=local"),
        (f"{__name__}:text", 1, "--jit_compile: XLA cannot compile the towers: .*AsString"),
    ],
)
def test_what_xla_cannot_compile_is_one_line(tmp_path, capsys, model, code, line):
    """Called from so deep that TensorFlow cuts the end of its message off: it adds the stack."""
    given = "--num_towers=2 --dataset=tests.tiny:images --augment=none --batch_size=7 --max_steps=2"
    flags = [*given.split(), f"--model={model}", f"--train_dir={tmp_path / 'run'}"]

    def below(depth):
        return below(depth - 1) if depth else cli.main(["train", "--jit_compile", *flags])

    assert below(200) == code
    error = capsys.readouterr().err
    assert re.search(rf"^towers: .*{line}.*\n", error, re.MULTILINE)
    if code == 2:
        assert error.count("\n") == 1 and not (tmp_path / "run").exists()


# On GPUs that XLA may not know.

B200 = dataclasses.replace(RTX5090, name="NVIDIA B200", capability=(10, 0))
DIES = "-6", "LLVM ERROR: PTX version 8.5 does not support target 'sm_120'\nStack dump:\n"


@pytest.fixture
def trials(monkeypatch):
    """Let trials fail on GPUs of {number among TensorFlow's GPUs: (code, what is said)}."""
    asked, ends = [], {}

    def run(command, *, env, **kwargs):
        assert env["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"  # the GPU may be nearly full
        asked.append(command[-1])
        code, said = ends.get(command[-1], (0, ""))
        return subprocess.CompletedProcess(command, int(code), "", said)

    monkeypatch.setattr(xla.subprocess, "run", run)
    xla._failure.cache_clear()
    yield asked, ends
    xla._failure.cache_clear()


@pytest.mark.unit
def test_xla_is_tried_on_new_gpus_once_and_before_it_compiles_there(install, trials):
    asked, ends = trials
    install(A100, B200, RTX5090).hidden = [1]
    TowerBuilder(["/gpu:0", "/cpu:0", "/job:worker/task:0/gpu:1"], jit_compile=True)
    TowerBuilder(["/gpu:1"])
    assert asked == []  # XLA knows an A100, and is not asked for; others' GPUs are not seen
    for _ in range(2):
        TowerBuilder(["/gpu:0", "/GPU:1"], jit_compile=True)
    assert asked == ["GPU:2"]
    ends["GPU:1"] = DIES
    install(A100, B200)
    said = {
        runs.refusal(TowerBuilder, ["/gpu:0", "/gpu:1"], jit_compile=True),
        runs.refusal(parallelize, tiny.dense(3, (4, 4, 1)), devices="/gpu:1", jit_compile=True),
        runs.refusal(setup.tower_devices, Options(devices="/gpu:1", jit_compile=True)),
    }
    for words in "/gpu:1", "NVIDIA B200", "10.0", "SIGABRT: LLVM ERROR", "--jit_compile=false":
        assert len(said) == 1 and words in [*said][0]
    assert asked == ["GPU:2", "GPU:1"]


@pytest.mark.process
def test_a_trial_of_xla_is_a_process_of_its_own(monkeypatch, tmp_path):
    xla._failure.cache_clear()
    assert xla._failure("CPU:0") == ""
    assert xla._failure("GPU:9").startswith("ended with code 1: IndexError")
    (tmp_path / "tensorflow.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(xla, "_TRIAL_SECONDS", 1)
    assert xla._failure("GPU:8") == "gave no answer within 1 s"
