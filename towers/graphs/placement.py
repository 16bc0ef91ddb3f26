"""Where every op really ran, read from the graph that TensorFlow executed.

    placement = read_placement(train_loop, batches, tf.constant(0))     # no step is made
    placement.misplaced(["/cpu:0", "/cpu:1"])                           # []

`op.device` of a traced function is only a request: soft placement and colocation change it. This
reads the graph after TensorFlow's placer, optimizer and partitioner.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_types import machine_of
from towers.builder.op_names import layer_of, tower_of

# Ops that move values between devices, steer loops, or read masters where these are.
_NOT_OF_A_TOWER = frozenset(
    "_Send _Recv _HostSend _HostRecv _Arg _Retval Const NoOp Enter Exit Merge Switch LoopCond "
    "NextIteration ReadVariableOp VarHandleOp ResourceGather".split()
)
_RECEIVES = ("_Recv", "_HostRecv")
_IN_BRANCH = re.compile(r"/(?:then|else)/_\d+/")


@dataclasses.dataclass(frozen=True)
class Op:
    """One op of an executed graph."""

    name: str  # as in the function that was traced, or as TensorFlow named what it added
    type: str
    requested: str  # device that was asked for, "" where none was
    device: str  # where it runs, "/cpu:0"; "" if TensorFlow folded, fused or pruned it

    @property
    def tower(self) -> int | None:
        """The tower in whose scope the op stands, or None."""
        return tower_of(self.name)

    @property
    def layer(self) -> str:
        """The layers that the op stands in, outermost first: "cnn/block_2/conv1"."""
        return layer_of(self.name)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A value that crosses from one device to another in a step.

    `bytes` is None if unknown; a value that is made in a branch crosses only in some steps.
    """

    name: str
    source: str
    target: str
    bytes: int | None
    in_some_steps: bool = False


@dataclasses.dataclass(frozen=True)
class Placement:
    """The ops of an executed graph, and what crosses between its devices."""

    ops: tuple[Op, ...]
    # Traced, and not run: the result was known or unused, or another op computes it.
    gone: tuple[Op, ...]
    transfers: tuple[Transfer, ...]
    # Traced, and now part of an XLA program, on the device of the op that calls it.
    compiled: tuple[Op, ...] = ()

    def misplaced(self, devices: Sequence[str]) -> list[Op]:
        """Return the ops in a tower's scope that do not run on that tower's device."""
        work = [op for op in self.ops if op.tower is not None and op.type not in _NOT_OF_A_TOWER]
        own = [short_device_name(device) for device in devices]
        return [op for op in work if op.device != own[op.tower]]

    def crossing_bytes(self, in_each_step: bool = False) -> Counter[tuple[str, str]]:
        """Return {(source, target): bytes}, as far as shapes are known.

        Args:
            in_each_step: leave out what crosses in some steps only; else it is the most of a step.
        """
        total: Counter[tuple[str, str]] = Counter()
        for transfer in self.transfers:
            if not (in_each_step and transfer.in_some_steps):
                total[transfer.source, transfer.target] += transfer.bytes or 0
        return total


def read_placement(function: Any, *arguments: Any) -> Placement:
    """Call a `tf.function` once and return where its ops ran.

    It is executed: hand it arguments that do no work, such as a loop of 0 steps, whose graph is
    placed and optimised like any other.

    Raises:
        ValueError: the function has run with such arguments before; TensorFlow places a graph when
            it first runs, and shows it only then.
    """
    # Traced first: what runs in tracing, as a model that is tried, is no graph of the function.
    traced = dict(traced_ops(function.get_concrete_function(*arguments).graph))
    with tf_internals.executed_graphs() as functions:
        function(*arguments)
    graphs = list(itertools.chain.from_iterable(functions))
    if not graphs:
        raise ValueError("the function has run before: read its placement at its first call")
    ops, transfers, programs, takers = [], [], {}, _takers(graphs)
    for node in (node for graph in graphs for node in graph.node):
        name = traced_name(node.name, traced)
        requested = traced[name].device if name in traced else ""
        ops.append(Op(name, node.op, short_device_name(requested), short_device_name(node.device)))
        if node.attr["_XlaMustCompile"].b:
            programs[f"{name}/"] = short_device_name(node.device)
        if node.op in ("_Send", "_HostSend") and not node.input[0].startswith("^"):
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


def short_device_name(device: str) -> str:
    """Return "/gpu:0" for "/job:localhost/replica:0/task:0/device:GPU:0"; "" for "".

    That of another machine keeps the machine: "/job:JOB/task:1/gpu:0".
    """
    match = re.search(r"/(?:device:)?([A-Za-z_]+):(\d+)$", device)
    if not match or match[1] in ("job", "replica", "task"):
        return device
    return f"{machine_of(device)}/{match[1].lower()}:{match[2]}"


def traced_ops(graph: tf.Graph, scope: str = "") -> Iterator[tuple[str, tf.Operation]]:
    """Yield (name, op) of a graph and of the functions that it calls.

    Names in a called function have the call's name in front, as after inlining. What inlining puts
    in front of names in a loop or a branch is removed by `traced_name`.
    """
    for op in graph.get_operations():
        yield scope + op.name, op
        for attribute in ("body", "cond", "then_branch", "else_branch", "f"):
            if inner := tf_internals.called_graph(op, attribute):
                yield from traced_ops(inner, f"{scope}{op.name}/" if attribute == "f" else "")


def needed_ops(ops: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Return these ops and those that they need, in topological order; the rest is pruned."""
    waiting = [(op, False) for op in ops]
    found, opened = [], set()
    while waiting:
        op, ready = waiting.pop()
        if ready:
            found.append(op)
        elif op not in opened:
            opened.add(op)
            waiting.append((op, True))
            waiting += [(t.op, False) for t in op.inputs]
            waiting += [(before, False) for before in op.control_inputs]
    return found


def traced_name(name: str, traced: Container[str]) -> str:
    """Return a node's traced name: without the scope that inlining puts in front of it."""
    parts = re.split(r"/_\d+/", name)
    return next((p for p in ("/".join(parts[i:]) for i in range(len(parts))) if p in traced), name)


def _takers(graphs: Iterable[Any]) -> dict[bytes, tuple[str, int]]:
    """Return {sent tensor: (name of a node that takes it, as which input)}."""
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
    if "/ctrl/" in source:  # only an order of execution crosses
        num_bytes = 0
    elif name in traced:
        tensor = traced[name].outputs[int(index or 0) if source == origin else 0]
    elif dtype == tf.bool:  # a loop's condition
        num_bytes = 1
    elif branches := traced.get(traced_name(origin.partition("/output/_")[0], traced)):
        if len({(t.shape, t.dtype) for t in branches.outputs}) == 1:  # which of them is not told
            tensor = branches.outputs[0]
    elif taker := takers.get(node.attr["tensor_name"].s):  # what was traced may be what takes it
        op = traced.get(traced_name(taker[0], traced))
        tensor = next(iter(op.inputs[taker[1] : taker[1] + 1]), None) if op else None
    if tensor is not None and tensor.dtype == dtype and tensor.shape.is_fully_defined():
        num_bytes = tensor.shape.num_elements() * dtype.size
    return Transfer(
        name,
        short_device_name(node.attr["send_device"].s.decode()),
        short_device_name(node.attr["recv_device"].s.decode()),
        num_bytes,
        bool(_IN_BRANCH.search(source)),
    )
