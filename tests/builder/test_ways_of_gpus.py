"""What GPUs gather, assign and read: few ops and transfers; `test_equality` has the numbers.

Logical CPU devices stand in for GPUs; /cpu:0 is the host, where the batch is.
"""

import collections
import itertools
import re

import keras
import pytest
import tensorflow as tf

from tests.builder.test_equality import Moments, copies
from towers import PerTower, TowerBuilder, tf_internals
from towers.builder.device_types import cpus_for_gpus

pytestmark = pytest.mark.run
GPUS = ["/cpu:1", "/cpu:2", "/cpu:3"]
layers = keras.layers


@pytest.fixture(autouse=True)
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
    free = ("Const", "Identity", "Reshape", "NoOp", "ReadVariableOp", "Assign", "_Arg", "_Recv")
    return sum(n for op, n in ops.items() if not op.startswith(free))


def test_one_gpu_receives_the_batch_and_sends_nothing():
    sent, _ = executed(build(2, Moments()), 1)
    assert sent == {("/cpu:0", GPUS[0]): ["float32"]}


def test_towers_receive_their_slices_and_the_key_of_collectives_and_the_state_of_seeds():
    sent, ops = executed(build(2), 3)
    of_host = {("/cpu:0", device): ["float32", "int32"] for device in GPUS}
    of_first = {(GPUS[0], device): ["int64"] for device in GPUS[1:]}
    assert {ends: sorted(types) for ends, types in sent.items()} == of_host | of_first
    # Of each BatchNorm layer one forward and one backward, then gradients and loss.
    assert ops[GPUS[0]]["CollectiveGatherV2"] == 4
    assert ops[GPUS[0]]["CollectiveReduceV2"] == 1


def test_local_statistics_are_sent_once_a_tower():
    sent, _ = executed(build(2), 3, batch_norm="local")
    assert [sent[device, GPUS[0]] for device in GPUS[1:]] == [["float32"]] * 2


def test_what_other_layers_keep_is_sent_once_for_each_way_to_put_it_together():
    sent, _ = executed(build(1, Moments(), Moments()), 2)
    assert sent[GPUS[1], GPUS[0]] == ["float32"] * 2  # means, largest values


def ops_of_layers(num_layers, num_towers, **keywords):
    model = on_gpu(*(layers.Dense(3) for _ in range(num_layers)))
    return executed(model, num_towers, **keywords)[1][GPUS[0]]


def test_parts_of_a_batch_are_added_packed():
    one, three = (ops_of_layers(number, 1, accumulate_steps=2) for number in (1, 3))
    assert three["AddN"] == one["AddN"] > 0


@pytest.mark.parametrize("num_towers", [1, 2])
def test_more_variables_cost_no_more_ops_of_the_gather(num_towers):
    two, four, six = (launches(ops_of_layers(number, num_towers)) for number in (2, 4, 6))
    assert six - four == four - two  # forward and backward of a layer
    assert (four - two) / 2 <= 6  # product and bias; two products, bias; which the test updates
