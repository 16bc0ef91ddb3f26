"""Joins the graphs that TensorFlow executes on logical CPUs, as if these were GPUs.

TensorFlow executes one graph for each device. Here they are one graph, without sends and receives.
`/cpu:0` is the host, `/cpu:1` stands for `/gpu:0`, and so on.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from towers.builder.op_names import layer_of, tower_of
from towers.graphs.communication import num_bytes
from towers.graphs.gpu_kernels import Argument, NodeDef, gpu_kernel
from towers.graphs.placement import short_device_name, traced_name

HOST = "host"
_SENDS, _RECEIVES = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
_LOOP = re.compile(r"(?:^|/)(?:body|cond)/_\d+(?=/)")
_LOOP_SCOPES = ("while", "body", "cond", "gradient_tape", "")


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
        self.kernel = gpu_kernel(proto, self.traced.type if self.traced else "")
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
