"""What nobody expects: names with control characters, signals at any time, odd file systems."""

import os

import pytest

from tests import runs
from towers import files, formatting, signals

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "name, shown",
    [
        ("a\x1b[31mred", r"a\x1b[31mred"), ("\x9b2J\x07", r"\x9b2J\x07"), ("b\rc", r"b\rc"),
        ("\u202egnp.exe", r"\u202egnp.exe"), (os.fsdecode(b"x\xff"), r"x\udcff"),
        ("日本 é\t|\n", "日本 é\t|\n"),
    ],
)  # fmt: skip
def test_names_do_not_command_the_terminal(name, shown, capsys, tmp_path):
    assert formatting.printable(name) == shown
    assert shown.strip("\n") in formatting.table(["a"], [[name]])[1] or "\n" in name
    signals.print_error(f"--train_dir={name}: no")
    files.warn_damaged(tmp_path / name.strip("\n"))
    said = capsys.readouterr().err
    assert said.encode() and not {"\x1b", "\x9b", "\x07", "\r", "\u202e"} & set(said)
    if not {"\n", "\r"} & set(name):  # which complain makes spaces of, for it is one line
        assert said.startswith(f"towers: --train_dir={shown}: no\nwarning     ")


@pytest.mark.run
def test_what_a_generator_gives_is_not_blamed_on_towers(folder, capsys):
    (folder / "gives.py").write_text(
        "import keras, numpy as np, tensorflow as tf\n"
        "def generate():\n    yield np.zeros([2]), 0\n    yield np.zeros([2]), 1\n"
        "    yield np.zeros([3]), 0\n"
        "def load():\n    specs = tf.TensorSpec([2]), tf.TensorSpec([], tf.int32)\n"
        "    d = tf.data.Dataset.from_generator(generate, output_signature=specs)\n"
        "    return (d, 3), (d.take(2), 2)\n"
        "def build():\n    return keras.Sequential([keras.Input([2]), keras.layers.Dense(2)])\n"
    )
    given = "--model=gives:build --dataset=gives:load --batch_size=3 --max_steps=2 --devices=cpu"
    code, _, said = runs.command(capsys, "train", *given.split())
    assert code in (1, 2) and "--dataset cannot be read" in said.splitlines()[-1], said
    assert "please report" not in said and "gallery.py" not in said
