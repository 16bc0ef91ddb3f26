"""What the windows of `towers benchmark` say: rates, the split of a step, ratios, the limit."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from towers.commands.benchmark.options import BenchmarkOptions
from towers.commands.benchmark.turns import Turns
from towers.devices import host
from towers.text import count

SPLIT = ("input", "compute", "gather", "update")
LARGE_PERCENT = 5.0  # of a step that is no computing: from here on it is named as the limit
_SAID = "num_towers scaling batch_size devices shared graph_seconds first_step_seconds".split()
_SAID += "peak_memory_mib flop_per_example precision variables".split()


def collect(options: BenchmarkOptions, turns: Turns, memory: Mapping[str, float]) -> dict[str, Any]:
    """Return the result of a benchmark; `memory` is {peer: its peak in MiB}."""
    ones = [lane for lane in turns.own if lane.ready["num_towers"] == 1]
    one_tower = rates(ones[0].ready, ones[0].windows[""])["median"] if ones else None
    results = [result_of(lane.ready, lane.windows, one_tower) for lane in turns.own]
    ready, ours = turns.own[-1].ready, turns.own[-1].windows[""]
    ratios = {peer.name: ratios_of(peer.windows[""], ours) for peer in turns.peers}
    return {
        "results": sorted(results, key=lambda r: (r["scaling"], r["num_towers"])),
        "ratios": {name: ratio["median"] for name, ratio in ratios.items()},
        "ratio_ranges": ratios,
        "peers": {
            peer.name: {
                "examples_per_second": rates(ready, peer.windows[""]),
                "peak_memory_mib": memory.get(peer.name),
                "versions": peer.ready["versions"],
            }
            for peer in turns.peers
        },
        "limit": limit(results[-1], hints(options, ready)),
        "notes": notes(options, results),
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


def result_of(
    ready: Mapping[str, Any], windows: Mapping[str, Sequence[float]], one_tower: float | None
) -> dict[str, Any]:
    """Return the entry of a lane in `results`; `one_tower` is the examples/s of one tower."""
    full = rates(ready, windows[""])
    speedup = full["median"] / one_tower if one_tower else None
    alone = speedup and not ready["shared"]
    split, clipped = split_of(windows)
    gflops = full["median"] * ready["flop_per_example"] / 1e9
    matmul = statistics.median(ready["matmul_flop"] / s / 1e9 for s in windows["matmul"])
    return {name: ready[name] for name in _SAID} | {
        "examples_per_second": full,
        "control": rates(ready, windows["control"]),
        "efficiency": ratios_of(windows["control"], windows[""])["median"],
        "speedup": speedup,
        # None where devices share their hardware, and it could not be 1.
        "scaling_efficiency": speedup / ready["num_towers"] if alone else None,
        "split": split,
        "clipped": clipped,
        "gflops": gflops,
        "matmul_gflops": matmul,
        "arithmetic_rate": gflops / matmul,
    }


def split_of(windows: Mapping[str, Sequence[float]]) -> tuple[dict[str, Any], list[str]]:
    """Return the split of a step, and the parts whose difference noise made negative: they are 0.

    A loop that leaves something out cannot take longer than one that does not: where it did, in the
    noise, it counts as long as that. So the parts add up to the whole step.
    """
    middle = {part: statistics.median(seconds) for part, seconds in windows.items()}
    full = left = middle[""]
    seconds, clipped = {}, []
    for name, rest in (("input", "constant"), ("update", "gather"), ("gather", "control")):
        without = middle.get(rest, left)  # without "constant" nothing was read
        clipped += [name] * (without > left)
        seconds[name] = left - min(without, left)
        left = min(without, left)
    seconds["compute"] = left
    return {n: {"seconds": seconds[n], "percent": 100 * seconds[n] / full} for n in SPLIT}, clipped


def limit(result: Mapping[str, Any], hints: Mapping[str, str]) -> str:
    """Return the sentence that says what limits a configuration, and which flag to try."""
    percents = {name: part["percent"] for name, part in result["split"].items()}
    where = f"{count(result['num_towers'], 'tower')} at batch size {result['batch_size']}"
    worst = max(("input", "gather", "update"), key=lambda name: percents[name])
    if 100 - percents["compute"] > LARGE_PERCENT:
        what = "the wait for input" if worst == "input" else f"the {worst}"
        return f"{what} limits {where}: {percents[worst]:.0f} % of a step; try {hints[worst]}"
    what, more = "nothing but computing", f"; try {hints['compute']}, or more devices"
    if result["shared"]:
        what = "the hardware that the devices share"
        more = f", so more towers cannot help; try {hints['compute']}"
    off = abs(100 * (1 - result["efficiency"]))
    return f"{what} limits {where}: within {off:.0f} % of the control{more}"


def hints(options: BenchmarkOptions, ready: Mapping[str, Any]) -> dict[str, str]:
    """Return {what limits: the flag to try}."""
    run = options.run
    larger = f"--batch_size={2 * run.batch_size}"
    local = ready["batch_norm"] and run.batch_norm == "sync" and ready["num_towers"] > 1
    simpler = run.optimizer == "adamw"
    return {
        "input": "a data set held as arrays, or --dataset=synthetic to see the rate without it",
        "gather": f"{larger} or --variables=auto{' or --batch_norm=local' * local}",
        "update": f"{larger} or --variables=auto{' or --optimizer=momentum' * simpler}",
        "compute": larger if "16" in run.dtype else "--dtype=mixed_bfloat16",
    }


def notes(options: BenchmarkOptions, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a reader must know to read the table right."""
    found = [
        "control: each tower computes its gradients from weights of its own, without gather, "
        "update or input: what perfect scaling would give on this machine"
    ]
    found += [
        f"{count(row['num_towers'], 'tower')}, {row['scaling']}: {' and '.join(row['clipped'])} "
        "came out below 0, in the noise, and stand as 0: take more --windows"
        for row in results
        if row["clipped"]
    ]
    parts = options.run.accumulate_steps
    if parts > 1:
        found.append(f"--accumulate_steps={parts}: the control takes each batch at once")
    return found
