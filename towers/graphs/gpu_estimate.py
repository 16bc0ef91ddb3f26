"""Estimates the kernels, copies and launches of a step on GPUs, on a machine without GPUs.

    with device_types.cpus_for_gpus():               # towers on /cpu:1, /cpu:2 ...; host: /cpu:0
        view = read(train_loop, batches, tf.constant(0))           # no step is made
    view.without_kernel                   # ops that would fall back to the CPU, with their layers
    view.transfers("host", "/gpu:0")      # copies to there in a step, with bytes
    view.launches("update")               # kernels that the update launches on the busiest GPU

It reads the graph that TensorFlow executes, with a GPU in place of each logical CPU but the first.
A value that is made in one memory and read in another is copied in each step, a constant too, and
each copy from a GPU to the host is a wait.

One difference remains: on a GPU Keras calls cuDNN for an LSTM or a GRU whose arguments allow it;
here such a layer is a loop.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from towers import tf_internals
from towers.builder import device_types
from towers.graphs.executed_graph import Node, read_nodes
from towers.graphs.placement import traced_ops

_PLUMBING = frozenset(
    "Enter Exit Merge Switch LoopCond NextIteration Identity NoOp Const _Arg _Retval".split()
)


class MemoryCopy(NamedTuple):
    """A value that is copied between memories in each step."""

    name: str  # traced name of the op that makes it
    type: str  # of that op
    dtype: str
    bytes: int | None  # None if the shape is unknown
    source: str  # "host" or "/gpu:0"
    target: str
    measured: bool  # only in steps that telemetry measures
    repeated: bool


class GpuEstimate(NamedTuple):
    """The ops and copies of a step on GPUs.

    Those in a loop of the model, such as an LSTM's, are listed once: `repeated` marks them.

    Attributes:
        ops: the nodes that run on a GPU.
        copies: the values that are copied between memories.
    """

    ops: tuple[Node, ...]
    copies: tuple[MemoryCopy, ...]

    @property
    def without_kernel(self) -> list[Node]:
        """Ops without a GPU kernel: they fall back to the CPU, or fail without soft placement."""
        return [op for op in self.ops if not op.kernel.exists]

    @property
    def undirected(self) -> tuple[str, ...]:
        """Names of the ops that run on a GPU without having requested a device."""
        return tuple(
            op.name
            for op in self.ops
            if op.traced is not None and not op.traced.device and op.kernel.exists
            # An op on a variable runs on the variable's device.
            if not any(argument.dtype == tf.resource for argument in op.kernel.inputs)
            if op.proto.op not in _PLUMBING
        )

    @property
    def collectives(self) -> list[Node]:
        """Collective ops, one for each GPU of an all-reduce."""
        return [op for op in self.ops if op.proto.op.startswith("Collective")]

    @property
    def scopes(self) -> list[str]:
        """Scopes that launch kernels: "tower_0", "gather", "update" ..."""
        return sorted({op.scope for op in self.ops if op.kernel.launches})

    def transfers(
        self, source: str = "", target: str = "", *, gpu: str = "", measured: bool = False
    ) -> list[MemoryCopy]:
        """Return the copies in a step from and to these memories ("": all).

        Args:
            source: "host" or "/gpu:0".
            target: likewise.
            gpu: only copies from or to this GPU.
            measured: whether to include those of measured steps only.
        """
        return [
            copy
            for copy in self.copies
            if measured >= copy.measured
            if source in ("", copy.source) and target in ("", copy.target)
            if gpu in ("", copy.source, copy.target)
        ]

    def launches(self, *scopes: str, measured: bool = False) -> int:
        """Return how many kernels these scopes launch on the busiest GPU.

        Args:
            *scopes: "tower_0", "gather", "update" ...
            measured: whether to include those of measured steps only.
        """
        total: Counter[str] = Counter()
        for op in self.ops:
            if op.scope in scopes and measured >= op.measured:
                total[op.gpu] += op.kernel.launches
        return max(total.values(), default=0)


def read(
    function: Any, *arguments: Any, call: Callable | None = None, is_one_step: bool = False
) -> GpuEstimate:
    """Call a `tf.function` once and return the view of one step on GPUs.

    Args:
        function: a train loop, not yet traced, built under `device_types.cpus_for_gpus`.
        *arguments: of the call, such as 0 steps, so that it does no work.
        call: calls the function with these arguments, as `fit` does; by default the function.
        is_one_step: whether the function is one step, without a loop over steps.

    Raises:
        ValueError: the function has run before.
    """
    # Ops that request no device go to the first GPU.
    with device_types.cpus_for_gpus(), not_fused(), tf.device("/cpu:1"):
        with tf_internals.executed_graphs() as functions:
            (call or function)(*arguments)
        if not functions:
            raise ValueError("the function has run before: read what it does at its first call")
        concrete = function.get_concrete_function(*arguments)
    # The smaller functions have made the variables.
    graphs = max(functions, key=lambda executed: sum(len(graph.node) for graph in executed))
    nodes = read_nodes(graphs, dict(traced_ops(concrete.graph)), int(is_one_step))
    # Ops outside of the loop over the steps run once a call.
    on_gpus = tuple(node for node in nodes if node.gpu and node.depth)
    return GpuEstimate(on_gpus, tuple(_copies(nodes)))


def _copies(nodes: Iterable[Node]) -> Iterator[MemoryCopy]:
    for node in nodes:
        # A value is copied once to each memory for each device's part of the graph.
        takers: dict[tuple, list[Node]] = defaultdict(list)
        for index, taker, place in node.takers:
            if index is not None:
                source = node.memory_of(node.kernel.outputs, index)
                target = taker.memory_of(taker.kernel.inputs, place)
                if source != target:
                    takers[index, taker.gpu, source, target].append(taker)
        for (index, _, source, target), group in takers.items():
            if depth := max(node.depth, *(taker.depth for taker in group)):
                outputs = node.kernel.outputs  # without those that oneDNN added
                dtype = outputs[index].dtype.name if index < len(outputs) else ""
                about = node.name, node.type, dtype, node.num_bytes(index)
                yield MemoryCopy(*about, source, target, node.measured, depth > 1)


@contextlib.contextmanager
def not_fused() -> Iterator[None]:
    """Keep TensorFlow from fusing ops in the block.

    Fusions differ between CPUs and GPUs; in float64 there are none, and a warning at each op.
    """
    before = tf.config.optimizer.get_experimental_options().get("remapping", True)
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": before})
