"""Reads where every op really ran from the graph that TensorFlow executed.

    placement = read_placement(train_loop, batches, tf.constant(0))     # no step is made
    placement.misplaced(["/cpu:0", "/cpu:1"])                           # []

`op.device` of a traced function is only a request: soft placement and colocation change it.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import layer_of, tower_of
from towers.devices.shown_names import short_device_name

# Ops that move values between devices, control loops, or read variables on their devices.
_NOT_OF_A_TOWER = frozenset(
    "_Send _Recv _HostSend _HostRecv _Arg _Retval Const NoOp Enter Exit Merge Switch LoopCond "
    "NextIteration ReadVariableOp VarHandleOp ResourceGather".split()
)
_RECEIVES = ("_Recv", "_HostRecv")
_ADDED = re.compile(r"/_\d+$")  # a node that TensorFlow adds where it cuts a graph by device
_IN_BRANCH = re.compile(r"/(?:then|else)/_\d+/")


@dataclasses.dataclass(frozen=True)
class Op:
    """One op of an executed graph."""

    name: str  # the traced name, or TensorFlow's name of an op that it added
    type: str
    requested: str  # the requested device, "" if none
    device: str  # where it runs, "/cpu:0"; "" if TensorFlow folded, fused or pruned it

    @property
    def tower(self) -> int | None:
        """The tower whose name scope the op is in, or None."""
        return tower_of(self.name)

    @property
    def layer(self) -> str:
        """The layers that the op is in, outermost first: "cnn/block_2/conv1"."""
        return layer_of(self.name)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A value that is sent from one device to another in each step."""

    name: str
    source: str
    target: str
    bytes: int | None  # None if unknown


@dataclasses.dataclass(frozen=True)
class Placement:
    """The ops of an executed graph, and the transfers between its devices."""

    ops: tuple[Op, ...]
    gone: tuple[Op, ...]  # traced, then folded, fused or pruned
    transfers: tuple[Transfer, ...]
    compiled: tuple[Op, ...] = ()  # in an XLA program, on the device of the op that calls it

    def misplaced(self, devices: Sequence[str]) -> list[Op]:
        """Return the ops in a tower's scope that do not run on that tower's device."""
        work = [op for op in self.ops if op.tower is not None and op.type not in _NOT_OF_A_TOWER]
        expected = [short_device_name(device) for device in devices]
        return [op for op in work if op.device != expected[op.tower]]

    def crossing_bytes(self) -> Counter[tuple[str, str]]:
        """Return {(source, target): bytes} of a step, as far as shapes are known."""
        total: Counter[tuple[str, str]] = Counter()
        for transfer in self.transfers:
            total[transfer.source, transfer.target] += transfer.bytes or 0
        return total


def read_placement(function: Any, *arguments: Any) -> Placement:
    """Call a `tf.function` once and return where its ops ran.

    Args:
        function: a `tf.function` that has not run with such arguments.
        *arguments: of the call; a loop of 0 steps does no work and is placed all the same.

    Raises:
        ValueError: the function has run with such arguments before; TensorFlow shows a graph only
            at its first run.
    """
    # Traced first: functions that run during tracing do not belong to the graph.
    traced = dict(traced_ops(function.get_concrete_function(*arguments).graph))
    with tf_internals.executed_graphs() as functions:
        function(*arguments)
    graphs = list(itertools.chain.from_iterable(functions))
    if not graphs:
        raise ValueError("the function has already run: read its placement at its first call")
    ops, transfers, programs, takers = [], [], {}, _takers(graphs)
    for node in (node for graph in graphs for node in graph.node):
        if node.op == "Identity" and _ADDED.search(node.name):
            continue  # it receives what only orders ops of two devices
        name = traced_name(node.name, traced)
        requested = traced[name].device if name in traced else ""
        ops.append(Op(name, node.op, short_device_name(requested), short_device_name(node.device)))
        if node.attr["_XlaMustCompile"].b:
            programs[f"{name}/"] = short_device_name(node.device)
        sends = node.op in ("_Send", "_HostSend") and not node.input[0].startswith("^")
        if sends and not _IN_BRANCH.search(node.input[0]):  # which some steps take
            transfers.append(_transfer(node, traced, takers))
    there = {op.name for op in ops if op.type != "Const"}  # folding leaves a Const of that name
    rest = []
    for name, op in traced.items():
        if name not in there:
            of_program = (programs[call] for call in programs if name.startswith(call))
            rest.append(Op(name, op.type, short_device_name(op.device), next(of_program, "")))
    return Placement(
        tuple(ops),
        tuple(op for op in rest if not op.device),
        tuple(t for t in transfers if t.source != t.target),
        tuple(op for op in rest if op.device),
    )


def traced_ops(graph: tf.Graph, scope: str = "") -> Iterator[tuple[str, tf.Operation]]:
    """Yield (name, op) of a graph and of the functions that it calls.

    Names in a called function begin with the call's name, as after inlining; `traced_name` removes
    the prefixes that inlining adds in loops and branches.

    Args:
        graph: of a traced function.
        scope: is put before each name, with its "/".
    """
    for op in graph.get_operations():
        yield scope + op.name, op
        for attribute in ("body", "cond", "then_branch", "else_branch", "f"):
            if inner := tf_internals.called_graph(op, attribute):
                yield from traced_ops(inner, f"{scope}{op.name}/" if attribute == "f" else "")


def traced_name(name: str, traced: Container[str]) -> str:
    """Return a node's traced name, without the prefix that inlining adds.

    Args:
        name: of a node of an executed graph.
        traced: the names of the traced ops; a name without one of them is returned as it is.
    """
    parts = re.split(r"/_\d+/", name)
    return next((p for p in ("/".join(parts[i:]) for i in range(len(parts))) if p in traced), name)


def _takers(graphs: Iterable[Any]) -> dict[bytes, tuple[str, int]]:
    # {sent tensor: (name of a consumer, number of its input)}.
    takers = {}
    for graph in graphs:
        received = {n.name: n.attr["tensor_name"].s for n in graph.node if n.op in _RECEIVES}
        for node in graph.node:
            for place, source in enumerate(node.input):
                if source in received:
                    takers[received[source]] = node.name, place
    return takers


def _transfer(
    node: Any, traced: Mapping[str, tf.Operation], takers: Mapping[bytes, tuple[str, int]]
) -> Transfer:
    source, _, index = node.input[0].partition(":")
    origin = node.attr["_src"].s.decode() or source
    name = traced_name(origin, traced)
    dtype = tf.as_dtype(node.attr["T"].type)
    tensor = num_bytes = None
    if "/ctrl/" in source:  # a control edge
        num_bytes = 0
    elif name in traced:
        tensor = traced[name].outputs[int(index or 0) if source == origin else 0]
    elif dtype == tf.bool:  # a loop's condition
        num_bytes = 1
    elif taker := takers.get(node.attr["tensor_name"].s):  # its consumer may have been traced
        op = traced.get(traced_name(taker[0], traced))
        tensor = next(iter(op.inputs[taker[1] : taker[1] + 1]), None) if op else None
    if tensor is not None and tensor.dtype == dtype and tensor.shape.is_fully_defined():
        num_bytes = tensor.shape.num_elements() * dtype.size
    return Transfer(
        name,
        short_device_name(node.attr["send_device"].s.decode()),
        short_device_name(node.attr["recv_device"].s.decode()),
        num_bytes,
    )
