"""What a step takes on GPUs in one setting, what it copies, and ring against NCCL.

    steps = measure(Setting("resnet20", towers=1, variables="replicated"), "gpu")
    steps["128"]["seconds_per_step"], steps["128"]["copies"], steps["128"]["foretold"]

Copies are counted in a profile; beside them stands what `towers.graphs.gpu_view` foretells of the
same step, which it reads on logical CPU devices of this process. `scripts/gpu_check.py` runs all
this, each setting in a process of its own.
"""

import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from towers import devices
from towers.builder import kinds
from towers.errors import InputError
from towers.graphs import gpu_view, profile_summary
from towers.options.run import Options
from towers.text import first_line
from towers.training.run import Run, assemble, load_data

MODELS = {
    "cnn": {"model": "models.cnn:cnn", "augment": "tutorial"},
    "resnet20": {"model": "models.resnet:resnet20", "augment": "resnet"},
}
WAYS = ("host to GPU", "GPU to host", "GPU to GPU")
BATCH_SIZES = {"gpu": (128, 1024), "cpu": (8,)}  # a CPU shows only that all of this works
WINDOWS, WINDOW_SECONDS = 3, 0.5
STEPS = 10  # of a call of the loop
PROFILED_STEPS = 20


class Skipped(Exception):
    """What cannot be tried here, for a reason that is no fault."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is varied."""

    model: str
    towers: int
    variables: str
    dtype: str = "float32"
    jit_compile: bool = False

    def __str__(self) -> str:
        """Return "resnet20, 2 towers, replicated, float32, XLA"."""
        towers = f"{self.towers} tower{'s' * (self.towers > 1)}"
        xla = ["XLA"] * self.jit_compile
        return ", ".join([self.model, towers, self.variables, self.dtype, *xla])

    def options(self, batch_size: int) -> Options:
        """Return the options of its run."""
        given = dict(variables=self.variables, dtype=self.dtype, jit_compile=self.jit_compile)
        given |= MODELS[self.model]
        return Options(**given, num_towers=self.towers, batch_size=batch_size)


def settings(num_gpus: int) -> list[Setting]:
    """Return all settings that so many GPUs can have, the most telling first."""
    found = []
    for jit, dtype in itertools.product((False, True), ("float32", "mixed_bfloat16")):
        for towers in dict.fromkeys((num_gpus, 1)):
            # On one GPU, sharded variables lie where replicated ones do.
            for variables in ("replicated", "sharded", "cpu"):
                if towers > 1 or variables != "sharded":
                    found += [Setting(m, towers, variables, dtype, jit) for m in MODELS]
    return found


def measure(setting: Setting, kind: str) -> dict[str, dict[str, Any]]:
    """Return {"128": {"seconds_per_step", "copies", "foretold"}}, for each of the BATCH_SIZES.

    Copies are those of one step on all GPUs: {"host to GPU": {"number": 2.0, "bytes": 400000.0}};
    None where nothing was recorded or foretold. In place of all that stands "error" where a batch
    is too large for the GPU.

    Raises:
        Skipped: the model cannot be had in this setting.
    """
    foretell = setting.dtype == "float32" and not setting.jit_compile  # types copy as much
    devices.configure()
    stand_ins = []
    if foretell or kind == "cpu":  # before TensorFlow starts
        with kinds.cpus_for_gpus():
            stand_ins = devices.tower_devices(setting.towers, "cpu")
    names = stand_ins if kind == "cpu" else devices.tower_devices(setting.towers)
    sizes = BATCH_SIZES[kind]
    dataset = load_data(setting.options(sizes[0]))

    def build(names: Sequence[str], batch_size: int) -> tuple[Run, Any]:
        run = assemble(setting.options(batch_size), names, dataset)
        return run, iter(run.batches(0, 0))

    found = {}
    for batch_size in sizes:
        try:
            steps = _measured(*build(names, batch_size))
        except InputError as error:
            raise Skipped(first_line(error, 300)) from None
        except tf.errors.ResourceExhaustedError as error:
            found[str(batch_size)] = {"error": first_line(error, 200)}
            continue
        steps["foretold"] = None
        if foretell:
            with kinds.cpus_for_gpus():
                steps["foretold"] = _foretold(*build(stand_ins, batch_size))
        found[str(batch_size)] = steps
    return found


def _measured(run: Run, batches: Any) -> dict[str, Any]:
    """Time steps that nobody looks at, then profile some."""
    loop = run.train_loop(telemetry=False)

    def make_steps(number: int) -> None:
        loop(batches, tf.constant(number))["loss"].numpy()  # which waits for all

    make_steps(1)
    windows = _windows(lambda: make_steps(STEPS), STEPS)
    return {"seconds_per_step": statistics.median(windows), "copies": _profiled(make_steps)}


def _windows(call: Callable[[], None], per_call: int) -> list[float]:
    """Return the seconds of each part of a call, in each of WINDOWS, after a call that warms up."""
    call()
    windows = []
    for _ in range(WINDOWS):
        start, calls, passed = time.perf_counter(), 0, 0.0
        while passed < WINDOW_SECONDS:
            call()
            calls += 1
            passed = time.perf_counter() - start
        windows.append(passed / calls / per_call)
    return windows


def _profiled(make_steps: Callable[[int], None]) -> dict[str, dict[str, float]] | None:
    """Return what was copied in a step: what a call copies whatever its steps is taken off."""
    try:
        few, many = (_copied(make_steps, number) for number in (1, 1 + PROFILED_STEPS))
    except Exception:  # of any kind: the seconds are worth more than a profile
        return None
    if few is None or many is None:
        return None
    return {
        way: {
            "number": (many[way][0] - few[way][0]) / PROFILED_STEPS,
            "bytes": (many[way][1] - few[way][1]) / PROFILED_STEPS,
        }
        for way in many
    }


def _copied(make_steps: Callable[[int], None], number: int) -> dict[str, tuple[int, int]] | None:
    """Return what was copied in a call of so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        tf.test.experimental.sync_devices()
        tf.profiler.experimental.start(folder)
        try:
            make_steps(number)
            tf.test.experimental.sync_devices()
        finally:
            tf.profiler.experimental.stop()
        [path] = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        return profile_summary.copies(profile_summary.read_trace(path))


def _foretold(run: Run, batches: Any) -> dict[str, dict[str, float]]:
    """Return the copies of a step as `gpu_view` reads them from the graph."""
    view = gpu_view.read(run.train_loop(telemetry=False), batches, tf.constant(0))
    found = {way: {"number": 0, "bytes": 0} for way in WAYS}
    for move in view.transfers():
        ends = ["host" if end == "host" else "GPU" for end in (move.source, move.target)]
        way = found[" to ".join(ends)]
        way["number"] += 1
        way["bytes"] += move.bytes or 0
    return found


def in_words(steps: dict[str, dict[str, Any]]) -> str:
    """Return what `measure` found in one line; copies are those up, down and between GPUs."""
    lines = []
    for batch_size, found in steps.items():
        if "error" in found:
            lines.append(f"at {batch_size}: {found['error']}")
            continue
        line = f"{1e3 * found['seconds_per_step']:.2f} ms at {batch_size}"
        for name in ("copies", "foretold"):
            if copies := found[name]:
                numbers = " ".join(f"{copies[way]['number']:.3g}" for way in WAYS)
                line += f", {name} {numbers}"
        lines.append(line)
    return "; ".join(lines)


# ---------------------------------------------------------------------------- Ring against NCCL

SUM_BYTES = {"1 MiB": 2**20, "64 MiB": 2**26}
_keys = itertools.count(50_000_000)  # far from those of a step


def ring_against_nccl(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return {"nccl": {"1 MiB": seconds of an all-sum}, "ring": ...}; each sum is exact.

    Raises:
        ArithmeticError: a sum is wrong.
    """
    found: dict[str, dict[str, float]] = {}
    for hint in ("nccl", "ring"):
        for title, size in SUM_BYTES.items():
            values, tokens = [], []
            for name in names:
                with tf.device(name):
                    values.append(tf.Variable(tf.range(size // 4, dtype=tf.float32) % 1000))
                    tokens.append(tf.Variable(0.0))
            sums = _make_sums(names, values, tokens, hint)
            for name, total in zip(names, sums(), strict=True):
                expected = len(names) * (tf.range(size // 4, dtype=tf.float32) % 1000)
                if not bool(tf.reduce_all(total == expected)):
                    raise ArithmeticError(f"{hint}: a wrong sum of {title} on {name}")
            call = lambda sums=sums: [total[:1].numpy() for total in sums()]  # noqa: E731
            found.setdefault(hint, {})[title] = statistics.median(_windows(call, 1))
    return found


def _make_sums(
    names: Sequence[str], values: Sequence[tf.Variable], tokens: Sequence[tf.Variable], hint: str
) -> Callable[[], list[tf.Tensor]]:
    group, instance = next(_keys), next(_keys)

    @tf.function(autograph=False)
    def sums() -> list[tf.Tensor]:
        totals = []
        for name, value, token in zip(names, values, tokens, strict=True):
            with tf.device(name):
                total = tf.raw_ops.CollectiveReduceV2(
                    input=value.read_value(),
                    group_size=len(names),
                    group_key=group,
                    instance_key=instance,
                    ordering_token=[token.handle],  # one for all would order the GPUs
                    merge_op="Add",
                    final_op="Id",
                    communication_hint=hint,
                )
            totals.append(total)
        return totals

    return sums
