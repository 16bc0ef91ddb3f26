"""The lanes of `towers benchmark`: which there are, how they are started, what they are told."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from towers.commands.benchmark.lanes import Lane, LaneError
from towers.commands.benchmark.options import BenchmarkOptions
from towers.errors import InputError
from towers.options.run import Options

MATMUL_SIZE = 2048  # rows of a matrix
# How long each part of a step is measured, as a share of a window.
SHARES = {"": 1.0, "constant": 0.5, "gather": 0.5, "control": 0.5, "matmul": 0.25}


@dataclasses.dataclass
class Turn:
    """What one lane does in a window, and what came of it: seconds of a step, one a window."""

    lane: Lane
    part: str
    seconds: float
    found: list[float] = dataclasses.field(default_factory=list)

    def take(self) -> None:
        """Let the lane train.

        Raises:
            LaneError: it failed.
        """
        answer = self.lane.ask(f"{self.seconds} {self.part}".strip(), self.seconds)
        self.found.append(answer["seconds"] / answer["steps"])


@dataclasses.dataclass
class Own:
    """One of our lanes: what was asked for, what it said, and its turns by part."""

    num_towers: int
    scaling: str
    batch_size: int
    lane: Lane
    ready: dict[str, Any]
    turns: dict[str, Turn]

    def __str__(self) -> str:
        """Return "2 towers, strong"."""
        return f"{self.num_towers} tower{'s' * (self.num_towers > 1)}, {self.scaling}"


def own_options(options: BenchmarkOptions, num_towers: int, batch_size: int) -> Options:
    """Return the options of one of our lanes."""
    changes: dict[str, Any] = dict(num_towers=num_towers, batch_size=batch_size, json=False)
    if options.devices.strip().lower() == "cpu":
        if not options.visible_gpus:
            changes["visible_gpus"] = "none"  # left to others
    elif options.devices:
        changes["devices"] = ",".join(options.devices.split(",")[:num_towers])
    return options.of_run(**changes)


def start_own(
    options: BenchmarkOptions,
    numbers: Sequence[int],
    images: str,
    stack: contextlib.ExitStack,
    say: Callable[[str], None],
) -> list[Own]:
    """Start our lanes, one after the other, and wait for each.

    Args:
        options: of the benchmark.
        numbers: of towers, rising.
        images: file that the training set is to be written to, for the peers, or "".
        stack: ends the lanes.
        say: prints a line.

    Returns:
        The lanes: weak scaling, then strong, so that the last is what peers are compared with.

    Raises:
        InputError: a lane refuses its options: the first to start asks for most.
        LaneError: a lane failed.
    """
    size = options.batch_size
    plan = [(n, "weak", size * n) for n in numbers if n > 1]
    plan += [(n, "strong", size) for n in numbers]
    found = []
    for num_towers, scaling, batch_size in reversed(plan):
        config = {
            "options": dataclasses.asdict(own_options(options, num_towers, batch_size)),
            "matmul_size": MATMUL_SIZE,
            "export": "" if found else images,
        }
        command = [sys.executable, "-m", "towers.commands.benchmark.own_lane", json.dumps(config)]
        lane = stack.enter_context(contextlib.closing(Lane("", command, _environment(options))))
        own = Own(num_towers, scaling, batch_size, lane, {}, {})
        say(f"starting    {own}, batch size {batch_size} ...")
        own.ready = lane.wait_ready()
        if "refused" in own.ready:
            raise InputError(own.ready["refused"])
        for part in [*own.ready["parts"], ""]:
            own.turns[part] = Turn(lane, part, options.seconds * SHARES[part])
        found.insert(0, own)
    return found


def peer_config(options: BenchmarkOptions, own: Own, images: str) -> dict[str, Any]:
    """Return what the peers are told to train: what `own` trains.

    "data" is None if the training set could not be written for them.
    """
    exported = images if own.ready["exported"] else None
    copied = "model dtype optimizer learning_rate momentum weight_decay ema_decay seed".split()
    return {name: getattr(options, name) for name in (*copied, "steps_per_loop")} | {
        "model_args": options.model_keywords(),
        "image_shape": own.ready["image_shape"],
        "num_classes": own.ready["num_classes"],
        "batch_size": own.batch_size,
        "num_devices": own.num_towers,
        "gpus": own.ready["devices"][0].startswith("/gpu"),
        "data": exported if images else "",
        "augment": options.augment if images else "off",
    }


def start_peers(
    programs: Mapping[str, Path],
    config: Mapping[str, Any],
    options: BenchmarkOptions,
    stack: contextlib.ExitStack,
    say: Callable[[str], None],
) -> tuple[dict[str, tuple[Turn, dict[str, Any]]], dict[str, str], dict[str, str]]:
    """Return {peer: (its turn, what it said)}, and {peer: why} for the skipped and the failed."""
    ready: dict[str, tuple[Turn, dict[str, Any]]] = {}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name, program in programs.items():
        if config["data"] is None:
            skipped[name] = f"--dataset={options.dataset} holds no bytes that it could be given"
            continue
        own = {"num_devices": 1} if name == "fit" else {}
        own |= {"own_layers": True} if name == "mirrored_own_layers" else {}
        say(f"starting    {name} ...")
        command = [sys.executable, str(program), json.dumps({**config, **own})]
        lane = stack.enter_context(contextlib.closing(Lane(name, command, _environment(options))))
        try:
            answer = lane.wait_ready()
        except LaneError as error:
            failed[name] = str(error)
            lane.close()
            continue
        if "ready" in answer:
            ready[name] = Turn(lane, "", options.seconds), answer
        else:
            skipped[name] = str(answer.get("skipped", answer.get("refused")))
    return ready, skipped, failed


def _environment(options: Options) -> dict[str, str]:
    """Return the variables of a lane: towers is found, and lanes share a GPU's memory."""
    path = os.environ.get("PYTHONPATH", "")
    package = str(Path(__file__).resolve().parents[3])
    found = {"PYTHONPATH": f"{path}{os.pathsep}{package}" if path else package}
    if not options.per_process_gpu_memory_fraction and not options.gpu_memory_limit_mib:
        found["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return found
