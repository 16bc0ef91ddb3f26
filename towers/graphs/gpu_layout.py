"""What TensorFlow's layout optimizer makes of a step on GPUs: transposes, and data formats.

It runs for GPUs alone, and turns convolutions to the format that their kernels like best: NHWC for
16 bits on tensor cores, else NCHW. Where formats meet, images are transposed, and each transpose
reads and writes a whole one.
"""

import dataclasses
import re
from collections import Counter

import tensorflow as tf

from towers import tf_private
from towers.graphs.placement import short

ARCHITECTURE = "8.0"  # of the GPUs that are asked for: an A100
_HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


@dataclasses.dataclass(frozen=True)
class Layout:
    """What GPUs run, after the layout optimizer, by op.

    Attributes:
        before: transposes of the step as it was traced, by GPU.
        transposes: (GPU, name) of those after it; those in loops of the model are not seen.
        formats: {(op, "NHWC", "float32"): how often}, of the ops that have a format.
    """

    before: Counter[str]
    transposes: tuple[tuple[str, str], ...]
    formats: Counter[tuple[str, str, str]]


def read_layout(graph: tf.Graph) -> Layout:
    """Return the layout of the step in the graph of a train loop with GPUs for its CPUs.

    A graph without a loop is taken for a step.
    """
    loops = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
    body = tf_private.called_graph(loops[0], "body") if loops else graph
    definition = body.as_graph_def()
    for node in definition.node:
        number = re.search(r"CPU:(\d+)$", node.device)
        node.device = _HOST
        if number and number[1] != "0":
            node.device = re.sub("CPU:0$", f"GPU:{int(number[1]) - 1}", _HOST)
    needed = {t.op.name for t in body.outputs} | {op.name for op in body.control_outputs}
    gpus = {node.device for node in definition.node} - {_HOST}
    num_gpus = 1 + max((int(device.rpartition(":")[2]) for device in gpus), default=0)
    after = tf_private.optimized_for_gpus(definition, sorted(needed), num_gpus, ARCHITECTURE)
    formats = Counter(
        (node.op, node.attr["data_format"].s.decode(), tf.as_dtype(node.attr["T"].type).name)
        for node in _on_gpus(after)
        if "data_format" in node.attr and "T" in node.attr
    )
    return Layout(
        Counter(device for device, _ in _transposes(definition)), _transposes(after), formats
    )


def _transposes(graph: tf.compat.v1.GraphDef) -> tuple[tuple[str, str], ...]:
    nodes = [node for node in _on_gpus(graph) if node.op == "Transpose"]
    return tuple((short(node.device), node.name) for node in nodes)


def _on_gpus(graph: tf.compat.v1.GraphDef) -> list[tf.compat.v1.NodeDef]:
    return [node for node in graph.node if short(node.device).startswith("/gpu")]
