"""Pictures and histograms of a run: what its towers see, and its weights."""

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageOps
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb

from towers.builder.sharding import split
from towers.builder.tower import TowerBuilder
from towers.data import Data, augment
from towers.formatting import cut, first_line
from towers.monitoring.monitor import Monitor
from towers.options.parts import StepOptions

NUM_IMAGES = 8  # of each tower
_SIDE, _MAX_SIDE = 128, 256  # pixels: smaller images are enlarged, larger ones shrunk
_GAP, _LINE = 6, 14  # pixels between images, and height of a line of text


@dataclasses.dataclass
class Gallery:
    """Shows towers' images and histograms, each once a step.

    An error in making a picture is printed and does not stop the run.
    """

    monitor: Monitor  # writes the pictures
    builder: TowerBuilder
    model: keras.Model
    data: Data  # names the classes

    def __post_init__(self) -> None:
        """Show nothing yet."""
        self._shown: set[tuple[str, int]] = set()

    def show_towers(self, step: int, options: StepOptions, batch: tuple[Any, tf.Tensor]) -> None:
        """Show a batch of images as the towers see it.

        Args:
            step: number of updates before it.
            options: options with the augmentation.
            batch: (example, random numbers) of a step.
        """

        def make() -> Summary:
            names = self.data.class_names or [""]  # no labels without classes
            (images, *targets), draws = batch
            labels = targets[0] if self.data.class_names else tf.zeros(len(images), tf.int32)
            return tower_images(self.builder, options, (images, labels, draws), names)

        if self.data.image_shape:
            self._show("pictures", step, make)

    def show_histograms(self, step: int) -> None:
        """Show histograms of the weights after `step` updates, without infinities and NaN."""

        def make() -> Summary:
            summary = Summary()
            for variable in self.model.trainable_variables:
                values = variable.numpy()
                if len(values := values[np.isfinite(values)]):
                    summary.MergeFrom(histogram_pb(f"weights/{variable.path}", values))
            return summary

        self._show("histograms", step, make)

    def _show(self, name: str, step: int, make: Callable[[], Summary]) -> None:
        if (name, step) in self._shown:
            return
        self._shown.add((name, step))
        with self.monitor.pause():
            try:
                summary = make()
            except Exception as error:  # the user's own code may raise anything
                self.monitor.say(f"no {name} {type(error).__name__}: {first_line(error)}")
            else:
                self.monitor.show(step, summary)


def tower_images(
    builder: TowerBuilder, options: StepOptions, batch: tuple[Any, ...], names: Sequence[str]
) -> Summary:
    """Return `images/tower_I` for each tower with examples: its images as its model sees them.

    With accumulate_steps they are of the first part of the batch.

    Args:
        builder: builder of the towers.
        options: options with the augmentation.
        batch: images, labels and random numbers.
        names: names of the classes.
    """
    summary, slices = Summary(), split(builder, batch, builder.accumulate_steps)
    for i, (part, device) in enumerate(zip(slices, builder.devices, strict=False)):
        with tf.device(device):
            images, labels, draws = tf.nest.map_structure(lambda t: t[:NUM_IMAGES], part.batch)
            seen = augment.train_images(images, draws, options.augment, options.input_dtype)
        if len(seen):
            classes = [names[label] for label in labels.numpy()]
            picture, png = draw_grid(list(map(to_bytes, seen.numpy())), classes), io.BytesIO()
            picture.save(png, "PNG")
            width, height = picture.size
            image = Summary.Image(width=width, height=height, encoded_image_string=png.getvalue())
            summary.value.add(tag=f"images/tower_{i}", image=image)
    return summary


def to_bytes(image: np.ndarray) -> np.ndarray:
    """Convert an image `[h, w, C]` to uint8 `[h, w, 3]` for display.

    The first three of 3 or 4 channels are red, green and blue; otherwise the first channel is shown
    in gray. Bytes are unchanged, other values are scaled from their minimum to their maximum.
    Infinities and NaN count as 0.
    """
    image = np.asarray(image)
    image = image[..., :3] if image.shape[-1] in (3, 4) else image[..., :1]
    if image.dtype != np.uint8:
        image = np.where(np.isfinite(image), image, 0.0)
        low, high = float(image.min()), float(image.max())
        image = np.round(255 * (image - low) / max(high - low, 1e-9)).astype(np.uint8)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def draw_grid(images: Sequence[np.ndarray], captions: Sequence[str]) -> Image.Image:
    """Draw images in rows of up to four, each above its line of text.

    Args:
        images: uint8 `[h, w, 3]` each, one or more.
        captions: line of text of each image.
    """
    side = max(_SIDE, min(_MAX_SIDE, max(images[0].shape[:2])))
    columns = min(4, len(images))
    width = side + _GAP
    height = width + _LINE
    num_rows = -(-len(images) // columns)
    picture = Image.new("RGB", (_GAP + columns * width, _GAP + num_rows * height), "white")
    draw = ImageDraw.Draw(picture)
    for i, image in enumerate(images):
        left, top = _GAP + i % columns * width, _GAP + i // columns * height
        small = max(image.shape[:2]) <= side
        how = Image.Resampling.NEAREST if small else Image.Resampling.BICUBIC
        picture.paste(ImageOps.contain(Image.fromarray(image), (side, side), how), (left, top))
        draw.text((left, top + side), _legible(captions[i]), "black")
    return picture


def _legible(line: str) -> str:
    # Fit the width of an image, in letters of Pillow's built-in font.
    return cut(" ".join(line.split()), 21).encode("latin-1", "replace").decode("latin-1")
