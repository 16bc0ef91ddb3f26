"""What `towers benchmark` prints: tables in markdown, a sentence, and the picture."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towers.commands.benchmark.options import BenchmarkOptions
from towers.commands.benchmark.results import SPLIT
from towers.text import count, markdown


def lines(options: BenchmarkOptions, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the result of `results.collect`."""
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
    header += [*SPLIT, "of matmul", "graph, first step", "peak MiB"]
    rows = []
    for row in result["results"]:
        rates = _range(row["examples_per_second"]), f"{row['control']['median']:.0f}"
        parts = [f"{row['split'][name]['percent']:.1f} %" for name in SPLIT]
        times = f"{row['graph_seconds']:.1f} s, {row['first_step_seconds']:.2f} s"
        cells = [*rates, f"{100 * row['efficiency']:.0f} %", *parts]
        cells += [f"{100 * row['arithmetic_rate']:.0f} %", times, f"{row['peak_memory_mib']:.0f}"]
        rows.append([row["scaling"], row["num_towers"], row["batch_size"], *cells])
    yield from markdown(header, rows)
    yield ""
    if result["peers"]:
        header = ["beside", "examples/s, median (range)", "ours / this, median (range)", "MiB"]
        rows = []
        for name, peer in result["peers"].items():
            rate, ratio = peer["examples_per_second"], result["ratio_ranges"][name]
            memory = peer["peak_memory_mib"]
            rows.append([name, _range(rate), _range(ratio, 2), memory and f"{memory:.0f}"])
        yield from markdown(header, rows)
        yield ""
    for note in result["notes"]:
        yield f"note        {note}"
    for kind in ("skipped", "failed"):
        for name, reason in result[kind].items():
            yield f"{kind:11} {name}: {reason}"
    yield f"limit       {result['limit']}"


def _range(values: Mapping[str, float], digits: int = 0) -> str:
    """Return "3210 (3100 to 3300)"."""
    low, middle, high = (f"{values[key]:.{digits}f}" for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def draw(result: Mapping[str, Any], path: str) -> None:
    """Write a PNG file: examples/s beside other programs, and scaling beside the control."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bars, scaling = figure.subplots(1, 2, width_ratios=[3, 2])
    strong = [row for row in result["results"] if row["scaling"] == "strong"]
    rates = {count(row["num_towers"], "tower"): row["examples_per_second"] for row in strong} | {
        name: peer["examples_per_second"] for name, peer in result["peers"].items()
    }
    colours = ["tab:blue" if i < len(strong) else "tab:gray" for i in range(len(rates))]
    middles, errors = _bars(list(rates.values()))
    bars.barh(list(rates), middles, color=colours, xerr=errors, capsize=3)
    for i, values in enumerate(rates.values()):
        bars.text(values["max"], i, f"  {values['median']:.0f}", va="center", fontsize=9)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set_xlabel(f"examples/s at batch size {strong[-1]['batch_size']}: median and range")
    labels = {"strong": "the same global batch", "weak": "that batch on each tower"}
    for (kind, label), colour in zip(labels.items(), ("tab:blue", "tab:orange"), strict=True):
        if kind not in {row["scaling"] for row in result["results"]}:
            continue
        rows = [r for r in result["results"] if r["scaling"] == kind or r["num_towers"] == 1]
        towers = [row["num_towers"] for row in rows]
        for key, style, name in (
            ("examples_per_second", "-o", f"{kind}: {label}"),
            ("control", "--x", "its control: gradients alone"),
        ):
            middles, errors = _bars([row[key] for row in rows])
            scaling.errorbar(
                towers, middles, errors, fmt=style, color=colour, capsize=3, label=name
            )
    scaling.set_xticks(sorted({row["num_towers"] for row in result["results"]}))
    scaling.set(xlabel="towers", ylabel="examples/s", ylim=(0, None))
    scaling.legend(fontsize=8, loc="lower right")
    where = result["machine"]
    figure.suptitle(f"{where['cores']} cores, {where['processor']}", fontsize=9)
    figure.savefig(os.path.expanduser(path), dpi=120)


def _bars(spreads: Sequence[Mapping[str, float]]) -> tuple[list[float], list[list[float]]]:
    """Return the medians, and how far each is from the least and from the greatest value."""
    middles = [s["median"] for s in spreads]
    below = [s["median"] - s["min"] for s in spreads]
    return middles, [below, [s["max"] - s["median"] for s in spreads]]
