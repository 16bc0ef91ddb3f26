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


def pixels(image):
    """Return the picture of a summary's image, uint8 [h, w, 3], having checked its size."""
    picture = Image.open(io.BytesIO(image.encoded_image_string))
    assert picture.size == (image.width, image.height)
    return np.asarray(picture.convert("RGB"))


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
    found = pictures.tower_images(run.builder, run.options, example[0], draws).value
    assert [value.tag for value in found] == [f"images/tower_{i}" for i in range(3)]
    images = augment.train_images(example[0][:20], draws[:20], "resnet", tf.float64).numpy()
    for value, (start, end) in zip(found, [(0, 7), (7, 14), (14, 20)], strict=True):
        shown = [pictures.to_bytes(image) for image in images[start:end]]
        np.testing.assert_array_equal(pixels(value.image), np.hstack(shown))


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
