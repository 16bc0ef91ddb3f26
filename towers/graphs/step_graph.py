"""The graph of one step for TensorBoard: towers are its scopes, devices its colours."""

import re
from collections.abc import Iterator

import tensorflow as tf

from towers.graphs.placement import Placement, short_device_name
from towers.tf_internals import called_graph

MAX_VALUE_BYTES = 1024  # of a constant or another attribute; nobody reads more of it in a graph
_PLUMBING = ("Identity", "NoOp", "Placeholder")
_CALLS = ("body", "then_branch", "else_branch", "f")  # attributes that name an inner function


def step_graph(graph: tf.Graph, placement: Placement) -> tf.compat.v1.GraphDef:
    """Return a graph of one step, for display only, from the traced graph of the train loop.

    The body of the loop is the step; a graph without a loop is a step itself. Each loop, branch and
    call of the step is a scope of its ops, without the edges that lead into it. An op has the
    device where it ran, or if TensorFlow folded or pruned it, the one that was asked for. Large
    constants are left out.
    """
    ran = {op.name: op.device for op in placement.compiled + placement.ops}
    loop = _loop(graph)
    in_loop = f"{loop.name}/" if loop else ""
    nodes = []
    for traced, scope, node in _nodes(called_graph(loop, "body") if loop else graph):
        device = ran.get(traced + node.name) or short_device_name(node.device)
        # "/device:GPU:0" for "/gpu:0": TensorBoard has a name for no other form.
        node.device = re.sub(r"/(\w+):(\d+)$", lambda m: f"/device:{m[1].upper()}:{m[2]}", device)
        node.name = _drawn(scope + node.name, in_loop)
        inputs = [re.match(r"(\^?)(.*)", name).groups() for name in node.input]
        node.input[:] = [caret + _drawn(scope + name, in_loop) for caret, name in inputs]
        _strip(node)
        nodes.append(node)
    result = tf.compat.v1.GraphDef()
    result.node.extend(_without_plumbing(nodes))
    return result


def _without_plumbing(nodes: list[tf.compat.v1.NodeDef]) -> list[tf.compat.v1.NodeDef]:
    """Remove the loop's parameters and results that no other node reads."""
    while True:
        read = {name.lstrip("^").partition(":")[0] for node in nodes for name in node.input}
        rest = [node for node in nodes if node.op not in _PLUMBING or node.name in read]
        if len(rest) == len(nodes):
            return rest
        nodes = rest


def _loop(graph: tf.Graph) -> tf.Operation | None:
    loops = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    size = {op: len(called_graph(op, "body").get_operations()) for op in loops}
    return max(loops, key=size.get, default=None)  # the loop over the steps has most ops


def _nodes(
    graph: tf.Graph, scope: str = "", traced: str = ""
) -> Iterator[tuple[str, str, tf.compat.v1.NodeDef]]:
    """Yield (prefix of the name in `placement`, prefix in the drawing, node) for all ops.

    As in `placement.traced_ops`, names in a called function have the call's name in front there,
    those in loops and branches have nothing.
    """
    for node in graph.as_graph_def().node:
        op = graph.get_operation_by_name(node.name)
        for attribute in _CALLS:
            if inner := called_graph(op, attribute):
                called = f"{traced}{node.name}/" if attribute == "f" else ""
                yield from _nodes(inner, f"{scope}{node.name}/{attribute}/", called)
        yield traced, scope, node


def _drawn(name: str, scope: str) -> str:
    """Remove the loop's scope from a name, and move the gradient of a tower's ops into that tower.

    What was made many times gets one scope: gather/gather_2.
    """
    name = name.removeprefix(scope)
    if name.startswith("gradient_tape/"):
        below = name.removeprefix("gradient_tape/").removeprefix(scope)
        tower, rest = re.match(r"(tower_\d+/)?(.*)", below).groups()
        name = f"{tower or ''}gradient_tape/{rest}"
    return re.sub(r"^(?!tower_)(([A-Za-z_]+)_\d+/)", r"\2/\1", name)


def _strip(node: tf.compat.v1.NodeDef) -> None:
    """Drop attributes that are large, or that only TensorFlow reads."""
    for name in list(node.attr):
        attribute = node.attr[name]
        if attribute.HasField("func"):
            attribute.func.ClearField("attr")
        if name == "_class" or attribute.ByteSize() > MAX_VALUE_BYTES:
            del node.attr[name]
