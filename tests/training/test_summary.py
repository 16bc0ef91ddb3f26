"""The summary of a run as it is printed, with its numbers."""

import pytest

from tests import tiny
from towers.training.run.setup import prepare
from towers.training.run.summary import run_summary

pytestmark = pytest.mark.graph


def test_the_summary_in_full():
    assert run_summary(prepare(tiny.options("unused", num_towers=2))) == [
        "towers      2: /cpu:0, /cpu:1; gather on /cpu:0",
        "batch size  7 global (1 x 4 and 1 x 3 per tower), float32",
        "data        tests.tiny:images: 60 training examples per epoch, 23 test; "
        "8.6 steps per epoch",
        "example     x [8, 8, 3] uint8, y [] int32",
        "images      [8, 8, 3] float32, with --augment=standardize",
        "classes     3: 0, 1, 2",
        "model       tests.tiny:dense(): 983 trainable weights",
        "task        loss sparse_categorical_crossentropy; accuracy",
        "length      12 steps, 84 examples, 1.4 epochs",
        "saved       at the end, and when stopped",
        "reproducibility settings, the same on any number of towers:",
        "  1 loss and gradients: mean over the global batch; add_n sums the towers' parts",
        "  2 regularization: once, on the weights; weight decay 0 (L2), and that of the layers",
        "  3 NaN/Inf check: on the loss and the summed gradient; stop if not finite",
        "  4 clipping: none, after the sum; then update, then EMA",
        "  5 shuffling, augmentation, dropout: from (seed, step, place in the global batch), "
        "seed 0",
        "  6 BatchNorm: sync, statistics of the global batch; averages updated once a step",
        "  7 schedules count examples; momentum, learning rate 0.1 cosine, EMA none",
        "  8 the printed loss is that of all towers",
        "  9 exactness: towers are compared with one device (--check=once); if they differ: warn",
    ]


def test_the_length_is_told_and_is_never_nothing():
    def length(num_epochs=0.0, **changes):
        given = {"max_steps": 0, "num_epochs": num_epochs} | changes
        lines = run_summary(prepare(tiny.options("t", **given)))
        return next(line for line in lines if line.startswith("length"))

    assert length(2, batch_size=10) == "length      12 steps, 120 examples, 2 epochs"
    assert length(max_steps=9) == "length      9 steps, 63 examples, 1.05 epochs"
    assert length(2, max_steps=9) == "length      9 steps, 63 examples, 1.05 epochs"
    assert length(2, batch_size=38) == "length      4 steps, 152 examples, 2.533 epochs"
    assert length(0.001) == "length      1 step, 7 examples, 0.1167 epochs"


def test_towers_without_examples_get_a_note():
    lines = run_summary(prepare(tiny.options("unused", num_towers=3, batch_size=2)))
    (note,) = [line for line in lines if line.startswith("note")]
    assert "no example for 1 tower; use a batch size of at least 3" in note
