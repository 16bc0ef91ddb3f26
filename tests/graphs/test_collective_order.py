"""Collectives cannot wait for each other: held on the graph that TensorFlow executes.

A collective ends for nobody before all its members have begun. So all members of one are taken for
one node; if what is left has no cycle, and each device has them in one order, no step can hang.
"""

import collections
import graphlib

import keras
import pytest
import tensorflow as tf

from scripts.count_step import read_nodes
from tests import tiny
from tests.runs import released
from towers import devices, tf_internals
from towers.builder import device_names
from towers.graphs.placement import traced_ops
from towers.training.run.setup import assemble, load_data

INSTANCE_KEY = 3  # which input of a collective
CASES = {
    "batch norm": ({}, 2),
    "three towers": ({}, 3),
    "parts of a batch": ({"accumulate_steps": 2}, 2),
    "clipping, 16 bits": ({"clip_global_norm": 1.0, "dtype": "mixed_float16"}, 2),
}


def normed(num_classes, image_shape):
    """Return a model in which towers meet in four layers, two of them side by side."""
    x = inputs = keras.Input(image_shape)
    for _ in range(2):
        x = keras.layers.BatchNormalization()(keras.layers.Conv2D(3, 3)(x))
    branches = [keras.layers.BatchNormalization()(keras.layers.Conv2D(3, n)(x)) for n in (1, 3)]
    pooled = [keras.layers.GlobalAveragePooling2D()(branch) for branch in branches]
    return keras.Model(inputs, keras.layers.Dense(num_classes)(keras.layers.add(pooled)))


def executed(changes, num_towers):
    """Return the nodes of a step's executed graphs, and what each waits for."""
    given = dict(model=f"{__name__}:normed", batch_size=6, variables="replicated")
    options = tiny.options("unused", **given | changes)
    with device_names.cpus_for_gpus():
        names = devices.tower_devices(num_towers, "cpu")
        run = assemble(options, names, load_data(options))
        loop, arguments = run.train_loop(), (iter(run.batches(0, 0)), tf.constant(0))
        with tf_internals.executed_graphs() as functions:
            loop(*arguments)
    traced = dict(traced_ops(loop.get_concrete_function(*arguments).graph))
    nodes = read_nodes(max(functions, key=lambda own: sum(len(g.node) for g in own)), traced)
    sources = {node: [] for node in nodes}
    for node in nodes:
        for _, taker, place in node.takers if node.proto.op != "NextIteration" else ():
            sources[taker].append((place, node))  # what a round of the loop leaves for the next
    return sources


def instance_of(collective, sources):
    """Return what is added to the first key of a call, which tells collectives apart."""
    (key,) = (node for place, node in sources[collective] if place == INSTANCE_KEY)
    added = [n for _, n in [(0, key), *sources[key]] if n.proto.op == "Const"]
    return sum(int(tf.make_ndarray(node.proto.attr["value"].tensor)) for node in added)


def check(sources, members):
    """Check that collectives cannot wait for each other; return their number on each device.

    Args:
        sources: {node: those that it waits for}.
        members: {(instance, device): node}.

    Raises:
        graphlib.CycleError: they can.
        AssertionError: a device has no one order of them.
    """
    merged = {node: instance for (instance, _), node in members.items()}
    graph = collections.defaultdict(set)
    for node, waits_for in sources.items():
        graph[merged.get(node, node)] |= {merged.get(source, source) for source in waits_for}
    depth = {}  # collectives on the longest way to a node
    for node in graphlib.TopologicalSorter(graph).static_order():
        before = max((depth[source] for source in graph.get(node, ())), default=0)
        depth[node] = before + isinstance(node, int)
    on_device = collections.defaultdict(list)
    for instance, device in members:
        on_device[device].append(depth[instance])
    assert all(len(set(ranks)) == len(ranks) for ranks in on_device.values()), on_device
    return {device: len(ranks) for device, ranks in on_device.items()}


@pytest.mark.run
@pytest.mark.parametrize("case", released(CASES, "batch norm"))
def test_the_collectives_of_a_step_cannot_wait_for_each_other(case):
    changes, num_towers = CASES[case]
    sources = executed(changes, num_towers)
    found = [node for node in sources if node.proto.op.startswith("Collective")]
    members = {(instance_of(node, sources), node.gpu): node for node in found}
    assert len(members) == len(found)  # two of one instance are on two devices
    plain = {node: [source for _, source in waits] for node, waits in sources.items()}
    numbers = check(plain, members)
    assert len(numbers) == num_towers and len(set(numbers.values())) == 1
    assert min(numbers.values()) >= 8  # of four layers, forward and backward
    for instance in {instance for instance, _ in members}:
        own = [members[instance, f"/gpu:{i}"].proto for i in range(num_towers)]
        attributes = [(p.op, p.attr["T"].type, p.attr["communication_hint"].s) for p in own]
        assert len(set(attributes)) == 1
        assert {tf.as_dtype(p.attr["T"].type).name for p in own} <= {"float32", "int64"}
        assert {p.attr["timeout_seconds"].f for p in own} == {0.0}


@pytest.mark.unit
def test_collectives_that_wait_for_each_other_are_found():
    members = {(i, d): f"{i} on {d}" for i in (1, 2) for d in "ab"}
    ordered = {"2 on a": ["x"], "x": ["1 on a"], "2 on b": ["1 on b"], "1 on a": [], "1 on b": []}
    assert check(ordered, members) == {"a": 2, "b": 2}
    with pytest.raises(graphlib.CycleError):
        check(ordered | {"2 on b": [], "1 on b": ["2 on b"]}, members)
    with pytest.raises(AssertionError):
        check(ordered | {"x": [], "2 on b": []}, members)
