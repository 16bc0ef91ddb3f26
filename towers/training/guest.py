"""What a run leaves as it was in the program that called it, however it ends."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Keep TensorFlow's advice about functions that are traced often: each run has its own."""
    logger, advice = tf.get_logger(), lambda record: "retracing" not in record.getMessage()
    logger.addFilter(advice)
    try:
        yield
    finally:
        logger.removeFilter(advice)


@contextlib.contextmanager
def as_a_guest() -> Iterator[None]:
    """Let the random numbers of Python and NumPy go on afterwards, as if there had been no run.

    Else those that a program draws after each of several runs, for a split, would be the same ones.
    The seeds of TensorFlow and Keras stay what the run has set.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with without_advice():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
