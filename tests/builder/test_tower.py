"""The tower builder: what it computes, where that runs, and what it says when it cannot."""

import functools
import re
import textwrap
import traceback
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builder.test_equality import with_tape
from towers import PerTower, TowerBuilder, tf_internals
from towers.builder import tower
from towers.errors import InputError

pytestmark = pytest.mark.graph
layers = keras.layers
DEVICES = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
A = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
B = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
PRODUCT_TWICE = [[44.0, 56.0], [98.0, 128.0]]
EAGER_OR_FUNCTION = pytest.mark.parametrize(
    "compiled", [lambda f: f, tf.function], ids=["eager", "function"]
)


def builder(num_towers, **options):
    return TowerBuilder(DEVICES[:num_towers], **options)


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
    return with_tape(lambda *batch: tf.reduce_mean(loss_fn(*batch)), variables)(*batch)


def executed_ops(function, *args):
    """Run a `tf.function` for the first time; return what TensorFlow made of it and ran."""
    with tf_internals.executed_graphs() as functions:
        function(*args)
    return [node for graphs in functions for graph in graphs for node in graph.node]


def devices_of(ops, kind, scope=""):
    """The devices of the ops of one kind (a MatMul is executed as `_MklMatMul`) in a scope."""
    return {op.device[-5:] for op in ops if kind in op.op and scope in op.name}


# Where things run.


@pytest.mark.unit
def test_eager_towers_and_their_gradients_run_on_their_devices():
    devices = []

    def noted(x):
        devices.extend([] if tf.is_symbolic_tensor(x) else [x.device[-5:]])  # not of a check
        return x

    probe = tf.custom_gradient(lambda x: (x, lambda upstream: noted(2 * upstream) / 2))
    w, towers = tf.Variable(1.0), TowerBuilder(["/cpu:1", "/cpu:2"], gather_device="/cpu:3")
    result = towers.sum(lambda: noted(tf.matmul(tf.constant(A), tf.constant(B))))
    assert result.numpy().tolist() == PRODUCT_TWICE
    assert devices == ["CPU:1", "CPU:2"]
    loss, gradients = towers.gradients(lambda x: probe(w * x), [w], tf.ones(3))
    assert devices == ["CPU:1", "CPU:2"] * 2
    assert {x.device[-5:] for x in (result, loss, *gradients)} == {"CPU:3"}


@pytest.mark.run
def test_ops_of_gradients_are_executed_on_their_towers(float64):
    """Weights, towers and gather on devices of their own; no placement is soft, or need be."""
    body = layers.Conv2D(3, 3, activation="tanh"), layers.BatchNormalization()
    with tf.device("/cpu:0"):
        model = keras.Sequential(
            [keras.Input((4, 4, 2)), *body, layers.Reshape((4, 3)), layers.GRU(2)]
        )
    devices = ["/cpu:1", "/cpu:2"]
    towers = TowerBuilder(devices, gather_device="/cpu:3", batch_norm="local", check="off")

    def gradients(images):
        loss_fn = lambda x: tf.reduce_sum(model(x, training=True), 1)  # noqa: E731
        return towers.gradients(loss_fn, model.trainable_variables, images)

    images = tf.constant(normal(5, 4, 4, 2))
    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        step = tf.function(gradients)
        step.get_concrete_function(images)  # what is tried while it is traced runs elsewhere
        ops = executed_ops(step, images)
        assert np.isfinite(gradients(images)[0])
    finally:
        tf.config.set_soft_device_placement(before)
    for kind in "Conv2DBackpropFilter", "MatMul", "TanhGrad":
        assert devices_of(ops, kind, "tower_0/") == {"CPU:1"}
        assert devices_of(ops, kind, "tower_1/") == {"CPU:2"}
        assert devices_of(ops, kind) == {"CPU:1", "CPU:2"}
    assert devices_of(ops, "AddN", "gather") == {"CPU:3"}
    assert devices_of(ops, "StridedSlice", "split/") == {"CPU:3"}
    # A loop does not fetch its weights each time round.
    assert devices_of(ops, "MatMul", "while/body") == {"CPU:1", "CPU:2"}
    assert devices_of(ops, "ReadVariableOp") == {"CPU:0"}
    assert devices_of(ops, "ReadVariableOp", "while/body") == set()


class Tokens(tf.experimental.ExtensionType):
    ids: tf.Tensor
    mask: tf.Tensor


REFUSED = {
    r'a list with one device for each tower, such as \["/gpu:0", "/gpu:1"\]': [
        lambda: TowerBuilder("/gpu:0"),
        lambda: TowerBuilder([]),
        lambda: TowerBuilder(2),
    ],
    "cannot join scalars along axis 0; use sum or map": [
        lambda: builder(2).concat(lambda: tf.constant(1.0))
    ],
    "PerTower holds 2 values for 3 towers; give one for each": [
        lambda: builder(3).map(lambda x: x, PerTower([1, 2]))
    ],
    "cannot hold scalars; convert a list of numbers to an array; capture .*towers.PerTower": [
        lambda x=x: builder(2).map(lambda *_: None, tf.ones(2), {"x": x})
        for x in (tf.constant(1), 3.0, True, [1, 2, 3])
    ],
    "^a batch can hold only tensors and arrays, .*, not a (Tokens|object); pass its tensors in": [
        functools.partial(gradients, tf.identity, [], {"x": x})
        for gradients in (builder(2).gradients, tf.function(builder(2).gradients, autograph=False))
        for x in (Tokens(tf.ones([2]), tf.ones([2])), object())
    ],
    r"must have the same size along axis 0, not \[8, 6\]": [
        lambda: builder(2).map(lambda *_: None, tf.ones(8), np.ones((6, 2)))
    ],
    r"one loss for each example, shape .b., not \(\) when traced with . examples; reduce all": [
        lambda: builder(2).gradients(tf.reduce_mean, [tf.Variable([1.0, 2.0])], tf.ones(2))
    ],
    "must be a list of tf.Variables or keras.Variables, but holds": [
        lambda: builder(2).gradients(lambda x: x, ["w"], tf.ones(2)),
        lambda: builder(2).gradients(lambda x: x, tf.Variable([1.0, 2.0]), tf.ones(2)),
    ],
}
REFUSED_AS_INPUT = {
    "output . has no row for each example": [
        lambda: tf.function(builder(2).concat)(lambda x: tf.reduce_mean(x, 0), tf.ones([4, 5])),
        lambda: builder(2).gradients(lambda x: (x, tf.reduce_mean(x)), [], tf.ones(4)),
    ],
    "(/gpu:7|/cpu:9).*TensorFlow has /": [
        lambda: TowerBuilder(["/gpu:7", "/cpu:1"]).sum(lambda: tf.constant(1.0)),
        lambda: TowerBuilder(["/cpu:0"], "/cpu:9").sum(lambda: tf.constant(1.0)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("remedy", [*REFUSED, *REFUSED_AS_INPUT])
def test_what_cannot_be_copied_split_or_joined_is_refused(remedy):
    for call in (REFUSED | REFUSED_AS_INPUT)[remedy]:
        with pytest.raises(ValueError if remedy in REFUSED else InputError, match=remedy):
            call()


def test_loops_of_towers_of_several_sizes_are_told_apart(capfd):
    """TensorFlow names those in ctc_loss by their ops, without shapes."""
    w, x = tf.Variable(tf.ones([4, 5])), tf.random.normal([7, 6, 4])
    labels = tf.ones([7, 2], tf.int32)

    def loss_fn(x, labels):
        sizes = [tf.fill(tf.shape(x)[:1], number) for number in (2, 6)]
        return keras.ops.ctc_loss(labels, x @ w, *sizes)

    loss, gradients = tf.function(builder(2).gradients)(loss_fn, [w], x, labels)
    assert_same([loss, *gradients], one_device(loss_fn, [w], x, labels), 1e-6)
    assert "not compatible" not in capfd.readouterr().err


# map, sum, concat.


@EAGER_OR_FUNCTION
def test_sum_of_a_structure_with_none_and_sparse_leaves(compiled):
    """A leaf is None in all or in some of the towers, sparse in all or in some of them."""

    def fn(i):
        rows = tf.IndexedSlices(tf.constant([[1.0 + i]]), tf.constant([i]), tf.constant([3, 1]))
        return {
            "dense": (tf.constant(1.0 + i), [tf.constant([10 * i])]), "sparse": rows, "none": None,
            "some": tf.constant(5.0) if i else None, "mixed": rows if i else tf.ones((3, 1)),
        }  # fmt: skip

    total = compiled(lambda: builder(3).sum(fn, PerTower([0, 1, 2])))()
    assert total["dense"][0].numpy() == 6
    assert total["dense"][1][0].numpy().tolist() == [30]
    assert total["none"] is None
    assert total["some"].numpy() == 10
    assert isinstance(total["sparse"], tf.IndexedSlices)
    assert dense(total["sparse"]).tolist() == [[1], [2], [3]]
    assert total["sparse"].values.shape == (3, 1)
    assert dense(total["mixed"]).tolist() == [[1], [3], [4]]


# Splitting.


@pytest.mark.checked
@pytest.mark.parametrize("num_towers", [1, 4])
def test_the_batch_size_may_be_unknown(num_towers):
    """One trace for all sizes; the slices are those of a known size, perhaps of no example."""

    told = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec(None)])
    def step(x, y):
        towers = TowerBuilder(DEVICES[:num_towers], on_warning=told.append)
        sizes = towers.map(lambda x, y: tf.stack([tf.shape(x)[0], tf.shape(y)[0]]), x, y)
        return sizes, towers.concat(lambda x, y: x + y, x, y)

    for size in 0, 1, 2, 3, 6, 7, 9:
        x, y = tf.random.normal((size, 2)), tf.random.normal((size, 2))
        sizes, joined = step(x, y)
        expected = [size // num_towers + (i < size % num_towers) for i in range(num_towers)]
        assert [s.numpy().tolist() for s in sizes] == [[n, n] for n in expected]
        assert joined.numpy().tolist() == (x + y).numpy().tolist()
    assert all("not checked" in line and "tf.ensure_shape" in line for line in told)
    assert bool(told) == (num_towers > 1)


@pytest.mark.parametrize("size, num_calls", [(2, 2), (0, 1)])
def test_towers_known_to_get_nothing_are_left_out_of_sums(size, num_calls):
    calls = []  # of towers: an analysis has symbolic tensors

    def fn(x):
        calls.extend([] if tf.is_symbolic_tensor(x) else [x])
        return tf.reduce_sum(x)

    x = tf.ones((size, 3))
    total = builder(4).sum(fn, x)
    assert (len(calls), total.numpy()) == (num_calls, 3 * size)
    assert builder(4).concat(lambda x: x, x).shape == x.shape
    sizes = [part.shape[0] for part in builder(4).map(lambda x: x, x)]
    assert sizes == [1] * size + [0] * (4 - size)


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


def test_per_tower_values_are_handed_over_whole_and_may_be_empty_or_scalars():
    """They say nothing about the number of examples: no tower is left out for them."""
    values = PerTower([{"rate": 0.5}, "anything"])
    seen = builder(2).map(lambda x, other: (x.shape[0], other), tf.ones(3), {"deep": [values]})
    assert seen == [(2, {"deep": [{"rate": 0.5}]}), (1, {"deep": ["anything"]})]
    values = PerTower([tf.constant(1.0), tf.zeros([0]), tf.ones([4])])
    assert builder(3).sum(lambda x, v: tf.size(x) + tf.size(v), tf.ones(3), values).numpy() == 8
    assert builder(3).sum(lambda v: tf.size(v), values).numpy() == 5


def test_unequal_sizes_are_refused_at_run_time():
    for second in None, 2:

        @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([second])])
        def step(x, y):
            return builder(2).sum(lambda x, y: tf.reduce_sum(x * y), x, y)

        assert step(tf.ones(2), tf.ones(2)).numpy() == 2
        with pytest.raises(tf.errors.InvalidArgumentError, match="same size along axis 0"):
            step(tf.ones(1), tf.ones(2))


# Gradients.


X = normal(7, 3)


def test_gradients_without_a_batch():
    """Each tower gives its losses; the mean is over all of them, not over the towers."""
    w = tf.Variable(2.0)
    losses = PerTower([tf.constant([1.0]), tf.constant([2.0, 3.0, 4.0])])
    loss, [gradient] = builder(2).gradients(lambda x: w * x, [w], losses)
    assert (loss.numpy(), gradient.numpy()) == (5, 2.5)
    loss, [gradient] = builder(2).gradients(lambda: w * [1.0, 2.0], [w])
    assert (loss.numpy(), gradient.numpy()) == (3, 1.5)


@pytest.mark.parametrize(
    ("make", "collection"), [(keras.Variable, list), (tf.Variable, tuple), (keras.Variable, iter)]
)
def test_variables_may_repeat_and_come_in_any_collection(make, collection):
    w, v = make(2.0), make(3.0)
    _, gradients = builder(2).gradients(lambda x: w * v * x, collection([w, v, w]), tf.ones(3))
    assert [g.numpy() for g in gradients] == [3, 2, 3]
    assert builder(2).gradients(lambda x: x, collection([]), tf.constant([1.0, 5.0])) == (3, [])


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_losses_of_16_bits_are_summed_in_32(dtype):
    """In 16 bits the sum of 600 ones is 256 (bfloat16), and 4 times 60000 is inf (float16)."""
    w = tf.Variable(1.0, dtype=dtype)
    for value, count in (1, 600), (60000, 4), (0.25, 70000):  # nor do 16 bits have that number
        losses = tf.constant(value, dtype, [count])
        loss, [gradient] = builder(2).gradients(lambda x: w * x, [w], losses)
        assert loss.dtype == tf.float32 and gradient.dtype == dtype
        assert loss.numpy() == losses.numpy().astype(np.float32)[0]
    if dtype == "float16":  # bfloat16 adds up no such number of losses
        assert gradient.numpy() == pytest.approx(0.25, rel=0.01)


def test_variables_created_in_a_tower_are_named():
    net = keras.Sequential([layers.Dense(1, name="dense")], name="net")
    creations = {
        "net/dense/kernel": lambda x: net(x)[:, 0],
        "w": lambda x: x[:, 0] * tf.Variable(1.0, name="w"),
        "": lambda x: x[:, 0] * tf.Variable(1.0),
    }
    for name, loss_fn in creations.items():
        named = f"the variable '{name}'" if name else "a variable"
        remedy = f"creates {named}, .*; build the model before, by calling it once"
        with pytest.raises(ValueError, match=remedy):
            builder(2).gradients(loss_fn, net.trainable_variables, tf.ones((2, 3)))


# State of Keras layers.


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
    towers = TowerBuilder(DEVICES[:3], on_warning=told.append)
    compiled(lambda x: towers.gradients(loss_fn, [], x, PerTower([0, 1, 2])))(tf.ones(7))
    assert {several.path, counter.path} == {line.split()[3] for line in told}
    assert [v.numpy() for v in (several, single, none, counter)] == [15, 4, 9, 1]


# The module.


def test_the_example_of_the_module_runs():
    example = re.search(r"\n\n((?:    .*\n|\n)+)", tower.__doc__)[1]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh")])
    optimizer = keras.optimizers.SGD(0.5)
    names = {"tf": tf, "TowerBuilder": TowerBuilder, "model": model, "optimizer": optimizer}
    code = textwrap.dedent(example).replace("/gpu:", "/cpu:").replace("@tf.function", "")
    exec(code, names)
    batch = np.float32(X), np.zeros(7, np.int32)
    before = names["train_step"](*batch)
    assert names["train_step"](*batch) < before


@pytest.mark.parametrize("way", ["gradients", "concat", "map"])
def test_autograph_converts_what_is_the_users_and_nothing_else(way):
    """Which made the first step of a program of one's own several times slower."""
    builder, weight, stacks = TowerBuilder(["/cpu:0"] * 2), tf.Variable(2.0), []

    def fn(*x):
        stacks.append(traceback.extract_stack())
        if tf.reduce_all(weight > 1.0):
            return weight * tf.reduce_sum(x, axis=0)
        return -weight * tf.reduce_sum(x, axis=0)

    @tf.function
    def step(x):
        if way == "gradients":
            return builder.gradients(fn, [weight], x)
        if way == "concat":
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(builder.concat(fn, x))
            return loss, [tape.gradient(loss, weight)]
        return tf.concat(builder.map(fn, x), 0)

    found = step(tf.constant([1.0, 2.0, 6.0]))
    if way == "map":
        np.testing.assert_array_equal(found, [2.0, 4.0, 12.0])
    else:
        assert float(found[0]) == 6.0 and float(found[1][0]) == 3.0
    frames = [frame for stack in stacks for frame in stack]
    converted = {frame.name for frame in frames if "autograph_generated" in frame.filename}
    of_fn = re.compile("tf__(step|fn|extract_stack)|(if|else)_body(_[12])?")
    assert all(map(of_fn.fullmatch, converted)) and "tf__fn" in converted


@pytest.mark.graph
def test_a_bias_does_not_slow_down_the_gradient_of_its_kernel():
    """TensorFlow fuses both gradients on CPUs with oneDNN; what is fused takes longer."""
    kernel, bias = tf.Variable(tf.ones([3, 3, 2, 4])), tf.Variable(tf.zeros([4]))

    def losses(x):
        y = tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias)
        return tf.reduce_sum(y**2, axis=[1, 2, 3])

    def plain(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(x))
        return loss, tape.gradient(loss, [kernel, bias])

    def towers(x):
        return TowerBuilder(["/cpu:0", "/cpu:1"], check="off").gradients(losses, [kernel, bias], x)

    found = []
    for fn in plain, towers:
        with tf_internals.executed_graphs() as graphs:
            loss, gradients = tf.function(fn)(tf.ones([6, 5, 5, 2]))
        ops = {node.op for parts in graphs for graph in parts for node in graph.node}
        found.append((ops, [loss, *gradients]))
    (of_plain, expected), (of_towers, actual) = found
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    fused = {"_MklNativeConv2DBackpropFilterWithBias"}  # without oneDNN neither has it
    assert fused & of_plain or not any("Mkl" in op for op in of_plain)
    assert not fused & of_towers
