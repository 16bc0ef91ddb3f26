"""What towers see: the very images of the step, and nothing is disturbed by looking."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from towers.data import ArraySplit, DatasetSplit, augment
from towers.monitoring import samples
from towers.training.run import prepare


def with_split(run, split):
    """Return the run with other training images."""
    return dataclasses.replace(run, data=dataclasses.replace(run.data, train=split))


def streamed(run):
    """Return the run with its training images in a `tf.data` pipeline of the user's."""
    dataset = tf.data.Dataset.from_tensor_slices(tiny.arrays(tiny.TRAIN_SIZE))
    return with_split(run, DatasetSplit(dataset, tiny.TRAIN_SIZE))


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
    dataset = tf.data.Dataset.from_tensor_slices(tiny.arrays(200)).cache(str(tmp_path / "cache"))
    run = with_split(prepare(tiny.options("unused")), DatasetSplit(dataset, 200))
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
    result = []
    for tower in range(num_towers):
        images, labels, draws = (
            tf.concat(v, 0) for v in zip(*slices[tower::num_towers], strict=True)
        )
        kind, dtype = run.options.augment, run.options.input_dtype
        result.append((augment.train_images(images, draws, kind, dtype).numpy(), labels))
    return result


@pytest.mark.parametrize(
    ("num_towers", "batch_size", "changes"),
    [
        (2, 7, {"augment": "tutorial"}),
        (3, 40, {"augment": "resnet", "dtype": "float64"}),
        (2, 9, {"augment": "resnet", "accumulate_steps": 2}),
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


def test_bytes_to_which_nothing_is_done_stay_bytes():
    images, labels = tiny.arrays(20)
    for stored in images, images.astype(np.float32) / 255:
        run = prepare(tiny.options("unused", augment="off"))
        batch = tiny.sampler(with_split(run, ArraySplit(stored, labels))).batch(0, 0)
        ((seen, _),) = samples.seen_by_towers(run.builder, run.options, batch, 3)
        assert seen.dtype == stored.dtype
        np.testing.assert_array_equal(seen, batch.images[:3])
