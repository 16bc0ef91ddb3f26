"""What a step would do on GPUs, read on a machine that has none.

    with kinds.cpus_for_gpus():                       # towers on /cpu:1, /cpu:2 ...; host: /cpu:0
        view = read(train_loop, batches, tf.constant(0))           # no step is made
    view.without_kernel                   # ops that would fall back to the CPU, with their layers
    view.transfers("host", "/gpu:0")      # what is copied there in a step, with bytes
    view.launches("update")               # kernels that the update starts on the busiest GPU

It reads the graph that TensorFlow executes, after its placer, optimizer and partitioner, with a GPU
in place of each logical CPU but the first. The registry of kernels tells in which memory an op's
inputs and outputs lie; a value that is made in one and read in another is copied with each step, a
constant too, and each copy from a GPU to the host is a wait.

A machine without GPUs cannot tell one thing: Keras calls cuDNN for an LSTM or a GRU where there is
a GPU and the layer's arguments allow it. Here its loop is seen, as it is for all other layers.
"""

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder import device_types
from towers.graphs.executed_graph import Node, read_nodes
from towers.graphs.placement import traced_ops

_PLUMBING = frozenset(
    "Enter Exit Merge Switch LoopCond NextIteration Identity NoOp Const _Arg _Retval".split()
)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A value that is copied between memories in each step."""

    name: str  # of the op that makes it, as it was traced
    type: str  # of that op
    dtype: str
    bytes: int | None  # None if the shape is not known
    source: str  # "host" or "/gpu:0"
    target: str
    measured: bool  # only in a step that telemetry measures
    repeated: bool


@dataclasses.dataclass(frozen=True)
class GpuView:
    """What a step does on GPUs.

    What stands in a loop of the model's own, such as an LSTM's, is told once, though it happens
    with each iteration: `repeated` marks it.

    Attributes:
        ops: the nodes that run on a GPU.
        copies: the values that are copied between memories.
    """

    ops: tuple[Node, ...]
    copies: tuple[Transfer, ...]

    @property
    def without_kernel(self) -> list[Node]:
        """The ops that no GPU can run: they fall back to the CPU, or fail without soft placement.

        Those of measured steps are among them.
        """
        return [op for op in self.ops if not op.kernel.exists]

    @property
    def undirected(self) -> tuple[str, ...]:
        """Names of the ops that are on a GPU because nobody says where they are to run."""
        return tuple(
            op.name
            for op in self.ops
            if op.traced is not None and not op.traced.device and op.kernel.exists
            # An op on a variable runs where that lies.
            if not any(argument.dtype == tf.resource for argument in op.kernel.inputs)
            if op.proto.op not in _PLUMBING
        )

    @property
    def collectives(self) -> list[Node]:
        """The parts of GPUs in all-reduces, one for each GPU that takes part."""
        return [op for op in self.ops if op.proto.op.startswith("Collective")]

    @property
    def scopes(self) -> list[str]:
        """The scopes that start kernels: "tower_0", "gather", "update" ..."""
        return sorted({op.scope for op in self.ops if op.kernel.launches})

    def transfers(
        self, source: str = "", target: str = "", *, gpu: str = "", measured: bool = False
    ) -> list[Transfer]:
        """Return the copies in a step from and to these memories ("": all).

        Args:
            source: "host" or "/gpu:0".
            target: likewise.
            gpu: those from or to this GPU.
            measured: whether to include what only a measured step has.
        """
        return [
            copy
            for copy in self.copies
            if measured >= copy.measured
            if source in ("", copy.source) and target in ("", copy.target)
            if gpu in ("", copy.source, copy.target)
        ]

    def launches(self, *scopes: str, measured: bool = False) -> int:
        """Return how many kernels these scopes start on the busiest GPU.

        `measured` adds what only a measured step starts.
        """
        total: Counter[str] = Counter()
        for op in self.ops:
            if op.scope in scopes and measured >= op.measured:
                total[op.gpu] += op.kernel.launches
        return max(total.values(), default=0)


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
    step, one = tf_internals.step_of_fit(model), model.steps_per_execution == 1
    return _read(model.train_function, step, [iter(batches)], int(one))


def _read(
    call: Callable, function: Any, arguments: Sequence[Any], depth_of_step: int = 0
) -> GpuView:
    """Return what a `tf.function` does on GPUs if `call` calls it with these arguments.

    `depth_of_step` is 1 if it makes one step, 0 if its loop makes them.
    """
    # What asks for no device goes to the first GPU.
    with device_types.cpus_for_gpus(), not_fused(), tf.device("/cpu:1"):
        with tf_internals.executed_graphs() as functions:
            call(*arguments)
        if not functions:
            raise ValueError("the function has run before: read what it does at its first call")
        concrete = function.get_concrete_function(*arguments)
    # Small ones besides have made the variables.
    graphs = max(functions, key=lambda found: sum(len(graph.node) for graph in found))
    nodes = read_nodes(graphs, dict(traced_ops(concrete.graph)), depth_of_step)
    # What is outside of the loop over the steps happens once a call.
    return GpuView(tuple(node for node in nodes if node.gpu and node.depth), tuple(_copies(nodes)))


def _copies(nodes: Iterable[Node]) -> Iterator[Transfer]:
    for node in nodes:
        # A value is copied once to each memory for each device's part of the graph.
        takers: dict[tuple, list[Node]] = defaultdict(list)
        for index, taker, place in node.takers:
            if index is not None:
                source = node.memory_of(node.kernel.outputs, index)
                target = taker.memory_of(taker.kernel.inputs, place)
                if source != target:
                    takers[index, taker.gpu, source, target].append(taker)
        for (index, _, source, target), found in takers.items():
            if depth := max(node.depth, *(taker.depth for taker in found)):
                dtype, num_bytes = node.dtype_of_output(index), node.num_bytes(index)
                about = node.name, node.type, dtype, num_bytes
                yield Transfer(*about, source, target, node.measured, depth > 1)


@contextlib.contextmanager
def not_fused() -> Iterator[None]:
    """Keep TensorFlow from fusing ops in the block.

    What it fuses differs between CPUs and GPUs; in float64 it fuses nothing, and warns at each op.
    """
    before = tf.config.optimizer.get_experimental_options().get("remapping", True)
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": before})
