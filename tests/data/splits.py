"""What is in a split, and the line with which data are refused."""

import numpy as np
import pytest
import tensorflow as tf

from tests import runs
from towers import data
from towers.data import ArraySplit


def run(*cases):
    """Return cases of a test, of some arguments each, that are slower than the others."""
    return [pytest.param(*case, marks=pytest.mark.run) for case in cases]


def refusal(*args, call=data.load, **given):
    """Return the line with which a data set is refused."""
    return runs.refusal(call, *args, **given)


def all_of(split):
    """Return all examples of a split, (x,), (x, y) or (x, y, sample_weight), as its spec says."""
    if isinstance(split, ArraySplit):
        example = split.arrays()
    else:
        example, counted = next(iter(split.eval_batches(split.size)))
        assert counted.numpy().all()
    of_rows = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), example)
    assert of_rows == split.spec and len(tf.nest.flatten(example)[0]) == split.size
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), example)


def take(split, batch_size, num_batches, **start):
    """Return batches for training, the tensors of each in a row."""
    return flat(split.train_batches(batch_size, **start).take(num_batches))


def flat(batches):
    return [tuple(part.numpy() for part in tf.nest.flatten(batch)) for batch in batches]


def assert_same(examples, others):
    """Compare bit for bit, whatever their structure."""
    tf.nest.map_structure(np.testing.assert_array_equal, examples, others)
