"""Joins the graphs that TensorFlow executes on logical CPUs, and reads them as if these were GPUs.

TensorFlow executes one graph for each device. Here they are one graph, without sends and receives.
`/cpu:0` is the host, `/cpu:1` stands for `/gpu:0`, and so on. TensorFlow's wheel has the registry
of GPU kernels on any machine; it says which arguments of an op are in the host's memory.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers import tf_internals
from towers.builder.op_names import layer_of, tower_of
from towers.graphs.communication import num_bytes
from towers.graphs.placement import short_device_name, traced_name

NodeDef = tf.compat.v1.NodeDef

HOST = "host"
_SENDS, _RECEIVES = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
_LOOP = re.compile(r"(?:^|/)(?:body|cond)/_\d+(?=/)")
_LOOP_SCOPES = ("while", "body", "cond", "gradient_tape", "")
# Ops that launch no kernel: other names of a buffer, control flow, transfers.
_NO_LAUNCH = frozenset(
    "Identity IdentityN Reshape Squeeze ExpandDims Bitcast StopGradient PreventGradient Const NoOp "
    "PlaceholderWithDefault ReadVariableOp AssignVariableOp Enter Exit Merge Switch LoopCond "
    "NextIteration _Send _Recv _HostSend _HostRecv _Arg _Retval CollectiveReduceV2 "
    "CollectiveGatherV2 Assert".split()
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
        measured: whether it runs only in steps that telemetry measures.
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
        self.measured = False
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
    waiting = [n for n in result if n.proto.op == "Switch" and "/telemetry" in n.proto.name]
    while waiting:
        node = waiting.pop()
        if not node.measured and node.proto.op != "Merge":
            node.measured = True
            waiting += [taker for _, taker, _ in node.takers]
    return result


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


def _gpu_kernel(node: NodeDef, traced_type: str) -> GpuKernel:
    # Of a node of the graph for CPUs; the traced op's type is "" if none was traced.
    kind, num_ops = _replaced_ops(node, traced_type)
    definition = tf_internals.op_definition(kind)
    if definition is None:  # a call of a function
        return GpuKernel(kind, True, (), (), 1)
    fits = (
        host_arguments
        for allowed_types, host_arguments in _kernels(kind)
        if all(_values(node, name, definition) <= types for name, types in allowed_types)
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
def _kernels(op_type: str) -> list[tuple[list[tuple[str, frozenset]], frozenset[str]]]:
    # ([(name of an attribute, its allowed types)], names of the arguments on the host) of each.
    registered = tf_internals.registered_kernels(op_type)
    return [
        (
            [(c.name, frozenset(_items(c.allowed_values.list))) for c in kernel.constraint],
            frozenset(kernel.host_memory_arg),
        )
        for device in ("GPU", "DEFAULT")
        for kernel in registered
        if kernel.device_type == device
    ]


def _values(node: NodeDef, name: str, definition: Any) -> frozenset:
    value = node.attr[name] if name in node.attr else None
    if value is None:
        defaults = (a.default_value for a in definition.attr if a.name == name)
        value = next(defaults, tf.compat.v1.AttrValue())
    if value.HasField("list"):
        return frozenset(_items(value.list))
    return frozenset([value.s] if value.HasField("s") else [value.type])


def _items(values: Any) -> list:
    return list(values.type) or list(values.s)


def _arguments(
    node: NodeDef, arguments: Iterable[Any], on_host: frozenset[str] | None
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
