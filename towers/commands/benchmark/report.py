"""What the windows of `towers benchmark` say: rates, the split of a step, ratios, the limit."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SPLIT = ("input", "compute", "gather", "update")
LARGE_PERCENT = 5.0  # of a step that is no computing: from here on it is named as the limit


@dataclasses.dataclass(frozen=True)
class Measured:
    """The windows of one of our lanes.

    Attributes:
        num_towers: of the lane.
        scaling: "strong" for the global batch of the options, "weak" for that batch on each tower.
        batch_size: global.
        ready: what the lane said before its first window.
        windows: {part: [seconds of a step, one for each window]}, "" for the whole step.
    """

    num_towers: int
    scaling: str
    batch_size: int
    ready: Mapping[str, Any]
    windows: Mapping[str, Sequence[float]]

    def rates(self, part: str = "") -> list[float]:
        """Return the examples/s of each window."""
        return [self.batch_size / seconds for seconds in self.windows[part]]


def result_of(lane: Measured, one_tower: float | None) -> dict[str, Any]:
    """Return the entry of a lane in `results`.

    Args:
        lane: what was measured.
        one_tower: examples/s of one tower, None if it was not measured.

    Returns:
        Beside what the lane said of itself: "examples_per_second" and "control", {"median", "min",
        "max"}; "efficiency": rate / control, window by window, the median; "speedup": rate over
        that of one tower; "scaling_efficiency": speedup / towers, None where devices share their
        hardware and it could not be 1; "split": {"input": {"seconds", "percent"}, ...}; "clipped":
        parts whose difference came out below 0; "gflops", "matmul_gflops" and "arithmetic_rate",
        their ratio.
    """
    full, control = lane.rates(), lane.rates("control")
    speedup = statistics.median(full) / one_tower if one_tower else None
    split, clipped = split_of(lane.windows)
    flop = lane.ready["flop_per_example"]
    gflops = statistics.median(full) * flop / 1e9
    matmul = [lane.ready["matmul_flop"] / seconds / 1e9 for seconds in lane.windows["matmul"]]
    shared = lane.ready["shared"]
    said = ("devices", "shared", "graph_seconds", "first_step_seconds", "peak_memory_mib")
    return {
        "num_towers": lane.num_towers,
        "scaling": lane.scaling,
        "batch_size": lane.batch_size,
        "examples_per_second": spread(full),
        "control": spread(control),
        "efficiency": spread([a / b for a, b in zip(full, control, strict=True)])["median"],
        "speedup": speedup,
        "scaling_efficiency": None if shared or not speedup else speedup / lane.num_towers,
        "split": split,
        "clipped": clipped,
        "flop_per_example": flop,
        "gflops": gflops,
        "matmul_gflops": statistics.median(matmul),
        "arithmetic_rate": gflops / statistics.median(matmul),
        **{name: lane.ready[name] for name in (*said, "precision", "variables")},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def split_of(windows: Mapping[str, Sequence[float]]) -> tuple[dict[str, Any], list[str]]:
    """Return the split of a step, and the parts whose difference noise made negative: they are 0.

    A loop that leaves something out cannot take longer than one that does not: where it did, in the
    noise, it counts as long as that. So the parts add up to the whole step.

    Args:
        windows: as of `Measured`; without "constant" nothing was read, and input is 0.
    """
    middle = {part: statistics.median(seconds) for part, seconds in windows.items()}
    full = middle[""]
    found = [full, middle.get("constant", full), middle["gather"], middle["control"]]
    capped = [min(found[: i + 1]) for i in range(len(found))]
    _, constant, gather, control = capped
    seconds = {
        "input": full - constant,
        "compute": control,
        "gather": gather - control,
        "update": constant - gather,
    }
    split = {n: {"seconds": s, "percent": 100 * s / full} for n, s in seconds.items()}
    names = ("input", "update", "gather")
    longer = [n for n, before, own in zip(names, capped, found[1:], strict=False) if own > before]
    return split, longer


def limit(result: Mapping[str, Any], hints: Mapping[str, str]) -> str:
    """Return the sentence that says what limits a configuration, and which flag to try.

    Args:
        result: one of `result_of`.
        hints: {"input" | "gather" | "update" | "compute": what to try}.
    """
    towers, percents = result["num_towers"], {n: s["percent"] for n, s in result["split"].items()}
    where = f"{towers} tower{'s' * (towers > 1)} at batch size {result['batch_size']}"
    worst = max(("input", "gather", "update"), key=lambda name: percents[name])
    if 100 - percents["compute"] > LARGE_PERCENT:
        what = {
            "input": "the wait for input",
            "gather": "the gather",
            "update": "the update",
        }[worst]
        return f"{what} limits {where}: {percents[worst]:.0f} % of a step; try {hints[worst]}"
    within = f"{abs(100 * (1 - result['efficiency'])):.0f} %"
    if result["shared"]:
        return (
            f"the hardware that the devices share limits {where}: within {within} of the control, "
            f"so more towers cannot help; try {hints['compute']}"
        )
    return (
        f"nothing but computing limits {where}: within {within} of the control; try "
        f"{hints['compute']}, or more devices"
    )


def ratios_of(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return median and range of the window-by-window ratios ours / theirs."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the tables of a benchmark's result, in markdown."""
    lines = [
        "| scaling | towers | batch | examples/s, median (range) | control | of control | input | "
        "compute | gather | update | of matmul | graph, first step | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        split = " | ".join(f"{row['split'][name]['percent']:.1f} %" for name in SPLIT)
        lines.append(
            f"| {row['scaling']} | {row['num_towers']} | {row['batch_size']} "
            f"| {range_text(row['examples_per_second'])} | {row['control']['median']:.0f} "
            f"| {100 * row['efficiency']:.0f} % | {split} | {100 * row['arithmetic_rate']:.0f} % "
            f"| {row['graph_seconds']:.1f} s, {row['first_step_seconds']:.2f} s "
            f"| {row['peak_memory_mib']:.0f} |"
        )
    if result["peers"]:
        lines += ["", "| beside | examples/s, median (range) | ours / this, median (range) | MiB |"]
        lines.append("|---|---|---|---|")
        for name, peer in result["peers"].items():
            ratio, memory = result["ratio_ranges"][name], peer["peak_memory_mib"]
            lines.append(
                f"| {name} | {range_text(peer['examples_per_second'])} | {range_text(ratio, 2)} "
                f"| {'-' if memory is None else format(memory, '.0f')} |"
            )
    return lines


def range_text(values: Mapping[str, float], digits: int = 0) -> str:
    """Return "3210 (3100 to 3300)"."""
    low, middle, high = (f"{values[key]:.{digits}f}" for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"
