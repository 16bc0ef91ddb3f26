"""What the windows of `towers benchmark` say: rates, the split of a step, ratios, the limit."""

import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towers.commands.benchmark.lanes import Turns
from towers.commands.benchmark.options import BenchmarkOptions
from towers.devices import host
from towers.text import count, markdown

SPLIT = ("input", "compute", "gather", "update")
LARGE_PERCENT = 5.0  # of a step that is no computing: from here on it is named as the limit
_SAID = "num_towers scaling batch_size devices shared peak_memory_mib flop_per_example".split()
HINTS = {  # what limits: the flags to try
    "input": "a data set held as arrays, or --dataset=synthetic to see the rate without it",
    "gather": "a larger --batch_size, --variables=auto or --batch_norm=local",
    "update": "a larger --batch_size or --variables=auto",
    "compute": "--dtype=mixed_bfloat16 or a larger --batch_size",
}


def collect(options: BenchmarkOptions, turns: Turns) -> dict[str, Any]:
    """Return the result of a benchmark, whose peers end now."""
    results = [result_of(lane.ready, lane.windows) for lane in turns.own]
    ready, ours = turns.own[-1].ready, turns.own[-1].windows[""]
    ratios = {peer.name: ratios_of(peer.windows[""], ours) for peer in turns.peers}
    return {
        "results": sorted(results, key=lambda r: (r["scaling"], r["num_towers"])),
        "ratios": {name: ratio["median"] for name, ratio in ratios.items()},
        "ratio_ranges": ratios,
        "peers": {
            peer.name: {
                "examples_per_second": rates(ready, peer.windows[""]),
                "peak_memory_mib": peer.finish(),
                "versions": peer.ready["versions"],
            }
            for peer in turns.peers
        },
        "limit": limit(results[-1]),
        "machine": {
            "processor": host.processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "devices": ready["devices"],
            "device_names": ready["device_names"],
        },
        "versions": ready["versions"],
        "skipped": turns.skipped,
        "failed": turns.failed,
    }


def ratios_of(longer: Sequence[float], shorter: Sequence[float]) -> dict[str, float]:
    """Return median and range of the ratios, window by window."""
    values = [a / b for a, b in zip(longer, shorter, strict=True)]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def rates(ready: Mapping[str, Any], seconds: Sequence[float]) -> dict[str, float]:
    """Return median and range of examples/s, from the seconds of a step in each window."""
    return ratios_of([ready["batch_size"]] * len(seconds), seconds)


def result_of(ready: Mapping[str, Any], windows: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the entry of a lane in `results`."""
    full = rates(ready, windows[""])
    gflops = full["median"] * ready["flop_per_example"] / 1e9
    matmul = statistics.median(ready["matmul_flop"] / s / 1e9 for s in windows["matmul"])
    return {name: ready[name] for name in _SAID} | {
        "examples_per_second": full,
        "control": rates(ready, windows["control"]),
        "efficiency": ratios_of(windows["control"], windows[""])["median"],
        "split": split_of(windows),
        "gflops": gflops,
        "matmul_gflops": matmul,
        "arithmetic_rate": gflops / matmul,
    }


def split_of(windows: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return the split of a step.

    A loop that leaves something out cannot take longer than one that does not: where it did, in the
    noise, it counts as long as that. So the parts add up to the whole step.
    """
    middle = {part: statistics.median(seconds) for part, seconds in windows.items()}
    left, seconds = middle[""], {}
    for name, rest in (("input", "constant"), ("update", "gather"), ("gather", "control")):
        without = min(left, middle.get(rest, left))  # without "constant" nothing was read
        seconds[name], left = left - without, without
    seconds["compute"] = left
    return {
        name: {"seconds": seconds[name], "percent": 100 * seconds[name] / middle[""]}
        for name in SPLIT
    }


def limit(result: Mapping[str, Any]) -> str:
    """Return the sentence that says what limits a configuration, and which flag to try."""
    percents = {name: part["percent"] for name, part in result["split"].items()}
    where = f"{count(result['num_towers'], 'tower')} at batch size {result['batch_size']}"
    worst = max(("input", "gather", "update"), key=lambda name: percents[name])
    if 100 - percents["compute"] > LARGE_PERCENT:
        what = "the wait for input" if worst == "input" else f"the {worst}"
        return f"{what} limits {where}: {percents[worst]:.0f} % of a step; try {HINTS[worst]}"
    what, more = "nothing but computing", f"; try {HINTS['compute']}, or more devices"
    if result["shared"]:
        what = "the hardware that the devices share"
        more = f", so more towers cannot help; try {HINTS['compute']}"
    off = abs(100 * (1 - result["efficiency"]))
    return f"{what} limits {where}: within {off:.0f} % of the control{more}"


def lines(options: BenchmarkOptions, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the result of `collect`: tables in markdown, and a sentence."""
    where, versions, run = result["machine"], result["versions"], options.run
    yield ""
    yield (
        f"{run.model}({run.model_args}), {run.dtype}, {options.dataset} data; "
        f"{where['cores']} cores, {where['processor']}; {', '.join(where['devices'])}; "
        f"Python {versions['python']}, TensorFlow {versions['tensorflow']}; "
        f"{options.windows} interleaved windows of {options.seconds:g} s"
    )
    yield ""
    header = ["scaling", "towers", "batch", "examples/s, median (range)", "control", "of control"]
    rows = []
    for row in result["results"]:
        cells = [_range(row["examples_per_second"]), f"{row['control']['median']:.0f}"]
        percents = [row["split"][name]["percent"] for name in SPLIT]
        cells += [f"{100 * row['efficiency']:.0f} %", *(f"{p:.1f} %" for p in percents)]
        cells += [f"{100 * row['arithmetic_rate']:.0f} %", f"{row['peak_memory_mib']:.0f}"]
        rows.append([row["scaling"], row["num_towers"], row["batch_size"], *cells])
    yield from markdown([*header, *SPLIT, "of matmul", "peak MiB"], rows)
    yield ""
    if result["peers"]:
        rows = []
        for name, peer in result["peers"].items():
            rate, ratio = peer["examples_per_second"], result["ratio_ranges"][name]
            memory = peer["peak_memory_mib"]
            rows.append([name, _range(rate), _range(ratio, 2), memory and f"{memory:.0f}"])
        header = ["beside", "examples/s, median (range)", "ours / this, median (range)", "MiB"]
        yield from markdown(header, rows)
        yield ""
    yield (
        "note        control: each tower computes its gradients from weights of its own, without "
        "gather, update or input: what perfect scaling would give on this machine"
    )
    for kind in ("skipped", "failed"):
        for name, reason in result[kind].items():
            yield f"{kind:11} {name}: {reason}"
    yield f"limit       {result['limit']}"


def _range(values: Mapping[str, float], digits: int = 0) -> str:
    """Return "3210 (3100 to 3300)"."""
    low, middle, high = (f"{values[key]:.{digits}f}" for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def draw(result: Mapping[str, Any], path: str) -> None:
    """Write a PNG file: examples/s of our towers, and of other programs, with their ranges."""
    from matplotlib.figure import Figure

    strong = [row for row in result["results"] if row["scaling"] == "strong"]
    bars = {count(row["num_towers"], "tower"): row["examples_per_second"] for row in strong}
    bars |= {name: peer["examples_per_second"] for name, peer in result["peers"].items()}
    middles = [rate["median"] for rate in bars.values()]
    ranges = [[rate["median"] - rate["min"] for rate in bars.values()]]
    ranges += [[rate["max"] - rate["median"] for rate in bars.values()]]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = ["tab:blue" if i < len(strong) else "tab:gray" for i in range(len(bars))]
    drawn = axes.barh(list(bars), middles, color=colours, xerr=ranges, capsize=3)
    axes.bar_label(drawn, fmt="{:.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(f"examples/s at batch size {strong[-1]['batch_size']}: median and range")
    where = result["machine"]
    axes.set_title(f"{where['cores']} cores, {where['processor']}", fontsize=9)
    figure.savefig(os.path.expanduser(path), dpi=120)
