"""`towers plan`: how a run would scale on GPUs, said before it starts, on any machine.

The run's real training step is built with its towers on logical CPU devices apart from the host,
as GPUs are. What crosses between devices is counted twice, in the graph as it was traced and in the
one that TensorFlow executes; what the devices hold follows from the first. Steps on GPUs that
nobody measured are predicted by `cost_model`, and on many machines by `workers`.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers import devices
from towers.commands.plan import cost_model, gpus, workers
from towers.commands.plan.measure import measure
from towers.commands.plan.network import measure_network
from towers.commands.plan.options import PlanOptions
from towers.commands.plan.picture import draw
from towers.commands.plan.report import report
from towers.data import Data
from towers.errors import InputError
from towers.graphs.flops import flop_per_example, has_unseen
from towers.graphs.placement import read_placement
from towers.graphs.traffic import HOST, Step, executed_bytes, num_bytes, read_step
from towers.options.run import Options
from towers.training import memory
from towers.training.run import Run, assemble, load_data
from towers.training.tensorflow_errors import one_line_errors
from towers.workers import connect

DEFAULT_TOWERS = TOWERS_PER_WORKER = 8
GIB = 2**30


def run(options: PlanOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Say how a run would scale.

    Returns:
        "num_towers", "batch_size", "placements" {"cpu": {"bytes_per_step", "memory_bytes", "fits",
        "largest_batch_per_tower"}}, "gradients" {"missing"}, "gpu" {"1": `gpus.describe`, "2": of
        two towers}, "flop_per_example", "flop_unseen": whether there are loops or functions that
        are not in it, "graph_seconds" of `num_towers`,
        "assumptions", "predictions", of one machine and of workers, "model_error" {"2": 0.06}, and
        "failed": a gradient is missing, or the two counts of bytes differ.

    Raises:
        InputError: the options cannot be had, or a worker.
        RunError: the data set cannot be read.
    """
    of_run, num_towers = options.run, options.num_towers or DEFAULT_TOWERS
    _check_towers(num_towers, of_run.batch_size)
    names = devices.tower_devices(max(num_towers + 1, 4), "cpu")[1 : num_towers + 1]
    dataset = load_data(of_run, say)
    networks = networks_of(options)
    say(
        f"plan        {of_run.model} on {dataset.name}: {num_towers} towers, batch size "
        f"{of_run.batch_size} in all, {of_run.dtype}"
    )
    one = assemble(dataclasses.replace(of_run, variables="cpu"), names[:1], dataset)
    missing = missing_gradients(one)
    batch = dataset.train.train_batches(1, seed=0).element_spec
    flop = flop_per_example(one.masters.model, one.task.loss, batch)
    # Each run has a loop of its own, which TensorFlow takes for one that is traced too often.
    tf.get_logger().setLevel("ERROR")
    placements, traffic = {}, None
    for placement in one.task.placements:
        say(f"tracing     the step with --variables={placement} on {num_towers} towers ...")
        placed = place(dataclasses.replace(of_run, variables=placement), names, dataset)
        traffic = traffic or placed
        placements[placement] = placed.describe(options.gpu_memory_gib)
    on_gpus = {str(count): _on_gpus(of_run, count, dataset, say) for count in (1, 2)}
    work = work_of(traffic, on_gpus, options, flop)
    share = traffic.examples / of_run.batch_size
    assumed = assumptions(options, work, networks)
    unequal = any(row["bytes_per_step"]["equal"] is False for row in placements.values())
    result = {
        "num_towers": num_towers,
        "batch_size": of_run.batch_size,
        "placements": placements,
        "gradients": {"missing": missing},
        "gpu": on_gpus,
        "flop_per_example": flop,
        "flop_unseen": has_unseen(one.masters.model, one.task.loss, batch),
        "graph_seconds": traffic.build_seconds,
        "assumptions": assumed,
        "predictions": _predictions(work, share, one.task.placements, networks, assumed),
        "model_error": measure(of_run, dataset, say) if options.measure else {},
        "failed": bool(missing) or unequal,
    }
    _show(result, options.plot, say)
    return result


def _predictions(
    work: cost_model.Work,
    share: float,
    placements: Sequence[str],
    networks: Sequence[cost_model.Link],
    assumed: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return those of one machine, and those of workers."""
    of_workers = {name: assumed[name] for name in ("towers_per_worker", "straggler_spread")}
    return [
        *cost_model.predictions(work, share, placements),
        *workers.predictions(work, share, placements, networks, **of_workers),
    ]


def _show(result: dict[str, Any], plot: str, say: Callable[[str], None]) -> None:
    for line in report(result):
        say(line)
    if plot:
        draw(result, plot)
        say(f"plot        {plot}")


def _check_towers(num_towers: int, batch_size: int) -> None:
    if not 2 <= num_towers <= batch_size:
        raise InputError(
            f"--num_towers={num_towers}: from 2 to --batch_size={batch_size} towers can be planned"
        )


def networks_of(options: PlanOptions) -> list[cost_model.Link]:
    """Return the networks that workers may have: as the flags say, as copies tell, or three."""
    found = list(workers.NETWORKS.values())
    where = options.run.workers, 1, options.run.worker_timeout_seconds
    if options.run.workers:
        connected = connect(*where)
        try:
            found = [measure_network(connected.devices)]
        finally:
            connected.close()
    if options.network_gbits:
        found = [workers.network(options.network_gbits, found[0].latency_seconds)]
    if options.network_latency_us:
        seconds = options.network_latency_us / 1e6
        found = [dataclasses.replace(link, latency_seconds=seconds) for link in found]
    return found


def _on_gpus(
    options: Options, num_gpus: int, dataset: Data, say: Callable[[str], None]
) -> dict[str, Any]:
    say(f"tracing     the step as GPUs make it, with {num_gpus} of them ...")
    return gpus.describe(gpus.view(options, num_gpus, dataset))


@dataclasses.dataclass(frozen=True)
class Placed:
    """The step with one placement of the variables, whose towers are logical CPU devices."""

    run: Run
    step: Step
    planned: Counter[tuple[str, str]]  # {(source, target): bytes} by the traced graph
    executed: Counter[tuple[str, str]]  # by the executed one
    unknown: Counter[tuple[str, str]]  # number of values whose size that does not tell
    constants: int  # bytes in neither count: values that are known beforehand
    build_seconds: float  # from the options to the executed graph

    @property
    def examples(self) -> int:
        """Examples of the first tower, which has most."""
        return -(-self.run.options.batch_size // len(self.run.builder.devices))

    @property
    def equal(self) -> bool | None:
        """Tell whether both counts agree; None if the step has loops, which are not looked into."""
        if self.step.loops:
            return None
        return all(
            self.planned[way] == self.executed[way]
            or (self.planned[way] > self.executed[way] and self.unknown[way] > 0)
            for way in self.planned.keys() | self.executed.keys()
        )

    def describe(self, gpu_memory_gib: float) -> dict[str, Any]:
        """Return what the result of the plan says of this placement."""
        held = [memory.held(self.run, self.step, name) for name in self.run.builder.devices]
        parts = max(held, key=lambda parts: sum(parts.values()))
        limit, total = int(gpu_memory_gib * GIB), sum(parts.values())
        summed = self.step.summed_bytes()
        return {
            "bytes_per_step": {
                "planned": _routes(self.planned),
                "executed": _routes(self.executed),
                "equal": self.equal,
                "per_device": {
                    name: {
                        "sent": sum(b for (way, _), b in self.planned.items() if way == name),
                        "received": sum(b for (_, way), b in self.planned.items() if way == name),
                        "collective": round(cost_model.ring_bytes(summed[name], len(summed))),
                    }
                    for name in [HOST, *self.run.builder.devices]
                },
            },
            "memory_bytes": parts | {"total": total},
            "fits": total <= limit,
            "largest_batch_per_tower": memory.largest_part(parts, self.examples, limit),
        }


def place(options: Options, names: Sequence[str], dataset: Data) -> Placed:
    """Build a run's train loop, let TensorFlow place it, and read it both ways; no step is made."""
    start = time.perf_counter()
    run = assemble(options, names, dataset)
    train_loop = run.train_loop(telemetry=False)  # which is not planned
    batches = iter(dataset.train.train_batches(options.batch_size, seed=options.seed))
    with one_line_errors(options):
        placement = read_placement(train_loop, batches, tf.constant(0))
    seconds = time.perf_counter() - start
    step = read_step(train_loop.get_concrete_function(batches, tf.constant(0)))
    return Placed(run, step, step.crossing_bytes(), *executed_bytes(placement, step), seconds)


def _routes(crossing: Counter[tuple[str, str]]) -> dict[str, int]:
    """Return {"/cpu:0 -> /cpu:1": bytes}."""
    return {f"{source} -> {target}": b for (source, target), b in sorted(crossing.items())}


def missing_gradients(run: Run) -> list[str]:
    """Return the names of weights without a gradient."""
    kept: list[Any] = []

    def traced(example: Any, draws: tf.Tensor) -> None:
        kept.extend(run.task.gradients(*example, draws))

    batches = run.data.train.train_batches(run.options.batch_size, seed=0)
    tf.function(traced, autograph=False).get_concrete_function(*batches.element_spec)
    pairs = zip(run.masters.model.trainable_variables, kept, strict=True)
    return [variable.path for variable, gradient in pairs if gradient is None]


def work_of(
    placed: Placed, on_gpus: dict[str, dict[str, Any]], options: PlanOptions, flop: int
) -> cost_model.Work:
    """Return what each tower computes and moves.

    What crosses is read from the step with its variables on the host, `placed`; what one
    GPU, and each of two, launches and waits for is `gpus.describe` of "1" and "2".
    """
    on_gpu, launches = on_gpus["1"], {n: view["launches"] for n, view in on_gpus.items()}
    step, names = placed.step, placed.run.builder.devices
    received = step.received_bytes(names[0])
    per_second = options.gpu_tflops * 1e12 * options.gpu_utilisation
    work = cost_model.Work(
        tower_seconds=flop * placed.examples / per_second,
        launch_seconds=launches["1"]["tower"] * cost_model.LAUNCH_SECONDS,
        more_launch_seconds=cost_model.LAUNCH_SECONDS
        * (launches["2"]["tower"] - launches["1"]["tower"]),
        update_launch_seconds=launches["1"]["update"] * cost_model.LAUNCH_SECONDS,
        host_copies=on_gpu["from_host"]["count"] + on_gpu["to_host"]["count"],
        slice_bytes=received["batch"],
        weights=[num_bytes(v.value) for v in placed.run.masters.model.trainable_variables],
        exchange_bytes=received["other"] / len(names),
        exchanges=step.num_exchanges(),
    )
    if not options.step_ms:
        return work
    # A measured step has its launches and its update: a smaller part of the batch saves neither.
    seconds = options.step_ms / 1e3
    update = min(work.update_launch_seconds, seconds)
    launches = min(work.launch_seconds, seconds - update)
    return dataclasses.replace(
        work,
        tower_seconds=seconds - update,
        launch_seconds=launches,
        update_launch_seconds=update,
    )


def assumptions(
    options: PlanOptions, work: cost_model.Work, networks: Sequence[cost_model.Link]
) -> dict[str, Any]:
    """Return what the predictions rest on."""
    links = [*cost_model.LINKS.values(), *networks]
    given = ("gpu_tflops", "gpu_utilisation", "gpu_memory_gib", "straggler_spread")
    return {name: getattr(options, name) for name in given} | {
        "tower_ms": work.computing_seconds() * 1e3,
        "launch_ms": work.launch_seconds * 1e3,
        "more_launch_ms": work.more_launch_seconds * 1e3,
        "update_launch_ms": work.update_launch_seconds * 1e3,
        "from": "--step_ms" if options.step_ms else "FLOP",
        "towers_per_worker": options.run.towers_per_worker or TOWERS_PER_WORKER,
        "network_latency_ms": networks[0].latency_seconds * 1e3,
        "links_gb_per_second": {link.name: link.gb_per_second * link.fraction for link in links},
    }
