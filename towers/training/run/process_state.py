"""Restores the state of the program that calls a run."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the random states of Python and NumPy after the block; suppress retracing warnings.

    Otherwise a program would draw the same numbers after each run, and TensorFlow would warn of
    functions, of which each run has its own. The seeds of TensorFlow and Keras stay those of the
    run.
    """
    python, numpy = random.getstate(), np.random.get_state()
    logger, advice = tf.get_logger(), lambda record: "retracing" not in record.getMessage()
    logger.addFilter(advice)
    try:
        yield
    finally:
        logger.removeFilter(advice)
        random.setstate(python)
        np.random.set_state(numpy)
