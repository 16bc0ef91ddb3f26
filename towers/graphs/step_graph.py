"""The graph of one step, as TensorBoard shows it: towers are its scopes, devices its colours."""

import re
from collections.abc import Iterator, Mapping

import tensorflow as tf

from towers.graphs.placement import Placement, short
from towers.tf_private import called_graph

MAX_VALUE_BYTES = 1024  # of a constant or another attribute; nobody reads more of it in a graph
_PLUMBING = ("Identity", "NoOp", "Placeholder")
_CALLS = ("body", "then_branch", "else_branch", "f")  # attributes that name an inner function


def step_graph(graph: tf.Graph, placement: Placement) -> tf.compat.v1.GraphDef:
    """Return the ops of one step, for looking at, from the graph of the train loop as traced.

    The body of its loop is the step; a graph without a loop is taken as a step itself. Each loop,
    branch and call of the step is drawn as a scope with what is in it. An op stands on the device
    where it ran, one that TensorFlow folded or pruned on that which was asked for. Large constants
    are left out.
    """
    ran = {op.name: op.device for op in placement.compiled + placement.ops}
    loop = _loop(graph)
    scope = f"{loop.name}/" if loop else ""
    nodes = []
    for traced_name, node in _nodes(called_graph(loop, "body") if loop else graph):
        device = ran.get(traced_name) or short(node.device)
        # "/device:GPU:0" for "/gpu:0": TensorBoard has a name for no other form.
        node.device = re.sub(r"^/(\w+):(\d+)$", lambda m: f"/device:{m[1].upper()}:{m[2]}", device)
        node.name = _drawn(node.name, scope)
        node.input[:] = [_drawn(name, scope) for name in node.input]
        _strip(node)
        nodes.append(node)
    result = tf.compat.v1.GraphDef()
    result.node.extend(_without_plumbing(nodes))
    return result


def _without_plumbing(nodes: list[tf.compat.v1.NodeDef]) -> list[tf.compat.v1.NodeDef]:
    """Return the nodes without the loop's parameters and results that no other node reads."""
    while True:
        read = {name.lstrip("^").partition(":")[0] for node in nodes for name in node.input}
        rest = [node for node in nodes if node.op not in _PLUMBING or node.name in read]
        if len(rest) == len(nodes):
            return rest
        nodes = rest


def _loop(graph: tf.Graph) -> tf.Operation | None:
    """Return the loop over the steps: the one with most ops in it."""
    loops = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    size = {op: len(called_graph(op, "body").get_operations()) for op in loops}
    return max(loops, key=size.get, default=None)


def _nodes(
    graph: tf.Graph, scope: str = "", traced: str = "", values: Mapping[str, str] | None = None
) -> Iterator[tuple[str, tf.compat.v1.NodeDef]]:
    """Yield (name as `placement` has it, node) of a graph and of all that it calls.

    `scope` is put in front of names, `traced` is what `placement.traced_ops` puts there. `values`
    is {name of a parameter of `graph`: what the caller hands in}: such a parameter becomes an edge.
    """
    values = values or {}

    def renamed(name: str) -> str:
        bare = name.removeprefix("^").partition(":")[0]
        return values.get(bare) or re.sub(r"^(\^?)", rf"\g<1>{scope}", name)

    for node in graph.as_graph_def().node:
        if node.name in values:
            continue
        op = graph.get_operation_by_name(node.name)
        handed = [renamed(name) for name in node.input if not name.startswith("^")]
        for attribute in _CALLS:
            if inner := called_graph(op, attribute):
                names = [tensor.op.name for tensor in inner.inputs]
                branches = attribute.endswith("_branch")  # an If's first input is its condition
                edges = dict(zip(names, handed[branches:], strict=False))
                inside = f"{scope}{node.name}/{attribute * branches}{'/' * branches}"
                called = f"{traced}{node.name}/" if attribute == "f" else ""
                yield from _nodes(inner, inside, called, edges)
        name = node.name
        node.name = scope + name
        node.input[:] = [renamed(name) for name in node.input]
        yield traced + name, node


def _drawn(name: str, scope: str) -> str:
    """Return a name without the loop's scope; the gradient of a tower's ops stands in that tower.

    What was made many times stands in one scope: gather/gather_2.
    """
    caret, bare = re.match(r"(\^?)(.*)", name).groups()
    bare = bare.removeprefix(scope)
    if bare.startswith("gradient_tape/"):
        below = bare.removeprefix("gradient_tape/").removeprefix(scope)
        tower, rest = re.match(r"(tower_\d+/)?(.*)", below).groups()
        bare = f"{tower or ''}gradient_tape/{rest}"
    return caret + re.sub(r"^(?!tower_)(([A-Za-z_]+)_\d+/)", r"\2/\1", bare)


def _strip(node: tf.compat.v1.NodeDef) -> None:
    """Drop attributes that are large, or that only TensorFlow reads."""
    for name in list(node.attr):
        attribute = node.attr[name]
        if attribute.HasField("func"):
            attribute.func.ClearField("attr")
        if name == "_class" or attribute.ByteSize() > MAX_VALUE_BYTES:
            del node.attr[name]
