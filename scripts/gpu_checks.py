"""The checks of `gpu_check.py`: each expects a process of its own, and returns what it found."""

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import towers
from scripts import gpu_steps
from scripts.gpu_steps import Skipped
from towers import devices, tf_private
from towers.builder.collectives import all_sum
from towers.devices import gpus, memory, nvml
from towers.devices.nvml import MIB
from towers.errors import RunError
from towers.graphs import profile_summary
from towers.graphs.placement import read_placement
from towers.monitoring.profiler import Profiler
from towers.options.run import Options
from towers.training.run import prepare


def expect(condition: bool, found: str) -> None:
    """End a check that failed, with what it found."""
    if not condition:
        raise RunError(found)


def two_devices(kind: str) -> list[str]:
    """Return two devices, halves of one GPU if there is no second; nothing may have started."""
    if kind == "cpu":
        return devices.tower_devices(2, "cpu")
    physical = tf.config.list_physical_devices("GPU")
    if len(physical) == 1:
        [gpu] = devices.describe()
        half = tf.config.LogicalDeviceConfiguration(
            memory_limit=min((gpu.free_bytes or 8192 * MIB) // MIB // 3, 8192)
        )
        tf.config.set_logical_device_configuration(physical[0], [half, half])
    return devices.tower_devices(2)


def find() -> list[str]:
    """Return a line for each GPU; an error if the driver has some and TensorFlow sees none."""
    devices.configure()
    if devices.tower_devices() == ["/cpu:0"]:
        return []
    return [str(gpu) for gpu in devices.describe()]


# ---------------------------------------------------------------------------- GPUs only


def total_mib() -> int:
    """Return the memory of the first GPU as CUDA has it."""
    [gpu, *_] = gpus.visible_gpus(nvml.gpus())
    if gpu.cuda_bytes is None or gpu.free_bytes is None:
        raise Skipped("the driver does not tell the memory of this GPU")
    return gpu.cuda_bytes // MIB


def fraction() -> str:
    """A fraction is of the GPU's total memory, and what TensorFlow may take."""
    total = total_mib()
    devices.configure(per_process_gpu_memory_fraction=0.25)
    [line, *_] = devices.read_back()
    limit = tf_private.device_memory_bytes()["/gpu:0"] // MIB
    expect(limit == total // 4, f"{limit} MiB of {total} MiB")
    return f"{line.split(maxsplit=1)[1]}, of {total} MiB"


def limit() -> str:
    """A limit is read back, and holds."""
    devices.configure(gpu_memory_limit_mib=512)
    [line, *_] = devices.read_back()
    try:
        with tf.device("/gpu:0"):
            tf.zeros([256 * MIB]).numpy()  # 1 GiB
    except tf.errors.ResourceExhaustedError:
        return f"{line.split(maxsplit=1)[1]}; 1 GiB is refused"
    raise RunError("1 GiB was given in spite of a limit of 512 MiB")


def growth() -> str:
    """With growth, a small tensor leaves most of the GPU: CUDA itself takes some 100 MiB."""
    total_mib()
    free_before = devices.describe()[0].free_bytes
    devices.configure(allow_growth=True)
    [line, *_] = devices.read_back()
    with tf.device("/gpu:0"):
        tf.zeros([MIB]).numpy()
    [gpu, *_] = devices.describe()
    taken = (free_before - gpu.free_bytes) // MIB
    expect(taken < free_before // MIB / 2, f"4 MiB in use, {taken} MiB taken")
    return f"{line.split(maxsplit=1)[1]}; 4 MiB in use, {taken} MiB taken"


def visible() -> str:
    """The largest GPU, by the driver's number, is the only one that is seen."""
    everything = gpus.visible_gpus(nvml.gpus())
    if not everything:
        raise Skipped("the driver (NVML) tells of no GPU")
    largest = max(everything, key=lambda gpu: (gpu.total_bytes or 0, gpu.index))
    largest, index = largest.key, largest.index
    devices.configure(visible_gpus=largest)
    seen = [gpu.driver_index for gpu in devices.describe()]
    expect(seen == [index], f"--visible_gpus={largest}, and TensorFlow sees {seen}")
    devices.read_back()
    started = [name for name in tf_private.device_memory_bytes() if name.startswith("/gpu")]
    expect(started == ["/gpu:0"], f"--visible_gpus={largest}, and {started} have started")
    return f"GPU {largest} of {len(everything)}"


def session() -> str:
    """A session takes the fraction of its `ConfigProto`."""
    total = total_mib()
    config = devices.config_proto(per_process_gpu_memory_fraction=0.25, allow_soft_placement=False)
    with tf.Graph().as_default(), tf.device("/gpu:0"):
        product = tf.matmul(tf.ones([64, 64]), tf.ones([64, 64]))
        with tf.compat.v1.Session(config=config) as running:
            expect(bool((running.run(product) == 64).all()), "a wrong product")
            limits = {d.name[-5:]: d.memory_limit_bytes // MIB for d in running.list_devices()}
    share = limits["GPU:0"] / total
    expect(0.23 < share < 0.27, f"{limits['GPU:0']} of {total} MiB")
    return f"{limits['GPU:0']} MiB of {total} MiB"


def health() -> str:
    """The driver tells what TensorBoard is to show of each GPU, as far as that GPU has it."""
    seen = gpus.visible_gpus(nvml.gpus())
    with nvml.opened():
        found = {gpu.key: nvml.sample(gpu) for gpu in seen}
    if not any(found.values()):
        raise Skipped("the driver tells nothing")
    first = next(values for values in found.values() if values)
    return ", ".join(f"{name} {value:g}" for name, value in first.items())


# ---------------------------------------------------------------------------- Towers


def placement(kind: str) -> str:
    """Each tower's ops run on its own device."""
    names = two_devices(kind)
    builder = towers.TowerBuilder(names)
    product = tf.function(lambda a: builder.sum(lambda: tf.matmul(a, a)))
    ran = read_placement(product, tf.random.stateless_normal([64, 64], [0, 0]))
    where = sorted(op.device for op in ran.ops if op.type.endswith("MatMul"))
    expect(where == sorted(names), f"MatMul ran on {', '.join(where)}")
    strays = [f"{op.name} on {op.device}" for op in ran.misplaced(names)]
    expect(not strays, ", ".join(strays))
    return f"MatMul on {' and '.join(where)}"


def gradients(kind: str) -> str:
    """Two towers compute what one device computes."""
    names = two_devices(kind)
    weights = tf.Variable(tf.random.stateless_normal([32, 8], [0, 0], dtype=tf.float64))
    batch = tf.random.stateless_normal([15, 32], [0, 1], dtype=tf.float64)

    def loss(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.tanh(x @ weights) ** 2, axis=1)

    _, [two] = towers.TowerBuilder(names).gradients(loss, [weights], batch)
    _, [one] = towers.TowerBuilder(names[:1]).gradients(loss, [weights], batch)
    difference = float(tf.reduce_max(abs(two - one)) / tf.reduce_max(abs(one)))
    expect(difference < 1e-12, f"largest relative difference {difference:.1e}")
    return f"largest relative difference {difference:.1e}"


def collectives(kind: str) -> str:
    """A collective sum over two devices is exact."""
    names = two_devices(kind)

    @tf.function
    def sums(x: tf.Tensor) -> list[tf.Tensor]:
        values = []
        for tower, name in enumerate(names):
            with tf.device(name):
                values.append([x * (tower + 1.0)])
        return [total for (total,) in all_sum(values, names)]

    x = tf.random.stateless_uniform([1000], [0, 0], maxval=1000, dtype=tf.int32)
    x = tf.cast(x, tf.float32)  # whole numbers: any order of adding gives the same
    found = zip(names, sums(x), strict=True)
    wrong = [name for name, result in found if not (result == 3 * x).numpy().all()]
    expect(not wrong, f"a wrong sum on {', '.join(wrong)}")
    return f"exact on {' and '.join(names)}"


def ring_against_nccl(kind: str) -> dict[str, Any]:
    """Return the seconds of all-sums over all GPUs, by NCCL and by TensorFlow's ring."""
    if kind == "gpu" and len(tf.config.list_physical_devices("GPU")) < 2:
        raise Skipped("there is one GPU")
    devices.configure()
    names = devices.tower_devices() if kind == "gpu" else two_devices(kind)
    return gpu_steps.ring_against_nccl(names)


def copies(kind: str) -> str:
    """What is copied between any two devices arrives bit for bit."""
    names = two_devices(kind)
    names = list(dict.fromkeys(["/cpu:0", *(devices.tower_devices() if kind == "gpu" else names)]))
    bits = tf.random.stateless_uniform([MIB], [0, 0], None, None, dtype=tf.int32)
    values = tf.bitcast(bits & 0x7FFFFF | 0x3F800000, tf.float32)  # from 1 to 2: all bits count
    wrong = []
    pairs = [(source, target) for source in names for target in names if source != target]
    for source, target in pairs:
        with tf.device(source):
            there = tf.identity(values) * 1.0  # computed on the source
        with tf.device(target):
            back = tf.identity(there) * 1.0
        expect(target[1:].upper() in back.device, f"{source} -> {target} ran on {back.device}")
        if not (back.numpy() == values.numpy()).all():
            wrong.append(f"{source} -> {target}")
    expect(not wrong, f"other bits arrive: {', '.join(wrong)}")
    return f"{len(pairs)} ways between {len(names)} devices"


def training(kind: str, **options: object) -> str:
    """A short run of two towers, with the tutorial's network."""
    from towers.training.train import train

    two_devices(kind)
    with tempfile.TemporaryDirectory() as folder:
        given = {"max_steps": 50, "batch_size": 64, "num_towers": 2, "json": True}
        given |= {"train_dir": f"{folder}/run", "devices": "cpu" if kind == "cpu" else ""}
        result = train(Options(**given | options))
    return f"{result['examples_per_second']:.0f} examples/s, loss {result['train_loss']:.3f}"


def strict_training(kind: str, **options: object) -> str:
    """The same, where an op that leaves its tower's device is an error."""
    given = {"variables": "replicated", "allow_soft_placement": False, "placement": "strict"}
    return training(kind, **given | options)


def batch_norm(kind: str) -> str:
    """The fused kernels of two towers compute what Keras' formula does on the CPU."""
    names = two_devices(kind)
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
    expect(off < 1e-4, f"largest relative difference {off:.1e}")
    return f"largest relative difference {off:.1e}"


def profile(kind: str) -> str:
    """A profile names the ops that each device ran."""
    names = two_devices(kind)
    builder = towers.TowerBuilder(names)
    product = tf.function(lambda a: builder.sum(lambda: tf.matmul(a, a)))
    a = tf.random.stateless_normal([512, 512], [0, 0])
    where = read_placement(product, a)
    said: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder, options = Path(name), {"last_step": 3, "placement": where, "say": said.append}
        with Profiler(folder, (0, 3), **options) as profiler:
            profiler.begin(0)
            for _ in range(3):
                product(a)
            profiler.end(3)
        traces = list(folder.glob("train/plugins/profile/*/*.xplane.pb"))
        expect(len(traces) == 1, said[-1])
        times = profile_summary.op_times(profile_summary.read_trace(traces[0]), where)
    rows = {row.device: row for row in times if "MatMul" in row.type}
    complaints = [line.strip() for line in said if "warning" in line]
    if kind == "gpu" and not rows:
        raise Skipped(complaints[0] if complaints else "no kernel was recorded")
    missing = ", ".join(sorted(set(names) - set(rows)))
    if kind == "gpu" and missing and len(tf.config.list_physical_devices("GPU")) == 1:
        raise Skipped(f"parts of one GPU have one trace: MatMul on {', '.join(rows)}")
    expect(not missing, f"no MatMul on {missing}; {'; '.join(complaints)}")
    return ", ".join(f"MatMul on {name} {1e3 * rows[name].seconds:.3f} ms" for name in names)


def telemetry(kind: str) -> str:
    """Towers have times, of the order of those of the steps, and hold memory."""
    names = two_devices(kind)
    run = prepare(Options(num_towers=2, batch_size=256, devices=",".join(names)))
    loop, batches = run.train_loop(), iter(run.batches(0, 0))
    loop(batches, tf.constant(5))
    start = time.perf_counter()
    values = {name: value.numpy() for name, value in loop(batches, tf.constant(20)).items()}
    wall, own = time.perf_counter() - start, values["tower_seconds"]
    found = f"towers {own[0]:.3f} and {own[1]:.3f} s of {wall:.3f} s"
    # A step that is measured begins on idle GPUs and is longer than others, which it stands for.
    expect(bool((own > 0).all() and (own < 10 * wall).all()), found)
    held = [memory.of_device(name)[1] for name in names]  # the most
    expect(min(held) > 4, f"towers hold {held} MiB, and the weights alone are 4")
    return found


FIND = "find"
STRICT = "a short training run, --placement=strict"
RING = "all-sums by NCCL and by a ring, seconds"
# Of any device, the most telling first. The first finds out by itself where variables are best; to
# try that in each would take too long.
TOWER_CHECKS: dict[str, Callable[..., Any]] = {
    "a short training run": training,
    STRICT: strict_training,
    "collectives sum": collectives,
    "two towers compute what one device does": gradients,
    RING: ring_against_nccl,
    "fused BatchNorm over two towers": batch_norm,
    "training with --variables=replicated": functools.partial(training, variables="replicated"),
    "training with --variables=sharded": functools.partial(training, variables="sharded"),
    "training with --metrics, by a step of Keras": functools.partial(
        training, metrics="accuracy", variables="sharded"
    ),
    "training with --jit_compile": functools.partial(
        training, jit_compile=True, variables="replicated"
    ),
    "ops of each tower run on its device": placement,
    "copies between all pairs of devices": copies,
    "a profile names the ops of each device": profile,
    "the times and the memory of each tower": telemetry,
}
# Of a GPU's memory and health.
MEMORY_CHECKS: dict[str, Callable[[], str]] = {
    "memory fraction is read back": fraction,
    "memory limit is read back and holds": limit,
    "memory growth is read back": growth,
    "one visible GPU, by the driver's number": visible,
    "memory fraction of a session": session,
    "the driver tells the health of each GPU": health,
}
