"""Pictures and histograms of a run: what its towers see, and its weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.histogram.summary_v2 import histogram_pb

from towers.builder.sharding import split
from towers.builder.tower import TowerBuilder
from towers.data import Data, augment
from towers.formatting import first_line
from towers.monitoring.monitor import Monitor
from towers.options.parts import StepOptions

NUM_IMAGES = 8  # of each tower


@dataclasses.dataclass
class Gallery:
    """Shows towers' images and histograms, each once a step.

    An error in making a picture is printed and does not stop the run.
    """

    monitor: Monitor  # writes the pictures
    builder: TowerBuilder
    model: keras.Model
    data: Data

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
            (images, *_), draws = batch
            return tower_images(self.builder, options, images, draws)

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
    builder: TowerBuilder, options: StepOptions, images: tf.Tensor, draws: tf.Tensor
) -> Summary:
    """Return `images/tower_I` for each tower with examples: its images as its model sees them.

    They stand side by side. With accumulate_steps they are of the first part of the batch.

    Args:
        builder: builder of the towers.
        options: options with the augmentation.
        images: of a batch.
        draws: its random numbers.
    """
    summary, slices = Summary(), split(builder, (images, draws), builder.accumulate_steps)
    for i, (part, device) in enumerate(zip(slices, builder.devices, strict=False)):
        with tf.device(device):
            first = [each[:NUM_IMAGES] for each in part.batch]
            seen = augment.train_images(*first, options.augment, options.input_dtype).numpy()
        if len(seen):
            row = np.concatenate(list(map(to_bytes, seen)), axis=1)
            (height, width, _), png = row.shape, tf.io.encode_png(row).numpy()
            image = Summary.Image(width=width, height=height, encoded_image_string=png)
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
