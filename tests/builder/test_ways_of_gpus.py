"""What is done otherwise for GPUs: few ops and transfers; `test_equality` has the numbers.

Logical CPU devices stand in for GPUs; /cpu:0 is the host, where the batch is.
"""

import collections
import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builder.test_equality import Moments, copies
from towers import PerTower, TowerBuilder, tf_internals
from towers.builder import device_names
from towers.builder.device_names import cpus_for_gpus
from towers.builder.replica_context import integers_on

pytestmark = pytest.mark.run
GPUS = ["/cpu:1", "/cpu:2", "/cpu:3"]
layers = keras.layers


@pytest.mark.unit
def test_logical_cpus_stand_in_for_gpus_where_that_is_asked_for(monkeypatch):
    whole = "/job:localhost/replica:0/task:0/device:"

    def found():
        return [device_names.is_gpu(device) for device in ("", "/cpu:0", "/cpu:1", f"{whole}CPU:2")]

    for device in "/gpu:0", "/GPU:3", f"{whole}GPU:1", "/job:worker/task:1/gpu:0":
        assert device_names.is_gpu(device), device
    with cpus_for_gpus():
        assert found() == [False, False, True, True]
    assert found() == [False] * 4
    monkeypatch.setenv(device_names.SWITCH, "1")
    assert found() == [False, False, True, True]
    for here in "", "/cpu:0", f"{whole}GPU:1", "/job:localhost/cpu:0":
        assert device_names.machine_of(here) == ""
    for device, task in ("task:1/gpu:0", 1), ("replica:0/task:2/device:CPU:3", 2), ("", 0):
        assert device_names.machine_of(f"/job:worker/{device}") == f"/job:worker/task:{task}"


# Few ops and transfers.


@pytest.fixture
def gpus():
    with cpus_for_gpus():
        yield


def on_gpu(*body):
    """Return a model whose variables lie on the first GPU."""
    with tf.device(GPUS[0]):
        return keras.Sequential([keras.Input((3,)), *body])


def build(num_layers=1, *others):
    keras.utils.set_random_seed(0)
    body = []
    with tf.device(GPUS[0]):
        for _ in range(num_layers):
            body += [layers.Dense(3, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3)]
    return on_gpu(*others, *body, layers.Dense(2))


def executed(model, num_towers, **keywords):
    """Return {(sender, receiver): types} of the values that one step sends, and ops by device."""
    builder = TowerBuilder(GPUS[:num_towers], GPUS[0], **({"batch_norm": "sync"} | keywords))
    weights = copies(model.trainable_variables, num_towers)
    x = tf.random.stateless_normal([12, 3], [3, 4], 1.0, 2.0)
    with tf.device(GPUS[0]):
        kept = tf.Variable(tf.zeros([]), trainable=False)

    def loss_fn(x):
        return tf.reduce_sum(model(x, training=True) ** 2, axis=1)

    def own(value):
        return value.values if isinstance(value, PerTower) else [value]

    @tf.function(input_signature=[tf.TensorSpec(x.shape, x.dtype)], autograph=False)
    def update(x):
        loss, gradients = builder.gradients(loss_fn, weights, x)
        kept.assign(loss)
        for weight, gradient in zip(weights, gradients, strict=True):
            for copied, part in zip(own(weight), own(gradient), strict=True):
                with tf.device(copied.value.device):
                    copied.value.assign_sub(part)

    update.get_concrete_function()  # with all that is tried before
    with tf_internals.executed_graphs() as functions:
        update(x)
    sent, ops = collections.defaultdict(list), collections.defaultdict(collections.Counter)

    def place(device):
        return "/cpu:" + re.search(r"CPU:(\d)$", device)[1]

    graphs = itertools.chain.from_iterable(functions)
    for node in (node for graph in graphs for node in graph.node):
        ops[place(node.device)][node.op] += 1
        if node.op == "_Send" and "/ctrl/" not in node.input[0]:
            ends = (place(node.attr[end].s.decode()) for end in ("send_device", "recv_device"))
            sent[tuple(ends)].append(tf.as_dtype(node.attr["T"].type).name)
    return {ends: types for ends, types in sent.items() if ends[0] != ends[1]}, ops


def launches(ops):
    """Return how many ops of a device do something on a GPU."""
    free = (
        *("Const", "Identity", "Reshape", "ExpandDims", "Unpack", "NoOp", "_Arg", "_Recv"),
        *("ReadVariableOp", "Assign", "Collective"),
    )
    return sum(n for op, n in ops.items() if not op.startswith(free))


HOST = [("/cpu:0", device) for device in GPUS]
FROM_FIRST, TO_FIRST = ([(GPUS[0], gpu)[::way] for gpu in GPUS[1:]] for way in (1, -1))


@pytest.mark.parametrize(
    ("make", "num_towers", "keywords", "expected"),
    [
        (lambda: build(2, Moments()), 1, {}, {HOST[0]: ["float32"]}),
        # Slices and states of seeds, and the key of collectives.
        (
            lambda: build(2), 3, {},
            dict.fromkeys(HOST, ["float32", "int32"]) | dict.fromkeys(FROM_FIRST, ["int64"]),
        ),
        # Once a tower; once for each way to put it together: means, largest values.
        (lambda: build(2), 3, {"batch_norm": "local"}, dict.fromkeys(TO_FIRST, ["float32"])),
        (lambda: build(1, Moments(), Moments()), 2, {}, {TO_FIRST[0]: ["float32"] * 2}),
    ],
    ids=["one GPU", "three", "local moments", "other moments"],
)  # fmt: skip
def test_what_is_sent_in_a_step(gpus, make, num_towers, keywords, expected):
    sent, ops = executed(make(), num_towers, **keywords)
    ways = expected if TO_FIRST[0] in expected else sent
    assert {ends: sorted(sent[ends]) for ends in ways} == expected
    if FROM_FIRST[0] in expected:
        # Of each BatchNorm layer one forward and one backward, then gradients and loss.
        of_first = [ops[GPUS[0]][f"Collective{op}V2"] for op in ("Gather", "Reduce")]
        assert of_first == [4, 1]


def ops_of_layers(num_layers, num_towers, **keywords):
    model = on_gpu(*(layers.Dense(3) for _ in range(num_layers)))
    return executed(model, num_towers, **keywords)[1][GPUS[0]]


def test_parts_of_a_batch_are_added_packed(gpus):
    one, three = (ops_of_layers(number, 1, accumulate_steps=2) for number in (1, 3))
    assert three["AddN"] == one["AddN"] > 0


@pytest.mark.parametrize("num_towers", [1, 2])
def test_more_variables_cost_no_more_ops_of_the_gather(gpus, num_towers):
    two, four, six = (launches(ops_of_layers(number, num_towers)) for number in (2, 4, 6))
    assert six - four == four - two  # forward and backward of a layer
    assert (four - two) / 2 <= 6  # product and bias; two products, bias; which the test updates


def test_batch_norm_over_all_towers_costs_few_more_ops_for_a_layer(gpus):
    def of_layer(mode):
        two, three = (executed(build(n), 2, batch_norm=mode)[1][GPUS[0]] for n in (2, 3))
        return launches(three) - launches(two)

    # Ten in the tower; two are for the moving averages, which else are made on another device.
    assert of_layer("sync") - of_layer("local") <= 12


# Whole numbers, which Keras has on the host.


@pytest.mark.graph
def test_the_largest_is_found_and_integers_are_looked_up_without_the_host():
    x = tf.constant([[0.0, -0.0, 0.0], [-1.0, np.inf, 2.0], [-0.0, 0.0, -1e-300]], tf.float64)

    def largest(device):
        with integers_on(device):
            find = tf.function(lambda: keras.ops.argmax(x, axis=1))
            return find(), [op.type for op in find.get_concrete_function().graph.get_operations()]

    expected, of_cpu = largest("/cpu:1")
    with cpus_for_gpus(), integers_on("/cpu:1"):
        found, of_gpu = largest("/cpu:1")
        rows = keras.ops.take(tf.constant([[3, 4], [5, 6]], tf.int32), tf.constant([1, 0]), axis=0)
        rows -= tf.constant([[1, 1], [1, 1]], tf.int32)  # of their own type, as Equalization needs
    np.testing.assert_array_equal(found, expected)
    assert "BitwiseAnd" in of_cpu and "BitwiseAnd" not in of_gpu
    np.testing.assert_array_equal(rows, [[4, 5], [2, 3]])
