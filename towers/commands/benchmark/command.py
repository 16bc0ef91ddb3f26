"""`towers benchmark`: how fast, how it scales, where the time of a step goes, and beside whom.

Each configuration is a process of its own, a lane: ours (`benchmark_lane`) with each number of
towers, on the global batch of the options (strong scaling) and on that batch for each tower (weak),
and other programs that train the same model (`scripts/peers`). All are warmed up, and then they
take turns, window by window. This process computes nothing meanwhile.
"""

import contextlib
import dataclasses
import importlib.util
import os
import platform
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from towers import devices
from towers.commands.benchmark.lanes import LaneError
from towers.commands.benchmark.options import BenchmarkOptions
from towers.commands.benchmark.report import Measured, limit, ratios_of, result_of, spread, table
from towers.commands.benchmark.start import Own, Turn, peer_config, start_own, start_peers
from towers.devices import host
from towers.errors import InputError, RunError
from towers.options.run import Options

PEER_FOLDER = Path("scripts") / "peers"
PROGRAMS = {"jax": "jax_loop", "mirrored_own_layers": "mirrored"}  # else as the peer is called


def benchmark(options: BenchmarkOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what the options describe.

    Returns:
        "results": see `benchmark_report.result_of`; "ratios" {peer: ours / peer, median of the
        windows}, "ratio_ranges" {peer: {"median", "min", "max"}}; "peers" {peer:
        {"examples_per_second", "peak_memory_mib", "versions"}}; "skipped" and "failed" {peer: the
        reason}; "limit": what limits the largest number of towers; "notes"; "machine"; "versions".

    Raises:
        InputError: the options cannot be had; nothing was measured.
        RunError: one of our own lanes failed.
    """
    peers = check(options)
    numbers = options.tower_numbers() or default_numbers(options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminated_as_interrupted())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        exported = peers and options.dataset != "synthetic"
        images = os.path.join(folder, "train.npz") if exported else ""
        try:
            own = start_own(options, numbers, images, stack, say)
            config = peer_config(options, own[-1], images)
            others, skipped, failed = start_peers(peers, config, options, stack, say)
            take_turns(own, others, failed, options.windows, say)
            for entry in own:
                entry.lane.finish()
        except LaneError as error:
            raise RunError(f"the benchmark's own lane failed: {error}") from None
        memory = finish_peers(others, failed)
    result = collect(options, own, others, memory, failed) | {"skipped": skipped, "failed": failed}
    for line in ["", heading(options, result), "", *table(result), ""]:
        say(line)
    for note in result["notes"]:
        say(f"note        {note}")
    for kind in ("skipped", "failed"):
        for name, reason in result[kind].items():
            say(f"{kind:11} {name}: {reason}")
    say(f"limit       {result['limit']}")
    if options.plot:
        from towers.commands.benchmark.plot import draw

        draw(result, options.plot)
        say(f"plot        {options.plot}")
    return result


def check(options: BenchmarkOptions) -> dict[str, Path]:
    """Return {peer: its program}, and refuse what could fail after all is measured.

    Raises:
        InputError: a program or matplotlib is missing, or the plot's folder.
    """
    programs = {n: PEER_FOLDER / f"{PROGRAMS.get(n, n)}.py" for n in options.peers()}
    for name, program in programs.items():
        if not program.is_file():
            raise InputError(
                f"--against={name}: there is no {program} in this folder; "
                "run it in a checkout of towers"
            )
    if options.plot:
        if importlib.util.find_spec("matplotlib") is None:
            raise InputError("--plot needs matplotlib: pip install matplotlib")
        folder = Path(options.plot).expanduser().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InputError(f"--plot={options.plot}: there is no folder {folder} to write to")
    return programs


def default_numbers(options: BenchmarkOptions) -> list[int]:
    """Return 1 and all GPUs, or all devices that are named; without GPUs 1, 2 and 4."""
    if options.devices.strip().lower() == "cpu":
        return [1, 2, 4]
    named = [name for name in options.devices.split(",") if name]
    towers = devices.describe()
    if not named and towers[0].device.startswith("/cpu"):
        return [1, 2, 4]
    return sorted({1, len(named or towers)})


def take_turns(
    own: Sequence[Own],
    others: Mapping[str, tuple[Turn, dict[str, Any]]],
    failed: dict[str, str],
    num_windows: int,
    say: Callable[[str], None],
) -> None:
    """Let all lanes train in turn; a peer that fails is left out from then on.

    Raises:
        LaneError: one of our own lanes failed.
    """
    order = [turn for entry in own for turn in entry.turns.values()]
    order += [turn for turn, _ in others.values()]
    say(f"measuring   {num_windows} windows of {sum(t.seconds for t in order):.0f} s at least")
    for window in range(num_windows):
        # Every other window backwards: neither of two neighbours is always the first.
        for turn in order[:: -1 if window % 2 else 1]:
            if turn.lane.name in failed:
                continue
            try:
                turn.take()
            except LaneError as error:
                if turn.lane.name not in others:
                    raise
                failed[turn.lane.name] = str(error)
                turn.lane.close()
        rates = [f"{e.batch_size / e.turns[''].found[-1]:.0f} ({e})" for e in own]
        say(f"window      {window + 1}/{num_windows}: examples/s {', '.join(rates)}")


def finish_peers(
    others: Mapping[str, tuple[Turn, dict[str, Any]]], failed: dict[str, str]
) -> dict[str, float]:
    """Return {peer: peak memory in MiB} of those that are there still."""
    memory = {}
    for name, (turn, _) in others.items():
        if name not in failed:
            with contextlib.suppress(LaneError):  # it was measured; only this is missing
                memory[name] = turn.lane.finish()["peak_memory_mib"]
    return memory


def collect(
    options: BenchmarkOptions,
    own: Sequence[Own],
    others: Mapping[str, tuple[Turn, dict[str, Any]]],
    memory: Mapping[str, float],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """Return the result, see `benchmark`, from what was measured."""
    measured = [
        Measured(
            e.num_towers,
            e.scaling,
            e.batch_size,
            e.ready,
            {part: turn.found for part, turn in e.turns.items()},
        )
        for e in own
    ]
    ones = [m for m in measured if m.num_towers == 1]
    one_tower = spread(ones[0].rates())["median"] if ones else None
    results = [result_of(m, one_tower) for m in measured]
    rates = {
        name: [own[-1].batch_size / seconds for seconds in turn.found]
        for name, (turn, _) in others.items()
        if name not in failed
    }
    ratios = {name: ratios_of(measured[-1].rates(), theirs) for name, theirs in rates.items()}
    peers = {
        name: {
            "examples_per_second": spread(theirs),
            "peak_memory_mib": memory.get(name),
            "versions": others[name][1].get("versions", {}),
        }
        for name, theirs in rates.items()
    }
    return {
        "results": sorted(results, key=lambda r: (r["scaling"], r["num_towers"])),
        "ratios": {name: ratio["median"] for name, ratio in ratios.items()},
        "ratio_ranges": ratios,
        "peers": peers,
        "limit": limit(results[-1], hints(options, own[-1])),
        "notes": notes(options, results),
        "machine": machine(own[-1]),
        "versions": own[-1].ready["versions"],
    }


def hints(options: BenchmarkOptions, own: Own) -> dict[str, str]:
    """Return {what limits: the flag to try}."""
    placements = {f.name: f for f in dataclasses.fields(Options)}.get("variables")
    choices = placements.metadata.get("choices", ()) if placements else ()
    auto = "auto" in choices and own.ready["variables"] != "auto"
    synced = own.ready["batch_norm"] and options.batch_norm == "sync" and own.num_towers > 1
    moved = ["--variables=auto"] * auto
    larger = f"--batch_size={2 * options.batch_size}"
    return {
        "input": "a data set held as arrays, or --dataset=synthetic to see the rate without it",
        "gather": " or ".join([larger, *moved, *["--batch_norm=local"] * synced]),
        "update": " or ".join(
            [larger, *moved, *["--optimizer=momentum"] * (options.optimizer == "adamw")]
        ),
        "compute": larger if "16" in options.dtype else "--dtype=mixed_bfloat16",
    }


def heading(options: BenchmarkOptions, result: Mapping[str, Any]) -> str:
    """Return the line that says what was measured, on what."""
    where, versions = result["machine"], result["versions"]
    return (
        f"{options.model}({options.model_args}), {options.dtype}, {options.dataset} data; "
        f"{where['cores']} cores, {where['processor']}; {', '.join(where['devices'])}; "
        f"Python {versions['python']}, TensorFlow {versions['tensorflow']}; "
        f"{options.windows} interleaved windows of {options.seconds:g} s"
    )


def notes(options: BenchmarkOptions, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a reader must know to read the table right."""
    found = [
        "control: each tower computes its gradients from weights of its own, without gather, "
        "update or input: what perfect scaling would give on this machine"
    ]
    for row in results:
        if row["clipped"]:
            found.append(
                f"{row['num_towers']} towers, {row['scaling']}: {' and '.join(row['clipped'])} "
                "came out below 0, in the noise, and stand as 0: take more --windows"
            )
    if options.accumulate_steps > 1:
        found.append(
            f"--accumulate_steps={options.accumulate_steps}: the control takes each batch at once"
        )
    return found


def machine(own: Own) -> dict[str, Any]:
    """Return what it was measured on."""
    return {
        "processor": host.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "devices": own.ready["devices"],
        "device_names": own.ready["device_names"],
    }


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the lanes, too, as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
