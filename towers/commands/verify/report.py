"""What `towers verify` prints and writes of the differences that it found."""

from collections.abc import Sequence
from typing import Any

from towers.commands.verify.differences import Difference, kind_of

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


def table(result: dict[str, Any], numbers: Sequence[int]) -> list[str]:
    """Return the table: the largest of each kind, then the arrays that differ most."""
    columns = list(map(str, numbers))
    rows = result["differences"]
    width = max(len(name) for name in [*rows, "largest relative difference, towers:"])

    def line(name: str, values: Sequence[Any]) -> str:
        cells = [v if isinstance(v, str) else f"{v:.1e}" for v in values]
        return f"  {name:{width}}" + "".join(f"{cell:>10}" for cell in cells)

    lines = [line("largest relative difference, towers:", columns)]
    for kind in _KINDS:
        of_kind = [row for name, row in rows.items() if kind_of(name) == kind]
        if of_kind:
            label = kind if len(of_kind) == 1 else f"{kind}, of {len(of_kind)}"
            lines.append(line(label, [max(row[c] for row in of_kind) for c in columns]))
    lines.append("")
    for name, row in list(rows.items())[:_SHOWN]:
        lines.append(line(name, [row[c] for c in columns]))
    if len(rows) > _SHOWN:
        lines.append(f"  and {len(rows) - _SHOWN} more, none larger")
    return lines
