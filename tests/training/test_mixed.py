"""Examples that are mixed, and images that are seen in a mirror: what a loss and a metric are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tiny
from towers.data import augment, augment_ops
from towers.data.device_cache import DeviceCache
from towers.errors import InputError
from towers.options.augmentation import parse
from towers.training.run.setup import prepare
from towers.training.step import loss_checks

pytestmark = pytest.mark.graph
NUM = 20


def weighted():
    """The same images, with sample weights."""
    train, test, num_classes = tiny.images()
    weights = np.linspace(0.2, 3, len(train[1])).astype(np.float32)
    return (*train, weights), (*test, np.ones(len(test[1]), np.float32)), num_classes


def of_all(labels, logits):
    labels = tf.cast(labels, tf.int32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


@pytest.mark.parametrize(
    ("kind", "dataset"),
    [
        ("none,mixup=1", "tests.tiny:images"),
        ("resnet,mixup,cutmix", "tests.training.test_mixed:weighted"),
    ],
)
def test_the_loss_of_a_mixed_example_is_of_both_targets(kind, dataset):
    given = dict(dataset=dataset, label_smoothing=0.1, augment=kind, dtype="float64")
    run = prepare(tiny.options("unused", **given))
    (x, y, *weights), draws = next(iter(run.data.train.train_batches(NUM, seed=1)))
    found = run.task.loss(x, y, *weights, draws).numpy()
    inputs = augment.train_images(x, draws, kind, "float64")
    probabilities = tf.nn.softmax(run.train_state.model(inputs, training=True)).numpy()
    smooth = np.eye(probabilities.shape[1])[y] * 0.9 + 0.1 / probabilities.shape[1]
    losses = -(smooth[:, None] * np.log(probabilities)[None]).sum(2)  # of target i, image j
    losses *= np.asarray(weights[0])[:, None] if weights else 1
    share = augment_ops.share(*inputs.shape[1:3], draws[0], parse(kind), tf.float64).numpy()
    here = np.arange(NUM)
    expected = share * losses[here, here] + (1 - share) * losses[here - 1, here]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.run
def test_examples_of_what_lies_on_the_towers_are_mixed_alike():
    given = dict(augment="resnet,mixup,cutmix", dtype="float64", num_towers=2)
    run = prepare(tiny.options("unused", **given))
    example, draws = next(iter(run.data.train.train_batches(NUM, seed=1)))
    expected = run.task.gradients(*example, draws)
    stored = DeviceCache(run.data.train, run.builder.devices)
    rows, (own, (partners, of_partners)) = next(iter(stored.train_batches(NUM, seed=1)))
    partners = stored.example(partners), of_partners
    found = run.task.gradients(*stored.example(rows), (own, partners))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.run
def test_examples_of_a_compiled_model_are_mixed_alike():
    given = dict(augment="none,mixup,cutmix", dtype="float64", num_towers=2, batch_size=7)
    of_flags = tiny.Loop(tiny.options("unused", **given))
    compiled = tiny.Loop(tiny.options("unused", **given, metrics="accuracy"))
    assert of_flags(3)["loss"] == pytest.approx(compiled(3)["loss"], rel=1e-6)
    ours, theirs = (
        {n: v for n, v in loop.state().items() if n.startswith("model/")}
        for loop in (compiled, of_flags)
    )
    tiny.assert_close(ours, theirs, 1e-7)  # the rate of one is float32
    batch = next(iter(compiled.run.data.train.train_batches(7, seed=1)))
    assert loss_checks.check(compiled.run.task, batch) == []  # as each run begins


def masks():
    """A model whose outputs are images."""
    return keras.Sequential([keras.Input(tiny.IMAGE_SHAPE), keras.layers.Conv2D(1, 3)])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"augment": "none,mixup", "loss": "tests.training.test_mixed:of_all"},
            "--augment=none,mixup=0.2: mixup and cutmix mix the losses of examples, and ",
        ),
        (
            {"variables": "replicated", "loss": "tests.training.test_mixed:of_all"},
            "--variables=replicated: tests.tiny:dense has a loss ",
        ),
        (
            {"test_time_flip": True, "loss": "mse", "model": "tests.training.test_mixed:masks"},
            "--test_time_flip needs one row of numbers for each image",
        ),
    ],
)
def test_a_loss_of_the_whole_batch_has_no_examples(given, line):
    own = dict(dataset="tests.tiny:images", batch_size=7, model="tests.tiny:dense", num_towers=2)
    with pytest.raises(InputError) as error:
        prepare(towers.Options(**own | given))
    assert str(error.value).startswith(line)


def assert_mirrored(folder, found, kind):
    """Compare what an evaluation found with the mean of the outputs of both images."""
    _, (x, y), _ = tiny.images()
    inputs = augment.eval_images(x, kind)
    for ending, averages in ("", False), ("_ema", True):
        model = towers.load(folder, averages=averages)
        logits = (model(inputs) + model(inputs[:, :, ::-1])) / 2
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        assert found[f"loss{ending}"] == pytest.approx(float(np.mean(losses)), rel=1e-5)
        assert found[f"accuracy{ending}"] == pytest.approx(np.mean(np.argmax(logits, 1) == y))


@pytest.mark.run
def test_a_mirror_image_counts_as_much_in_evaluation(trained):
    folder = str(trained("classes"))
    found = towers.evaluate(train_dir=folder, num_towers=2, test_time_flip=True)
    assert_mirrored(folder, found, "tutorial")
    plain = towers.evaluate(train_dir=folder)["loss_ema"]
    assert plain != pytest.approx(found["loss_ema"], rel=1e-5)


@pytest.mark.run
def test_a_mirror_image_counts_as_much_for_a_compiled_model(tmp_path):
    given = dict(metrics="accuracy", test_time_flip=True, num_towers=1, ema_decay=0.5)
    result = towers.train(tiny.options(tmp_path, max_steps=2, **given))
    found = towers.evaluate(train_dir=str(tmp_path))
    assert_mirrored(str(tmp_path), found, "none")
    for name in found.keys() & {"loss", "loss_ema"}:
        assert result[f"test_{name}"] == found[name]
