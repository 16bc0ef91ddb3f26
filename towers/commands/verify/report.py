"""What `towers verify` prints and writes of the differences that it found."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from towers.commands.verify.differences import TOLERANCE, Difference, kind_of

_SHOWN = 12  # lines of the table
_KINDS = ("loss", "gradient", "model", "optimizer", "average", "evaluation")


def by_number(found: Sequence[Difference], numbers: Sequence[int], what: str) -> dict[str, float]:
    """Return {"2": the largest difference on two towers}."""
    return {
        str(number): max((getattr(d, what) for d in found if d.num_towers == number), default=0.0)
        for number in numbers
    }


def by_name(found: Sequence[Difference], numbers: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return {name: {"2": its largest difference on two towers}}, the largest first."""
    result: dict[str, dict[str, float]] = {}
    for d in found:
        row = result.setdefault(d.name, dict.fromkeys(map(str, numbers), 0.0))
        row[str(d.num_towers)] = max(row[str(d.num_towers)], d.relative)
    return dict(sorted(result.items(), key=lambda item: -max(item[1].values())))


def first_difference(first: Difference, cause: str) -> dict[str, Any]:
    """Return the JSON of the first difference."""
    return {
        "num_towers": first.num_towers,
        "step": first.step,
        "name": first.name,
        "relative_difference": first.relative,
        "cause": cause,
    }


def say_table(
    rows: Mapping[str, Mapping[str, float]], numbers: Sequence[int], say: Callable[[str], None]
) -> None:
    """Say the largest difference of each kind, then the arrays that differ most: of `by_name`."""
    title = "largest relative difference, towers:"
    width = max(map(len, [*rows, title]))

    def say_row(name: str, values: Sequence[str]) -> None:
        say(f"  {name:{width}}" + "".join(f"{value:>10}" for value in values))

    say_row(title, list(map(str, numbers)))
    for kind in _KINDS:
        of_kind = [row.values() for name, row in rows.items() if kind_of(name) == kind]
        if of_kind:
            label = kind if len(of_kind) == 1 else f"{kind}, of {len(of_kind)}"
            say_row(label, [f"{max(column):.1e}" for column in zip(*of_kind, strict=True)])
    say("")
    for name, row in list(rows.items())[:_SHOWN]:
        say_row(name, [f"{value:.1e}" for value in row.values()])
    if len(rows) > _SHOWN:
        say(f"  and {len(rows) - _SHOWN} more, none larger")


def say_outcome(result: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Say whether it passed, and else what is the first to differ and why."""
    first = result["first_difference"]
    if first is None:
        largest = max(result["max_relative_difference"].values())
        say(f"passed      the largest relative difference is {largest:.1e}, under {TOLERANCE:g}")
        return
    when = f"at step {first['step']}" if first["step"] >= 0 else "before the first step"
    say(
        f"FAILED      {first['name']} is the first to differ, by "
        f"{first['relative_difference']:.1e} {when} on {first['num_towers']} towers"
    )
    say(f"likely      {first['cause']}")
