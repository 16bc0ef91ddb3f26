"""What nobody expects: names with control characters, signals at any time, odd file systems."""

import os

import pytest

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
