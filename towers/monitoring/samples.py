"""Training examples to look at: the batch of a step, and what each tower sees of it.

    sampler = Sampler(data.train, options, masters.step)     # reads nothing
    batch = sampler.batch(step=40, examples=5120)
    for images, labels in seen_by_towers(builder, options, batch, 8): ...

Batches are read by a pipeline of their own: the run's iterator and its draws are as they were.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from towers.builder.splitting import split
from towers.builder.tower import TowerBuilder
from towers.data import DatasetSplit, Split, augment
from towers.options.run import Options

# A user's `tf.data` pipeline cannot jump: what comes before a batch is read and dropped. Further
# into an epoch than so many examples a look at a batch is not worth it.
FAR_EXAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Batch:
    """A global batch of the training set."""

    images: tf.Tensor  # `[B, H, W, C]`, as they are stored
    labels: tf.Tensor  # int32 `[B]`
    draws: tf.Tensor  # float32 `[B, augment.NUM_DRAWS]`
    step: int | None  # that trains on this very batch; None: it stands for that of another step

    @property
    def tensors(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """What the function of a step takes."""
        return self.images, self.labels, self.draws


class Sampler:
    """Gives out the batches that a run trains on, at any step.

    Those of a user's `tf.data` pipeline are read from the start of the epoch, and two readers at a
    time may disturb each other: with `Dataset.cache(file)` the second one ends both. So such a
    pipeline is read once, before the first step of training, and that batch kept. A run that goes
    on more than `FAR_EXAMPLES` into an epoch gets the epoch's first batch.
    """

    def __init__(self, split: Split, options: Options, step: tf.Variable):
        """Note where the run stands, by the number of steps that training counts; read nothing."""
        self._split, self._options, self._step = split, options, step
        self._first_step, self._kept = int(step.numpy()), None

    def batch(self, step: int, examples: int) -> Batch | None:
        """Return the batch of step number `step`, before which `examples` were seen.

        Of a pipeline of the user's it is the one that is kept; None where the first call came after
        the first step.
        """
        if not isinstance(self._split, DatasetSplit):
            return self._read(step, examples, step)
        if self._kept is None and int(self._step.numpy()) == self._first_step:
            position = examples % self._split.size
            if position <= FAR_EXAMPLES:
                self._kept = self._read(step, examples, step)
            else:
                self._kept = self._read(step, examples - position, None)
        return self._kept

    def _read(self, step: int, examples: int, known_as: int | None) -> Batch:
        size, seed = self._options.batch_size, self._options.seed
        batches = self._split.train_batches(size, seed=seed, step=step, examples=examples)
        return Batch(*next(iter(batches)), known_as)


def seen_by_towers(
    builder: TowerBuilder, options: Options, batch: Batch, num: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return at most `num` images of each tower's slice as its model gets them, with their labels.

    Returns:
        (images `[n, h, w, C]`, labels int32 `[n]`) of each tower; n is 0 for one without examples.
        Images are float, but uint8 where they are stored so and nothing is done to them.
    """
    as_stored = options.augment == "off" and batch.images.dtype == tf.uint8

    def see(images: tf.Tensor, labels: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        images, draws = images[:num], draws[:num]
        kind, dtype = options.augment, options.input_dtype
        return (
            images if as_stored else augment.train_images(images, draws, kind, dtype),
            labels[:num],
        )

    found, num_towers = [], len(builder.devices)
    slices = split(batch.tensors, num_towers, builder.accumulate_steps)
    for tower, device in enumerate(builder.devices):
        with tf.device(device):
            own = [see(*part.batch) for part in slices[tower::num_towers]]
        found.append(tuple(np.concatenate(values)[:num] for values in zip(*own, strict=True)))
    return found
