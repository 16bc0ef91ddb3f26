"""The rule book as it is printed, with the numbers of the run."""

import pytest

from tests import tiny
from towers.training.run.setup import prepare
from towers.training.run.summary import run_summary

pytestmark = pytest.mark.graph


def test_the_rule_book_in_full():
    assert run_summary(prepare(tiny.options("unused", num_towers=2))) == [
        "towers      2: /cpu:0, /cpu:1; gather on /cpu:0",
        "batch size  7 global (1 x 4 and 1 x 3 per tower), float32",
        "data        tests.tiny:images: 60 training examples per epoch, 23 test; "
        "8.6 steps per epoch",
        "example     x [8, 8, 3] uint8, y [] int32",
        "images      [8, 8, 3] float32, by --augment=standardize",
        "classes     3: 0, 1, 2",
        "model       tests.tiny:dense(): 983 trainable weights",
        "task        loss sparse_categorical_crossentropy; accuracy",
        "length      12 steps, 84 examples, 1.4 epochs",
        "saved       at the end, and when stopped",
        "rules, the same at any number of towers:",
        "  1 loss and gradients: mean over the global batch; add_n adds the towers' parts",
        "  2 regularisation: once, on the master weights; weight decay 0 (L2), and the layers' own",
        "  3 finite test: on the loss and the gathered gradient; else stop",
        "  4 clipping: none, after the gather; then update, then EMA",
        "  5 shuffling, augmentation, dropout: by (seed, step, place in the global batch), seed 0",
        "  6 BatchNorm: sync, moments over the global batch; statistics gathered, assigned once a "
        "step",
        "  7 clock: examples; momentum, learning rate 0.1 cosine, EMA none",
        "  8 the loss that is printed is that of all towers",
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
