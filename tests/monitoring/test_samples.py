"""What towers see: the very images of the step, and nothing is disturbed by looking."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers.data import ArraySplit, DatasetSplit, augment
from towers.monitoring import samples
from towers.training.run import prepare


def streamed(run):
    """Return the run with its training images in a `tf.data` pipeline of the user's."""
    images, labels = tiny.arrays(tiny.TRAIN_SIZE)
    split = DatasetSplit(tf.data.Dataset.from_tensor_slices((images, labels)), tiny.TRAIN_SIZE)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, train=split))


def trained_on(run, step):
    """Return the batch of a step, by reading all before it."""
    batches = iter(run.data.train.train_batches(run.options.batch_size, seed=run.options.seed))
    for _ in range(step + 1):
        batch = next(batches)
    return batch


def assert_equal(batch, expected):
    for value, other in zip((batch.images, batch.labels, batch.draws), expected, strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize("change", [lambda run: run, streamed])
def test_the_batch_is_that_of_the_step(change):
    run = change(prepare(tiny.options("unused", seed=3)))
    for step in 0, 5, 20:
        batch = tiny.sampler(run).batch(step, step * 7)
        assert batch.step == step
        assert_equal(batch, trained_on(run, step))


def test_a_pipeline_of_the_users_is_read_once_and_before_training():
    run = streamed(prepare(tiny.options("unused")))
    early, late = tiny.sampler(run), tiny.sampler(run)
    first = early.batch(0, 0)
    run.masters.step.assign(9)
    assert early.batch(9, 63) is first and first.step == 0
    assert late.batch(9, 63) is None
    assert tiny.sampler(run).batch(9, 63).step == 9  # continued there


def test_far_into_an_epoch_of_a_pipeline_its_first_batch_stands_for_the_steps(monkeypatch):
    monkeypatch.setattr(samples, "FAR_EXAMPLES", 6)
    run = streamed(prepare(tiny.options("unused", batch_size=12)))
    assert tiny.sampler(run).batch(5, 60).step == 5  # an epoch is 60 examples
    batch = tiny.sampler(run).batch(6, 72)
    assert batch.step is None
    assert_equal(batch, (*trained_on(run, 5)[:2], trained_on(run, 6)[2]))
    assert tiny.sampler(prepare(tiny.options("unused"))).batch(6, 42).step == 6  # it can jump


def test_a_pipeline_that_is_cached_in_a_file_survives_a_look(tmp_path, monkeypatch):
    monkeypatch.setattr("towers.data.pipeline._SHUFFLE_BUFFER_BYTES", 10 * 192)
    images, labels = tiny.arrays(200)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).cache(str(tmp_path / "cache"))
    run = prepare(tiny.options("unused"))
    run = dataclasses.replace(
        run, data=dataclasses.replace(run.data, train=DatasetSplit(dataset, 200))
    )
    batches = iter(run.data.train.train_batches(7, seed=0))
    sampler = tiny.sampler(run)
    assert_equal(sampler.batch(0, 0), next(batches))
    for step in range(1, 60):
        run.masters.step.assign(step)
        next(batches)
        assert sampler.batch(step, 7 * step).step == 0


def of_each_tower(run, batch):
    """Return the images and labels that the builder gives each tower, all parts together."""
    slices = []

    def loss_fn(images, labels, draws):
        if not tf.is_symbolic_tensor(images):  # as a rehearsal has them
            slices.append((images, labels, draws))
        return tf.zeros(tf.shape(labels))

    variables = run.masters.model.trainable_variables
    run.builder.gradients(loss_fn, variables, batch.images, batch.labels, batch.draws)
    num_towers = len(run.builder.devices)
    dtype = tf.float64 if run.options.dtype == "float64" else tf.float32
    result = []
    for tower in range(num_towers):
        own = [np.concatenate(v) for v in zip(*slices[tower::num_towers], strict=True)]
        images = augment.train_images(
            tf.constant(own[0]), tf.constant(own[2]), run.options.augment, dtype=dtype
        )
        result.append((images.numpy(), own[1]))
    return result


@pytest.mark.parametrize(
    ("num_towers", "batch_size", "changes"),
    [
        (1, 5, {}),
        (2, 7, {"augment": "tutorial"}),
        (3, 40, {"augment": "resnet", "dtype": "float64"}),
        (2, 9, {"augment": "resnet", "accumulate_steps": 2}),
        (3, 30, {"accumulate_steps": 4, "dtype": "mixed_bfloat16"}),
        (2, 6, {"augment": "off"}),
    ],
)
def test_the_images_are_those_that_each_towers_model_gets(num_towers, batch_size, changes):
    run = prepare(
        tiny.options("unused", num_towers=num_towers, batch_size=batch_size, seed=1, **changes)
    )
    batch = tiny.sampler(run).batch(4, 4 * batch_size)
    seen = samples.seen_by_towers(run.builder, run.options, batch, 8)
    expected = of_each_tower(run, batch)
    assert len(seen) == len(expected) == num_towers
    for (images, labels), (all_images, all_labels) in zip(seen, expected, strict=True):
        assert len(images) == min(8, len(all_images)) > 0
        np.testing.assert_allclose(images, all_images[:8], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(labels, all_labels[:8])


def test_a_tower_without_examples_sees_none():
    run = prepare(tiny.options("unused", num_towers=4, batch_size=2))
    seen = samples.seen_by_towers(run.builder, run.options, tiny.sampler(run).batch(0, 0), 8)
    assert [(len(images), len(labels)) for images, labels in seen] == [(1, 1)] * 2 + [(0, 0)] * 2


def test_bytes_to_which_nothing_is_done_stay_bytes():
    run = prepare(tiny.options("unused", augment="off"))
    batch = tiny.sampler(run).batch(0, 0)
    ((images, _),) = samples.seen_by_towers(run.builder, run.options, batch, 3)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(images, batch.images[:3])
    stored = ArraySplit(*(lambda i, n: (i.astype(np.float32) / 255, n))(*tiny.arrays(20)))
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, train=stored))
    batch = tiny.sampler(run).batch(0, 0)
    ((images, _),) = samples.seen_by_towers(run.builder, run.options, batch, 3)
    np.testing.assert_array_equal(images, batch.images[:3])
