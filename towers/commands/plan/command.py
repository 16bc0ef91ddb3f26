"""`towers plan`: the transfers, memory and kernel launches of a run on GPUs, before it starts.

The run's real training step is built with its towers on logical CPU devices that are apart from the
host, as GPUs are, so no GPU is needed. Transfers and memory are counted in the traced graph.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers import devices
from towers.builder import device_types
from towers.commands.plan.options import PlanOptions
from towers.data import Data
from towers.errors import InputError
from towers.formatting import table
from towers.graphs import gpu_estimate
from towers.graphs.communication import HOST, TracedStep, read_step
from towers.graphs.gpu_estimate import GpuEstimate
from towers.options.run import Options
from towers.training.run import memory_estimate
from towers.training.run.setup import RunContext, assemble, load_data
from towers.training.run.tensorflow_errors import user_facing_errors

DEFAULT_TOWERS = 8
GIB = 2**30
# The rows of the table of a step on GPUs: {key in the result: what is said}.
_COPIES = {
    "from_host": "copy from the host", "to_host": "copy to the host, and wait",
    "from_gpus": "copy from another GPU", "collectives": "sum over GPUs",
}  # fmt: skip
_LAUNCHES = {"tower": "launch kernels in a tower", "update": "launch others, as for the update"}


def run(options: PlanOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Report the transfers, memory and kernel launches of a run on GPUs.

    Args:
        options: the run, its number of towers, and the memory of a GPU.
        say: called with each line to print.

    Returns:
        "num_towers", "batch_size", "placements" {"cpu": {"bytes_per_step", "memory_bytes", "fits",
        "largest_batch_per_tower"}}, "gradients" {"missing"}, "gpu" {"1": `describe`, "2": of two
        towers}, and "failed": a gradient is missing.
    """
    run_options, num_towers = options.run, options.num_towers or DEFAULT_TOWERS
    if not 2 <= num_towers <= run_options.batch_size:
        raise InputError(
            f"--num_towers={num_towers}: from 2 to --batch_size={run_options.batch_size} towers "
            "can be planned"
        )
    names = devices.tower_devices(max(num_towers + 1, 4), "cpu")[1 : num_towers + 1]
    dataset = load_data(run_options)
    say(
        f"plan        {run_options.model} on {dataset.name}: {num_towers} towers, batch size "
        f"{run_options.batch_size} in all, {run_options.dtype}"
    )
    one = assemble(dataclasses.replace(run_options, variables="cpu"), names[:1], dataset)
    missing = _missing_gradients(one)
    # Each run traces a loop of its own, for which TensorFlow would warn of retracing.
    tf.get_logger().setLevel("ERROR")
    placements, on_gpus = {}, {}
    for placement in one.task.placements:
        say(f"tracing     the step with --variables={placement} on {num_towers} towers ...")
        placed = place(dataclasses.replace(run_options, variables=placement), names, dataset)
        placements[placement] = placed.describe(options.gpu_memory_gib)
    for count in 1, 2:
        say(f"tracing     the step as GPUs make it, with {count} of them ...")
        on_gpus[str(count)] = describe(estimate(run_options, count, dataset))
    result = {
        "num_towers": num_towers,
        "batch_size": run_options.batch_size,
        "placements": placements,
        "gradients": {"missing": missing},
        "gpu": on_gpus,
        "failed": bool(missing),
    }
    for line in _report(result, options.gpu_memory_gib):
        say(line)
    return result


@dataclasses.dataclass(frozen=True)
class PlacedStep:
    """The step with one placement of the variables, on logical CPU devices."""

    run: RunContext
    step: TracedStep
    planned: Counter[tuple[str, str]]  # {(source, target): bytes}

    def describe(self, gpu_memory_gib: float) -> dict[str, Any]:
        """Return this placement's entry in the plan's result."""
        names = self.run.builder.devices
        held = [memory_estimate.memory_by_purpose(self.run, self.step, name) for name in names]
        parts = max(held, key=lambda parts: sum(parts.values()))
        limit, total = int(gpu_memory_gib * GIB), sum(parts.values())
        examples = -(-self.run.options.batch_size // len(names))  # of the first, largest slice
        summed = self.step.summed_bytes()
        # A ring all-reduce sends this share over each link (Patarasuk and Yuan 2009).
        ring = 2 * (len(summed) - 1) / max(len(summed), 1)
        return {
            "bytes_per_step": {
                "planned": {f"{a} -> {b}": size for (a, b), size in sorted(self.planned.items())},
                "loops": sorted(self.step.loops),  # in which bytes are not counted
                "per_device": {
                    name: {
                        "sent": sum(b for (way, _), b in self.planned.items() if way == name),
                        "received": sum(b for (_, way), b in self.planned.items() if way == name),
                        "collective": round(ring * summed[name]),
                    }
                    for name in [HOST, *names]
                },
            },
            "memory_bytes": parts | {"total": total},
            "fits": total <= limit,
            "largest_batch_per_tower": memory_estimate.largest_slice(parts, examples, limit),
        }


def place(options: Options, names: Sequence[str], dataset: Data) -> PlacedStep:
    """Trace a run's train loop and count its transfers.

    Args:
        options: options of the run, with the placement of its variables.
        names: device of each tower.
        dataset: the data set.
    """
    run = assemble(options, names, dataset)
    train_loop = run.train_loop(telemetry=False)  # the plan leaves it out
    batches = iter(dataset.train.train_batches(options.batch_size, seed=options.seed))
    with user_facing_errors(options):
        step = read_step(train_loop.get_concrete_function(batches, tf.constant(0)))
    return PlacedStep(run, step, step.crossing_bytes())


def estimate(options: Options, num_towers: int, dataset: Data) -> GpuEstimate:
    """Build a run for GPUs and analyse its step, without running it.

    Args:
        options: options of the run.
        num_towers: number of GPUs, each with a tower; CPU devices stand for them.
        dataset: the data set.
    """
    if options.variables == "auto":  # a trial of real steps
        options = dataclasses.replace(options, variables="default")
    with device_types.cpus_for_gpus():
        run = assemble(options, devices.tower_devices(num_towers, "cpu"), dataset)
        batches = iter(run.batches(0, 0))
        with user_facing_errors(options):
            return gpu_estimate.read(run.train_loop(), batches, tf.constant(0))


def describe(view: GpuEstimate) -> dict[str, Any]:
    """Return the plan's entry for a step on GPUs; counts are those of the busiest GPU.

    Returns:
        "without_kernel" [{"op", "dtype", "layer"}]; "undirected" [names]; copies in a step
        "from_host", "to_host", "from_gpus" and "collectives", each {"count", "bytes", "repeated":
        number of copies inside a loop of the model}; kernel "launches" {"tower", "update": others}.
    """
    host, gpus = gpu_estimate.HOST, sorted({op.gpu for op in view.ops}) or ["/gpu:0"]
    towers = {scope for scope in view.scopes if scope.startswith("tower_")}

    between = [[t for t in view.transfers(target=gpu) if t.source != host] for gpu in gpus]

    def busiest(of_gpus: Iterable[list[Any]]) -> dict[str, int]:
        longest = max(of_gpus, key=len)
        return {
            "count": len(longest),
            "bytes": sum(one.bytes or 0 for one in longest),
            "repeated": sum(one.repeated for one in longest),
        }

    missing = dict.fromkeys((op.type, op.dtype, op.layer) for op in view.without_kernel)
    return {
        "without_kernel": [dict(zip(("op", "dtype", "layer"), op, strict=True)) for op in missing],
        "undirected": list(view.undirected),
        "from_host": busiest(view.transfers(host, gpu) for gpu in gpus),
        "to_host": busiest(view.transfers(gpu, host) for gpu in gpus),
        "from_gpus": busiest(between),
        "collectives": busiest([c for c in view.collectives if c.gpu == gpu] for gpu in gpus),
        "launches": {
            "tower": max((view.launches(scope) for scope in towers), default=0),
            "update": view.launches(*(set(view.scopes) - towers)),
        },
    }


def _missing_gradients(run: RunContext) -> list[str]:
    """Return the names of weights without a gradient."""
    missing: list[str] = []

    def traced(example: Any, draws: tf.Tensor) -> None:
        gradients = run.task.gradients(*example, draws)
        pairs = zip(run.train_state.model.trainable_variables, gradients, strict=True)
        missing[:] = [variable.path for variable, gradient in pairs if gradient is None]

    batches = run.data.train.train_batches(run.options.batch_size, seed=0)
    tf.function(traced, autograph=False).get_concrete_function(*batches.element_spec)
    return missing


def _report(result: Mapping[str, Any], gpu_memory_gib: float) -> list[str]:
    missing = ", ".join(result["gradients"]["missing"])
    failure = f"FAILED      no gradient: {missing}"
    lines = [failure if missing else "gradients   every trainable variable has one"]

    def add(title: str, header: list[str], rows: list[list[Any]]) -> None:
        lines.append(title)
        lines.extend(f"  {line}" for line in table(header, rows))

    views = list(result["gpu"].values())
    rows = [
        ["run on the CPU, for want of a kernel", *(len(view["without_kernel"]) for view in views)],
        ["ask for no device", *(len(view["undirected"]) for view in views)],
    ]
    for way, name in _COPIES.items():
        copies = [view[way] for view in views]
        rows.append([name, *(f"{c['count']}, {c['bytes'] / 1e6:.3f} MB" for c in copies)])
    for part, name in _LAUNCHES.items():
        rows.append([name, *(view["launches"][part] for view in views)])
    counts = ["1 GPU" if n == "1" else f"each of {n} GPUs" for n in result["gpu"]]
    add("on GPUs a step would, by the kernels that TensorFlow has for them", ["", *counts], rows)
    for op in views[0]["without_kernel"]:
        lines.append(f"  no kernel: {op['op']} of {op['dtype']}, layer {op['layer']}")
    if any(view[way]["repeated"] for view in views for way in ("from_host", "to_host")):
        where = "in a loop of the model, as an LSTM has"
        lines.append(f"  copies {where}, are made with each iteration")

    rows = []
    for name, row in result["placements"].items():
        host, *towers = row["bytes_per_step"]["per_device"].values()
        cells = [host["sent"], host["received"]]
        cells += [max(tower[key] for tower in towers) for key in ("sent", "received", "collective")]
        rows.append([name, *(f"{b / 1e6:.3f}" for b in cells)])
    header = "variables|host sends|host receives|tower sends|tower receives|ring each"
    title = f"in a step cross, with {result['num_towers']} towers, in MB (a tower: the busiest one)"
    add(title, header.split("|"), rows)
    if row["bytes_per_step"]["loops"]:
        lines.append("  and what crosses in loops and functions of the model, which is not counted")

    rows = []
    for name, row in result["placements"].items():
        held = row["memory_bytes"]
        fits = f"{row['largest_batch_per_tower']} a tower" + ": TOO LARGE" * (not row["fits"])
        rows.append([name, *(f"{b / 1e6:.1f}" for b in held.values()), fits])
    header = ["variables", *(part.replace("_", " ") for part in held), "largest batch"]
    title = f"a tower's GPU holds, in MB, of {gpu_memory_gib:g} GiB (reserved: for CUDA and its "
    add(title + "libraries)", header, rows)
    return lines
