"""The pictures of a run: bounded, of the very images of a step, and a run is worth more."""

import contextlib
import io
import types

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorboard.util import tensor_util

from tests import tiny
from tests.trained_runs import flags
from towers.data import augment
from towers.monitoring import pictures
from towers.monitoring.pictures import Gallery
from towers.options.run import Options
from towers.training.run.setup import prepare
from towers.training.train import train

pytestmark = pytest.mark.unit

NAMES = ("cat", "dog", "bird")


def pixels(image):
    """Return the picture of a summary's image, uint8 [h, w, 3], having checked its size."""
    picture = Image.open(io.BytesIO(image.encoded_image_string))
    assert picture.size == (image.width, image.height)
    return np.asarray(picture.convert("RGB"))


def test_floats_are_stretched_and_infinities_are_zero():
    for image, shown in (
        ([0.2, 0.6], [0, 255]),
        ([-1.0, 3.0], [0, 255]),
        ([0.0, np.nan, np.inf, 3.0], [0, 0, 0, 255]),
        ([np.nan, np.nan], [0, 0]),
    ):
        image = np.array(image, np.float32).reshape(1, -1, 1)
        assert pictures.to_bytes(image)[0, :, 0].tolist() == shown


def test_three_or_four_channels_are_colors_and_of_others_the_first_is_gray():
    for channels in 1, 2, 3, 4, 5:
        shown = [0, 1, 2] if channels in (3, 4) else [0, 0, 0]
        image = np.random.default_rng(0).integers(0, 256, (3, 4, channels)).astype(np.uint8)
        np.testing.assert_array_equal(pictures.to_bytes(image), image[..., shown])


@pytest.mark.parametrize("shape", [(1, 1, 1), (500, 40, 3), (700, 900, 3)])
def test_a_grid_is_bounded_and_takes_any_name(shape):
    for num in 1, 7:
        names = ["a name " * 50, "日本語\nnew line", ""] * 3
        width, height = pictures.draw_grid([np.zeros([*shape[:2], 3], np.uint8)] * num, names).size
        assert 128 <= width <= 4 * 262 + 6 and 40 <= height <= 2 * 304 + 6


@pytest.mark.run
def test_a_run_that_goes_on_has_each_picture_once_and_needs_none(
    trained, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise ZeroDivisionError("of a\npicture")

    runs = [trained.copy("classes", tmp_path / name) for name in ("shown", "failed")]
    for run in runs:
        if run.name == "failed":
            for name in "tower_images", "histogram_pb":
                monkeypatch.setattr(pictures, name, fail)
        train(Options(train_dir=str(run), **flags("classes") | {"num_epochs": 3.0}))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("no ")]
        kinds, shown = ("pictures", "histograms"), run.name == "shown"
        assert {line.split(":")[0] for line in lines} == {
            f"no {kind} ZeroDivisionError" for kind in kinds if not shown
        }
        found = {}
        for step, value in tiny.records(run / "train"):
            if not value.HasField("simple_value"):
                found.setdefault(value.tag.partition("/")[0], set()).add(step)
        at = {"images": {0, 18}, "weights": {0, 9, 18, 26}}
        # What a process shows at its first step replaces what the one before has shown there.
        before = {kind: {step for step in at[kind] if step < 18} for kind in at}
        assert found == (at if shown else before)
    tiny.assert_identical(*map(tiny.saved, runs))


@pytest.mark.graph
def test_the_images_are_those_that_each_towers_model_gets():
    changes = {"augment": "resnet", "dtype": "float64", "accumulate_steps": 2}
    run = prepare(tiny.options("unused", num_towers=3, batch_size=40, seed=1, **changes))
    example, draws = next(iter(run.data.train.train_batches(40, seed=1)))
    found = pictures.tower_images(run.builder, run.options, (*example, draws), NAMES).value
    assert [value.tag for value in found] == [f"images/tower_{i}" for i in range(3)]
    images = augment.train_images(example[0][:20], draws[:20], "resnet", tf.float64).numpy()
    for value, (start, end) in zip(found, [(0, 7), (7, 14), (14, 20)], strict=True):
        classes = [NAMES[label] for label in example[1][start:end].numpy()]
        shown = [pictures.to_bytes(image) for image in images[start:end]]
        expected = np.asarray(pictures.draw_grid(shown, classes))
        np.testing.assert_array_equal(pixels(value.image), expected)


@pytest.mark.graph
def test_histograms_are_of_the_finite_weights():
    run, shown = prepare(tiny.options("unused")), []
    show = lambda step, summary: shown.extend(summary.value)  # noqa: E731
    monitor = types.SimpleNamespace(pause=contextlib.nullcontext, show=show)
    model = run.train_state.model
    kernel = model.trainable_variables[2]
    values = kernel.numpy()
    values[0, 0], values[1, 1] = np.nan, np.inf
    kernel.assign(values)
    Gallery(monitor, run.builder, model, run.data).show_histograms(0)
    rows = {v.tag: tensor_util.make_ndarray(v.tensor) for v in shown}
    assert set(rows) == {f"weights/{v.path}" for v in model.trainable_variables}
    assert rows[f"weights/{kernel.path}"][:, 2].sum() == values.size - 2
