"""Rates, ratios and tables of `towers benchmark`."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towers.commands.benchmark.options import BenchmarkOptions
from towers.commands.benchmark.runner import Runner
from towers.devices import host
from towers.formatting import markdown

_COPIED = "num_towers batch_size devices shared peak_memory_mib".split()


def collect(runners: Sequence[Runner]) -> dict[str, Any]:
    """Return the result of a benchmark after all turns, and end the other programs."""
    ready, ours = runners[0].ready, runners[0].windows[""]  # with which peers are compared
    own = [result_of(runner) for runner in runners if runner.scaling]
    failed = {r.name: r.failed for r in runners if r.failed}
    skipped = {r.name: r.ready["skipped"] for r in runners if "skipped" in r.ready}
    peers = [r for r in runners if not (r.scaling or r.failed or r.name in skipped)]
    ratios = {peer.name: _ratios(peer.windows[""], ours) for peer in peers}
    return {
        "results": sorted(own, key=lambda r: (r["scaling"], r["num_towers"])),
        "ratios": {name: ratio["median"] for name, ratio in ratios.items()},
        "ratio_ranges": ratios,
        "peers": {
            peer.name: {
                "examples_per_second": _rates(ready, peer.windows[""]),
                "peak_memory_mib": peer.finish(),
                "versions": peer.ready["versions"],
            }
            for peer in peers
        },
        "machine": {
            "processor": host.processor(),
            "cores": os.cpu_count(),
            "devices": ready["devices"],
            "device_names": ready["device_names"],
        },
        "versions": ready["versions"],
        "skipped": skipped,
        "failed": failed,
    }


def result_of(runner: Runner) -> dict[str, Any]:
    """Return the entry of a runner of ours in "results"."""
    ready, windows = runner.ready, runner.windows
    return {name: ready[name] for name in _COPIED} | {
        "scaling": runner.scaling,
        "examples_per_second": _rates(ready, windows[""]),
        "control": _rates(ready, windows["control"]),
        "efficiency": _ratios(windows["control"], windows[""])["median"],
    }


def _ratios(longer: Sequence[float], shorter: Sequence[float]) -> dict[str, float]:
    """Return median, min and max of longer / shorter, window by window."""
    values = [a / b for a, b in zip(longer, shorter, strict=True)]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _rates(ready: Mapping[str, Any], seconds: Sequence[float]) -> dict[str, float]:
    """Return median, min and max of examples/s, from each window's seconds per step."""
    return _ratios([ready["batch_size"]] * len(seconds), seconds)


def lines(options: BenchmarkOptions, result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines to print: markdown tables, and notes.

    Args:
        options: options of the benchmark.
        result: the result that `collect` returns.
    """
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
        cells += [f"{100 * row['efficiency']:.0f} %", f"{row['peak_memory_mib']:.0f}"]
        rows.append([row["scaling"], row["num_towers"], row["batch_size"], *cells])
    yield from markdown([*header, "peak MiB"], rows)
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
        "gather, update or input: what perfect scaling would give on this machine; of control: "
        "the median of the ratios of all windows"
    )
    for kind in ("skipped", "failed"):
        for name, reason in result[kind].items():
            yield f"{kind:11} {name}: {reason}"


def _range(values: Mapping[str, float], digits: int = 0) -> str:
    low, middle, high = (f"{values[key]:.{digits}f}" for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"
