"""`towers benchmark`: speed, scaling, and the speed of other programs.

Each configuration is a process of its own: ours (`own_run`) with each number of towers, with the
global batch of the options (strong scaling) and with that batch for each tower (weak), and other
programs that train the same model (`scripts/peers`). After warming up they take turns, window by
window, while this process is idle.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from towers import devices
from towers.commands.benchmark.options import BenchmarkOptions
from towers.commands.benchmark.results import collect, lines
from towers.commands.benchmark.runner import Runner, take_turns
from towers.errors import InputError
from towers.formatting import count
from towers.options import search_path
from towers.options.augmentation import parse
from towers.options.fields import parse_tower_numbers

PEER_FOLDER = Path(search_path.CHECKOUT, "scripts", "peers")
PROGRAMS = {"mirrored_own_layers": "mirrored"}  # {peer: program}
PEER_OPTIONS = (
    "model dtype optimizer learning_rate momentum weight_decay ema_decay steps_per_loop seed"
)


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
    run_options = options.run
    grow = not run_options.per_process_gpu_memory_fraction + run_options.gpu_memory_limit_mib
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        exported = programs and options.dataset != "synthetic"
        images = os.path.join(folder, "train.npz") if exported else ""

        def start(name: str, *what: Any) -> Runner:
            say(f"starting    {name} ...")
            runner = Runner(name, *what, grow=grow)  # all share the GPUs' memory
            stack.callback(runner.close)
            runner.wait_ready()
            return runner

        runners = start_own(options, images, start)
        ours, why = runners[0].ready, ""
        if images and not os.path.exists(images):
            why = f"--dataset={options.dataset} holds no images as bytes, with one class each"
        if parse(ours["augment"]).cutout:
            why = f"--augment={ours['augment']} cuts out a square, and other programs do not"
        for name, program in programs.items() if not why else ():
            runners.append(start(name, [str(program)], _peer_config(options, name, ours, images)))
        take_turns(runners, options.windows, options.seconds, say)
        result = collect(runners)
    result["skipped"] |= dict.fromkeys(programs, why) if why else {}
    for line in lines(options, result):
        say(line)
    return result


def start_own(options: BenchmarkOptions, images: str, start: Callable[..., Runner]) -> list[Runner]:
    """Start our runners; peers are compared with the first.

    Args:
        options: the options of the benchmark.
        images: file to which the first writes the training set, or "".
        start: starts a `Runner` of these arguments.

    Raises:
        InputError: a runner refuses its options.
    """
    run, runners = options.run, []
    numbers = parse_tower_numbers(options.num_towers) or _default_numbers(run.devices)
    plan = [(n, "strong", run.batch_size) for n in reversed(numbers)]
    plan += [(n, "weak", run.batch_size * n) for n in reversed(numbers) if n > 1]
    for num_towers, scaling, batch_size in plan:
        changes = {"dataset": options.dataset, "num_towers": num_towers, "batch_size": batch_size}
        if run.devices.strip().lower() == "cpu":
            changes["visible_gpus"] = run.visible_gpus or "none"  # left to others
        else:
            changes["devices"] = ",".join(run.devices.split(",")[:num_towers])
        changed = dataclasses.asdict(dataclasses.replace(run, **changes))
        config = {"options": changed, "export": "" if runners else images}
        name = f"{count(num_towers, 'tower')}, {scaling}, batch size {batch_size}"
        runner = start(name, ["-m", "towers.commands.benchmark.own_run"], config, scaling)
        if "skipped" in runner.ready:
            raise InputError(runner.ready["skipped"])
        runners.append(runner)
    return runners


def _peer_config(
    options: BenchmarkOptions, name: str, ours: dict[str, Any], images: str
) -> dict[str, Any]:
    run = options.run
    return {option: getattr(run, option) for option in PEER_OPTIONS.split()} | {
        "model_args": run.model_keywords(),
        "image_shape": ours["image_shape"],
        "num_classes": ours["num_classes"],
        "batch_size": ours["batch_size"],
        "num_devices": 1 if name == "fit" else ours["num_towers"],
        "gpus": ours["devices"][0].startswith("/gpu"),
        "data": images,
        "augment": ours["augment"],
        "own_layers": name == "mirrored_own_layers",
    }


def _default_numbers(named: str) -> list[int]:
    """Return 1 and the number of GPUs or named devices; without GPUs 1, 2 and 4."""
    named = named.strip().lower()
    if named not in ("", "cpu", "gpu"):
        return sorted({1, len(named.split(","))})
    places = devices.describe()
    if named == "cpu" or places[0].device.startswith("/cpu"):
        return [1, 2, 4]
    return sorted({1, len(places)})
