"""The lanes of one benchmark: which there are, what they are told, and how they take turns."""

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
from towers.text import count

MATMUL_SIZE = 2048  # rows of a matrix
# How long each part of a step is measured, as a share of a window.
SHARES = {"": 1.0, "constant": 0.5, "gather": 0.5, "control": 0.5, "matmul": 0.25}
COPIED = "model dtype optimizer learning_rate momentum weight_decay ema_decay steps_per_loop seed"


@dataclasses.dataclass
class Turns:
    """All lanes of a benchmark. A LaneError that a method raises is of one of our own lanes."""

    options: BenchmarkOptions
    stack: contextlib.ExitStack  # which ends the lanes
    say: Callable[[str], None]
    # Ours: weak scaling, then strong; peers are compared with the last.
    own: list[Lane] = dataclasses.field(default_factory=list)
    peers: list[Lane] = dataclasses.field(default_factory=list)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # {peer: why}
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def start_own(self, numbers: Sequence[int], images: str) -> None:
        """Start our lanes with these numbers of towers, one after the other.

        The first, which asks for most, writes the training set to `images`, unless that is "".

        Raises:
            InputError: a lane refuses its options.
        """
        run = self.options.run
        size = run.batch_size
        plan = [(n, "weak", size * n) for n in numbers if n > 1]
        plan += [(n, "strong", size) for n in numbers]
        for num_towers, scaling, batch_size in reversed(plan):
            name = f"{count(num_towers, 'tower')}, {scaling}"
            changes: dict[str, Any] = {"dataset": self.options.dataset}
            changes |= {"num_towers": num_towers, "batch_size": batch_size}
            if run.devices.strip().lower() == "cpu":
                changes["visible_gpus"] = run.visible_gpus or "none"  # left to others
            else:
                changes["devices"] = ",".join(run.devices.split(",")[:num_towers])
            config = {
                "options": dataclasses.asdict(dataclasses.replace(run, **changes)),
                "matmul_size": MATMUL_SIZE,
                "export": "" if self.own else images,
            }
            self.say(f"starting    {name}, batch size {batch_size} ...")
            lane = self._start(name, ["-m", "towers.commands.benchmark.own_lane"], config)
            if "refused" in lane.ready:
                raise InputError(lane.ready["refused"])
            lane.ready["scaling"] = scaling
            self.own.insert(0, lane)

    def start_peers(self, programs: Mapping[str, Path], images: str) -> None:
        """Start other programs, which train what the last of our lanes trains."""
        run, ours = self.options.run, self.own[-1].ready
        config = {name: getattr(run, name) for name in COPIED.split()} | {
            "model_args": run.model_keywords(),
            "image_shape": ours["image_shape"],
            "num_classes": ours["num_classes"],
            "batch_size": ours["batch_size"],
            "num_devices": ours["num_towers"],
            "gpus": ours["devices"][0].startswith("/gpu"),
            "data": images,
            "augment": run.augment if images else "off",
        }
        changes = {"fit": {"num_devices": 1}, "mirrored_own_layers": {"own_layers": True}}
        if images and not os.path.exists(images):
            why = f"--dataset={self.options.dataset} holds no bytes that it could be given"
            self.skipped, programs = dict.fromkeys(programs, why), {}
        for name, program in programs.items():
            self.say(f"starting    {name} ...")
            try:
                lane = self._start(name, [str(program)], config | changes.get(name, {}))
                if "ready" in lane.ready:
                    self.peers.append(lane)
                else:
                    self.skipped[name] = lane.ready["skipped"]
            except LaneError as error:
                self.failed[name] = str(error)

    def _start(self, name: str, program: Sequence[str], config: Mapping[str, Any]) -> Lane:
        """Start a lane that finds towers and shares a GPU's memory with the others; await it."""
        paths = os.environ.get("PYTHONPATH"), str(Path(__file__).resolve().parents[3])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        run = self.options.run
        if not run.per_process_gpu_memory_fraction + run.gpu_memory_limit_mib:
            environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        lane = Lane(name, [sys.executable, *program, json.dumps(config)], environment)
        self.stack.callback(lane.close)
        lane.wait_ready()
        return lane

    def take(self) -> None:
        """Let all lanes train in turn; a peer that fails is left out from then on."""
        windows, length = self.options.windows, self.options.seconds
        turns = [(lane, part) for lane in self.own for part in [*lane.ready["parts"], ""]]
        turns += [(lane, "") for lane in self.peers]
        seconds = sum(length * SHARES[part] for _, part in turns)
        self.say(f"measuring   {windows} windows of {seconds:.0f} s at least")
        for window in range(windows):
            # Every other window backwards: neither of two neighbours is always the first.
            for lane, part in turns[:: -1 if window % 2 else 1]:
                try:
                    if lane.name not in self.failed:
                        lane.train(length * SHARES[part], part)
                except LaneError as error:
                    if lane in self.own:
                        raise
                    self.failed[lane.name] = str(error)
                    self.peers.remove(lane)
            rates = [
                f"{e.ready['batch_size'] / e.windows[''][-1]:.0f} ({e.name})" for e in self.own
            ]
            self.say(f"window      {window + 1}/{windows}: examples/s {', '.join(rates)}")
