"""Formats text for people: tables, counts, errors in one line."""

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Any, TextIO


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a table, with numbers aligned to the right.

        table(["rate", "n"], [[0.1, 2], [0.05, None]])  ->  ["rate  n", " 0.1  2", "0.05  -"]

    Args:
        header: names of the columns.
        rows: cells of each row; None is shown as "-".
    """
    cells = [list(map(_text, row)) for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    columns = zip(*rows, strict=True)
    right = [all(c in (None, "-") or _is_number(c) for c in column) for column in columns]
    right = right or [False] * len(widths)
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a markdown table; None is shown as "-".

    Args:
        header: the names of the columns.
        rows: the cells of each row.
    """
    cells = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(map(_text, row))} |" for row in cells]


def count(number: int, noun: str) -> str:
    """Return a number with its noun, whose plural ends in -s: "1 tower" or "2 towers".

    Args:
        number: how many there are.
        noun: in the singular.
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def figure(value: float, decimals: int = 4) -> str:
    """Return a number in few characters: "0.1250", "1.25e-05" or "4.102e+11".

    Args:
        value: any, finite or not.
        decimals: of a number that is neither large nor so small that they would show little of it.
    """
    fixed = value == 0 or 10.0 ** (1 - decimals) <= abs(value) < 1e5
    return f"{value:.{decimals}f}" if fixed else f"{value:.4g}"


def first_of(texts: Sequence[str], most: int = 5) -> str:
    """Return the first texts on one line, as "a, b, ...".

    Args:
        texts: any number of them.
        most: how many are shown.
    """
    return ", ".join(texts[:most]) + ", ..." * (len(texts) > most)


def process_end(code: int, output: str) -> str:
    """Return how a process ended, by its return code, and its last line, or that of towers.

    Args:
        code: the return code, below 0 after a signal.
        output: what the process has written.
    """
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line.removeprefix("towers: ") for line in lines if line.startswith("towers: ")]
    return f"{how}: {(ours or lines or ['it printed nothing'])[-1][:500]}"


# Control characters except line ends and tabs, those that change the direction of writing, and
# surrogates, which stand for undecodable bytes.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Escape characters that would control a terminal, such as file names may contain."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_line(line: str, stream: TextIO | None) -> None:
    """Print a line at once, with characters escaped that the stream lacks or that would control it.

    Args:
        line: any text.
        stream: standard output or error; None if it is closed.
    """
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = printable(line).encode(encoding, "backslashreplace").decode(encoding)
    print(shown, file=stream, flush=True)


def _text(cell: Any) -> str:
    return "-" if cell is None else printable(str(cell))


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True
