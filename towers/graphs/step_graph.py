"""Builds the graph of one step for TensorBoard: towers are its scopes, devices its colors."""

import re
from collections.abc import Iterator

import tensorflow as tf

from towers.devices.shown_names import short_device_name
from towers.graphs.placement import Placement
from towers.tf_internals import called_graph

MAX_VALUE_BYTES = 1024  # of a constant or another attribute that is shown
_PLUMBING = ("Identity", "NoOp", "Placeholder")
_CALLS = ("body", "then_branch", "else_branch", "f")  # attributes that name an inner function


def step_graph(graph: tf.Graph, placement: Placement) -> tf.compat.v1.GraphDef:
    """Return a graph of one step, for display only, from the traced graph of the train loop.

    The body of the loop is the step; a graph without a loop is one step. Each loop, branch and call
    of the step is a scope of its ops, without the edges into it. An op's device is where it ran, or
    the requested one if TensorFlow folded or pruned it. Large constants are left out.

    Args:
        graph: of the train loop, or of a function that is one step.
        placement: of that function; an empty one for requested devices alone.
    """
    ran = {op.name: op.device for op in placement.compiled + placement.ops}
    loops = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    size = {op: len(called_graph(op, "body").get_operations()) for op in loops}
    loop = max(loops, key=size.get, default=None)  # the loop over the steps has most ops
    in_loop = f"{loop.name}/" if loop else ""
    nodes = []
    for traced, scope, node in _nodes(called_graph(loop, "body") if loop else graph):
        device = ran.get(traced + node.name) or short_device_name(node.device)
        # "/device:GPU:0" for "/gpu:0": TensorBoard has a name for no other form.
        node.device = re.sub(r"/(\w+):(\d+)$", lambda m: f"/device:{m[1].upper()}:{m[2]}", device)
        node.name = _drawn(scope + node.name, in_loop)
        inputs = [re.match(r"(\^?)(.*)", name).groups() for name in node.input]
        node.input[:] = [caret + _drawn(scope + name, in_loop) for caret, name in inputs]
        for name in list(node.attr):
            attribute = node.attr[name]
            if attribute.HasField("func"):
                attribute.func.ClearField("attr")
            if name == "_class" or attribute.ByteSize() > MAX_VALUE_BYTES:
                del node.attr[name]
        nodes.append(node)
    num_nodes = 0
    while len(nodes) != num_nodes:  # drop the loop's parameters and results that no node reads
        num_nodes = len(nodes)
        read = {name.lstrip("^").partition(":")[0] for node in nodes for name in node.input}
        nodes = [node for node in nodes if node.op not in _PLUMBING or node.name in read]
    result = tf.compat.v1.GraphDef()
    result.node.extend(nodes)
    return result


def _nodes(
    graph: tf.Graph, scope: str = "", traced: str = ""
) -> Iterator[tuple[str, str, tf.compat.v1.NodeDef]]:
    # Yields (prefix of the name in `placement`, see `traced_ops`; prefix in the drawing; node).
    for node in graph.as_graph_def().node:
        op = graph.get_operation_by_name(node.name)
        for attribute in _CALLS:
            if inner := called_graph(op, attribute):
                called = f"{traced}{node.name}/" if attribute == "f" else ""
                yield from _nodes(inner, f"{scope}{node.name}/{attribute}/", called)
        yield traced, scope, node


def _drawn(name: str, scope: str) -> str:
    """Remove the loop's scope from a name, and move a tower's gradient into the tower's scope.

    Scopes that are numbered get a common one: gather/gather_2.
    """
    name = name.removeprefix(scope)
    if name.startswith("gradient_tape/"):
        below = name.removeprefix("gradient_tape/").removeprefix(scope)
        tower, rest = re.match(r"(tower_\d+/)?(.*)", below).groups()
        name = f"{tower or ''}gradient_tape/{rest}"
    return re.sub(r"^(?!tower_)(([A-Za-z_]+)_\d+/)", r"\2/\1", name)
