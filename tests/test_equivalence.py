"""N towers compute what one device computes: models, options, numbers of towers, several steps.

Two levels. The builder's gradients are compared with a plain GradientTape over the whole batch on
one device, which knows nothing of towers; a run's steps with those of the run on one tower.
"""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from tests.catalogue import CASES
from tests.training.test_update import batches_with_overflow
from towers import TowerBuilder

DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
TOLERANCE = 1e-9  # in float64, of an array's largest value
FLOOR = 1e-3  # gradients that are zero in theory are not compared with their own rounding


def difference(found, expected):
    """Return the largest difference of {name: array}, relative to each array's largest value."""
    assert found.keys() == expected.keys()
    errors = {}
    for name, value in expected.items():
        value, other = np.float64(value), np.float64(found[name])
        size = max(np.max(np.abs(value), initial=0), FLOOR)
        errors[name] = np.max(np.abs(other - value), initial=0) / size
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return float(np.nan_to_num(errors[worst], nan=np.inf)), worst


def assert_same(found, expected):
    error, name = difference(found, expected)
    assert error <= TOLERANCE, f"{name} differs by {error:.1e}"


def assert_not_same(found, expected):
    assert difference(found, expected)[0] > 1e-4


# ------------------------------------------------------------------------------------- The builder


def batch(size, step):
    random = np.random.default_rng([size, step])
    images = random.normal(size=(size, *tiny.IMAGE_SHAPE))
    images[0, 0, 0, 0] = 2.0  # example 0 asks for what others do without, see Sometimes
    return tf.constant(images), tf.constant(random.integers(0, tiny.NUM_CLASSES, size), tf.int32)


def train(case, compute, sizes):
    """Return what some steps of plain descent give: losses, gradients and all that changes."""
    record, variables = {}, [*case.variables, *case.state]
    initial = [v.numpy() for v in variables]
    for step, size in enumerate(sizes):
        loss, gradients = compute(*batch(size, step))
        record[f"loss {step}"] = loss
        for i, (v, g) in enumerate(zip(case.variables, gradients, strict=True)):
            name = f"gradient {step} of {i} {v.name}"
            record[f"{name}: none, sparse"] = [g is None, isinstance(g, tf.IndexedSlices)]
            if g is not None:
                record[name] = tf.convert_to_tensor(g)
                v.assign(v - 0.1 * record[name])
        for i, v in enumerate(case.state):
            record[f"state {step} of {i} {v.path}"] = v.numpy()
    for v, value in zip(variables, initial, strict=True):
        v.assign(value)
    return record


def one_device(case, num_parts=1):
    """Compute loss and gradients by a tape; in parts for those whose BatchNorm sees a part."""
    sources = [v.value if isinstance(v, keras.Variable) else v for v in case.variables]

    def compute(*batch):
        size, before = len(batch[0]), [v.numpy() for v in case.state]
        loss, gradients, states = 0.0, [None] * len(case.variables), []
        for rows in np.array_split(np.arange(size), min(num_parts, size)):
            for v, value in zip(case.state, before, strict=True):
                v.assign(value)
            with tf.GradientTape() as tape:
                part = tf.reduce_sum(case.loss_fn(*(x[rows[0] : rows[-1] + 1] for x in batch)))
                part /= size
            loss += part
            of_part = tape.gradient(part, sources)
            pairs = zip(gradients, of_part, strict=True)
            gradients = [b if a is None else a + tf.convert_to_tensor(b) for a, b in pairs]
            states.append([np.float64(v.numpy()) * len(rows) / size for v in case.state])
        for v, *values in zip(case.state, *states, strict=True):
            v.assign(np.round(sum(values)) if v.dtype == "uint32" else sum(values))
        return loss, gradients

    return compute


def on_towers(case, num_towers, accumulate_steps=1, size=None, batch_norm="sync"):
    """Compute loss and gradients by the builder, compiled for batches of one size, or of any."""
    builder = TowerBuilder(
        DEVICES[:num_towers], batch_norm=batch_norm, accumulate_steps=accumulate_steps
    )
    images = tf.TensorSpec([size, *tiny.IMAGE_SHAPE], tf.float64)

    @tf.function(autograph=False, input_signature=[images, tf.TensorSpec([size], tf.int32)])
    def step(images, labels):
        return builder.gradients(case.loss_fn, case.variables, images, labels)

    return step


def make(name):
    keras.utils.set_random_seed(0)
    return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_device(float64, name):
    case, sizes = make(name), [7] * 3
    num_towers = 2 if name in ("resnet", "transformer") else 3  # those that are slow to build
    expected = train(case, one_device(case), sizes)
    assert_same(train(case, on_towers(case, num_towers, size=7), sizes), expected)


FEW = ["cnn", "embedding", "frozen", "partly_used", "two_outputs"]


@pytest.mark.parametrize(
    "name, size",
    [(name, None) for name in CASES if name != "resnet"] + [(name, 2) for name in FEW],
)
def test_towers_may_be_left_without_examples(float64, name, size):
    """In batches of any size, and where two examples for four towers are all there is."""
    case, sizes = make(name), [size] * 2 if size else [7, 2, 5]
    expected = train(case, one_device(case), sizes)
    assert_same(train(case, on_towers(case, 4, size=size), sizes), expected)


@pytest.mark.parametrize(
    "name, num_towers",
    [("cnn", 4), ("embedding", 4), ("partly_used", 4), ("module", 2), ("frozen", 1), ("frozen", 4)],
)
def test_parts_add_up_to_the_batch(float64, name, num_towers):
    """BatchNorm sees a part at a time: the same parts at any number of towers."""
    case, sizes = make(name), [7] * 2
    expected = train(case, one_device(case, num_parts=3 if name == "frozen" else 1), sizes)
    assert_same(train(case, on_towers(case, num_towers, 3, size=7), sizes), expected)


# -------------------------------------------------------------------- What would be found, if wrong


def test_local_batch_norm_is_not_the_same(float64):
    case = make("resnet")
    expected = train(case, one_device(case), [7])
    assert_not_same(train(case, on_towers(case, 2, batch_norm="local"), [7]), expected)


# ------------------------------------------------------------------------------------------ The run

MODELS = {name: dict(model=f"tests.catalogue:{name}") for name in ("cnn", "embedding", "frozen")}
RUNS = MODELS | {
    "partly used": dict(model="tests.catalogue:partly_used"),
    "sgd, smooth labels": dict(optimizer="sgd", label_smoothing=0.2),
    "momentum, two examples": dict(momentum=0.5, batch_size=2),
    "nesterov, resnet's crops": dict(optimizer="nesterov", augment="resnet"),
    "adamw, regularizer": dict(optimizer="adamw", weight_decay=0.25, model_args="l2=0.25"),
    "clip_norm, the tutorial's crops": dict(clip_norm=0.02, augment="tutorial"),
    "reflected crops, parts": dict(augment="shift,cutout=3,color,randaugment", schedule="linear"),
    "mixed with others": dict(augment="resnet,mixup,cutmix", label_smoothing=0.1, batch_size=7),
    "CutMix in parts": dict(augment="none,cutmix", accumulate_steps=2, optimizer="lamb"),
    "clip_value": dict(clip_value=0.002),
    "clip_global_norm, weight decay": dict(clip_global_norm=0.1, weight_decay=0.25),
    "sparse slots": MODELS["embedding"] | dict(optimizer="adamw", weight_decay=0.1),
    "sparse momentum, clipped": MODELS["embedding"] | dict(optimizer="nesterov", clip_norm=0.02),
    "moments of parts": MODELS["frozen"] | dict(accumulate_steps=3),
    "much at once": dict(
        model="tests.tiny:cnn",
        augment="tutorial",
        accumulate_steps=2,
        optimizer="nesterov",
        weight_decay=0.1,
        clip_global_norm=0.1,
        label_smoothing=0.1,
        ema_decay=0.5,
        schedule="onecycle",
    ),
}
OVERFLOWING = "tests.training.test_update:overflowing"


def make_loop(num_towers=1, batches=None, loss_scale=None, **options):
    """Return the loop of a run in float64."""
    given = dict(dtype="float64", ema_decay=0.9, learning_rate=0.25) | options
    loop = tiny.Loop(tiny.options("unused", num_towers=num_towers, **given), batches)
    if loss_scale:
        loop.masters.loss_scale = tf.Variable(loss_scale, trainable=False)
        loop.masters.good_steps = tf.Variable(0, trainable=False, dtype=tf.int64)
    return loop


def run(num_towers=1, batches=None, num_steps=3, **options):
    """Return the state after some steps, and the metrics of the last."""
    loop = make_loop(num_towers, batches, **options)
    metrics = loop(num_steps)
    return loop.state(), metrics


@functools.cache
def without_options(model="tests.tiny:dense"):
    return run(model=model)


@pytest.mark.parametrize("name, num_towers", list(zip(RUNS, itertools.cycle([3, 2, 4]))))
def test_a_run_is_that_of_one_tower(name, num_towers):
    """A model, or options that do not hide each other, on one of the numbers of towers."""
    options = RUNS[name]
    plain, _ = without_options(options.get("model", "tests.tiny:dense"))
    expected, metrics = without_options(options["model"]) if name in MODELS else run(**options)
    assert expected["step"] == 3 and expected["examples"] == 3 * options.get("batch_size", 7)
    if set(options) != {"model"}:
        biases = [n for n in expected if n.startswith("model/") and n.endswith("bias")]
        # The options do something here.
        assert_not_same({n: expected[n] for n in biases}, {n: plain[n] for n in biases})
    state, found = run(num_towers, **options)
    assert_same(state, expected)
    assert found == pytest.approx(metrics, rel=1e-6)


@pytest.mark.parametrize("name, num_towers", [("cnn", 3), ("embedding", 1)])
def test_a_run_in_parts_is_that_of_whole_batches(name, num_towers):
    model = MODELS[name]["model"]
    state, _ = run(num_towers, model=model, accumulate_steps=3)
    assert_same(state, without_options(model)[0])


def test_the_loss_scale_and_a_skipped_step_are_those_of_one_tower():
    """The overflow is in the last tower's slice, the second step of four."""
    given = dict(model=OVERFLOWING, batch_size=8, loss_scale=2.0**8, num_steps=4)
    (expected, metrics), (state, found) = (
        run(n, batches_with_overflow({1}), **given) for n in (1, 3)
    )
    assert expected["loss_scale"] == 2**7 and expected["good_steps"] == 2
    assert_same(state, expected)
    assert found == pytest.approx(metrics, rel=1e-6)


# -------------------------------------- What MirroredStrategy with Keras 3 gets wrong on 2 replicas


def test_clipping_comes_after_the_sum():
    """The update's norm is the limit: with each tower's gradient clipped it would be up to 1.41."""
    options = dict(optimizer="sgd", schedule="constant", learning_rate=1.0, clip_norm=1.0)
    loop = make_loop(2, model_args="scale=100,activation=linear", **options)
    before = loop.state()
    assert loop()["gradient_norm"] > 10
    after = loop.state()
    norms = [np.linalg.norm(after[n] - before[n]) for n in after if n.endswith("dense/kernel")]
    assert norms[0] == pytest.approx(1.0, abs=1e-9)


def test_an_infinite_gradient_on_the_second_tower_skips_the_step_for_all():
    given = dict(model=OVERFLOWING, dtype="mixed_float16", batch_size=8, loss_scale=2.0**8)
    loop = make_loop(2, batches_with_overflow({1}), **given)
    loop()
    before = loop.state()
    loop()
    after = loop.state()
    told = {"step": 2, "examples": 16, "loss_scale": 2**7, "good_steps": 0}
    assert {name: after.pop(name) for name in told} == told
    tiny.assert_identical(after, {name: before[name] for name in after})
