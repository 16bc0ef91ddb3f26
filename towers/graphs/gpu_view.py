"""What a step would do on GPUs, read on a machine that has none.

    with kinds.cpus_for_gpus():                       # towers on /cpu:1, /cpu:2 ...; host: /cpu:0
        view = read(train_loop, batches, tf.constant(0))           # no step is made
    view.without_kernel                   # ops that would fall back to the CPU, with their layers
    view.transfers("host", "/gpu:0")      # what is copied there in a step, with bytes
    view.launches("update")               # kernels that the update starts on the busiest GPU

It is the graph that TensorFlow executes, after its placer, optimizer and partitioner, with a GPU in
place of each logical CPU but the first; `read_fit` reads a step of `model.fit`. What the registry
of kernels says of each op tells in which memory its inputs and outputs lie; a value that is made in
one and read in another is copied with each step, a constant too, and each copy from a GPU to the
host is a wait.

What a machine without GPUs cannot tell: Keras calls cuDNN for an LSTM or a GRU where there is a GPU
and the layer's arguments allow it. Here its loop is seen, which it is for all others.
"""

import contextlib
import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_private
from towers.builder import kinds
from towers.builder.layers import layer_of, tower_of
from towers.graphs.gpu_nodes import HOST, Node, read_nodes
from towers.graphs.placement import traced_ops

# The scope of what towers exchange in BatchNorm; TensorFlow numbers those that follow.
_EXCHANGE = re.compile(r"(?:^|/)exchange(?:_\d+)?/")
_OF_LOOPS = ("while", "body", "cond", "gradient_tape", "")
_PLUMBING = frozenset(
    "Enter Exit Merge Switch LoopCond NextIteration Identity NoOp Const _Arg _Retval".split()
)


@dataclasses.dataclass(frozen=True)
class GpuOp:
    """An op that runs on a GPU in each step."""

    name: str  # as it was traced
    type: str
    dtype: str
    gpu: str  # "/gpu:0"
    launches: int  # kernels that it starts; see `GpuKernel`
    has_kernel: bool
    measured: bool  # only in a step that telemetry measures
    repeated: bool  # inside of a loop of the model, such as an LSTM's: told once

    @property
    def layer(self) -> str:
        """The layers that the op stands in, outermost first; outside of a tower, its scope."""
        in_tower = tower_of(self.name) is not None
        return layer_of(self.name) if in_tower else self.scope or self.name

    @property
    def scope(self) -> str:
        """What it belongs to: "tower_0", "gather", "update" ..."""
        return scope_of(self.name)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A value that is copied between memories, or an order to wait, in each step.

    `source` and `target` are the memories, "host" or "/gpu:0"; both are "host" for what goes from
    one device's part of the graph to another's without a copy, such as a loop's condition.
    """

    name: str  # of the op that makes it, as it was traced
    takers: tuple[str, ...]  # names of those that take it
    type: str  # of the op that makes it
    dtype: str
    bytes: int | None  # None if the shape is not known
    source: str
    target: str
    inside: bool  # of one GPU's part: an op has an argument in the host's memory
    control: bool  # an order of execution: no data
    measured: bool
    repeated: bool

    @property
    def layer(self) -> str:
        """The layers of the op that makes it."""
        return layer_of(self.name)

    @property
    def of_exchange(self) -> bool:
        """Whether towers exchange it, or its gradient, in the middle of a step."""
        return any(map(_EXCHANGE.search, (self.name, *self.takers)))


@dataclasses.dataclass(frozen=True)
class Collective:
    """A GPU's part in an all-reduce of each step."""

    name: str
    gpu: str
    dtype: str
    bytes: int | None
    hint: str  # "nccl", "ring" or "auto"


@dataclasses.dataclass(frozen=True)
class GpuView:
    """What a step does on GPUs.

    What stands in a loop of the model's own, such as an LSTM's, is told once, though it happens
    with each iteration: `repeated` marks it.

    Attributes:
        ops: that run on a GPU.
        moves: all that goes between the parts of the graph, one for each device, or between
            memories.
        collectives: one for each GPU that takes part.
        undirected: ops on the first GPU that ask for no device.
    """

    ops: tuple[GpuOp, ...]
    moves: tuple[Transfer, ...]
    collectives: tuple[Collective, ...]
    undirected: tuple[str, ...]

    @property
    def without_kernel(self) -> list[GpuOp]:
        """The ops that no GPU can run: they fall back to the CPU, or fail without soft placement.

        Those of measured steps are among them.
        """
        return [op for op in self.ops if not op.has_kernel]

    def transfers(
        self, source: str = "", target: str = "", *, gpu: str = "", measured: bool = False
    ) -> list[Transfer]:
        """Return the copies of data in a step, from and to these memories ("": all).

        Args:
            source: "host" or "/gpu:0".
            target: likewise.
            gpu: those from or to this GPU.
            measured: whether to tell what only a measured step has, too.
        """
        return [
            move
            for move in self.moves
            if move.source != move.target and not move.control and measured >= move.measured
            if source in ("", move.source) and target in ("", move.target)
            if gpu in ("", move.source, move.target)
        ]

    @property
    def copies(self) -> list[Transfer]:
        """The transfers inside of a tower: an op there has an argument in the host's memory."""
        return [move for move in self.transfers() if move.inside]

    @property
    def exchanged_by_host(self) -> list[Transfer]:
        """The transfers of BatchNorm's exchange from or to the host."""
        return [m for m in self.transfers() if m.of_exchange and HOST in (m.source, m.target)]

    def launches(self, *scopes: str, measured: bool = False) -> int:
        """Return the kernels that "tower_0", "gather", "update" ... start on the busiest GPU.

        `measured` adds what only a measured step starts.
        """
        total: Counter[str] = Counter()
        for op in self.ops:
            if op.scope in scopes and measured >= op.measured:
                total[op.gpu] += op.launches
        return max(total.values(), default=0)

    @property
    def scopes(self) -> list[str]:
        """The scopes that start kernels."""
        return sorted({op.scope for op in self.ops if op.launches})


def read(function: Any, *arguments: Any) -> GpuView:
    """Call a train loop once, with arguments that do no work, and return what GPUs would do.

    It must not have been traced before, and its parts have been built with `kinds.cpus_for_gpus`
    in force, so that they go a GPU's ways.

    Raises:
        ValueError: the function has run before.
    """
    return _read(function, function, arguments)


def read_fit(model: keras.Model, batches: tf.data.Dataset) -> GpuView:
    """Call what `fit` calls once, on a compiled model, and return what GPUs would do in a step.

    So many steps are made as one call makes, `steps_per_execution`; the model must not have been
    fitted before.

    Raises:
        ValueError: the model has been fitted before.
    """
    step, one = tf_private.step_of_fit(model), model.steps_per_execution == 1
    return _read(model.train_function, step, [iter(batches)], int(one))


def _read(
    call: Callable, function: Any, arguments: Sequence[Any], depth_of_step: int = 0
) -> GpuView:
    """Return what a `tf.function` does on GPUs if `call` calls it with these arguments.

    `depth_of_step` is 1 if it makes one step, 0 if its loop makes them.
    """
    # What asks for no device goes to the first GPU.
    with kinds.cpus_for_gpus(), not_fused(), tf.device("/cpu:1"):
        with tf_private.executed_graphs() as functions:
            call(*arguments)
        if not functions:
            raise ValueError("the function has run before: read what it does at its first call")
        concrete = function.get_concrete_function(*arguments)
    # Small ones besides have made the variables.
    graphs = max(functions, key=lambda found: sum(len(graph.node) for graph in found))
    nodes = read_nodes(graphs, dict(traced_ops(concrete.graph)), depth_of_step)
    ours = [node for node in nodes if node.gpu and node.depth]
    return GpuView(
        tuple(map(_op, ours)),
        tuple(_moves(nodes)),
        tuple(_collective(node) for node in ours if node.proto.op.startswith("Collective")),
        tuple(node.name for node in ours if _is_undirected(node)),
    )


def scope_of(name: str) -> str:
    """Return what an op of this name belongs to: "tower_0", or the outermost scope in the loop."""
    if (tower := tower_of(name)) is not None:
        return f"tower_{tower}"
    scopes = [re.sub(r"_\d+$", "", scope) for scope in name.split("/")[:-1]]
    return next((scope for scope in scopes if scope not in _OF_LOOPS), "")


@contextlib.contextmanager
def not_fused() -> Iterator[None]:
    """Keep TensorFlow from fusing ops in the block.

    What it fuses differs between CPUs and GPUs; in float64 it is nothing, told by a warning an op.
    """
    before = tf.config.optimizer.get_experimental_options().get("remapping", True)
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": before})


def _moves(nodes: Iterable[Node]) -> Iterator[Transfer]:
    """Yield what goes between memories, or between the parts of the graph, with each step."""
    for node in nodes:
        ways: dict[tuple, list[Node]] = defaultdict(list)
        for index, taker, place in node.takers:
            elsewhere = node.gpu != taker.gpu
            if index is None:
                if elsewhere:
                    ways[None, taker.gpu, node.gpu or HOST, taker.gpu or HOST].append(taker)
                continue
            source, target = node.memory_of_output(index), taker.memory_of_input(place)
            if elsewhere or source != target:
                ways[index, taker.gpu, source, target].append(taker)
        for (index, part, source, target), takers in ways.items():
            depth = max(node.depth, *(taker.depth for taker in takers))
            if depth:  # else it is outside of the loop over the steps: once a call
                yield Transfer(
                    node.name,
                    tuple(taker.name for taker in takers),
                    node.kernel.type,
                    "" if index is None else node.dtype_of_output(index),
                    0 if index is None else node.num_bytes(index),
                    source,
                    target,
                    inside=part == node.gpu,
                    control=index is None,
                    measured=node.measured,
                    repeated=depth > 1,
                )


def _op(node: Node) -> GpuOp:
    return GpuOp(
        node.name,
        node.kernel.type,
        node.dtype,
        node.gpu,
        node.kernel.launches,
        node.kernel.exists,
        node.measured,
        node.depth > 1,
    )


def _collective(node: Node) -> Collective:
    hint = node.proto.attr["communication_hint"].s.decode()
    return Collective(node.name, node.gpu, node.dtype, node.num_bytes(0), hint or "auto")


def _is_undirected(node: Node) -> bool:
    """Tell whether an op is on a GPU because nobody says where it is to run."""
    if node.traced is None or node.traced.device or not node.kernel.exists:
        return False
    # An op on a variable runs where that lies.
    variables = any(argument.dtype == tf.resource for argument in node.kernel.inputs)
    return not variables and node.proto.op not in _PLUMBING
