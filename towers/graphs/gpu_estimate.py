"""Estimates the kernels, copies and launches of a step on GPUs, on a machine without GPUs.

    with device_types.cpus_for_gpus():               # towers on /cpu:1, /cpu:2 ...; host: /cpu:0
        view = read(train_loop, batches, tf.constant(0))           # no step is made
    view.without_kernel                   # ops that would fall back to the CPU, with their layers
    view.transfers("host", "/gpu:0")      # copies to there in a step, with bytes
    view.launches("update")               # kernels that the update launches on the busiest GPU

TensorFlow executes one graph for each logical CPU. Here they are one graph, without sends and
receives: `/cpu:0` is the host, `/cpu:1` stands for `/gpu:0`, and so on. TensorFlow's wheel has the
registry of GPU kernels on any machine; it says which arguments of an op are in the host's memory. A
value that is made in one memory and read in another is copied in each step, a constant too, and
each copy from a GPU to the host is a wait. Steps that telemetry measures do more, which is left
out.

One difference remains: on a GPU Keras calls cuDNN for an LSTM or a GRU whose arguments allow it;
here such a layer is a loop.
"""

import contextlib
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers import tf_internals
from towers.builder import device_types
from towers.builder.op_names import layer_of, tower_of
from towers.graphs.communication import num_bytes
from towers.graphs.placement import short_device_name, traced_name, traced_ops

NodeDef = tf.compat.v1.NodeDef

HOST = "host"
_SENDS, _RECEIVES = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
_LOOP = re.compile(r"(?:^|/)(?:body|cond)/_\d+(?=/)")
_LOOP_SCOPES = ("while", "body", "cond", "gradient_tape", "")
_PLUMBING = frozenset(
    "Enter Exit Merge Switch LoopCond NextIteration Identity NoOp Const _Arg _Retval".split()
)
# Ops that launch no kernel: these, other names of a buffer, transfers.
_NO_LAUNCH = _PLUMBING | frozenset(
    "IdentityN Reshape Squeeze ExpandDims Bitcast StopGradient PreventGradient Assert "
    "PlaceholderWithDefault ReadVariableOp AssignVariableOp CollectiveReduceV2 "
    "CollectiveGatherV2".split()
)
_ALWAYS_ON_HOST = (tf.string, tf.resource)


class Argument(NamedTuple):
    """An input or output of an op."""

    dtype: tf.DType
    on_host: bool  # in the host's memory, even if the op runs on a GPU


class GpuKernel(NamedTuple):
    """An op's kernel on a GPU.

    Attributes:
        type: the op that users know.
        exists: whether there is a kernel for these types; without one the op runs on the host.
        inputs, outputs: the arguments; () for an unregistered op.
        launches: least number of kernels that it launches. 0 for other names of a buffer (Reshape,
            Identity, reading and plainly assigning a variable, rows of a tensor, which are assumed
            to be a multiple of 64 bytes), control flow, constants, and ops whose outputs are all
            lists or in the host's memory, such as shapes and int32 counters. Transfers and
            collectives are not launches.
    """

    type: str
    exists: bool
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    launches: int


class Node:
    """A node of an executed graph, and its consumers.

    Attributes:
        gpu: "/gpu:0", or "" for the host.
        name: the traced name, or TensorFlow's name of a node that it added.
        traced: the traced op, or None.
        type: the type of the traced op.
        kernel: of the GPU.
        depth: number of loops around it: the one over the steps, and those of the model.
        takers: its consumers: (output number, None for a control edge; node; input number).
    """

    def __init__(self, proto: NodeDef, traced: Mapping[str, tf.Operation], depth: int = 0):
        """Read a node.

        Args:
            proto: the node.
            traced: {name: op} of the function.
            depth: number of loops around the function.
        """
        device = short_device_name(proto.device)
        self.proto = proto
        self.gpu = ""
        if device not in ("", "/cpu:0"):
            self.gpu = f"/gpu:{int(device.rpartition(':')[2]) - 1}"
        self.name = traced_name(proto.name, traced)
        self.traced = traced.get(self.name)
        self.kernel = _gpu_kernel(proto, self.traced.type if self.traced else "")
        self.type = self.kernel.type
        self.depth = depth + len(_LOOP.findall(proto.name)) + ("/LoopCond/" in proto.name)
        self.takers: list[tuple[int | None, Node, int]] = []

    @property
    def repeated(self) -> bool:
        """True in a loop of the model, such as an LSTM's."""
        return self.depth > 1

    @property
    def scope(self) -> str:
        """The outermost name scope in the loop: "tower_0", "gather"."""
        if (tower := tower_of(self.name)) is not None:
            return f"tower_{tower}"
        scopes = [re.sub(r"_\d+$", "", scope) for scope in self.name.split("/")[:-1]]
        return next((scope for scope in scopes if scope not in _LOOP_SCOPES), "")

    @property
    def layer(self) -> str:
        """The layers that it is in, outermost first; outside of a tower its scope."""
        in_tower = tower_of(self.name) is not None
        return layer_of(self.name) if in_tower else self.scope or self.name

    @property
    def dtype(self) -> str:
        """The dtype of its first argument that is no variable."""
        arguments = (*self.kernel.inputs, *self.kernel.outputs)
        return next((a.dtype.name for a in arguments if a.dtype != tf.resource), "")

    @property
    def bytes(self) -> int | None:
        """Bytes of the first output, None if the shape is unknown."""
        return self.num_bytes(0)

    def num_bytes(self, index: int) -> int | None:
        """Return the bytes of an output, None if its shape is unknown."""
        tensors = self.traced.outputs[index : index + 1] if self.traced else []
        if not tensors:  # TensorFlow added this node: read the inputs of its traced consumers
            takers = [(taker.traced, place) for i, taker, place in self.takers if i == index]
            tensors = [op.inputs[i] for op, i in takers if op and i < len(op.inputs)]
        return max(map(num_bytes, tensors), default=0) or None

    def memory_of(self, arguments: Sequence[Argument], index: int) -> str:
        """Return the memory that holds an input or output: "host" or the GPU.

        Args:
            arguments: `kernel.inputs` or `kernel.outputs`.
            index: of one of them; oneDNN's outputs come after these.
        """
        on_host = index < len(arguments) and arguments[index].on_host
        return HOST if on_host or not self.gpu else self.gpu


class MemoryCopy(NamedTuple):
    """A value that is copied between memories in each step."""

    name: str  # traced name of the op that makes it
    type: str  # of that op
    dtype: str
    bytes: int | None  # None if the shape is unknown
    source: str  # "host" or "/gpu:0"
    target: str
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

    def transfers(self, source: str = "", target: str = "", *, gpu: str = "") -> list[MemoryCopy]:
        """Return the copies in a step from and to these memories ("": all).

        Args:
            source: "host" or "/gpu:0".
            target: likewise.
            gpu: only copies from or to this GPU.
        """
        return [
            copy
            for copy in self.copies
            if source in ("", copy.source) and target in ("", copy.target)
            if gpu in ("", copy.source, copy.target)
        ]

    def launches(self, *scopes: str) -> int:
        """Return how many kernels these scopes, as "update", launch on the busiest GPU."""
        total: Counter[str] = Counter()
        for op in self.ops:
            if op.scope in scopes:
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
    measured = _measured(nodes)
    nodes = [node for node in nodes if node not in measured]
    # Ops outside of the loop over the steps run once a call.
    on_gpus = tuple(node for node in nodes if node.gpu and node.depth)
    return GpuEstimate(on_gpus, tuple(_copies(nodes)))


def read_nodes(
    graphs: Iterable[tf.compat.v1.GraphDef], traced: Mapping[str, tf.Operation], depth: int = 0
) -> list[Node]:
    """Return the nodes of the executed graphs, joined over the devices, without sends.

    Args:
        graphs: one for each device.
        traced: the function's ops by name.
        depth: 1 if a call of the function is one step, 0 if it is a loop over steps.
    """
    graphs = [{proto.name: Node(proto, traced, depth) for proto in graph.node} for graph in graphs]
    sends = {
        node.proto.attr["tensor_name"].s: (nodes, node.proto.input[0])
        for nodes in graphs
        for node in nodes.values()
        if node.proto.op in _SENDS
    }
    result = []
    for nodes in graphs:
        for node in nodes.values():
            if node.proto.op in _SENDS + _RECEIVES:
                continue
            result.append(node)
            for i, source in enumerate(node.proto.input):
                producer, index = _producer(source, nodes, sends)
                producer.takers.append((index, node, i))
    return result


def _measured(nodes: Iterable[Node]) -> set[Node]:
    # Those that run only in steps that telemetry measures.
    measured: set[Node] = set()
    waiting = [n for n in nodes if n.proto.op == "Switch" and "/telemetry" in n.proto.name]
    while waiting:
        node = waiting.pop()
        if node not in measured and node.proto.op != "Merge":
            measured.add(node)
            waiting += [taker for _, taker, _ in node.takers]
    return measured


def _producer(
    source: str, nodes: Mapping[str, Node], sends: Mapping[bytes, tuple]
) -> tuple[Node, int | None]:
    # The node, maybe on another device, and the number of its output.
    name, _, index = source.lstrip("^").partition(":")
    waits = source.startswith("^")
    node = nodes[name]
    if node.proto.op in _RECEIVES:
        there, sent = sends[node.proto.attr["tensor_name"].s]
        if "/ctrl/" not in sent:
            producer, number = _producer(sent, there, sends)
            return producer, None if waits else number
        # A control edge is sent as an empty constant.
        return _producer(there[sent.partition(":")[0]].proto.input[0], there, sends)
    return node, None if waits else int(index or 0)


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
                yield MemoryCopy(*about, source, target, depth > 1)


def _gpu_kernel(node: NodeDef, traced_type: str) -> GpuKernel:
    # Of a node of the graph for CPUs; the traced op's type is "" if none was traced.
    kind, num_ops = _replaced_ops(node, traced_type)
    definition = tf_internals.op_definition(kind)
    if definition is None:  # a call of a function
        return GpuKernel(kind, True, (), (), 1)
    fits = (
        kernel.host_memory_arg
        for kernel in _kernels(kind)
        if all(_items(node.attr[c.name]) <= _items(c.allowed_values) for c in kernel.constraint)
    )
    on_host = next(fits, None)
    inputs = _arguments(node, definition.input_arg, on_host)
    outputs = _arguments(node, definition.output_arg, on_host)
    computes = not outputs or any(not a.on_host and a.dtype != tf.variant for a in outputs)
    free = kind in _NO_LAUNCH or (kind == "Unpack" and not node.attr["axis"].i)
    launches = 0 if on_host is None or free or not computes else num_ops
    return GpuKernel(kind, on_host is not None, inputs, outputs, launches)


def _replaced_ops(node: NodeDef, traced_type: str) -> tuple[str, int]:
    # The first op that an op for CPUs, as oneDNN's, replaces, and the number of ops.
    if node.op == "_UnaryOpsComposition":
        names = node.attr["op_names"].list.s
        return names[0].decode(), len(names)
    if not node.op.startswith("_Mkl"):
        return node.op, 1
    name = re.sub(r"^_Mkl(Native)?", "", node.op)
    plain = re.sub(r"WithBias$|^PadWith", "", name)
    if tf_internals.op_definition(plain) is None:
        return traced_type or plain, 1
    return plain, 1 + (plain != name)


@functools.cache
def _kernels(op_type: str) -> list[Any]:
    # A kernel for GPUs comes before one for any device.
    registered = tf_internals.registered_kernels(op_type)
    return [k for device in ("GPU", "DEFAULT") for k in registered if k.device_type == device]


def _items(value: Any) -> set:
    # Types or texts of an attribute.
    if value.HasField("list"):
        return set(value.list.type or value.list.s)
    return {value.s if value.HasField("s") else value.type}


def _arguments(
    node: NodeDef, arguments: Iterable[Any], on_host: Sequence[str] | None
) -> tuple[Argument, ...]:
    # An argument of an op may be a list of tensors; without a kernel all are on the host.
    expanded = []
    for argument in arguments:
        if argument.type_list_attr:
            types = list(node.attr[argument.type_list_attr].list.type)
        else:
            kind = argument.type or node.attr[argument.type_attr].type
            types = [kind] * (node.attr[argument.number_attr].i if argument.number_attr else 1)
        there = on_host is None or argument.name in on_host
        dtypes = map(tf.as_dtype, types)
        expanded += [Argument(dtype, there or dtype in _ALWAYS_ON_HOST) for dtype in dtypes]
    return tuple(expanded)


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
