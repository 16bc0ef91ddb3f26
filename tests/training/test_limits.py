"""What would take all memory is one line: labels, pictures, batches, and what is too large."""

import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tiny
from tests.runs import command, released
from towers.errors import InputError

pytestmark = pytest.mark.graph


def compiled():
    network = tiny.dense(3, tiny.IMAGE_SHAPE)
    network.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return network


@pytest.mark.parametrize("model", [tiny.dense, compiled])
def test_one_wrong_label_is_named_whatever_the_model(tmp_path, model):
    images, labels = tiny.arrays(20)
    labels = np.where(np.arange(20) == 17, 2_000_000_000, labels)
    train = dict(model=model, dataset=((images, labels), tiny.arrays(8)), max_steps=1)
    with pytest.raises(InputError, match=r"train y: row 17 \(counted from 0\) has label 20000000"):
        towers.train(**train, batch_size=4, train_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# Data that fail on the way. Each is read twice before the first step.

X, Y = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
GOOD_READS = 2


def generated(num, error=None):
    """Return a half whose generator ends after `num` examples, or raises then."""
    reads = iter(range(100))

    def generate():
        good = next(reads) < GOOD_READS
        for i in range(60 if good else num):
            yield X[i % 60], Y[i % 60]
        if error and not good:
            raise error

    specs = tf.TensorSpec([4], tf.float32), tf.TensorSpec([], tf.int32)
    return tf.data.Dataset.from_generator(generate, output_signature=specs), 60


class Batches(keras.utils.PyDataset):
    num_batches = 10

    def __init__(self, error):
        super().__init__()
        self.error, self.reads = error, iter(range(1000))

    def __getitem__(self, number):
        if next(self.reads) > 20 and number == 7:
            raise self.error
        return X[:6], Y[:6]


FAILING = {
    "early": (lambda: generated(45), "expected to contain 60 elements but contained only 45 elem"),
    "late": (lambda: generated(75), "expected to contain 60 elements but contained at least 61 e"),
    "raises": (lambda: generated(45, ValueError("mine")), "ValueError: mine; the error comes"),
    "exits": (lambda: generated(45, SystemExit(0)), "SystemExit: 0; the error comes from tests"),
    "interrupts": (lambda: generated(45, KeyboardInterrupt()), "KeyboardInterrupt"),
    "batch": (lambda: Batches(KeyError("mine")), f"KeyError: 'mine' in {__name__}:"),
}
failing = None  # what `load` returns


def load():
    return FAILING[failing][0](), (X, Y), 3


def line_of(num_classes):
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(num_classes)])


def train(tmp_path, capsys, dataset="load"):
    """Return the lines on standard error of a run that fails."""
    flags = f"--model={__name__}:line_of", f"--dataset={__name__}:{dataset}", "--batch_size=12"
    code, _, err = command(capsys, "train", *flags, f"--train_dir={tmp_path}/run", "--max_steps=60")
    assert code == 1
    return err.splitlines()


@pytest.mark.run
@pytest.mark.parametrize("kind", released(FAILING, "early", "raises", "batch"))
def test_data_that_fail_on_the_way_say_why_and_at_which_step(tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr(f"{__name__}.failing", kind)
    *above, line = train(tmp_path, capsys)
    words = rf"towers: --dataset={__name__}:load cannot be read at step ([1-9]\d*): "
    step = int(re.match(words, line)[1])
    assert FAILING[kind][1] in line
    if "error comes from" in line:  # the traceback of the user's own code stands above
        assert above[0].startswith("Traceback") and any("test_limits.py" in row for row in above)
        assert kind != "raises" or above[-1] == "ValueError: mine"
    else:
        assert above == []
    assert tiny.saved_steps(tmp_path / "run") == [0, step]  # no step that was made is lost


def exits():
    sys.exit(0)


def test_own_code_that_exits_is_no_success(tmp_path, capsys):
    above, *_, line = train(tmp_path, capsys, "exits")
    assert line.startswith("towers: the error comes from tests/training/test_limits.py, line ")
    assert above.startswith("Traceback")
