"""Computes the bytes that a traced training step will send and hold, before anything runs.

    step = read_step(train_loop.get_concrete_function(batches, tf.constant(0)))
    step.crossing_bytes()       # {("/cpu:0", "/cpu:1"): 4_300_000, ...}

It reads the traced graph; `towers.graphs.placement` reads the executed one, and a test holds that
the same bytes cross in both.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from towers.builder.device_types import HOST
from towers.builder.op_names import tower_of
from towers.graphs.placement import needed_ops, short_device_name
from towers.tf_internals import called_graph

_COPIES = frozenset("Identity IdentityN StopGradient PreventGradient".split())
_SAME_BUFFER = _COPIES | frozenset("Reshape Squeeze ExpandDims".split())
_OF_SHAPES = frozenset("Shape ShapeN Size Rank BroadcastGradientArgs".split())
_BRANCHES = frozenset(["If", "StatelessIf"])
_CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall"])
_LOOPS = frozenset(["While", "StatelessWhile", "Case", "StatelessCase"])
FUNCTIONS = _BRANCHES | _CALLS | _LOOPS


class TracedStep:
    """The ops of one training step that TensorFlow will not prune.

    Attributes:
        devices: {op: "/cpu:0"} in topological order, the ops of a branch before its condition.
        known: ops whose values follow from constants and shapes alone.
        loops: types of ops whose insides are not read: loops, functions with variables.
    """

    def __init__(self, body: tf.Graph, homes: dict[tf.Operation, str]):
        """Read the graph of a step.

        Args:
            body: the graph.
            homes: {placeholder: the device of its value}.
        """
        self.devices: dict[tf.Operation, str] = {}
        self.known: set[tf.Operation] = set()
        self.loops: set[str] = set()
        self._homes = homes
        self._outer: dict[tf.Operation, tf.Tensor] = {}  # behind a placeholder
        self._takers: list[tuple[list[tf.Tensor], str]] = []
        self._read(body, HOST)
        self._takers.append((body.outputs, HOST))

    def crossing_bytes(self) -> Counter[tuple[str, str]]:
        """Return {(source, target): bytes in a step}.

        A value is sent once to each device. Constant values are left out: they are scalars, and the
        optimizer decides whether they are sent. The loop's condition, 1 byte, goes to all devices.
        """
        total = Counter({(HOST, d): 1 for d in set(self.devices.values()) if d != HOST})
        for tensor, target in self.crossings():
            total[self.devices[tensor.op], target] += num_bytes(tensor)
        return total

    def crossings(self) -> Iterator[tuple[tf.Tensor, str]]:
        """Yield each (tensor, other device that reads it) once."""
        seen = set()
        for tensors, target in self._takers:
            for tensor in (self._behind(tensor, _COPIES) for tensor in tensors):
                place = (tensor.op, tensor.value_index, target)
                crosses = self.devices[tensor.op] != target and tensor.dtype != tf.resource
                if crosses and tensor.op not in self.known and place not in seen:
                    seen.add(place)
                    yield tensor, target

    def summed_bytes(self) -> Counter[str]:
        """Return {device: bytes that its collectives sum}."""
        total: Counter[str] = Counter()
        for op, device in self.devices.items():
            if op.type == "CollectiveReduceV2":
                total[device] += num_bytes(op.inputs[0])
        return total

    def received_bytes(self, device: str) -> Counter[str]:
        """Return {"weights", "batch", "other": bytes that a device receives}."""
        total: Counter[str] = Counter()
        for tensor, target in self.crossings():
            if target == device:
                source = self._behind(tensor, _COPIES | {"Cast"}).op
                kind = "batch" if "/split/" in source.name else "other"
                total["weights" if source.type == "ReadVariableOp" else kind] += num_bytes(tensor)
        return total

    def activation_bytes(self, tower: int) -> int:
        """Return the peak bytes of a tower's forward and backward pass.

        Ops are assumed to run in traced order; a tensor lives from its op to its last consumer.
        Weights, the batch, and the gradients that leave the tower are not counted.
        """
        of_tower = {op for op in self.devices if tower_of(op.name) == tower}
        graphs = dict.fromkeys(op.graph for op in self.devices if op in of_tower)
        traced = [op for graph in graphs for op in graph.get_operations() if op in of_tower]
        order = [op for op in traced if op not in self.known]
        last = {}
        for i, op in enumerate(order):
            for tensor in (self._behind(tensor, _SAME_BUFFER) for tensor in op.inputs):
                last[tensor.op, tensor.value_index] = i
        ending: Counter[int] = Counter()
        live = most = 0
        for i, op in enumerate(order):
            for tensor in op.outputs:
                end = last.get((op, tensor.value_index))
                # None: it leaves the tower, is unused, or is another name of its input
                if end is not None and op.type != "ReadVariableOp":
                    live += num_bytes(tensor)
                    ending[end] += num_bytes(tensor)
            most = max(most, live)
            live -= ending[i]
        return most

    def _read(self, graph: tf.Graph, caller: str) -> None:
        # Ops that request no device get that of `caller`.
        for op in needed_ops([*(t.op for t in graph.outputs), *graph.control_outputs]):
            if op.type in _BRANCHES:
                self._read_branches(op, short_device_name(op.device) or caller)
            elif op.type in _LOOPS or (op.type in _CALLS and not _is_local(op, caller)):
                self.loops.add(op.type)
            inputs = [self._behind(tensor, frozenset()) for tensor in op.inputs]
            resources = [self.devices[t.op] for t in inputs if t.dtype == tf.resource]
            # An op on a variable runs on the variable's device, whatever it requests.
            device = self._homes.get(op) or short_device_name(op.device) or caller
            if resources and op.type not in FUNCTIONS:
                device = resources[-1]
            self.devices[op] = device
            if _is_known(op, inputs, self.known):
                self.known.add(op)
            elif op.type not in _COPIES | _BRANCHES:
                self._takers.append((list(op.inputs), device))

    def _read_branches(self, op: tf.Operation, device: str) -> None:
        condition, *arguments = op.inputs
        before = len(self._takers)
        for attribute in ("then_branch", "else_branch"):
            inner = called_graph(op, attribute)
            pairs = zip(inner.inputs, arguments, strict=True)
            self._outer |= {placeholder.op: tensor for placeholder, tensor in pairs}
            self._read(inner, device)
            self._takers.append((inner.outputs, device))
        # Each device needs the condition.
        used = {device for _, device in self._takers[before:]}
        self._takers += [([condition], device) for device in used]

    def _behind(self, tensor: tf.Tensor, kinds: frozenset[str]) -> tf.Tensor:
        # Follows placeholders and ops of these types back to the tensor that they forward.
        while True:
            op = tensor.op
            if op in self._outer:
                tensor = self._outer[op]
            elif op.type in kinds:
                tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
            else:
                return tensor


def read_step(function: Any) -> TracedStep:
    """Return the step of a traced train loop, a concrete function with one loop over steps."""
    loop = next(op for op in function.graph.get_operations() if op.type in _LOOPS)
    body = called_graph(loop, "body")
    outside = {
        inner.op: short_device_name(outer.device) for outer, inner in function.graph.captures
    }
    pairs = zip(loop.inputs, body.inputs, strict=True)
    # A loop's input is on the device of its op, whatever its placeholder requests.
    return TracedStep(
        body, {i.op: outside.get(o.op) or short_device_name(o.op.device) or HOST for o, i in pairs}
    )


def _is_local(op: tf.Operation, caller: str) -> bool:
    # On one device, without variables and loops.
    inside = called_graph(op, "f").get_operations()
    asked = {short_device_name(one.device) for one in inside}
    variables = any(tensor.dtype == tf.resource for tensor in op.inputs)
    loops = any(one.type in _LOOPS for one in inside)
    return asked <= {"", short_device_name(op.device) or caller} and not variables and not loops


def num_bytes(tensor: tf.Tensor | tf.Variable) -> int:
    """Return the bytes of a tensor, 0 if its shape is unknown or it is a resource."""
    if not tensor.shape.is_fully_defined() or tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return tensor.shape.num_elements() * tensor.dtype.size


def _is_known(op: tf.Operation, inputs: list[tf.Tensor], known: set[tf.Operation]) -> bool:
    if op.type in _OF_SHAPES:
        return all(tensor.shape.is_fully_defined() for tensor in op.inputs)
    if op.type == "Placeholder" or op.type in FUNCTIONS or op.op_def.is_stateful:
        return False
    return op.type == "Const" or bool(inputs) and all(tensor.op in known for tensor in inputs)
