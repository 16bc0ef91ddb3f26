"""The questions of `gpu_check.py` in the order in which they matter, and their checks.

A check runs in a process of its own, in which TensorFlow has not started. It is a generator: each
result that it yields is kept at once; an error means that the check failed. All sizes fit a GPU of
8 GB.
"""

import contextlib
import io
import itertools
import json
import math
import os
import pkgutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import towers
from scripts import step_memory
from tests import user_models
from towers import cli, devices, tf_internals
from towers.builder import gather
from towers.devices import gpus, memory, nvml
from towers.devices.nvml import MIB
from towers.errors import RunError, first_line
from towers.graphs.placement import traced_ops
from towers.options.run import Options
from towers.training.run.setup import RunContext, assemble, load_data

ROOT = Path(__file__).resolve().parent.parent
# GPUs of host memory (tests/gpu) are as slow as CPUs: they only show that each check works.
SIMULATED = not tf.test.is_built_with_cuda()
SIZES = (8, 16) if SIMULATED else (128, 1024)  # of batches
WINDOW = 2 if SIMULATED else 20  # steps that are timed together
GPU = "/gpu:0"
TEXT_LENGTH = 64
MODELS = {  # and their data
    "CNN": ("models.cnn:cnn", "scripts.gpu_checks:images"),
    "ResNet-20": ("models.resnet:resnet20", "scripts.gpu_checks:images"),
    "transformer": ("scripts.gpu_checks:transformer", "scripts.gpu_checks:texts"),
}


class CannotAsk(Exception):
    """A question that has no answer on this machine, and why."""


class Check(NamedTuple):
    """A check: its name, the seconds that it may take, and its function."""

    name: str
    seconds: int
    run: Callable[[], Iterator[Any]]


class Question:
    """A question and the checks that answer it."""

    def __init__(self, asks: str, *checks: Check):
        self.asks, self.checks = asks, checks
        self.seconds = sum(check.seconds for check in checks)


def expect(condition: bool, problem: str) -> None:
    """End a check that failed, with the problem."""
    if not condition:
        raise RunError(problem)


def command(line: str) -> Any:
    """Run `towers LINE --json` in this process; return its JSON."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.main([*line.split(), "--json"])
    if code and line != "doctor":
        sys.exit(code)  # the command has said why
    return json.loads(printed.getvalue())


def cards() -> list[nvml.DriverGpu]:
    """Return the driver's view of the visible GPUs."""
    return gpus.visible_gpus(nvml.gpus())


def several(on_cards: bool, most_mib: int = 8192) -> list[str]:
    """Limit the memory of all GPUs, or of two virtual GPUs on the first card; return them."""
    physical = tf.config.list_physical_devices("GPU")
    shown = physical if on_cards else physical[:1]
    tf.config.set_visible_devices(shown, "GPU")
    free = next((card.free_bytes for card in cards()), None) or 3 * most_mib * MIB
    part = tf.config.LogicalDeviceConfiguration(memory_limit=min(free // MIB // 3, most_mib))
    for card in shown:
        tf.config.set_logical_device_configuration(card, [part] if on_cards else [part, part])
    return [f"/gpu:{number}" for number in range(len(shown) if on_cards else 2)]


# ---------------------------------------------------------------------------- Models


def transformer() -> keras.Model:
    return user_models.transformer(depth=4, width=128, length=TEXT_LENGTH)


def texts() -> tuple:
    random = np.random.default_rng(0)
    x = random.integers(1, user_models.WORDS, (2048, TEXT_LENGTH)).astype(np.int32)
    part = x, random.integers(0, user_models.CLASSES, len(x))
    return part, part, user_models.CLASSES


def images() -> tuple:
    random = np.random.default_rng(0)
    part = random.random((2048, 32, 32, 3), np.float32), random.integers(0, 10, 2048)
    return part, part, 10


def for_fit(model: str, names: Sequence[str] = (), xla: bool = False) -> tuple:
    """Return a compiled model, over towers if devices are named, and its examples."""
    keras.utils.set_random_seed(0)
    network, ((x, y), *_) = (pkgutil.resolve_name(name)() for name in MODELS[model])
    if names:
        towers.parallelize(network, devices=names)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    network.compile(optimizer, loss, metrics=["accuracy"], jit_compile="auto" if xla else False)
    return network, x, y


def fit_windows(network: keras.Model, x: Any, y: Any) -> tuple[list[float], list[float]]:
    """Make five windows of steps on one batch by `fit`; return the loss and seconds of each."""
    batches, times = tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2), []
    mark = lambda *_: times.append(time.perf_counter())  # noqa: E731
    marks = keras.callbacks.LambdaCallback(on_epoch_begin=mark, on_epoch_end=mark)
    given = dict(steps_per_epoch=WINDOW, epochs=5, callbacks=[marks], shuffle=False, verbose=0)
    return network.fit(batches, **given).history["loss"], np.diff(times)[::2].tolist()


def for_train(model: str, names: Sequence[str], size: int, **options: Any) -> RunContext:
    """Return a run of `towers train` with the weights on each of these GPUs."""
    function, dataset = MODELS[model]
    given = {"model": function, "dataset": dataset, "variables": "replicated"} | options
    run = Options(**given, batch_size=size, num_towers=len(names))
    return assemble(run, names, load_data(run))


def loop_of(run: RunContext) -> tuple[Callable, Iterator]:
    """Return a run's train loop and its batches."""
    return run.train_loop(telemetry=False), iter(run.batches(0, 0))


def train_windows(loop: Callable, batches: Iterator) -> list[float]:
    """Make five windows of steps of a run; return the seconds of each."""
    times = [time.perf_counter()]
    for _ in range(5):
        loop(batches, tf.constant(WINDOW))["loss"].numpy()  # which waits for the GPU
        times.append(time.perf_counter())
    return np.diff(times).tolist()


def per_step(windows: list[float]) -> dict[str, float]:
    """Return the seconds of a step; the first window includes tracing and compiling."""
    seconds = statistics.median(windows[1:]) / WINDOW
    return {"seconds_per_step": round(seconds, 6), "seconds_of_first_call": round(windows[0], 1)}


# ---------------------------------------------------------------------------- The start


def first_calls() -> Iterator[tuple[str, Any]]:
    """Yield (op, the seconds of its first and second call, or its error) of common ops."""
    tf.config.set_soft_device_placement(False)
    with tf.device(GPU):
        shapes = (256, 256), (8, 32, 32, 3), (3, 3, 3, 16)
        x, image, kernel = (tf.constant(np.ones(shape, np.float32)) for shape in shapes)
        numbers = tf.constant(np.arange(256))
        ops = {
            "Mul": lambda: x * x,
            "Cast": lambda: tf.cast(numbers, tf.float32),
            "Sum": lambda: tf.reduce_sum(x, 0),
            "random draw": lambda: tf.random.stateless_normal([256], [0, 1]),
            "Conv2D": lambda: tf.nn.conv2d(image, kernel, 1, "SAME"),
            "MatMul": lambda: x @ x,
        }
        for name, op in ops.items():
            times = [time.perf_counter()]
            try:
                for _ in range(2):
                    op().numpy()
                    times.append(time.perf_counter())
                yield name, np.diff(times).round(4).tolist()
            except Exception as error:  # the other ops are tried, too
                yield name, first_line(error, 300)


def kernels() -> Iterator[Any]:
    """Common ops run; the driver compiles PTX where first calls are slow and the cache grows."""
    cache = Path(os.environ.get("CUDA_CACHE_PATH") or Path.home() / ".nv/ComputeCache")
    mib = lambda: sum(p.stat().st_size for p in cache.rglob("*") if p.is_file()) / MIB  # noqa: E731
    before, began = mib(), time.perf_counter()
    tf.config.list_logical_devices()
    yield {"seconds until the GPUs have started": round(time.perf_counter() - began, 2)}
    failed = []
    for name, found in first_calls():
        yield {name: found}
        failed += [name] * isinstance(found, str)
    most = os.environ.get("CUDA_CACHE_MAXSIZE")
    yield {"MiB of compiled kernels": [before, mib()], "CUDA_CACHE_MAXSIZE": most}
    expect(not failed, f"these ops fail: {', '.join(failed)}")


def doctor() -> Iterator[Any]:
    """`towers doctor` finds a problem exactly if an op fails."""
    yield from (findings := command("doctor"))
    problems = [finding["name"] for finding in findings if finding["status"] == "problem"]
    yield {"ops": (ops := dict(first_calls()))}
    failed = [name for name, found in ops.items() if isinstance(found, str)]
    same = bool(problems) == bool(failed)
    expect(same, f"doctor's problems: {problems}, ops that fail: {failed}")


# ---------------------------------------------------------------------------- One GPU


def cnn() -> Iterator[Any]:
    """`towers train` trains the CNN."""
    with tempfile.TemporaryDirectory() as name:
        flags = "--max_steps=100 --batch_size=64 --num_towers=1 --variables=replicated"
        yield (result := command(f"train --train_dir={name}/run {flags}"))
    expect(math.isfinite(result["train_loss"]), f"the loss is {result['train_loss']}")


def profile() -> Iterator[Any]:
    """A step of the CNN has the copies and kernels that scripts/count_step.py counts."""
    loop, batches = loop_of(for_train("CNN", [GPU], 64, dataset="shapes"))
    steps = 20
    loop(batches, tf.constant(5))["loss"].numpy()
    with tempfile.TemporaryDirectory() as name:
        with tf.profiler.experimental.Profile(name):
            loop(batches, tf.constant(steps))["loss"].numpy()
            tf.test.experimental.sync_devices()
        [path] = Path(name).rglob("*.xplane.pb")
        trace = xplane_pb2.XSpace.FromString(path.read_bytes())
    events = Counter()
    for plane in (plane for plane in trace.planes if plane.name.startswith("/device:GPU:")):
        for line in (line for line in plane.lines if line.name.startswith("Stream")):
            for event in line.events:
                title = plane.event_metadata[event.metadata_id].name
                events[title if title.startswith("Mem") else "kernels"] += 1
                events["picoseconds"] += event.duration_ps
    yield {"in a step": {kind: number / steps for kind, number in events.items()}}
    count = "scripts/count_step.py --models=cnn --num_towers=1 --by=train".split()
    given = dict(cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, check=True, text=True)
    table = subprocess.run([sys.executable, *count], stdout=subprocess.PIPE, **given).stdout
    header, _, row = (line.strip("| ").split(" | ") for line in table.splitlines())
    yield {"count_step.py": dict(zip(header, row, strict=True))}
    if not events:
        raise CannotAsk(
            "the profile has no kernels; the driver may keep its counters for root "
            "(NVreg_RestrictProfilingToAdminUsers)"
        )


def ways(number: int, model: str) -> list[Check]:
    """Return the checks that time a model, each way in a process that XLA may end."""

    def check(way: str, seconds: int) -> Check:
        def run() -> Iterator[Any]:
            xla = "XLA" in way
            if SIMULATED and xla:
                raise CannotAsk("this TensorFlow has no CUDA, so XLA compiles for no GPU")
            if way == "train with XLA":  # before this process takes the GPU's memory
                devices.try_xla([GPU])
            for size in SIZES:
                try:
                    if way.startswith("train"):
                        given = {"jit_compile": True, "batch_norm": "local"} if xla else {}
                        run = for_train(model, [GPU], size, **given)
                        windows = train_windows(*loop_of(run))
                    else:
                        names = [GPU] if way == "parallelize" else []
                        network, x, y = for_fit(model, names, xla)
                        windows = fit_windows(network, x[:size], y[:size])[1]
                    yield {"batch_size": size, **per_step(windows)}
                except tf.errors.ResourceExhaustedError as error:
                    yield {"batch_size": size, "out of memory": first_line(error, 300)}

        return Check(f"{number} {model}: {way}", seconds, run)

    rows = {"fit with XLA": 28, "fit": 16, "parallelize": 18, "train": 18, "train with XLA": 28}
    return [check(way, seconds) for way, seconds in rows.items()]


# ---------------------------------------------------------------------------- Several towers


def exchange(name: str, seconds: int, batch_norm: str, on_cards: bool = False) -> Check:
    """Return the check that towers train ResNet-20 for many steps on virtual or on all GPUs."""

    def run() -> Iterator[Any]:
        names = several(on_cards)
        steps = WINDOW * (2000 if on_cards else 500) // 20
        run = for_train("ResNet-20", names, SIZES[0] * len(names), batch_norm=batch_norm)
        (loop, batches), one = loop_of(run), tf.constant(1)
        yield {"towers": len(names), **per_step(train_windows(loop, batches))}
        ops = [op for _, op in traced_ops(loop.get_concrete_function(batches, one).graph)]
        exchanges = [op for op in ops if op.type.startswith("Collective")]
        hints = Counter(op.get_attr("communication_hint").decode() for op in exchanges)
        yield {"collectives": len(exchanges), "communication": hints}
        rss = [memory.of_device("/cpu:0")[0]]
        for _ in range(steps):  # each call takes new keys of its collectives
            loss = float(loop(batches, one)["loss"])
        rss.append(memory.of_device("/cpu:0")[0])
        yield {"steps": steps, "loss": loss, "resident MiB before and after": rss}
        expect(set(hints) <= ({"nccl"} if on_cards else {"auto", "ring"}), f"exchange by {hints}")
        expect(math.isfinite(loss), f"the loss is {loss}")
        expect(rss[1] < rss[0] + 64, f"{rss[0]:.0f} MiB of host memory became {rss[1]:.0f}")

    return Check(name, seconds, run)


def out_of_memory(name: str, seconds: int, on_cards: bool = False) -> Check:
    """Return the check that `fit` trains after a batch that was too large for towers' GPUs."""

    def run() -> Iterator[Any]:
        network, x, y = for_fit("ResNet-20", names := several(on_cards, most_mib=512))
        x, y = np.tile(x, [len(names), 1, 1, 1]), np.tile(y, len(names))

        def fit(size: int) -> float:
            return network.fit(x[:size], y[:size], batch_size=size, verbose=0).history["loss"][0]

        yield {"loss": fit(64)}
        began = time.perf_counter()
        try:
            error = f"none, with a loss of {fit(len(x))}"
        except Exception as problem:
            error = f"{type(problem).__name__}: {first_line(problem, 300)}"
        yield {"error": error, "seconds": round(time.perf_counter() - began, 1)}
        expect("memory" in error or "Exhausted" in error, f"a batch that is too large: {error}")
        yield {"loss after it": (loss := fit(64))}
        expect(math.isfinite(loss), f"the loss is {loss}")

    return Check(name, seconds, run)


def verify(name: str, seconds: int, on_cards: bool = False) -> Check:
    """Return the check that in float64 towers compute what one device computes, for ResNet-20."""

    def run() -> Iterator[Any]:
        number = len(several(on_cards))
        flags = f"--model=models.resnet:resnet20 --num_towers={number} --steps=2 --batch_size=24"
        told = command(f"verify {flags}")
        yield {key: told[key] for key in ("passed", "first_difference", "max_relative_difference")}

    return Check(name, seconds, run)


# ---------------------------------------------------------------------------- Other promises


def peak(way: str, most: float) -> Check:
    """Return the check of the peak memory of a step, in multiples of the weights."""

    def run() -> Iterator[Any]:
        shape = (30, 1000) if SIMULATED else step_memory.DENSE
        held, reached = step_memory.measure(shape, way, 1, {})
        yield {"held": round(held, 2), "peak": round(reached, 2)}
        expect(reached <= most, f"{reached:.2f} times the weights, {most} were expected")

    return Check(f"7 {way}", 13, run)


def deterministic() -> Iterator[Any]:
    """With --deterministic two runs end with the same bits, or an op refuses."""
    os.environ["TF_DETERMINISTIC_OPS"] = "1"
    devices.configure(deterministic=True)
    bad = []
    for model in MODELS:
        ends = []
        try:
            for _ in range(2):
                run = for_train(model, [GPU], SIZES[0], deterministic=True)
                loop, batches = loop_of(run)
                loop(batches, tf.constant(WINDOW))
                variables = run.train_state.variables()
                ends.append({name: v.numpy().tobytes() for name, v in variables.items()})
            other = [name for name in ends[0] if ends[0][name] != ends[1][name]]
            found = f"{len(other)} of {len(variables)} variables differ: {', '.join(other[:3])}"
        except tf.errors.OpError as error:
            other = found = first_line(error, 400)
        yield {model: found if other else "the same bits"}
        bad += [model] * bool(other)
    expect(not bad, f"not deterministic: {', '.join(bad)}")


def memory_option(name: str, allocator: str = "", **options: Any) -> Check:
    """Return the check that the driver (nvidia-smi) shows the memory that an option leaves."""

    def run() -> Iterator[Any]:
        before, *_ = cards() or [nvml.DriverGpu(0)]
        if before.free_bytes is None:
            raise CannotAsk("the driver does not report the memory of this GPU")
        if allocator:
            os.environ["TF_GPU_ALLOCATOR"] = allocator
        devices.configure(**options)
        lines = devices.read_back()
        with tf.device(GPU):
            tf.zeros([MIB]).numpy()
        taken = (before.free_bytes - cards()[0].free_bytes) // MIB
        yield {"towers says": lines, "MiB taken": taken, "of": before.cuda_bytes // MIB}
        if not taken:
            raise CannotAsk("the driver does not show the memory of this process")
        if allocator:
            with contextlib.suppress(tf.errors.ResourceExhaustedError), tf.device(GPU):
                tf.zeros([512 * MIB]).numpy()
                yield "2 GiB were allocated in spite of the limit"
            return
        limit = 0 if name == "growth" else tf_internals.device_memory_bytes()[GPU] // MIB
        # CUDA itself takes some hundred MiB.
        expect(limit <= taken <= limit + 2048, f"{taken} MiB are used, the limit is {limit}")

    return Check(f"11 {name}", 10, run)


def many_rows() -> Iterator[Any]:
    """FusedBatchNormV3 takes more than 65,535 rows, at least in the layout that towers use."""
    bad, sizes = [], (70_000, 1_000_000)
    shapes = [(1, n, 1, 8) for n in sizes] + [(n, 1, 1, 8) for n in sizes]
    for shape, training, dtype in itertools.product(shapes, (False, True), ("float32", "float16")):
        case = f"{shape}, {'training' if training else 'inference'}, {dtype}"
        try:
            with tf.device(GPU):
                x = tf.random.stateless_normal(shape, [0, 1], 1.0, 2.0)
                mean, variance = tf.nn.moments(x, [0, 1, 2])
                y = tf.raw_ops.FusedBatchNormV3(
                    x=tf.cast(x, dtype), scale=tf.ones(8), offset=tf.zeros(8), mean=mean,
                    variance=variance, epsilon=1e-3, is_training=training,
                ).y  # fmt: skip
                right = (x - mean) * tf.math.rsqrt(variance + 1e-3)
                off = float(tf.reduce_max(abs(tf.cast(y, tf.float32) - right)))
            found = "ok" if off < 0.02 else f"off by {off}"
        except tf.errors.OpError as error:
            found = first_line(error, 300)
        yield {case: found}
        bad += [case] * (found != "ok" and shape[0] == 1)
    if SIMULATED:
        raise CannotAsk("this TensorFlow has no cuDNN")
    expect(not bad, f"it fails for {'; '.join(bad)}")


# ---------------------------------------------------------------------------- Several GPUs


def all_sum() -> Iterator[Any]:
    """An all-reduce over all GPUs is exact in each type."""
    names = devices.tower_devices()
    numbers = np.arange(100_003) % 16  # whole and small, so each type holds their sum exactly
    expected = sum(numbers + tower for tower in range(len(names)))
    # The types that are rarest in collectives come last: a failure ends all that follow.
    for dtype in ("float32", "float64", "float16", "int64", "bfloat16", "int32"):
        if SIMULATED and dtype == "int32":
            raise CannotAsk("TensorFlow's ring does not sum int32 on these GPUs")

        @tf.function(autograph=False)
        def sums(*values: Any) -> list[Any]:
            return [total for (total,) in gather.all_sum([[v] for v in values], names)]

        values = []
        for tower, name in enumerate(names):
            with tf.device(name):
                values.append(tf.identity(tf.constant(numbers + tower, dtype)))
        for name, total in zip(names, sums(*values), strict=True):
            right = tf.constant(expected, dtype).numpy()
            expect(np.array_equal(total.numpy(), right), f"a wrong sum of {dtype} on {name}")
        yield f"{dtype}: exact"


def fit() -> Iterator[Any]:
    """`fit` over all GPUs has the losses of plain `fit`."""
    names, losses = devices.tower_devices(), []
    size = SIZES[0] * len(names)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # its rounding hides faults
    for given in ((), names):
        network, x, y = for_fit("ResNet-20", given)
        losses.append(fit_windows(network, x[:size], y[:size])[0][:2])
        yield {f"losses with {len(given)} towers": losses[-1]}
    off = max(abs(one - other) / one for one, other in zip(*losses, strict=True))
    expect(off < 1e-2, f"the losses differ by {off:.1e}")


def second_gpu() -> Iterator[Any]:
    """`towers train --devices=/gpu:1` takes no memory of the first GPU."""
    before = cards()
    with tempfile.TemporaryDirectory() as name:
        flags = "--max_steps=20 --batch_size=64 --devices=/gpu:1"
        command(f"train --train_dir={name}/run {flags}")
    started = [device.driver_index for device in devices.describe()]
    taken = ((before[0].free_bytes or 0) - (cards()[0].free_bytes or 0)) // MIB
    yield {"GPUs that have started": started, "MiB taken of the first": taken}
    expect(started == [before[1].index] and taken < 64, "the first GPU is not left alone")


# ---------------------------------------------------------------------------- The table

ON_ONE = (
    Question(
        "Do common ops run, and how long does the first call of each take?",
        Check("1 kernels", 60, kernels),
    ),
    Question("Does towers doctor say the same?", Check("2 doctor", 25, doctor)),
    Question(
        "Does the CNN train, with the kernels and copies that count_step.py counts?",
        Check("3 CNN: train", 30, cnn),
        Check("3 CNN: profile", 35, profile),
    ),
    Question("Which way of training ResNet-20 is the fastest?", *ways(4, "ResNet-20")),
    Question("Which way of training a transformer is the fastest?", *ways(5, "transformer")),
    Question(
        "Do two virtual GPUs train ResNet-20 by TensorFlow's ring for 500 steps?",
        exchange("6 sync", 40, "sync"),
        exchange("6 local", 30, "local"),
    ),
    Question(
        "How many times the weights is the peak memory of a step?",
        *itertools.starmap(peak, [("plain", 3.5), ("fit", 3.5), ("train", 4.5)]),
    ),
    Question("Does fit train after it ran out of memory?", out_of_memory("8 fit", 50)),
    Question("Do two virtual GPUs compute what one computes?", verify("9 verify", 90)),
    Question("Do two runs have the same bits?", Check("10 deterministic", 40, deterministic)),
    Question(
        "Does nvidia-smi show the memory that was asked for?",
        memory_option("limit", gpu_memory_limit_mib=1024),
        memory_option("fraction", per_process_gpu_memory_fraction=0.25),
        memory_option("growth", allow_growth=True),
        memory_option("cuda_malloc_async", "cuda_malloc_async", gpu_memory_limit_mib=1024),
    ),
    Question("Does BatchNorm take more than 65,535 rows?", Check("12 rows", 20, many_rows)),
)
ON_SEVERAL = (
    Question("Do all GPUs sum exactly, in each type?", Check("13 sums", 60, all_sum)),
    Question(
        "Do all GPUs train ResNet-20 by NCCL for 2,000 steps?",
        exchange("14 sync", 150, "sync", on_cards=True),
        exchange("14 local", 120, "local", on_cards=True),
    ),
    Question("Does fit on all GPUs have the losses of plain fit?", Check("15 fit", 90, fit)),
    Question("Do all GPUs compute what one computes?", verify("16 verify", 120, on_cards=True)),
    Question(
        "Does fit train by NCCL after it ran out of memory?",
        out_of_memory("17 fit", 60, on_cards=True),
    ),
    Question("Does --devices=/gpu:1 leave GPU 0 alone?", Check("18 devices", 40, second_gpu)),
)
