"""`towers plan`: how a run would scale on GPUs, said before it starts, on any machine.

The run's real training step is built with its towers on logical CPU devices apart from the host,
as GPUs are. What crosses between devices is counted twice, in the graph as it was traced and in the
one that TensorFlow executes; what the devices hold follows from the first. Steps on GPUs that
nobody measured are predicted by `towers.commands.plan.cost_model`.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import devices
from towers.commands.plan import cost_model
from towers.commands.plan.cost_model import Memory, Work
from towers.commands.plan.measure import measure
from towers.commands.plan.options import PlanOptions
from towers.commands.plan.report import report
from towers.commands.verify.command import load_data
from towers.data import Data
from towers.errors import InputError
from towers.graphs.flops import flop_per_example
from towers.graphs.placement import read_placement, short
from towers.graphs.traffic import HOST, Executed, Step, executed_bytes, read_step
from towers.options.run import Options
from towers.training import masters
from towers.training.run import Run, assemble, one_line_errors
from towers.training.step import make_loss_fn

DEFAULT_TOWERS = 8
# Of a GPU's memory, for CUDA's context, its libraries and their workspaces: an estimate.
RESERVED_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Placed:
    """The step with one placement of the variables.

    Attributes:
        run: on logical devices.
        step: as it was traced.
        planned: {(source, target): bytes} by the traced graph.
        executed: the same by the executed one.
    """

    run: Run
    step: Step
    planned: Counter[tuple[str, str]]
    executed: Executed

    @property
    def equal(self) -> bool | None:
        """Tell whether both counts agree; None if the step has loops, which are not looked into."""
        return None if self.step.loops else self.executed.agrees(self.planned)


def plan(options: PlanOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Say how a run would scale.

    Returns:
        "num_towers", "batch_size", "placements" {"cpu": {"bytes_per_step", "memory_bytes", "fits",
        "largest_batch_per_tower"}}, "gradients" {"missing", "shapes_differ"}, "flop_per_example",
        "assumptions", "predictions", "model_error" {"2": 0.06}, and "failed": a gradient is missing
        or of another shape, or the two counts of bytes differ.

    Raises:
        InputError: the options cannot be had.
        RunError: the data set cannot be read.
    """
    num_towers = options.num_towers or DEFAULT_TOWERS
    if not 2 <= num_towers <= options.batch_size:
        raise InputError(
            f"--num_towers={num_towers}: from 2 to --batch_size={options.batch_size} towers can be "
            "planned"
        )
    names = devices.tower_devices(max(num_towers + 1, 4), "cpu")[1 : num_towers + 1]
    dataset = load_data(options, say)
    say(
        f"plan        {options.model} on {dataset.name}: {num_towers} towers, batch size "
        f"{options.batch_size} in all, {options.dtype}"
    )
    one = assemble(options.of_run(variables="cpu"), names[:1], dataset)
    gradients = check_gradients(one)
    flop = flop_per_example(
        one.masters.model,
        make_loss_fn(one.masters, one.options),
        dataset.image_shape,
        dataset.train.train_batches(1, seed=0).element_spec[0].dtype,
    )
    # Each run has a loop of its own, which TensorFlow takes for one that is traced too often.
    tf.get_logger().setLevel("ERROR")
    placements, traffic = {}, None
    for placement in masters.VARIABLES:
        start = time.perf_counter()
        say(f"tracing     the step with --variables={placement} on {num_towers} towers ...")
        placed = place(options.of_run(variables=placement), names, dataset)
        say(f"  took {time.perf_counter() - start:.0f} s")
        traffic = traffic or placed
        placements[placement] = describe(placed, names, options.gpu_memory_gib)
    work = work_of(traffic, names, options, flop)
    errors = measure(options.of_run(), dataset, say) if options.measure else {}
    result = {
        "num_towers": num_towers,
        "batch_size": options.batch_size,
        "placements": placements,
        "gradients": gradients,
        "flop_per_example": flop,
        "assumptions": assumptions(options, work),
        "predictions": predict(work, options.batch_size, num_towers),
        "model_error": errors,
        "failed": bool(
            any(gradients.values())
            or any(row["bytes_per_step"]["equal"] is False for row in placements.values())
        ),
    }
    for line in report(result):
        say(line)
    return result


def place(options: Options, names: Sequence[str], dataset: Data) -> Placed:
    """Build a run's train loop, let TensorFlow place it, and read it both ways; no step is made."""
    run = assemble(options, names, dataset)
    train_loop = run.train_loop(telemetry=False)  # which is not planned
    batches = iter(dataset.train.train_batches(options.batch_size, seed=options.seed))
    with one_line_errors(options):
        placement = read_placement(train_loop, batches, tf.constant(0))
    step = read_step(train_loop.get_concrete_function(batches, tf.constant(0)))
    return Placed(run, step, step.crossing_bytes(), executed_bytes(placement, step))


def check_gradients(run: Run) -> dict[str, list[str]]:
    """Return the names of weights without a gradient, and with one of another shape."""
    train_step, kept = run.train_step(), []

    def traced(*batch: tf.Tensor) -> None:
        kept.extend(train_step(*batch)[1])

    batches = run.data.train.train_batches(run.options.batch_size, seed=0)
    tf.function(traced, autograph=False).get_concrete_function(*batches.element_spec)
    pairs = list(zip(run.masters.model.trainable_variables, kept, strict=True))
    return {
        "missing": [v.path for v, gradient in pairs if gradient is None],
        "shapes_differ": [
            v.path for v, g in pairs if g is not None and tuple(g.shape) != tuple(v.shape)
        ],
    }


def describe(placed: Placed, names: Sequence[str], gpu_memory_gib: float) -> dict[str, Any]:
    """Return what the result says of one placement."""
    memory = max((memory_of(placed, name) for name in names), key=Memory.total)
    limit = gpu_memory_gib * cost_model.GIB
    per_device = {
        name: {
            "sent": sum(b for (source, _), b in placed.planned.items() if source == name),
            "received": sum(b for (_, target), b in placed.planned.items() if target == name),
            "collective": placed.step.collective_bytes()[name],
        }
        for name in [HOST, *names]
    }
    parts = memory.fixed | {k: round(v * memory.examples) for k, v in memory.per_example.items()}
    return {
        "bytes_per_step": {
            "planned": routes(placed.planned),
            "executed": routes(placed.executed.crossing),
            "equal": placed.equal,
            "constants": placed.executed.constants,
            "unknown_sizes": sum(placed.executed.unknown.values()),
            "per_device": per_device,
        },
        "memory_bytes": parts | {"total": sum(parts.values())},
        "fits": memory.total() <= limit,
        "largest_batch_per_tower": memory.largest_slice(limit),
    }


def routes(crossing: Counter[tuple[str, str]]) -> dict[str, int]:
    """Return {"/cpu:0 -> /cpu:1": bytes}."""
    return {f"{source} -> {target}": b for (source, target), b in sorted(crossing.items())}


def memory_of(placed: Placed, name: str) -> Memory:
    """Return what a tower's device holds."""
    run, step = placed.run, placed.step
    tower = run.builder.devices.index(name)
    examples = -(-run.options.batch_size // len(run.builder.devices))  # of the first, the largest
    received = step.received_bytes(name)
    replicas = run.masters.replicas
    copies = [v.value for replica in replicas[1:] for v in replica.weights]
    slots = [v.value for replica in replicas for v in replica.optimizer.variables]
    fixed = {
        "weights": _bytes_on(name, [*(v.value for v in run.masters.model.variables), *copies]),
        "optimizer": _bytes_on(name, slots),
        "average": _bytes_on(name, [average for _, average in run.masters.averages]),
        "weights_received": received["weights"],
        "gradients": sum(map(_num_bytes, _trainable(run))),
        "gather": received["other"] + 2 * step.summed_bytes()[name],
        "reserved": RESERVED_BYTES,
    }
    per_example = {
        "activations": step.activation_bytes(tower) / examples,
        "batch": received["batch"] / examples,
    }
    return Memory(fixed, per_example, examples)


def work_of(placed: Placed, names: Sequence[str], options: PlanOptions, flop: int) -> Work:
    """Return what each tower computes and moves, from the step with its variables on the host."""
    received = placed.step.received_bytes(names[0])
    examples = -(-options.batch_size // len(names))
    seconds = options.step_ms / 1e3 or cost_model.compute_seconds(
        flop * examples, options.gpu_tflops, options.gpu_utilisation
    )
    launches = placed.step.num_launches(0) * cost_model.LAUNCH_SECONDS
    return Work(
        tower_seconds=seconds,
        # A measured step has its launches: a smaller part of the batch saves none of them.
        launch_seconds=min(launches, seconds) if options.step_ms else launches,
        slice_bytes=received["batch"],
        weights=[_num_bytes(v) for v in _trainable(placed.run)],
        exchange_bytes=received["other"] / len(names),
        exchanges=placed.step.num_exchanges(),
    )


def assumptions(options: PlanOptions, work: Work) -> dict[str, Any]:
    """Return what the predictions rest on."""
    links = [*cost_model.LINKS.values(), *cost_model.NETWORKS.values()]
    return {
        "tower_ms": work.computing_seconds * 1e3,
        "launch_ms": work.launch_seconds * 1e3,
        "from": "--step_ms" if options.step_ms else "FLOP",
        "gpu_tflops": options.gpu_tflops,
        "gpu_utilisation": options.gpu_utilisation,
        "gpu_memory_gib": options.gpu_memory_gib,
        "gpus_per_machine": cost_model.GPUS_PER_MACHINE,
        "links": {
            link.name: {"gb_per_second": link.gb_per_second, "fraction": link.fraction}
            for link in links
        },
    }


def predict(work: Work, batch_size: int, num_towers: int) -> list[dict[str, Any]]:
    """Return the predictions: "strong", the global batch stays, and "weak", a tower's part does."""
    examples = -(-batch_size // num_towers)
    whole = cost_model.split(work, examples / batch_size)
    found = {
        "strong": cost_model.predictions(whole, masters.VARIABLES, strong=True),
        "weak": cost_model.predictions(work, masters.VARIABLES),
    }
    return [
        {"scaling": scaling, **dataclasses.asdict(row)}
        for scaling, rows in found.items()
        for row in rows
    ]


def _trainable(run: Run) -> list[tf.Variable]:
    return [v.value for v in run.masters.model.trainable_variables]


def _bytes_on(name: str, variables: Sequence[tf.Variable]) -> int:
    return sum(_num_bytes(v) for v in variables if short(v.device) == name)


def _num_bytes(variable: tf.Variable) -> int:
    return variable.shape.num_elements() * variable.dtype.size
