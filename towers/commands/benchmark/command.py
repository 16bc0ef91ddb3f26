"""`towers benchmark`: how fast, how it scales, and beside whom.

Each configuration is a process of its own: ours (`own_lane`) with each number of towers, on the
global batch of the options (strong scaling) and on that batch for each tower (weak), and other
programs that train the same model (`scripts/peers`). All are warmed up, and then they take turns,
window by window. This process computes nothing meanwhile.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from towers import devices
from towers.commands.benchmark.options import BenchmarkOptions
from towers.commands.benchmark.results import collect, draw, lines
from towers.commands.benchmark.runners import InterleavedRuns, RunnerError
from towers.errors import InputError, RunError
from towers.options import search_path
from towers.options.fields import parse_tower_numbers

PEER_FOLDER = Path(search_path.CHECKOUT, "scripts", "peers")
PROGRAMS = {"jax": "jax_loop", "mirrored_own_layers": "mirrored"}  # else as the peer is called


def run(options: BenchmarkOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what the options describe.

    Returns:
        "results", one for each configuration of ours; "ratios" {peer: ours / peer, median of the
        windows}, "ratio_ranges"; "peers"; "skipped" and "failed" {peer: the reason}; "machine";
        "versions".
    """
    programs = {n: PEER_FOLDER / f"{PROGRAMS.get(n, n)}.py" for n in options.peers()}
    for name, program in programs.items():
        if not program.is_file():
            raise InputError(
                f"--against={name}: there is no {program}: it comes with a checkout of towers; "
                "install that with pip install -e, or leave --against out"
            )
    numbers = parse_tower_numbers(options.num_towers) or default_numbers(options.run.devices)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        exported = programs and options.dataset != "synthetic"
        images = os.path.join(folder, "train.npz") if exported else ""
        runs = InterleavedRuns(options, stack, say)
        try:
            runs.start_own(numbers, images)
            runs.start_peers(programs, images)
            runs.take_turns()
        except RunnerError as error:
            raise RunError(f"the benchmark's own lane failed: {error}") from None
        result = collect(runs)
    for line in lines(options, result):
        say(line)
    if options.plot:
        draw(result, options.plot)
        say(f"plot        {options.plot}")
    return result


def default_numbers(named: str) -> list[int]:
    """Return 1 and all GPUs, or all devices that are named; without GPUs 1, 2 and 4."""
    named = named.strip().lower()
    if named not in ("", "cpu", "gpu"):
        return sorted({1, len(named.split(","))})
    places = devices.describe()
    if named == "cpu" or places[0].device.startswith("/cpu"):
        return [1, 2, 4]
    return sorted({1, len(places)})
