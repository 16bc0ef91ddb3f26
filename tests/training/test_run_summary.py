"""The rule book as it is printed, with the numbers of the run."""

import pytest

from tests import tiny
from towers.training.run.run_summary import run_summary
from towers.training.run.setup import prepare

pytestmark = pytest.mark.graph


def test_the_rule_book_in_full():
    assert run_summary(prepare(tiny.options("unused", num_towers=2))) == [
        "towers      2: /cpu:0, /cpu:1; gather on /cpu:0",
        "batch size  7 global (1 x 4 and 1 x 3 per tower), float32",
        "data        tests.tiny:images: 60 training examples per epoch, 23 test; "
        "8.6 steps per epoch",
        "images      8x8x3 uint8 -> 8x8x3 float32: standardised",
        "targets     3 classes: 0, 1, 2",
        "model       tests.tiny:dense(): 983 trainable weights",
        "task        classification: cross entropy of logits, 3 classes",
        "length      12 steps, 84 examples, 1.4 epochs",
        "saved       at the end, and when stopped",
        "rules, the same at any number of towers:",
        "  1 loss and gradients: mean over the global batch; towers give sums, add_n gathers them",
        "  2 regularisation: once, on the master weights; weight decay 0 (L2), and the layers' own",
        "  3 finite test: on the loss and the gathered gradient; else stop",
        "  4 clipping: none, after the gather; then update, then EMA",
        "  5 shuffling, augmentation, dropout: by (seed, step, place in the global batch), seed 0",
        "  6 BatchNorm: sync, moments over the global batch; statistics gathered, assigned once a "
        "step",
        "  7 clock: examples; momentum, learning rate 0.1 cosine, EMA none",
        "  8 the loss that is printed is that of all towers",
    ]


def line(start, **changes):
    found = run_summary(prepare(tiny.options("t", **changes)))
    return next(line for line in found if line.startswith(start))


TOLD = [
    ("batch", dict(num_towers=4), "(3 x 2 and 1 x 1 per tower)"),
    ("batch", {}, "(1 x 7 per tower)"),
    ("batch", dict(num_towers=4, batch_size=2), "(2 x 1 and 2 x 0 per tower)"),
    ("batch", dict(num_towers=4, batch_size=8), "8 global (4 x 2 per tower)"),
    ("saved", dict(checkpoint_every_steps=40), "every 40 steps or 5 minutes, at the end, and"),
    ("  2", dict(optimizer="adamw", weight_decay=0.01), "weight decay 0.01 (adamw, apart from"),
    ("  3", dict(dtype="mixed_float16"), "loss scale from 32768"),
    ("  4", dict(clip_norm=0.5), "clip_norm=0.5, after"),
    ("  4", dict(clip_global_norm=2), "clip_global_norm=2, after"),
    ("  5", dict(seed=9), "seed 9"),
    ("  6", dict(batch_norm="local"), "local, moments over a tower's slice;"),
    ("  6", dict(accumulate_steps=4), "over the global batch in 4 parts;"),
    ("  7", dict(optimizer="adamw", learning_rate=0.5, schedule="constant", ema_decay=0.9),
     "adamw, learning rate 0.5 constant, EMA 0.9"),
    ("model", dict(model_args="width=2,l2=0.5"),
     "tests.tiny:dense(width=2,l2=0.5): 395 trainable weights"),
]  # fmt: skip


def test_options_are_told_as_they_are():
    for start, changes, words in TOLD:
        assert words in line(start, **changes)


def test_the_length_is_told_and_is_never_nothing():
    def length(num_epochs=0.0, **changes):
        return line("length", num_epochs=num_epochs, **{"max_steps": 0} | changes)

    assert length(2, batch_size=10) == "length      12 steps, 120 examples, 2 epochs"
    assert length(max_steps=9) == "length      9 steps, 63 examples, 1.05 epochs"
    first = "length      9 steps, 63 examples, 1.05 epochs instead of 2: --max_steps comes first"
    assert length(2, max_steps=9) == first
    full = "length      4 steps, 152 examples, 2.533 epochs instead of 2: all batches are full"
    assert length(2, batch_size=38) == full
    assert length(0.001).startswith("length      1 step, 7 examples, 0.1167 epochs inst")
