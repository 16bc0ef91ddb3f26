"""The checks of `gpu_check.py`: a table, the most telling first, and what each of them does.

A check runs in a process of its own. It is a generator: what it yields is kept at once, what it
raises is what failed.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import towers
from towers import cli, devices, tf_internals
from towers.builder import collectives
from towers.devices import gpus as gpu_memory
from towers.devices import memory, nvml
from towers.devices.nvml import MIB
from towers.errors import RunError
from towers.formatting import first_line
from towers.monitoring.profiler import Profiler
from towers.options.run import Options
from towers.training.run.setup import RunContext, assemble, load_data, prepare

ROOT = Path(__file__).resolve().parent.parent
# The types that are rarest in collectives come last: a failure ends all that follow.
SUM_TYPES = "float32", "float64", "float16", "int64", "bfloat16", "int32"


class Skipped(Exception):
    """What cannot be tried here, for a reason that is no fault."""


@dataclasses.dataclass(frozen=True)
class Gpus:
    """What the checks run on: so many GPUs, or in a dry run CPU devices that stand in for them."""

    number: int
    dry: bool = False
    folder: Path = Path("gpu_check")  # of the results and of the runs

    @property
    def all(self) -> int:
        """The number of towers on all GPUs; a single GPU is split into two."""
        return max(self.number, 2)

    @property
    def flags(self) -> list[str]:
        """The flag by which a dry run stays on the CPU."""
        return ["--devices=cpu"] * self.dry

    def batch_size(self, towers: int) -> int:
        return (4 if self.dry else 64) * towers

    def limit(self, check: "Check") -> float:
        """Return the seconds that a check may take: about half goes by the number of towers."""
        return check.seconds * (2 + self.all) / 4

    def devices(self, number: int = 0) -> list[str]:
        """Return the devices of so many towers, by default of all; nothing may have started."""
        if self.dry:
            return devices.tower_devices(number or self.all, "cpu")
        cards = tf.config.list_physical_devices("GPU")
        if len(cards) == 1 and number != 1:
            [gpu] = devices.describe()
            half = tf.config.LogicalDeviceConfiguration(
                memory_limit=min((gpu.free_bytes or 8192 * MIB) // MIB // 3, 8192)
            )
            tf.config.set_logical_device_configuration(cards[0], [half, half])
        return devices.tower_devices(number or self.all)


@dataclasses.dataclass(frozen=True)
class Check:
    """A check: its name, what it decides, and how long it may take on two GPUs."""

    name: str
    decides: str
    seconds: int
    run: Callable[[Gpus], Iterator[Any]]


def expect(condition: bool, problem: str) -> None:
    """End a check that failed, with the problem."""
    if not condition:
        raise RunError(problem)


# ---------------------------------------------------------------------------- Commands


def command(line: str) -> Callable[[Gpus], Iterator[Any]]:
    """Return a check that runs `towers LINE --json` in its process; {all} is the number of towers.

    A single GPU is split into two for it if it asks for two towers.
    """

    def run(gpus: Gpus) -> Iterator[Any]:
        arguments = shlex.split(line.format(all=gpus.all))
        if "--num_towers=1" not in arguments and "--allow_growth" not in arguments:
            gpus.devices()
        arguments += gpus.flags
        printed = io.StringIO()
        print("towers", *arguments, "--json", file=sys.stderr)
        with contextlib.redirect_stdout(printed):
            code = cli.main([*arguments, "--json"])
        report = json.loads(printed.getvalue() or "null")
        if report is not None:
            yield report
        if code:
            sys.exit(code)  # the command has said why

    return run


def train(name: str, flags: str) -> Callable[[Gpus], Iterator[Any]]:
    """Return a check that trains with these flags; the run stays in FOLDER/runs/NAME."""

    def run(gpus: Gpus) -> Iterator[Any]:
        num_towers = int(flags.format(all=gpus.all).partition("--num_towers=")[2].split()[0])
        folder = shlex.quote(str(gpus.folder / "runs" / name))
        rest = f" --train_dir={folder} --overwrite --batch_size={gpus.batch_size(num_towers)}"
        rest += f" --log_every_steps=10 {' '.join(short(gpus, 50))}"
        for result in command(f"train {flags}{rest}")(gpus):
            yield result
            expect(math.isfinite(result["train_loss"]), f"the loss is {result['train_loss']}")

    return run


def short(gpus: Gpus, max_steps: int) -> list[str]:
    """Return the flags of a run of so many steps; CPUs show only that all of it works."""
    few = ["--dataset=scripts.gpu_checks:few_images", "--max_steps=10", "--trust"]
    return few if gpus.dry else [f"--max_steps={max_steps}"]


def few_images() -> tuple:
    """Return a data set that CPUs are done with at once."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (384, 32, 32, 3)).astype(np.uint8)
    labels = random.integers(0, 10, 384)
    return (images[:256], labels[:256]), (images[256:], labels[256:]), 10


def run_apart(*arguments: object, **environ: str) -> tuple[int, Any]:
    """Run `towers ... --json` in a process of its own; return its exit code and what it prints."""
    run = [sys.executable, "-m", "towers", *map(str, arguments), "--json"]
    print(shlex.join(run), file=sys.stderr)
    environ = os.environ | environ
    done = subprocess.run(run, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ)
    return done.returncode, json.loads(done.stdout or "null")


# ---------------------------------------------------------------------------- Towers


def all_sum(gpus: Gpus) -> Iterator[Any]:
    """An all-sum over all GPUs is exact in each type."""
    names = gpus.devices()
    numbers = np.arange(100_003) % 16  # whole and small: each type holds their sum
    expected = sum(numbers + tower for tower in range(len(names)))
    for dtype in SUM_TYPES:

        @tf.function(autograph=False)
        def sums(*values: Any) -> list[Any]:
            return [total for (total,) in collectives.all_sum([[v] for v in values], names)]

        values = []
        for tower, name in enumerate(names):
            with tf.device(name):
                values.append(tf.identity(tf.constant(numbers + tower, dtype)))
        for name, total in zip(names, sums(*values), strict=True):
            right = tf.constant(expected, dtype).numpy()
            expect(np.array_equal(total.numpy(), right), f"a wrong sum of {dtype} on {name}")
        yield f"{dtype}: exact"


def doctor(_: Gpus) -> Iterator[Any]:
    """`towers doctor` finds no problem."""
    code, findings = run_apart("doctor")
    yield findings
    problems = [finding for finding in findings or () if finding["status"] == "problem"]
    expect(code == 0, "; ".join(f"{finding['name']}: {finding['detail']}" for finding in problems))


def fit(gpus: Gpus) -> Iterator[Any]:
    """`fit` over towers gives the losses of plain `fit`; and the seconds of a step of each."""
    names, steps = gpus.devices(), 10
    tf.config.experimental.enable_tensor_float_32_execution(False)  # its rounding hides faults
    size = gpus.batch_size(gpus.all)
    random = np.random.default_rng(0)
    x = random.standard_normal((steps * size, 32, 32, 3), np.float32)
    y = random.integers(0, 10, steps * size)
    losses, layers = {}, keras.layers
    for title in ("plain", "towers"):
        keras.utils.set_random_seed(0)
        body = [layers.Conv2D(16, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
        last = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
        model = keras.Sequential([keras.Input((32, 32, 3)), *body, *last])
        if title == "towers":
            model = towers.parallelize(model, devices=names)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
        seconds = []
        for _ in range(3):  # the first one is traced
            start = time.perf_counter()
            history = model.fit(x, y, batch_size=size, shuffle=False, verbose=0).history
            losses.setdefault(title, []).extend(history["loss"])
            seconds.append((time.perf_counter() - start) / steps)
        yield {title: {"losses": losses[title], "seconds_per_step": min(seconds)}}
    pairs = zip(losses["plain"], losses["towers"], strict=True)
    off = max(abs(one - other) / abs(one) for one, other in pairs)
    yield {"largest_relative_difference": off}
    expect(off < 1e-3, f"the losses differ by {off:.1e}")


def long_run(gpus: Gpus) -> Iterator[Any]:
    """2,000 steps, 200 in a dry run, leave no thread, descriptor or memory behind."""
    names = gpus.devices()
    fields = dict(model="models.resnet:resnet20", augment="resnet", variables="replicated")
    fields |= dict(num_towers=len(names), batch_size=gpus.batch_size(len(names)))
    run = prepare(Options(**fields, devices=",".join(names)))
    loop, batches = run.train_loop(), iter(run.batches(0, 0))
    steps = 200 if gpus.dry else 2000
    loop(batches, tf.constant(20))["loss"].numpy()
    before = held(names)
    yield {"steps": 20, **before}
    for done in range(steps // 4, steps + 1, steps // 4):
        for _ in range(steps // 4 // 10):
            loss = float(loop(batches, tf.constant(10))["loss"])
        after = held(names)
        yield {"steps": 20 + done, "loss": loss, **after}
    expect(math.isfinite(loss), f"the loss is {loss}")
    for name, more in {"threads": 4, "descriptors": 4, "resident_mib": 256, "gpu_mib": 64}.items():
        grown = f"{after[name]} {name} after {steps} steps, {before[name]} before"
        expect(after[name] <= before[name] + more, grown)


def held(names: list[str]) -> dict[str, int]:
    """Return what this process holds: threads, descriptors, MiB of the host and of GPUs."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident_mib": int(status["VmRSS"].split()[0]) // 1024,
        "gpu_mib": int(sum(memory.of_device(name)[0] for name in names if "gpu" in name)),
    }


def resume(gpus: Gpus) -> Iterator[Any]:
    """A run that is repeated, and one that was stopped and resumed, end with the same bits."""
    common = ["--deterministic", *gpus.flags]

    def make(name: str, *max_steps: int) -> dict[str, np.ndarray]:
        folder = gpus.folder / "runs" / name
        for number, steps in enumerate(max_steps):
            code, _ = run_apart(
                "train", f"--train_dir={folder}", *["--overwrite"] * (number == 0), *common,
                "--model=models.resnet:resnet20", "--augment=resnet", "--variables=replicated",
                f"--num_towers={gpus.number}", f"--batch_size={gpus.batch_size(gpus.number)}",
                "--num_epochs=100", "--evaluate_every_epochs=0",
                *short(gpus, 0), f"--max_steps={steps}",
                TF_DETERMINISTIC_OPS="1",
            )  # fmt: skip
            expect(code == 0, f"the run of {name} to step {steps} ended with exit code {code}")
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder / "checkpoints"))
        keys = reader.get_variable_to_shape_map()
        return {key: np.asarray(reader.get_tensor(key)) for key in keys}

    def different(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> list[str]:
        keys = [k for k in one if k not in other or one[k].tobytes() != other[k].tobytes()]
        return [key for key in keys if "OBJECT_GRAPH" not in key]

    once, resumed = make("once", 20), make("resumed", 10, 20)
    yield {"arrays": len(once), "different_after_resuming": (bad := different(once, resumed))}
    if not bad:
        return
    again = different(once, make("again", 20))
    yield {"different_if_repeated": again}
    raise RunError(f"{len(bad)} arrays differ after resuming, {len(again)} if repeated: {bad[0]}")


def evaluate(gpus: Gpus) -> Iterator[Any]:
    """Evaluations by all towers and by one say the same."""
    runs = sorted(gpus.folder.glob("runs/*/result.json"))
    if not runs:
        raise Skipped("no run has come to its end that could be evaluated")
    results = {}
    for number in dict.fromkeys((gpus.number, 1)):
        line = "evaluate", f"--train_dir={runs[0].parent}", f"--num_towers={number}"
        code, results[number] = run_apart(*line, "--trust", *gpus.flags)
        expect(code == 0, f"the evaluation by {number} ended with exit code {code}")
        yield {"run": runs[0].parent.name, "num_towers": number, **results[number]}
    few, many = results[1], results[gpus.number]
    for name, off in {"examples": 0, "loss": 0.01 * few["loss"], "accuracy": 0.01}.items():
        difference = f"{name} {many[name]} by {gpus.number} towers, {few[name]} by 1"
        expect(abs(few[name] - many[name]) <= off, difference)


def batch_norm(gpus: Gpus) -> Iterator[Any]:
    """The fused kernels of two towers compute what Keras' formula does on the CPU."""
    names = gpus.devices(2)
    layer = keras.layers.BatchNormalization()
    with tf.device("/cpu:0"):
        x = tf.random.stateless_normal([16, 8, 8, 4], [0, 0], 3.0, 2.0)
        layer.build(x.shape)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 3)
        expected = tape.gradient(loss, [layer.gamma.value, layer.beta.value])
    builder = towers.TowerBuilder(names, batch_norm="sync")

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        loss_fn = lambda x: tf.reduce_sum(layer(x, training=True) ** 3, [1, 2, 3])  # noqa: E731
        return builder.gradients(loss_fn, [layer.gamma, layer.beta], x)[1]

    pairs = zip(step(x), expected, strict=True)
    off = max(float(tf.reduce_max(abs(g * 16 - e)) / tf.reduce_max(abs(e))) for g, e in pairs)
    yield {"largest_relative_difference": off}
    expect(off < 1e-4, f"largest relative difference {off:.1e}")


def copies(gpus: Gpus) -> Iterator[Any]:
    """What is copied between any two devices arrives bit for bit."""
    names = ["/cpu:0", *gpus.devices()]
    bits = tf.random.stateless_uniform([MIB], [0, 0], None, None, dtype=tf.int32)
    values = tf.bitcast(bits & 0x7FFFFF | 0x3F800000, tf.float32)  # from 1 to 2: all bits count
    wrong, pairs = [], list(itertools.permutations(names, 2))
    for source, target in pairs:
        with tf.device(source):
            there = tf.identity(values) * 1.0  # computed on the source
        with tf.device(target):
            back = tf.identity(there) * 1.0
        expect(target[1:].upper() in back.device, f"{source} -> {target} ran on {back.device}")
        if not (back.numpy() == values.numpy()).all():
            wrong.append(f"{source} -> {target}")
    yield f"{len(pairs)} ways between {len(names)} devices"
    expect(not wrong, f"other bits arrive: {', '.join(wrong)}")


def profile(gpus: Gpus) -> Iterator[Any]:
    """A profile holds the kernels of each GPU."""
    names = gpus.devices(2)
    builder = towers.TowerBuilder(names)
    product = tf.function(lambda a: builder.sum(lambda: tf.matmul(a, a)))
    a = tf.random.stateless_normal([512, 512], [0, 0])
    product(a)
    said: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Profiler(folder, (0, 3), said.append) as profiler:
            profiler.begin(0)
            for _ in range(3):
                product(a)
            profiler.end(3)
        traces = list(folder.glob("train/plugins/profile/*/*.xplane.pb"))
        expect(len(traces) == 1, said[-1])
        trace = xplane_pb2.XSpace.FromString(traces[0].read_bytes())
    if gpus.dry:  # logical CPU devices have no plane of their own
        titles = {m.name for plane in trace.planes for m in plane.event_metadata.values()}
        matmuls = [title for title in titles if "tower_" in title and "MatMul" in title]
        yield {"ops": matmuls}
        expect(bool(matmuls), "no MatMul")
        return
    busy = {
        f"/gpu:{plane.name.split(':')[2].split()[0]}": 1e-9 * sum(
            event.duration_ps for line in plane.lines if line.name.startswith("Stream")
            for event in line.events
        )
        for plane in trace.planes
        if plane.name.startswith("/device:GPU:")
    }  # fmt: skip
    yield {f"milliseconds of kernels on {name}": ms for name, ms in busy.items()}
    if not any(busy.values()):
        raise Skipped(
            "no kernel was recorded; the driver may keep its counters for root "
            "(NVreg_RestrictProfilingToAdminUsers)"
        )
    missing = ", ".join(name for name in names if not busy.get(name))
    if missing and gpus.number == 1:
        raise Skipped(f"parts of one GPU have one trace: {busy}")
    expect(not missing, f"no kernel on {missing}")


def telemetry(gpus: Gpus) -> Iterator[Any]:
    """Towers have times, of the order of those of the steps, and hold memory."""
    names = gpus.devices(2)
    run = prepare(Options(num_towers=2, batch_size=256, devices=",".join(names)))
    loop, batches = run.train_loop(), iter(run.batches(0, 0))
    loop(batches, tf.constant(5))
    start = time.perf_counter()
    values = {name: value.numpy() for name, value in loop(batches, tf.constant(20)).items()}
    wall, seconds = time.perf_counter() - start, values["tower_seconds"]
    most = [memory.of_device(name)[1] for name in names]
    yield {"tower_seconds": seconds.tolist(), "seconds": wall, "mib": most}
    # A step that is measured begins on idle GPUs and is longer than others, which it stands for.
    expect(bool((seconds > 0).all() and (seconds < 10 * wall).all()), f"{seconds} of {wall:.3f} s")
    expect(min(most) > 4, f"towers hold {most} MiB, and the weights alone are 4")


# ---------------------------------------------------------------------------- GPUs only


def total_mib() -> int:
    """Return the memory of the first GPU as CUDA has it."""
    [gpu, *_] = gpu_memory.visible_gpus(nvml.gpus())
    if gpu.cuda_bytes is None or gpu.free_bytes is None:
        raise Skipped("the driver does not tell the memory of this GPU")
    return gpu.cuda_bytes // MIB


def fraction(_: Gpus) -> Iterator[Any]:
    """A fraction is of the GPU's total memory, and what TensorFlow may take."""
    total = total_mib()
    devices.configure(per_process_gpu_memory_fraction=0.25)
    [line, *_] = devices.read_back()
    limit = tf_internals.device_memory_bytes()["/gpu:0"] // MIB
    yield f"{line.split(maxsplit=1)[1]}, of {total} MiB"
    expect(limit == total // 4, f"{limit} MiB of {total} MiB")


def limit(_: Gpus) -> Iterator[Any]:
    """A limit is read back, and holds."""
    devices.configure(gpu_memory_limit_mib=512)
    [line, *_] = devices.read_back()
    try:
        with tf.device("/gpu:0"):
            tf.zeros([256 * MIB]).numpy()  # 1 GiB
    except tf.errors.ResourceExhaustedError:
        yield f"{line.split(maxsplit=1)[1]}; 1 GiB is refused"
        return
    raise RunError("1 GiB was given in spite of a limit of 512 MiB")


def growth(_: Gpus) -> Iterator[Any]:
    """With growth, a small tensor leaves most of the GPU: CUDA itself takes some 100 MiB."""
    total_mib()
    free_before = devices.describe()[0].free_bytes
    devices.configure(allow_growth=True)
    [line, *_] = devices.read_back()
    with tf.device("/gpu:0"):
        tf.zeros([MIB]).numpy()
    [gpu, *_] = devices.describe()
    taken = (free_before - gpu.free_bytes) // MIB
    yield f"{line.split(maxsplit=1)[1]}; 4 MiB in use, {taken} MiB taken"
    expect(taken < free_before // MIB / 2, f"4 MiB in use, {taken} MiB taken")


def visible(_: Gpus) -> Iterator[Any]:
    """The largest GPU, by the driver's number, is the only one that is seen."""
    everything = gpu_memory.visible_gpus(nvml.gpus())
    if not everything:
        raise Skipped("the driver (NVML) tells of no GPU")
    largest = max(everything, key=lambda gpu: (gpu.total_bytes or 0, gpu.index))
    largest, index = largest.key, largest.index
    devices.configure(visible_gpus=largest)
    seen = [gpu.driver_index for gpu in devices.describe()]
    expect(seen == [index], f"--visible_gpus={largest}, and TensorFlow sees {seen}")
    devices.read_back()
    started = [name for name in tf_internals.device_memory_bytes() if name.startswith("/gpu")]
    expect(started == ["/gpu:0"], f"--visible_gpus={largest}, and {started} have started")
    yield f"GPU {largest} of {len(everything)}"


def session(_: Gpus) -> Iterator[Any]:
    """A session takes the fraction of its `ConfigProto`."""
    total = total_mib()
    config = devices.config_proto(per_process_gpu_memory_fraction=0.25, allow_soft_placement=False)
    with tf.Graph().as_default(), tf.device("/gpu:0"):
        product = tf.matmul(tf.ones([64, 64]), tf.ones([64, 64]))
        with tf.compat.v1.Session(config=config) as running:
            expect(bool((running.run(product) == 64).all()), "a wrong product")
            limits = {d.name[-5:]: d.memory_limit_bytes // MIB for d in running.list_devices()}
    yield f"{limits['GPU:0']} MiB of {total} MiB"
    expect(0.23 < limits["GPU:0"] / total < 0.27, f"{limits['GPU:0']} of {total} MiB")


# ---------------------------------------------------------------------------- The table

ONE = "--num_towers=1 --variables=replicated"
TWO = "--num_towers=2 --variables=replicated"
ALL = "--num_towers={all} --variables=replicated"
SHARDED = "--num_towers={all} --variables=sharded"
RESNET = "--model=models.resnet:resnet20 --augment=resnet"
STRICT = "--placement=strict --allow_soft_placement=false"


def _train(name: str, decides: str, seconds: int, flags: str) -> Check:
    return Check(name, decides, seconds, train(name, flags))


# Name, what it decides, seconds that it may take on two GPUs, what is run.
CHECKS = [
    # The first one compiles kernels where GPUs are newer than TensorFlow's build.
    _train("one_gpu", "whether a GPU trains at all", 900, ONE),
    Check("all_sum", "whether all GPUs sum exactly, in each type", 180, all_sum),
    _train("two_gpus", "whether two GPUs train together", 300, TWO),
    Check("doctor", "what is wrong with this machine", 300, doctor),
    _train("all_gpus", "whether all GPUs train together", 300, ALL),
    Check("fit", "whether `fit` over towers gives what plain `fit` gives, and its speed", 300, fit),
    _train("batch_norm_all", "BatchNorm over all towers", 300, f"{ALL} {RESNET}"),
    _train("batch_norm_local", "BatchNorm of each", 300, f"{ALL} {RESNET} --batch_norm=local"),
    _train("strict", "whether each op has a GPU kernel", 300, f"{ALL} {RESNET} {STRICT}"),
    Check("long_run", "whether thousands of steps leave anything behind", 600, long_run),
    Check("resume", "whether repeated and resumed runs are the same, bit for bit", 600, resume),
    Check("evaluate", "whether all towers evaluate as one does", 300, evaluate),
    _train("allow_growth", "--allow_growth on two GPUs", 300, f"{TWO} --allow_growth"),
    Check(
        "verify", "whether N towers compute what one GPU computes", 600,
        command(f"verify {RESNET} --variables=replicated --num_towers=1,{{all}} --steps=2"
                " --batch_size=24"),
    ),
    _train("default", "which --variables a run chooses by itself", 600, "--num_towers={all}"),
    Check("batch_norm_kernels", "whether fused kernels compute BatchNorm", 180, batch_norm),
    Check("copies", "whether copies between devices arrive", 180, copies),
    _train("sharded", "--variables=sharded", 300, SHARDED),
    _train("cpu", "--variables=cpu", 300, "--num_towers={all} --variables=cpu"),
    _train("float16", "mixed_float16, with its loss scale", 300, f"{ALL} --dtype=mixed_float16"),
    _train("bfloat16", "mixed_bfloat16", 300, f"{ALL} --dtype=mixed_bfloat16"),
    _train("keras_metrics", "a step with Keras' metrics", 300, f"{SHARDED} --metrics=accuracy"),
    _train("xla", "--jit_compile", 600, f"{ALL} --jit_compile"),
    Check("profile", "whether a profile names the ops of each device", 180, profile),
    Check("telemetry", "the times and the memory of each tower", 300, telemetry),
]  # fmt: skip
# Memory options and the driver: there is nothing that could stand in for them.
GPU_CHECKS = [
    Check("memory_fraction", "--per_process_gpu_memory_fraction", 120, fraction),
    Check("memory_limit", "--gpu_memory_limit_mib, and whether it holds", 120, limit),
    Check("memory_growth", "--allow_growth, and what it leaves", 120, growth),
    Check("visible_gpus", "--visible_gpus", 120, visible),
    Check("session", "the fraction of a session", 120, session),
]


MODELS = {
    "cnn": {"model": "models.cnn:cnn", "augment": "tutorial"},
    "resnet20": {"model": "models.resnet:resnet20", "augment": "resnet"},
}
# What a step is timed with: one thing varies at a time. A program of XLA's meets no other.
STEPS = {
    "1024": {},
    "128": {"batch_size": 128},
    "bfloat16": {"dtype": "mixed_bfloat16"},
    "xla": {"jit_compile": True, "batch_norm": "local"},
    "cpu": {"variables": "cpu"},
}


def step_check(name: str, number: int, changes: str) -> Check:
    """Return the check that times the steps of a model on so many GPUs."""

    def run(gpus: Gpus) -> Iterator[Any]:
        given = {"variables": "replicated", "batch_size": 1024} | MODELS[name] | STEPS[changes]
        size = {"batch_size": 2 * number} if gpus.dry else {}  # CPUs show only that it works
        options = Options(**given | size, num_towers=number)
        try:
            built = assemble(options, gpus.devices(number), load_data(options))
            yield {"seconds_per_step": (seconds := seconds_per_step(built))}
        except tf.errors.ResourceExhaustedError as error:
            raise Skipped(first_line(error, 300)) from None
        yield {"seconds_per_step": seconds, "examples_per_second": options.batch_size / seconds}

    decides = f"seconds of a step: {name}, {number} towers, {STEPS[changes]}"
    return Check(f"step_{name}_{number}_{changes}", decides, 600, run)


def seconds_per_step(run: RunContext, windows: int = 3, window_seconds: float = 0.5) -> float:
    """Return the median over windows of a step's seconds; the first loop warms up."""
    loop, batches = run.train_loop(telemetry=False), iter(run.batches(0, 0))
    loop(batches, tf.constant(10))["loss"].numpy()  # which waits for all
    found = []
    for _ in range(windows):
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < window_seconds:
            loop(batches, tf.constant(10))["loss"].numpy()
            steps += 10
        found.append((time.perf_counter() - start) / steps)
    return statistics.median(found)


def checks_for(gpus: Gpus) -> list[Check]:
    """Return all checks for so many GPUs, the most telling first."""
    checks = CHECKS if gpus.dry else CHECKS + GPU_CHECKS
    if gpus.all == 2:  # these are all
        checks = [check for check in checks if check.name != "all_gpus"]
    numbers = dict.fromkeys((gpus.number, 1))
    return [*checks, *(step_check(*case) for case in itertools.product(MODELS, numbers, STEPS))]
