"""Pictures of a run: of the very images of a step, and a run is worth more than they are."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from tests.trained_runs import flags
from towers.data import ArraySplit, DatasetSplit, augment
from towers.monitoring import histograms, image_summaries, pictures
from towers.options.run import Options
from towers.training.run.setup import prepare
from towers.training.train import train

pytestmark = pytest.mark.run


def tags_at(folder):
    """Return {tag: steps at which it stands} of what is no scalar."""
    found = {}
    for step, value in tiny.records(folder):
        if value.metadata.plugin_data.plugin_name != "scalars":
            found.setdefault(value.tag, []).append(step)
    return found


def test_a_run_that_goes_on_has_each_picture_once_and_needs_none(
    trained, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise ZeroDivisionError("of a\npicture")

    runs = [trained.copy("classes", tmp_path / name) for name in ("shown", "failed")]
    for run in runs:
        if run.name == "failed":
            monkeypatch.setattr(pictures, "tower_images", fail)
            monkeypatch.setattr(pictures, "evaluation_images", fail)
            monkeypatch.setattr(histograms, "histogram_pb", fail)
        train(Options(train_dir=str(run), **flags("classes") | {"num_epochs": 3.0}))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no ")]
        kinds, shown = ("pictures", "histograms", "mistakes"), run.name == "shown"
        assert {line.split(":")[0] for line in lines} == {
            f"no {kind} ZeroDivisionError" for kind in kinds if not shown
        }
        at = dict.fromkeys(("images", "filters"), [0, 5, 9, 13, 18, 22, 26])
        at |= dict.fromkeys(("weights", "gradients", "activations"), [0, 9, 18, 26])
        found = tags_at(run / "train")
        assert {tag.partition("/")[0] for tag in found} == set(at)
        assert {"images/tower_0", "images/tower_1", "filters/sequential/conv2d"} < set(found)
        for tag, steps in found.items():
            expected = at[tag.partition("/")[0]]
            # The picture at 18 is of the first step that the run goes on with.
            assert steps == [step for step in expected if shown or step < 18]
        steps = [5, 9, 13, 18, 22, 26] if shown else [5, 9, 13, 18]
        assert tags_at(run / "eval") == {"confusion_matrix": steps, "mistakes": steps}
    tiny.assert_identical(*map(tiny.saved, runs))


# What towers see.


def with_split(run, split):
    """Return the run with other training images."""
    return dataclasses.replace(run, data=dataclasses.replace(run.data, train=split))


def trained_on(run, step):
    """Return the batch of a step, by reading all before it."""
    batches = run.data.train.train_batches(run.options.batch_size, seed=run.options.seed)
    return next(iter(batches.skip(step)))


def assert_equal(batch, expected):
    tf.nest.assert_same_structure(batch, expected)
    tf.nest.map_structure(np.testing.assert_array_equal, batch, expected)


def test_the_batch_is_that_of_the_step_and_no_look_builds_a_pipeline_of_its_own(monkeypatch):
    """What TensorFlow takes to build one it never gives back: 0.2 MiB with each look."""
    run = prepare(tiny.options("unused", seed=3))
    built, real = [], type(run.data.train).train_batches

    def train_batches(split, *args, **kwargs):
        built.append(kwargs)
        return real(split, *args, **kwargs)

    expected = {step: trained_on(run, step) for step in (0, 5, 20)}
    monkeypatch.setattr(type(run.data.train), "train_batches", train_batches)
    sampler = tiny.sampler(run)
    for step, batch in expected.items():
        assert_equal(sampler.batch(step, step * 7), batch)
    assert len(built) == 1


def test_a_pipeline_of_the_users_is_read_once_at_the_start_of_an_epoch():
    dataset = tf.data.Dataset.from_tensor_slices(tiny.arrays(tiny.TRAIN_SIZE))
    run = prepare(tiny.options("unused", batch_size=12))  # an epoch is 60 examples
    run = with_split(run, DatasetSplit(dataset, tiny.TRAIN_SIZE))
    sampler = tiny.sampler(run)
    batch = sampler.batch(6, 72)
    example, of_example = trained_on(run, 5)
    of_step = trained_on(run, 6)[1]  # all but the last draw, which an example has for an epoch
    draws = tf.concat([of_step[:, :-1], of_example[:, -1:]], axis=1)
    assert_equal(batch, (example, draws))
    assert sampler.batch(9, 108) is batch


def test_a_pipeline_that_is_cached_in_a_file_survives_a_look(tmp_path, monkeypatch):
    monkeypatch.setattr("towers.data.tfdata_splits._SHUFFLE_BUFFER_BYTES", 10 * 192)
    dataset = tf.data.Dataset.from_tensor_slices(tiny.arrays(200)).cache(str(tmp_path / "cache"))
    run = with_split(prepare(tiny.options("unused")), DatasetSplit(dataset, 200))
    batches = iter(run.data.train.train_batches(7, seed=0))
    sampler = tiny.sampler(run)
    first = sampler.batch(0, 0)
    assert_equal(first, next(batches))
    for step in range(1, 60):
        next(batches)
        assert sampler.batch(step, 7 * step) is first


def of_each_tower(run, batch):
    """Return the images and labels that the builder gives each tower, all parts together."""
    slices = []

    def loss_fn(images, labels, draws):
        if not tf.is_symbolic_tensor(images):  # as an analysis has them
            slices.append((images, labels, draws))
        return tf.zeros(tf.shape(labels))

    variables = run.train_state.model.trainable_variables
    run.builder.gradients(loss_fn, variables, *batch)
    num_towers = len(run.builder.devices)
    result = []
    for tower in range(num_towers):
        images, labels, draws = tf.nest.map_structure(
            lambda *parts: tf.concat(parts, 0), *slices[tower::num_towers]
        )
        kind, dtype = run.options.augment, run.options.input_dtype
        result.append((augment.train_images(images, draws, kind, dtype).numpy(), labels))
    return result


@pytest.mark.parametrize(
    ("num_towers", "batch_size", "changes"),
    [
        pytest.param(2, 7, {"augment": "tutorial"}, marks=pytest.mark.graph),
        (3, 40, {"augment": "resnet", "dtype": "float64", "accumulate_steps": 2}),
        (2, 7, {"augment": "shift,cutout=3"}),
    ],
)
def test_the_images_are_those_that_each_towers_model_gets(num_towers, batch_size, changes):
    run = prepare(
        tiny.options("unused", num_towers=num_towers, batch_size=batch_size, seed=1, **changes)
    )
    batch = tiny.flat(tiny.sampler(run).batch(4, 4 * batch_size))
    seen = image_summaries.seen_by_towers(run.builder, run.options, batch, 8)
    expected = of_each_tower(run, batch)
    assert len(seen) == len(expected) == num_towers
    for (images, labels), (all_images, all_labels) in zip(seen, expected, strict=True):
        assert len(images) == min(8, len(all_images)) > 0
        np.testing.assert_allclose(images, all_images[:8], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(labels, all_labels[:8])


@pytest.mark.graph
def test_bytes_to_which_nothing_is_done_stay_bytes():
    images, labels = tiny.arrays(20)
    run = prepare(tiny.options("unused", augment="off"))
    for stored in images, images.astype(np.float32) / 255:
        split = ArraySplit(stored, labels)
        batch = tiny.flat(tiny.sampler(with_split(run, split)).batch(0, 0))
        ((seen, _),) = image_summaries.seen_by_towers(run.builder, run.options, batch, 3)
        assert seen.dtype == stored.dtype
        np.testing.assert_array_equal(seen, batch[0][:3])
