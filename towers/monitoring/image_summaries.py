"""Pictures and histograms of the batches that a run trains on, made between its steps.

    sampler = Sampler(data.train, options)     # reads nothing
    batch = sampler.batch(step=40, examples=5120)
    for images, labels in seen_by_towers(builder, options, batch, 8): ...

Batches are read by a separate pipeline, which leaves the run's iterator and random numbers alone.
An error in making a picture is printed and does not stop the run.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary

from towers.builder.sharding import split
from towers.builder.tower import TowerBuilder
from towers.data import Data, DatasetSplit, Split, augment
from towers.formatting import first_line
from towers.monitoring import pictures
from towers.monitoring.monitor import Monitor
from towers.options.parts import StepOptions
from towers.options.triggers import Timetable

# A global batch of the training set, as a step takes it: (example, draws), see `data.Split`.
Batch = tuple[Any, tf.Tensor]


@dataclasses.dataclass
class Sampler:
    """Returns the batch that a run trains on at any step.

    A user's `tf.data` pipeline cannot seek, and two readers at a time may fail, as with
    `Dataset.cache(file)`. So the first batch of the epoch under way stands for all others; it is
    read at the first call, which must come before training.
    """

    split: Split  # the examples
    options: StepOptions

    def __post_init__(self) -> None:
        """Prepare to read; nothing is read yet."""
        self._kept: Batch | None = None
        number = tf.TensorSpec([], tf.int64)
        # Traced once: building a pipeline leaks memory in TensorFlow.
        self._read = tf.function(
            lambda step, examples: self._batches(step, examples).take(1).get_single_element(),
            input_signature=[number, number],
            autograph=False,
        )

    def batch(self, step: int, examples: int) -> Batch:
        """Return the batch of a step.

        Args:
            step: number of steps before it.
            examples: number of examples before it.
        """
        if self._kept is not None:
            return self._kept
        if isinstance(self.split, DatasetSplit):
            self._kept = next(iter(self._batches(step, examples - examples % self.split.size)))
            return self._kept
        with tf.device("/cpu:0"):
            return self._read(step, examples)

    def _batches(self, step: Any, examples: Any) -> tf.data.Dataset:
        size, seed = self.options.batch_size, self.options.seed
        return self.split.train_batches(size, seed=seed, step=step, examples=examples)


def seen_by_towers(
    builder: TowerBuilder, options: StepOptions, batch: tuple[Any, ...], num: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the images of each tower's slice as its model sees them, with their labels.

    Args:
        builder: builder of the towers.
        options: options with the augmentation.
        batch: images, labels and random numbers.
        num: largest number of images of a tower.

    Returns:
        (images `[n, h, w, C]`, labels int32 `[n]`) of each tower; n is 0 without examples. Images
        are float, or uint8 if they are stored so and not augmented.
    """
    as_stored = options.augment == "off" and batch[0].dtype == tf.uint8
    kind, dtype = options.augment, options.input_dtype

    def see(*batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        images, labels, draws = tf.nest.map_structure(lambda t: t[:num], batch)
        if not as_stored:
            images = augment.train_images(images, draws, kind, dtype)
        return images, labels

    seen, slices = [], split(builder, batch, builder.accumulate_steps)
    for tower, device in enumerate(builder.devices):
        with tf.device(device):
            of_slices = [see(*part.batch) for part in slices[tower :: len(builder.devices)]]
        seen.append(tuple(np.concatenate(values)[:num] for values in zip(*of_slices, strict=True)))
    return seen


@dataclasses.dataclass
class Gallery:
    """Shows towers' images, mistakes, and histograms, each once a step."""

    monitor: Monitor  # writes the pictures
    timetable: Timetable
    sampler: Sampler  # of batches for pictures
    draw_histograms: Callable[[Batch], Summary]  # returns the histograms of a batch
    builder: TowerBuilder
    model: keras.Model
    data: Data  # names the classes

    def __post_init__(self) -> None:
        """Show the first pictures, before training: some data sets allow one reader at a time."""
        self._shown: set[tuple[str, int]] = set()
        self.show_training(self.timetable.first_step)
        if self.timetable.options.histogram_every_epochs:
            self.show_histograms(self.timetable.first_step)

    def show_training(self, step: int) -> None:
        """Show the batch after `step` updates as the towers see it, and the first filters."""

        def make() -> list[Summary]:
            filters, options = pictures.filter_images(self.model), self.sampler.options
            if self.data.image_shape is None:
                return filters
            names = self.data.class_names or [""]  # no labels without classes
            (images, *targets), draws = self._batch(step)
            labels = targets[0] if self.data.class_names else tf.zeros(len(images), tf.int32)
            batch = images, labels, draws
            seen = seen_by_towers(self.builder, options, batch, pictures.NUM_IMAGES)
            return pictures.tower_images(seen, names, options.augment != "off") + filters

        self._show("pictures", step, make)

    def show_histograms(self, step: int) -> None:
        """Show histograms of weights, gradients and activations after `step` updates."""
        self._show("histograms", step, lambda: [self.draw_histograms(self._batch(step))])

    def show_evaluation(self, step: int, predictions: pictures.Predictions) -> None:
        """Show an evaluation's mistakes and confusion matrix.

        Args:
            step: number of updates before it.
            predictions: the true and predicted classes.
        """
        names = self.data.class_names
        self._show("mistakes", step, lambda: pictures.evaluation_images(predictions, names), "eval")

    def _batch(self, step: int) -> Batch:
        return self.sampler.batch(step, self.timetable.examples(step))

    def _show(
        self, name: str, step: int, make: Callable[[], Iterable[Summary]], part: str = "train"
    ) -> None:
        if (name, step) in self._shown:
            return
        self._shown.add((name, step))
        with self.monitor.pause():
            try:
                summaries = make()
            except Exception as error:  # the user's own code may raise anything
                self.monitor.say(f"no {name} {type(error).__name__}: {first_line(error)}")
            else:
                self.monitor.show(step, summaries, part)
