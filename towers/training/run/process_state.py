"""State of the program that calls a run, which the run leaves as it was, however it ends."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def suppress_retracing_warnings() -> Iterator[None]:
    """Suppress TensorFlow's warnings about retracing: each run has functions of its own."""
    logger, advice = tf.get_logger(), lambda record: "retracing" not in record.getMessage()
    logger.addFilter(advice)
    try:
        yield
    finally:
        logger.removeFilter(advice)


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the random states of Python and NumPy after the block; suppress retracing warnings.

    Else a program that draws after each of several runs, for a split, would draw the same numbers.
    The seeds of TensorFlow and Keras stay what the run has set.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with suppress_retracing_warnings():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
