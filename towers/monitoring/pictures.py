"""Pictures and histograms of a run: what its towers see, and its weights."""

import dataclasses
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageOps
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
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

        def make() -> list[Summary]:
            names = self.data.class_names or [""]  # no labels without classes
            (images, *targets), draws = batch
            labels = targets[0] if self.data.class_names else tf.zeros(len(images), tf.int32)
            return tower_images(self.builder, options, (images, labels, draws), names)

        if self.data.image_shape:
            self._show("pictures", step, make)

    def show_histograms(self, step: int) -> None:
        """Show histograms of the weights after `step` updates, without infinities and NaN."""

        def make() -> list[Summary]:
            pairs = [(v.path, v.numpy()) for v in self.model.trainable_variables]
            finite = [(path, value[np.isfinite(value)]) for path, value in pairs]
            return [histogram_pb(f"weights/{path}", value) for path, value in finite if len(value)]

        self._show("histograms", step, make)

    def _show(self, name: str, step: int, make: Callable[[], Iterable[Summary]]) -> None:
        if (name, step) in self._shown:
            return
        self._shown.add((name, step))
        with self.monitor.pause():
            try:
                summaries = make()
            except Exception as error:  # the user's own code may raise anything
                self.monitor.say(f"no {name} {type(error).__name__}: {first_line(error)}")
            else:
                self.monitor.show(step, summaries)


def tower_images(
    builder: TowerBuilder, options: StepOptions, batch: tuple[Any, ...], names: Sequence[str]
) -> list[Summary]:
    """Return `images/tower_I` for each tower with examples: its images as its model sees them.

    With accumulate_steps they are of the first part of the batch.

    Args:
        builder: builder of the towers.
        options: options with the augmentation.
        batch: images, labels and random numbers.
        names: names of the classes.
    """
    summaries, slices = [], split(builder, batch, builder.accumulate_steps)
    for i, (part, device) in enumerate(zip(slices, builder.devices, strict=False)):
        with tf.device(device):
            images, labels, draws = tf.nest.map_structure(lambda t: t[:NUM_IMAGES], part.batch)
            seen = augment.train_images(images, draws, options.augment, options.input_dtype)
        if len(seen):
            classes = [names[label] for label in labels.numpy()]
            about = f"Training images as tower {i} sees them: {', '.join(classes)}."
            picture = draw_grid(list(map(to_bytes, seen.numpy())), [[name] for name in classes])
            summaries.append(_summary(f"images/tower_{i}", picture, about))
    return summaries


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


def draw_grid(images: Sequence[np.ndarray], captions: Sequence[Sequence[str]]) -> Image.Image:
    """Draw images in rows of up to four, each above its lines of text.

    Args:
        images: uint8 `[h, w, 3]` each, one or more.
        captions: lines of text of each image.
    """
    side = max(_SIDE, min(_MAX_SIDE, max(images[0].shape[:2])))
    columns = min(4, len(images))
    width = side + _GAP
    height = width + _LINE * max(map(len, captions))
    num_rows = -(-len(images) // columns)
    picture = Image.new("RGB", (_GAP + columns * width, _GAP + num_rows * height), "white")
    draw = ImageDraw.Draw(picture)
    for i, image in enumerate(images):
        left, top = _GAP + i % columns * width, _GAP + i // columns * height
        small = max(image.shape[:2]) <= side
        how = Image.Resampling.NEAREST if small else Image.Resampling.BICUBIC
        picture.paste(ImageOps.contain(Image.fromarray(image), (side, side), how), (left, top))
        for number, line in enumerate(captions[i]):
            draw.text((left, top + side + number * _LINE), _legible(line), "black")
    return picture


def _summary(tag: str, picture: Image.Image, description: str) -> Summary:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    width, height = picture.size
    png = Summary.Image(width=width, height=height, encoded_image_string=buffer.getvalue())
    about = SummaryMetadata(summary_description=description)
    return Summary(value=[Summary.Value(tag=tag, metadata=about, image=png)])


def _legible(line: str) -> str:
    # Fit the width of an image, in letters of Pillow's built-in font.
    return cut(" ".join(line.split()), 21).encode("latin-1", "replace").decode("latin-1")
