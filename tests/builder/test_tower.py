"""The tower builder: what it computes, where that runs, and what it says when it cannot."""

import functools
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from towers import PerTower, TowerBuilder, tf_private
from towers.builder import tower

DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
A = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
B = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
PRODUCT_TWICE = [[44.0, 56.0], [98.0, 128.0]]
EAGER_OR_FUNCTION = pytest.mark.parametrize(
    "compiled", [lambda f: f, tf.function], ids=["eager", "function"]
)


@pytest.fixture(autouse=True)
def _seed():
    keras.utils.set_random_seed(0)


def builder(num_towers):
    return TowerBuilder(DEVICES[:num_towers])


def normal(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape)


def dense(value):
    return tf.convert_to_tensor(value).numpy()


def assert_same(actual, expected, tolerance=1e-10):
    """Assert that values (dense, sparse or None) differ by at most 1e-10 of the largest."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            assert np.abs(dense(a) - dense(e)).max() <= tolerance * np.abs(dense(e)).max()


def one_device(loss_fn, variables, *batch):
    """What the builder promises, computed without it."""
    sources = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(loss_fn(*batch))
    return loss, tape.gradient(loss, sources)


def assert_like_one_device(loss_fn, variables, *batch, num_towers=(1, 2, 3, 4), compiled=None):
    loss, gradients = one_device(loss_fn, variables, *batch)
    for n in num_towers:
        step = functools.partial(builder(n).gradients, loss_fn, variables)
        tower_loss, tower_gradients = (compiled(step) if compiled else step)(*batch)
        assert_same([tower_loss, *tower_gradients], [loss, *gradients])


class Op(NamedTuple):
    name: str
    type: str
    device: str


def executed_ops(function, *args):
    """Run a `tf.function` for the first time; return what TensorFlow made of it and ran."""
    with tf_private.executed_graphs() as graphs:
        function(*args)
    ops = [Op(n.name, n.op, n.device.rpartition(":")[2]) for graph in graphs for n in graph.node]
    assert ops
    return ops


def devices_of(ops, kind, scope=""):
    """The devices of the ops of one kind (a MatMul is executed as `_MklMatMul`) in a scope."""
    return {op.device for op in ops if kind in op.type and scope in op.name}


# Where things run.


def test_two_matmuls_are_summed_eagerly():
    a, b = tf.constant(A), tf.constant(B)
    devices = []

    def fn():
        product = tf.matmul(a, b)
        devices.append(product.device[-5:])
        return product

    result = TowerBuilder(["/cpu:0", "/cpu:1"]).sum(fn)
    assert result.numpy().tolist() == PRODUCT_TWICE
    assert result.device.endswith("CPU:0")
    assert devices == ["CPU:0", "CPU:1"]


def test_two_matmuls_are_executed_on_their_towers():
    @tf.function
    def step(a, b):
        return TowerBuilder(["/cpu:0", "/cpu:1"]).sum(lambda: tf.matmul(a, b))

    ops = executed_ops(step, tf.constant(A), tf.constant(B))
    assert devices_of(ops, "MatMul", "tower_0/") == {"0"}
    assert devices_of(ops, "MatMul", "tower_1/") == {"1"}
    assert devices_of(ops, "AddN") == {"0"}


SESSIONS = """
import tensorflow as tf
from towers import TowerBuilder

def run():
    with tf.Graph().as_default():
        a = tf.compat.v1.placeholder(tf.float32, [None, 3])
        b = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        towers = TowerBuilder(["/cpu:2", "/cpu:3"])
        results = towers.sum(lambda: tf.matmul(a, b)), towers.concat(lambda a: tf.matmul(a, b), a)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 4})
        options = tf.compat.v1.RunOptions(output_partition_graphs=True)
        metadata = tf.compat.v1.RunMetadata()
        with tf.compat.v1.Session(config=config) as session:
            feed = {a: [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]}
            total, rows = session.run(results, feed, options, metadata)
    nodes = [node for partition in metadata.partition_graphs for node in partition.node]
    devices = {(node.name[:7], node.device[-5:]) for node in nodes if "MatMul" in node.op}
    print(total.tolist(), rows.tolist(), sorted(devices))

run()
tf.compat.v1.disable_v2_behavior()
run()
"""


def test_towers_in_a_session():
    root = pathlib.Path(tower.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    devices = [("tower_0", "CPU:2"), ("tower_1", "CPU:3")]
    line = f"{PRODUCT_TWICE} [[22.0, 28.0], [49.0, 64.0]] {devices}\n"
    assert done.stdout == 2 * line, done.stderr


def small_cnn():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4, 4, 2), dtype="float64"),
            layers.Conv2D(3, 3, activation="tanh"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def cross_entropy(model):
    """Losses [b] of a model in training."""

    def loss_fn(images, labels):
        logits = model(images, training=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)

    return loss_fn


def test_gradient_ops_run_on_their_towers(float64):
    with tf.device("/cpu:0"):
        model = small_cnn()
    towers = TowerBuilder(["/cpu:1", "/cpu:2"], gather_device="/cpu:3")

    @tf.function
    def step(images, labels):
        return towers.gradients(cross_entropy(model), model.trainable_variables, images, labels)

    batch = tf.constant(normal(5, 4, 4, 2)), tf.constant([0, 1, 0, 1, 1])
    ops = executed_ops(step, *batch)
    for kind in "Conv2DBackpropFilter", "MatMul", "TanhGrad":
        assert devices_of(ops, kind, "tower_0/") == {"1"}
        assert devices_of(ops, kind, "tower_1/") == {"2"}
        assert devices_of(ops, kind) == {"1", "2"}
    assert devices_of(ops, "AddN", "gather") == {"3"}
    assert devices_of(ops, "StridedSlice", "split/") == {"3"}


def test_gradients_run_on_their_towers_eagerly():
    devices = []

    @tf.custom_gradient
    def probe(x):
        def backward(upstream):
            devices.append((2 * upstream).device[-5:])
            return upstream

        return x, backward

    w = tf.Variable(1.0)
    towers = TowerBuilder(["/cpu:1", "/cpu:2"], gather_device="/cpu:3")
    loss, gradients = towers.gradients(lambda x: probe(w * x), [w], tf.ones(3))
    assert devices == ["CPU:1", "CPU:2"]
    assert loss.device[-5:] == gradients[0].device[-5:] == "CPU:3"


@pytest.mark.parametrize("num_towers", [1, 2])
@pytest.mark.parametrize("gather", ["sum", "concat"])
def test_results_are_on_the_gather_device(gather, num_towers):
    towers = TowerBuilder(["/cpu:1", "/cpu:2"][:num_towers], gather_device="/cpu:3")
    assert getattr(towers, gather)(lambda x: 2 * x, tf.ones(4)).device.endswith("CPU:3")
    devices = [x.device[-5:] for x in towers.map(lambda x: 2 * x, tf.ones(4))]
    assert devices == ["CPU:1", "CPU:2"][:num_towers]


def test_placement_needs_no_help(float64):
    """Weights, towers and gather on devices of their own, and soft placement off."""
    with tf.device("/cpu:0"):
        model = small_cnn()
    towers = TowerBuilder(["/cpu:1", "/cpu:2"], gather_device="/cpu:3")
    step = functools.partial(towers.gradients, cross_entropy(model), model.trainable_variables)
    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        for run in step, tf.function(step):
            loss, _ = run(tf.constant(normal(5, 4, 4, 2)), tf.constant([0, 1, 0, 1, 1]))
            assert np.isfinite(loss)
    finally:
        tf.config.set_soft_device_placement(before)


def test_a_function_inside_the_tower_runs_on_its_device():
    w = tf.Variable(tf.ones((2, 2)))
    inner = tf.function(lambda x: tf.matmul(x, w))
    step = tf.function(lambda: TowerBuilder(["/cpu:1", "/cpu:2"]).sum(inner, tf.ones((4, 2))))
    ops = executed_ops(step)
    assert devices_of(ops, "MatMul", "tower_0/") == {"1"}
    assert devices_of(ops, "MatMul", "tower_1/") == {"2"}


def test_a_device_may_hold_several_towers():
    towers = TowerBuilder(("/cpu:1", "/cpu:1", "/cpu:2"))
    parts = towers.map(lambda x: x + 0, tf.range(3))
    assert [(x.device[-5:], x.numpy().tolist()) for x in parts] == [
        ("CPU:1", [0]),
        ("CPU:1", [1]),
        ("CPU:2", [2]),
    ]


@pytest.mark.parametrize("devices", ["/gpu:0", []])
def test_devices_must_be_a_list(devices):
    with pytest.raises(ValueError) as error:
        TowerBuilder(devices)
    assert str(error.value) == (
        f"devices={devices!r} must be a list with one device for each tower, "
        'such as ["/gpu:0", "/gpu:1"]'
    )


# map, sum, concat.


def test_map_without_a_batch_copies_the_function():
    calls = []
    assert builder(3).map(lambda: calls.append(0) or len(calls)) == [1, 2, 3]


def test_map_returns_any_result_in_tower_order():
    results = builder(2).map(
        lambda x: {"shape": x.shape.as_list(), "first": int(x[0])}, tf.constant([5, 6, 7])
    )
    assert results == [{"shape": [2], "first": 5}, {"shape": [1], "first": 7}]


@EAGER_OR_FUNCTION
def test_sum_of_a_structure_with_none_and_sparse_leaves(compiled):
    """A leaf is None in all or in some of the towers, sparse in all or in some of them."""

    def fn(i):
        rows = tf.IndexedSlices(tf.constant([[1.0 + i]]), tf.constant([i]), tf.constant([3, 1]))
        return {
            "dense": (tf.constant(1.0 + i), [tf.constant([10 * i])]),
            "none": None,
            "some": tf.constant(5.0) if i else None,
            "sparse": rows,
            "mixed": rows if i else tf.ones((3, 1)),
        }

    total = compiled(lambda: builder(3).sum(fn, PerTower([0, 1, 2])))()
    assert total["dense"][0].numpy() == 6
    assert total["dense"][1][0].numpy().tolist() == [30]
    assert total["none"] is None
    assert total["some"].numpy() == 10
    assert isinstance(total["sparse"], tf.IndexedSlices)
    assert dense(total["sparse"]).tolist() == [[1], [2], [3]]
    assert total["sparse"].values.shape == (3, 1)
    assert dense(total["mixed"]).tolist() == [[1], [3], [4]]


def test_sum_can_be_differentiated():
    x = tf.constant([1.0, 2.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = builder(2).sum(lambda x: tf.reduce_sum(x**2), x)
    assert tape.gradient(total, x).numpy().tolist() == [2, 4, 6]


def test_concat_joins_in_tower_order():
    batch = {"x": tf.range(7), "names": tf.constant(list("abcdefg"))}
    joined = builder(3).concat(lambda b: (b["names"], {"twice": 2 * b["x"], "none": None}), batch)
    assert joined[0].numpy().tolist() == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]
    assert joined[1]["twice"].numpy().tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert joined[1]["none"] is None


def test_concat_leaves_out_towers_that_return_none():
    joined = builder(3).concat(lambda x: x, PerTower([tf.ones(2), None, np.float32([3])]))
    assert joined.numpy().tolist() == [1, 1, 3]


@pytest.mark.parametrize("scalar", [tf.constant(1.0), np.float32(1), 1.0])
def test_concat_refuses_scalars(scalar):
    with pytest.raises(ValueError) as error:
        builder(2).concat(lambda: scalar)
    assert str(error.value) == ("concat joins along axis 0 and cannot join scalars: use sum or map")


def test_towers_must_return_the_same_structure():
    with pytest.raises(ValueError) as error:
        builder(2).sum(lambda x: x, PerTower([{"a": 1}, {"b": 1}]))
    assert str(error.value) == (
        "towers must return the same structure: "
        "tower 0 returned {'a': 1}, tower 1 returned {'b': 1}"
    )


# Splitting.


@pytest.mark.parametrize("num_towers", [1, 3, 4])
def test_the_batch_size_may_be_unknown(num_towers):
    """One trace for all sizes; the slices are those of a known size, perhaps of no example."""

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec(None)])
    def step(x, y):
        towers = builder(num_towers)
        sizes = towers.map(lambda x, y: tf.stack([tf.shape(x)[0], tf.shape(y)[0]]), x, y)
        return sizes, towers.concat(lambda x, y: x + y, x, y)

    for size in 0, 1, 2, 3, 6, 7, 9:
        x, y = tf.random.normal((size, 2)), tf.random.normal((size, 2))
        sizes, joined = step(x, y)
        expected = [size // num_towers + (i < size % num_towers) for i in range(num_towers)]
        assert [s.numpy().tolist() for s in sizes] == [[n, n] for n in expected]
        assert joined.numpy().tolist() == (x + y).numpy().tolist()


@pytest.mark.parametrize("size, num_calls", [(2, 2), (0, 1)])
def test_towers_known_to_get_nothing_are_left_out_of_sums(size, num_calls):
    calls = []  # of towers: a rehearsal has symbolic tensors

    def fn(x):
        calls.extend([] if tf.is_symbolic_tensor(x) else [x])
        return tf.reduce_sum(x)

    x = tf.ones((size, 3))
    total = builder(4).sum(fn, x)
    assert (len(calls), total.numpy()) == (num_calls, 3 * size)
    assert builder(4).concat(lambda x: x, x).shape == x.shape
    assert [part.shape[0] for part in builder(4).map(lambda x: x, x)] == [1] * size + [0] * (
        4 - size
    )


class Pair(NamedTuple):
    left: object
    right: object


def test_batches_may_be_nested_and_of_any_type():
    batch = {
        "numpy": np.arange(3.0),
        "pair": Pair([tf.constant(["a", "b", "c"])], (np.array([1, 2, 3], np.int8),)),
        "ragged": tf.ragged.constant([[1], [], [2, 3]]),
        "variable": tf.Variable([True, False, True]),
        "missing": None,
    }
    first, second = builder(2).map(lambda batch, _: batch, batch, np.ones(3))
    assert first["numpy"].numpy().tolist() == [0, 1] and second["numpy"].numpy().tolist() == [2]
    assert isinstance(first["pair"], Pair)
    assert second["pair"].left[0].numpy().tolist() == [b"c"]
    assert second["pair"].right[0].dtype == tf.int8
    assert first["ragged"].to_list() == [[1], []] and second["ragged"].to_list() == [[2, 3]]
    assert first["variable"].numpy().tolist() == [True, False]
    assert first["missing"] is None


@EAGER_OR_FUNCTION
def test_ragged_batches_are_joined_again(compiled):
    ragged = tf.ragged.constant([[1], [], [2, 3], [4]])
    joined = compiled(lambda x: builder(3).concat(lambda x: 2 * x, x))(ragged)
    assert joined.to_list() == [[2], [], [4, 6], [8]]


def test_per_tower_values_are_handed_over_whole():
    values = PerTower([{"rate": 0.5}, "anything"])
    seen = builder(2).map(lambda x, other: (x.shape[0], other), tf.ones(3), {"deep": [values]})
    assert seen == [(2, {"deep": [{"rate": 0.5}]}), (1, {"deep": ["anything"]})]


def test_per_tower_values_may_be_empty_or_scalars():
    """They say nothing about the number of examples: no tower is left out for them."""
    values = PerTower([tf.constant(1.0), tf.zeros([0]), tf.ones([4])])
    assert builder(3).sum(lambda x, v: tf.size(x) + tf.size(v), tf.ones(3), values).numpy() == 8
    assert builder(3).sum(lambda v: tf.size(v), values).numpy() == 5


def test_per_tower_needs_a_value_for_each_tower():
    with pytest.raises(ValueError) as error:
        builder(3).map(lambda x: x, PerTower([1, 2]))
    assert str(error.value) == "PerTower holds 2 values for 3 towers: it must hold one for each"


@pytest.mark.parametrize("scalar", [tf.constant(1), 3.0, True, [1, 2, 3]])
def test_scalars_are_refused(scalar):
    with pytest.raises(ValueError) as error:
        builder(2).map(lambda *_: None, tf.ones(2), {"x": scalar})
    assert str(error.value) == (
        "a batch is split along axis 0 and cannot hold scalars: make a list of numbers an array; "
        "capture a single value in the function, or hand it over as towers.PerTower"
    )


def test_unequal_sizes_are_refused():
    with pytest.raises(ValueError) as error:
        builder(2).map(lambda *_: None, tf.ones(8), np.ones((6, 2)))
    assert str(error.value) == (
        "the tensors of a batch must have the same size along axis 0, not [6, 8]"
    )


@pytest.mark.parametrize("second", [None, 2], ids=["both unknown", "one known"])
def test_unequal_sizes_are_refused_at_run_time(second):
    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([second])])
    def step(x, y):
        return builder(2).sum(lambda x, y: tf.reduce_sum(x * y), x, y)

    assert step(tf.ones(2), tf.ones(2)).numpy() == 2
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        step(tf.ones(1), tf.ones(2))
    assert "the tensors of a batch must have the same size along axis 0" in str(error.value)


SHAPES = st.tuples(st.sampled_from([(), (2,), (0,), (2, 1)]), st.sampled_from(["int64", "float64"]))
STRUCTURES = st.recursive(
    SHAPES.map(lambda leaf: ("leaf", leaf)),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda x: ("list", x)),
        st.lists(inner, min_size=1, max_size=3).map(lambda x: ("tuple", x)),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(lambda x: ("dict", x)),
    ),
    max_leaves=5,
)


def build(node, size):
    """A batch of `size` examples, with the structure that was drawn."""
    kind, inner = node
    if kind == "leaf":
        shape, dtype = inner
        return np.random.randint(-9, 9, (size, *shape)).astype(dtype)
    if kind == "dict":
        return {key: build(value, size) for key, value in inner.items()}
    return {"list": list, "tuple": tuple}[kind](build(x, size) for x in inner)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 9), num_towers=st.integers(1, 4), structure=STRUCTURES)
def test_nothing_is_lost_or_counted_twice(size, num_towers, structure):
    batch = build(structure, size)
    towers = builder(num_towers)
    joined = towers.concat(lambda x: x, batch)
    total = towers.sum(lambda x: tf.nest.map_structure(lambda y: tf.reduce_sum(y, 0), x), batch)
    tf.nest.assert_same_structure(joined, batch)
    tf.nest.map_structure(np.testing.assert_array_equal, joined, batch)
    tf.nest.map_structure(lambda t, x: np.testing.assert_array_equal(t, x.sum(0)), total, batch)


# Gradients.


def squared_error(predict):
    return lambda x, y: (tf.reshape(predict(x), [-1]) - y) ** 2


X, Y = normal(7, 3), normal(7)


@EAGER_OR_FUNCTION
def test_gradients_are_those_of_the_mean_over_all_examples(compiled):
    w, b = keras.Variable(normal(3, 1), dtype="float64"), tf.Variable(0.5, dtype=tf.float64)
    loss_fn = squared_error(lambda x: tf.matmul(x, w) + b)
    assert_like_one_device(loss_fn, [w, b], X, Y, compiled=compiled)


def test_gradients_without_a_batch():
    """Each tower gives its losses; the mean is over all of them, not over the towers."""
    w = tf.Variable(2.0)
    losses = PerTower([tf.constant([1.0]), tf.constant([2.0, 3.0, 4.0])])
    loss, [gradient] = builder(2).gradients(lambda x: w * x, [w], losses)
    assert (loss.numpy(), gradient.numpy()) == (5, 2.5)
    loss, [gradient] = builder(2).gradients(lambda: w * [1.0, 2.0], [w])
    assert (loss.numpy(), gradient.numpy()) == (3, 1.5)


@pytest.mark.parametrize("collection", [list, tuple, iter])
@pytest.mark.parametrize("make", [keras.Variable, tf.Variable])
def test_variables_may_repeat_and_come_in_any_collection(collection, make):
    w, v = make(2.0), make(3.0)
    _, gradients = builder(2).gradients(lambda x: w * v * x, collection([w, v, w]), tf.ones(3))
    assert [g.numpy() for g in gradients] == [3, 2, 3]


def test_no_variables_give_no_gradients():
    loss, gradients = builder(2).gradients(lambda x: x, [], tf.constant([1.0, 2.0, 6.0]))
    assert loss.numpy() == 3 and gradients == []


def test_variables_must_be_variables():
    with pytest.raises(ValueError) as error:
        builder(2).gradients(lambda x: x, ["w"], tf.ones(2))
    assert str(error.value) == (
        "variables must be a list of tf.Variables or keras.Variables, but holds 'w'"
    )
    with pytest.raises(ValueError, match="variables must be a list of tf.Variables"):
        builder(2).gradients(lambda x: x, tf.Variable([1.0, 2.0]), tf.ones(2))


@EAGER_OR_FUNCTION
def test_variables_that_not_every_tower_uses(compiled):
    """A variable of no tower gives None; one of some towers what one device would give."""
    everywhere, somewhere = keras.Variable(2.0, dtype="float64"), tf.Variable(3.0, dtype=tf.float64)
    nowhere = [keras.Variable(1.0), tf.Variable(1.0)]
    variables = [everywhere, somewhere, *nowhere]

    def loss_fn(x, branch):
        return everywhere * x * (somewhere * x if branch else 1)

    step = compiled(lambda x: builder(3).gradients(loss_fn, variables, x, PerTower([0, 1, 0])))
    loss, gradients = step(tf.constant(X[:, 0]))
    picks = np.repeat([False, True, False], [3, 2, 2])
    expected = one_device(
        lambda x: everywhere * x * tf.where(picks, somewhere * x, 1), variables, X[:, 0]
    )
    assert_same([loss, *gradients], [expected[0], *expected[1]])
    assert gradients[2:] == [None, None]


class Table(tf.Module):
    """An embedding as a `tf.Variable`."""

    def __init__(self):
        super().__init__()
        self.table = tf.Variable(normal(9, 3))

    def __call__(self, ids):
        return tf.gather(self.table, ids)


@pytest.mark.parametrize(
    "make, compiled", [(lambda: keras.layers.Embedding(9, 3), tf.function), (Table, lambda f: f)]
)
def test_embeddings_have_sparse_gradients(float64, make, compiled):
    embedding = make()
    ids = tf.constant([[0, 1], [1, 2], [8, 8], [3, 0], [1, 1]])
    embedding(ids)

    def loss_fn(ids):
        return tf.reduce_sum(embedding(ids) ** 3, axis=[1, 2])

    [expected] = one_device(loss_fn, embedding.trainable_variables, ids)[1]
    step = functools.partial(builder(3).gradients, loss_fn, embedding.trainable_variables)
    _, [gradient] = compiled(step)(ids)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.values.shape[-1] == 3 and tf.size(gradient.indices) == 10
    assert_same([gradient], [expected])


def test_embeddings_of_some_towers_only_stay_sparse(float64):
    embedding = Table()
    _, [gradient] = builder(2).gradients(
        lambda ids, use: tf.reduce_sum(embedding(ids), 1) if use else tf.ones_like(ids, tf.float64),
        [embedding.table],
        tf.constant([1, 2, 3]),
        PerTower([False, True]),
    )
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.indices.numpy().tolist() == [3]
    assert_same([gradient.values], [np.full([1, 3], 1 / 3)])


def test_an_embedding_that_is_also_used_densely(float64):
    """Tied input and output embeddings: in all towers, then densely in one tower only."""
    table = keras.Variable(normal(9, 3))
    ids = tf.constant([0, 1, 1, 8, 5])

    def loss_fn(ids):
        logits = tf.matmul(tf.gather(table, ids), table, transpose_b=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(ids, logits)

    assert_like_one_device(loss_fn, [table], ids)

    def mixed(ids, tied):
        return loss_fn(ids) if tied else tf.reduce_sum(tf.gather(table, ids), 1)

    _, [gradient] = builder(2).gradients(mixed, [table], ids, PerTower([True, False]))
    parts = [one_device(mixed, [table], ids[:3], True), one_device(mixed, [table], ids[3:], False)]
    assert_same(
        [gradient], [sum(n * dense(g) for n, (_, [g]) in zip([3, 2], parts, strict=True)) / 5]
    )


def module():
    class Linear(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(normal(3, 1))

        def __call__(self, x):
            return tf.matmul(x, self.w)

    net = Linear()
    return net, net.trainable_variables


def keras_model():
    net = keras.Sequential(
        [keras.Input((3,), dtype="float64"), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    return net, net.trainable_variables


def functional_model():
    """A layer that is used twice, and two outputs."""
    x = keras.Input((3,), dtype="float64")
    shared = keras.layers.Dense(3, activation="tanh")
    net = keras.Model(x, {"a": keras.layers.Dense(1)(shared(shared(x))), "b": shared(x)})
    return lambda x: net(x)["a"] * tf.reduce_mean(net(x)["b"], 1, True), net.trainable_variables


def recurrent_model():
    net = keras.Sequential(
        [keras.layers.Reshape((3, 1)), keras.layers.GRU(2), keras.layers.Dense(1)]
    )
    net(X)
    return net, net.trainable_variables


def recomputed_model():
    """The same weights in a part that is recomputed and in one that is not."""
    net, variables = keras_model()
    recomputed = tf.recompute_grad(lambda x: net(x))
    return lambda x: recomputed(x) * net(2 * x), variables


def stateless_model():
    net, variables = keras_model()
    call = net.stateless_call
    return lambda x: call(net.trainable_variables, net.non_trainable_variables, x)[0], variables


def function_with_keywords():
    w = tf.Variable(normal(3, 1))
    return functools.partial(lambda x, *, scale: scale * tf.matmul(x, w), scale=2.0), [w]


@pytest.mark.parametrize(
    "make, compiled",
    [
        (module, None),
        (keras_model, None),
        (functional_model, tf.function),
        (recurrent_model, tf.function),
        (recomputed_model, tf.function),
        (stateless_model, None),
        (function_with_keywords, tf.function),
    ],
)
def test_any_callable_will_do(float64, make, compiled):
    predict, variables = make()
    loss_fn = squared_error(predict)
    assert_like_one_device(loss_fn, variables, X, Y, num_towers=[2], compiled=compiled)


def test_loss_fn_may_be_a_function_of_its_own(float64):
    """Traced for one tower and one step, it serves the others with the weights of the day."""
    net, variables = keras_model()
    loss_fn = tf.function(squared_error(net))
    x, y = tf.constant(X[:6]), tf.constant(Y[:6])
    for _ in range(2):
        loss, gradients = builder(2).gradients(loss_fn, variables, x, y)
        expected = one_device(squared_error(net), variables, x, y)
        assert_same([loss, *gradients], [expected[0], *expected[1]])
        for v in variables:
            v.assign(v + 1.0)


def test_a_function_inside_a_compiled_step(float64):
    """It becomes a part of each tower: of slices of other sizes, and of the same size."""
    net, variables = keras_model()
    loss_fn = tf.function(squared_error(net))
    assert_like_one_device(loss_fn, variables, X, Y, num_towers=[2], compiled=tf.function)
    loss_fn = tf.function(squared_error(net))
    x, y = tf.constant(X[:6]), tf.constant(Y[:6])  # slices of one size: of one trace
    assert_like_one_device(loss_fn, variables, x, y, num_towers=[2, 3], compiled=tf.function)


def test_what_is_recomputed_is_not_assigned_again(float64):
    layer = keras.layers.BatchNormalization(momentum=0.5)
    layer.build([None, 3])
    recomputed = tf.recompute_grad(lambda x: layer(x, training=True))
    builder(2).gradients(lambda x: tf.reduce_sum(recomputed(x), 1), layer.trainable_variables, X)
    assert_same([layer.moving_mean.numpy()], [0.5 * X.mean(0)])


def test_grouped_convolutions(float64):
    """Keras has XLA compile them, which reads no weights of another device."""
    layer = keras.layers.Conv1D(4, 1, groups=2)
    x = normal(4, 3, 4)
    layer.build(x.shape)
    towers = TowerBuilder(["/cpu:1", "/cpu:2"])

    def loss_fn(x):
        return tf.reduce_sum(layer(x) ** 2, [1, 2])

    step = tf.function(functools.partial(towers.gradients, loss_fn, layer.trainable_variables))
    loss, gradients = step(x)
    expected = one_device(loss_fn, layer.trainable_variables, x)
    assert_same([loss, *gradients], [expected[0], *expected[1]])


def test_loops_do_not_fetch_their_weights_each_time_round(float64):
    net, variables = recurrent_model()
    towers = TowerBuilder(["/cpu:1", "/cpu:2"])
    step = tf.function(functools.partial(towers.gradients, squared_error(net), variables))
    ops = executed_ops(step, X, Y)
    assert devices_of(ops, "MatMul", "while/body") == {"1", "2"}
    assert devices_of(ops, "ReadVariableOp") == {"0"}
    assert devices_of(ops, "ReadVariableOp", "while/body") == set()


def test_loss_fn_may_take_gradients_itself(float64):
    net, variables = keras_model()

    def loss_fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = net(x)
        return tf.reduce_sum(tape.gradient(y, x) ** 2, axis=1)

    assert_like_one_device(loss_fn, variables[:1], tf.constant(X))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_losses_of_16_bits_are_summed_in_32(dtype):
    """In 16 bits the sum of 600 ones is 256 (bfloat16), and 4 times 60000 is inf (float16)."""
    w = tf.Variable(1.0, dtype=dtype)
    for value, count in (1, 600), (60000, 4):
        losses = tf.constant(value, dtype, [count])
        loss, [gradient] = builder(2).gradients(lambda x: w * x, [w], losses)
        assert loss.dtype == tf.float32 and gradient.dtype == dtype
        assert loss.numpy() == losses.numpy().astype(np.float32)[0]


def test_the_number_of_examples_may_exceed_16_bits():
    w = tf.Variable(1.0, dtype=tf.float16)
    _, [gradient] = builder(2).gradients(lambda x: w * x, [w], tf.fill([70000], np.float16(0.25)))
    assert gradient.numpy() == pytest.approx(0.25, rel=0.01)


def test_variables_created_in_a_tower_are_named():
    net = keras.Sequential([keras.layers.Dense(1, name="dense")], name="net")
    creations = {
        "net/dense/kernel": lambda x: net(x)[:, 0],
        "w": lambda x: x[:, 0] * tf.Variable(1.0, name="w"),
    }
    for name, loss_fn in creations.items():
        with pytest.raises(ValueError) as error:
            builder(2).gradients(loss_fn, net.trainable_variables, tf.ones((2, 3)))
        assert (
            f"loss_fn creates the variable {name!r}, which `variables` cannot hold: "
            "build the model before, by calling it once outside the towers"
        ) in str(error.value)


def test_state_may_be_created_in_a_tower():
    """Keras makes its global seed when it is first used; no gradient misses it."""
    keras.utils.clear_session()
    w = tf.Variable(2.0)
    step = tf.function(lambda: builder(2).gradients(lambda: w * keras.random.uniform([4]), [w]))
    first, [gradient] = step()
    assert gradient.numpy() == pytest.approx(first.numpy() / 2)
    assert step()[0].numpy() != first.numpy()
    loss, _ = builder(2).gradients(lambda: tf.random.Generator.from_seed(1).uniform([4]), [w])
    assert 0 < loss.numpy() < 1


def test_towers_without_examples_do_no_harm(float64):
    """Two examples on four towers, through convolution and BatchNorm: no NaN, nothing counted."""
    model = small_cnn()
    statistics = [v.numpy() for v in model.non_trainable_variables]
    loss_fn = cross_entropy(model)

    specs = [tf.TensorSpec([None, 4, 4, 2], tf.float64), tf.TensorSpec([None], tf.int32)]

    @tf.function(input_signature=specs)
    def step(images, labels):
        return builder(4).gradients(loss_fn, model.trainable_variables, images, labels)

    images, labels = tf.constant(normal(2, 4, 4, 2)), tf.constant([0, 1])
    loss, gradients = step(images, labels)
    updated = [v.numpy() for v in model.non_trainable_variables]
    singles = []
    for i in range(2):
        for v, value in zip(model.non_trainable_variables, statistics, strict=True):
            v.assign(value)
        losses, parts = one_device(
            loss_fn, model.trainable_variables, images[i : i + 1], labels[i : i + 1]
        )
        singles.append([losses, *parts, *model.non_trainable_variables])
        singles[-1] = [dense(value) for value in singles[-1]]
    assert_same([loss, *gradients, *updated], [(a + b) / 2 for a, b in zip(*singles, strict=True)])


# State of Keras layers.


@EAGER_OR_FUNCTION
def test_batch_norm_statistics_are_the_weighted_mean_of_the_towers(float64, compiled):
    layer = keras.layers.BatchNormalization(momentum=0.75)
    layer.build([None, 3])
    layer.moving_mean.assign([1.0, 2.0, 3.0])

    def loss_fn(x):
        return tf.reduce_sum(layer(x, training=True), 1)

    compiled(lambda x: builder(3).gradients(loss_fn, layer.trainable_variables, x))(tf.constant(X))
    slices = X[:3], X[3:5], X[5:]
    mean = sum(len(x) * (0.75 * np.array([1, 2, 3]) + 0.25 * x.mean(0)) for x in slices) / 7
    variance = sum(len(x) * (0.75 + 0.25 * x.var(0)) for x in slices) / 7
    assert_same([layer.moving_mean.numpy(), layer.moving_variance.numpy()], [mean, variance])


@EAGER_OR_FUNCTION
def test_seeds_advance_once_a_step(compiled):
    """As one call of the layer would advance them; each step has new masks."""
    dropout, once = (keras.layers.Dropout(0.5, seed=1) for _ in range(2))
    losses = []

    def loss_fn(x):
        return tf.reduce_sum(dropout(x, training=True), 1)

    step = compiled(lambda x: builder(3).gradients(loss_fn, [], x)[0])
    for _ in range(3):
        losses.append(step(tf.random.uniform((6, 50))).numpy())
        once(tf.ones((6, 50)), training=True)
        state = dropout.seed_generator.state.numpy().tolist()
        assert state == once.seed_generator.state.numpy().tolist()
    assert len(set(losses)) == 3


@EAGER_OR_FUNCTION
def test_counters_count_steps_and_every_tower_sees_the_master(compiled):
    integer = keras.Variable(5, dtype="int32", trainable=False)
    floating = keras.Variable(5.0, dtype="float64", trainable=False)

    def loss_fn(x):
        before = integer.value + 0, floating.value + 0
        integer.assign_add(1)
        floating.assign(floating + 1)
        after = integer.value + 0, floating.value + 0
        return x * tf.cast(before[0] + after[0], x.dtype) * (before[1] + after[1])

    step = compiled(lambda x: builder(3).gradients(loss_fn, [], x)[0])
    assert step(tf.ones(7, tf.float64)).numpy() == (5 + 6) * (5 + 6)
    assert (integer.numpy(), floating.numpy()) == (6, 6)
    assert step(tf.ones(7, tf.float64)).numpy() == (6 + 7) * (6 + 7)
    assert (integer.numpy(), floating.numpy()) == (7, 7)


@EAGER_OR_FUNCTION
def test_assignments_of_some_towers_only(compiled):
    """The mean is over the towers that assigned: slices of 3, 2, 2, of which the last two do."""
    counter = keras.Variable(0, dtype="int32", trainable=False)
    several, single, none = (keras.Variable(9.0, trainable=False) for _ in range(3))

    def loss_fn(x, i):
        if i > 0:
            several.assign(10.0 * i)
            counter.assign(i)
        if i == 2:
            single.assign(4.0)
        return x

    told = []
    towers = TowerBuilder(DEVICES[:3], on_doubt=told.append)
    compiled(lambda x: towers.gradients(loss_fn, [], x, PerTower([0, 1, 2])))(tf.ones(7))
    assert {several.path, counter.path} == {line.split()[3] for line in told}
    assert [v.numpy() for v in (several, single, none, counter)] == [15, 4, 9, 1]


def test_variables_that_keras_wants_from_the_first_tower():
    v = keras.Variable(0.0, trainable=False, aggregation="only_first_replica")
    builder(2).gradients(lambda x: v.assign(x[0]) * x, [], tf.constant([1.0, 2.0, 3.0]))
    assert v.numpy() == 1


@EAGER_OR_FUNCTION
def test_metrics_count_all_examples(compiled):
    accuracy = keras.metrics.BinaryAccuracy(dtype="float64")
    accuracy.update_state([1], [1])

    def loss_fn(labels, predictions):
        accuracy.update_state(labels, predictions)
        return tf.cast(labels, tf.float64)

    labels, predictions = tf.constant([1, 1, 1, 1, 1, 1, 1]), tf.constant([0, 0, 0, 1, 1, 1, 0])
    compiled(functools.partial(builder(4).gradients, loss_fn, []))(labels, predictions)
    assert accuracy.count.numpy() == 8
    assert accuracy.result().numpy() == 4 / 8


def test_assignments_to_trainable_variables_come_after_the_gradients():
    w = keras.Variable(2.0)
    loss, [gradient] = builder(2).gradients(lambda x: (w * x, w.assign(7.0))[0], [w], tf.ones(3))
    assert (loss.numpy(), gradient.numpy(), w.numpy()) == (2, 1, 7)


def test_states_of_16_bits_do_not_overflow():
    state = keras.Variable(1.0, dtype="float16", trainable=False)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        return builder(2).gradients(lambda x: (x, state.assign(200.0 + x[:1][0]))[0], [], x)

    step(tf.ones(2000))
    assert state.numpy() == 201


def inside_a_function(v, x):
    return tf.function(lambda: v.assign_add(1.0) * x)()


def inside_a_loop(v, x):
    return tf.while_loop(lambda y: y[0] < 2, lambda y: [y + v.assign_add(1.0)], [x])[0]


def inside_a_branch(v, x):
    return x * tf.cond(x[0] > 0, lambda: v.assign_add(1.0), lambda: v.value)


@pytest.mark.parametrize("assign", [inside_a_function, inside_a_loop, inside_a_branch])
def test_assignments_in_inner_graphs_are_made_once(assign):
    v = keras.Variable(1.0, name="v", trainable=False)
    step = tf.function(lambda x: builder(2).gradients(lambda x: assign(v, x), [], x)[0])
    for expected in 2.0, 3.0:
        step(tf.ones(2))
        assert v.numpy() == expected


def test_mixed_precision_gives_gradients_in_32_bits():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        net, variables = keras_model()
    finally:
        keras.config.set_dtype_policy(before)
    computed_in = set()

    def loss_fn(x):
        y = net(x)
        computed_in.add(y.dtype)
        return y[:, 0] ** 2

    loss, gradients = builder(2).gradients(loss_fn, variables, X)
    assert computed_in == {tf.bfloat16}
    assert {g.dtype for g in gradients} == {tf.float32} == {loss.dtype}
    assert_same(gradients, one_device(loss_fn, variables, X)[1], tolerance=0.05)


# The module.


def test_the_example_of_the_module_runs():
    example = re.search(r"\n\n((?:    .*\n|\n)+)", tower.__doc__)[1]
    model, _ = keras_model()
    optimizer = keras.optimizers.SGD(0.5)
    names = {"tf": tf, "TowerBuilder": TowerBuilder, "model": model, "optimizer": optimizer}
    code = textwrap.dedent(example).replace("/gpu:", "/cpu:").replace("@tf.function", "")
    exec(code, names)
    batch = np.float32(X), np.zeros(7, np.int32)
    model.pop()
    before = names["train_step"](*batch)
    assert names["train_step"](*batch) < before
