"""`towers benchmark`: speed, scaling, and the speed of other programs.

Each configuration is a process of its own: ours (`own_run`) with each number of towers, with the
global batch of the options (strong scaling) and with that batch for each tower (weak), and other
programs that train the same model (`scripts/peers`). After warming up they take turns, window by
window, while this process is idle.
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
PROGRAMS = {"jax": "jax_loop", "mirrored_own_layers": "mirrored"}  # {peer: program}


def run(options: BenchmarkOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure the configurations that the options describe.

    Args:
        options: the run, the numbers of towers, the peers, and the windows.
        say: called with each line to print.

    Returns:
        "results", one for each of our configurations; "ratios" {peer: ours / peer, median of the
        windows}, "ratio_ranges"; "peers"; "skipped" and "failed" {peer: reason}; "machine";
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
            raise RunError(f"the benchmark's own run failed: {error}") from None
        result = collect(runs)
    for line in lines(options, result):
        say(line)
    if options.plot:
        draw(result, options.plot)
        say(f"plot        {options.plot}")
    return result


def default_numbers(named: str) -> list[int]:
    """Return 1 and the number of GPUs or named devices; without GPUs 1, 2 and 4."""
    named = named.strip().lower()
    if named not in ("", "cpu", "gpu"):
        return sorted({1, len(named.split(","))})
    places = devices.describe()
    if named == "cpu" or places[0].device.startswith("/cpu"):
        return [1, 2, 4]
    return sorted({1, len(places)})
