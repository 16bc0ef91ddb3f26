"""Private parts of TensorFlow and Keras: they still are what towers take them for.

Whatever of this fails with a new release is to be mended in `towers/tf_private.py` alone.
"""

import ast
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph
from tensorflow.python import pywrap_tfe

from towers import tf_private
from towers.tf_private import added_losses, all_in_float64, floatx_set

PACKAGE = Path(tf_private.__file__).parent
layers = keras.layers


# One place.


def private_parts(sources):
    """Return what of TensorFlow and Keras a program of these sources uses, and they do not publish.

    An attribute with an underscore is the program's own if one of its classes or modules has it.
    """
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    of_self = [n for n in attributes if isinstance(n.value, ast.Name) and n.value.id == "self"]
    own = {node.name for node in nodes if hasattr(node, "name")} | {n.attr for n in of_self}
    modules = []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    hidden = {m for m in modules if m.startswith(("tensorflow.python", "keras.src", "unittest"))}
    private = {n.attr for n in attributes if n.attr.startswith("_") and not n.attr.endswith("__")}
    of_python = {"_exit", "_current_frames"}  # names that Python's own pages have
    return hidden | private - own - of_python | {"__internal__"} & {n.attr for n in attributes}


@pytest.mark.parametrize(
    "source",
    [
        "from tensorflow.python.eager import context",
        "def f():\n    import keras.src.layers",
        "from unittest import mock",
        "from unittest.mock import patch",
        "def f(layer): return layer._layers",
        "def f(variable): variable._value = 0",
        "import tensorflow as tf\ntf.__internal__.autograph",
    ],
)
def test_a_private_part_is_found(source):
    assert len(private_parts([source])) == 1


def test_private_parts_are_in_one_place():
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "tf_private.py"]
    assert private_parts(path.read_text(encoding="utf-8") for path in paths) == set()


# What is replaced, for one thread and one block.


def in_a_thread(function):
    """Return what a function returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_replacements_are_nested_and_taken_back():
    class Owner:
        def say(self):
            return "own"

    def saying(word):
        return Owner, "say", lambda before: lambda owner: f"{word} {before(owner)}"

    with pytest.raises(KeyError), tf_private._replaced(saying("outer")):
        with tf_private._replaced(saying("inner"), saying("innermost")):
            assert Owner().say() == "innermost inner outer own"
            assert in_a_thread(Owner().say) == "own"
        assert Owner().say() == "outer own"
        raise KeyError
    assert Owner().say() == "own" and not tf_private._SWITCHES


def noted(calls, name):
    """Return a replacement that notes what it is called with."""

    def make(before):
        def call(*args, **kwargs):
            calls.append((name, *args[1:]))
            return before(*args, **kwargs)

        return call

    return make


class Adds(layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_sum(inputs))
        return inputs


def test_calls_of_layers_added_losses_convolutions_and_moments():
    both = [layers.Conv2D(1, 1), layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((3, 1, 1)), Adds(), *both])
    calls = []
    with (
        tf_private.layer_calls_replaced(noted(calls, "layer")),
        tf_private.add_loss_replaced(noted(calls, "loss")),
        tf_private.convolution_replaced(noted(calls, "convolution")),
        tf_private.batch_norm_replaced(noted(calls, "call"), noted(calls, "moments")),
    ):
        model(tf.ones([2, 3, 1, 1]), training=True)
    names = [name for name, *_ in calls]
    expected = ["layer", "layer", "loss", "layer", "convolution", "layer", "call", "moments"]
    assert names == expected
    assert float(calls[2][1]) == 6.0
    number = len(calls)
    model(tf.ones([2, 3, 1, 1]), training=True)
    assert len(calls) == number


def test_layers_and_metrics_compare_integers_by_ops_of_keras():
    calls = []

    def make(name):
        return lambda before: lambda *args, **kw: calls.append(name) or before(*args, **kw)

    x = keras.Input((2,), dtype="int32")
    model = keras.Model(x, layers.LSTM(2)(layers.Embedding(3, 2, mask_zero=True)(x)))
    with tf_private.ops_of_integers_replaced(make):
        logits = model(tf.constant([[1, 0]]))
        keras.metrics.sparse_categorical_accuracy(tf.constant([1]), logits)
    assert {"take", "not_equal", "signbit"} <= set(calls)


def test_draws_come_through_the_ops():
    draws = {
        "stateless_random_uniform_v2": lambda: tf.random.stateless_uniform([2], [1, 2]),
        "stateless_random_normal_v2": lambda: keras.random.normal([2], seed=1),
        "stateless_random_uniform_int_v2": lambda: keras.random.randint([2], 0, 9, seed=1),
        "stateless_random_uniform_full_int_v2": lambda: tf.random.stateless_uniform(
            [2], [1, 2], minval=None, maxval=None, dtype=tf.int32
        ),
        "stateless_truncated_normal_v2": lambda: keras.random.truncated_normal([2], seed=1),
    }
    calls = []

    def draw(name, /, shape, *, key, counter, **arguments):
        calls.append(name)
        return tf_private.draw_op(name)(shape, key=key, counter=counter, **arguments)

    for name, function in draws.items():
        expected = function()
        with tf_private.draws_replaced(draw):
            np.testing.assert_array_equal(function(), expected)
        assert calls.pop() == name and not calls
    assert tuple(draws) == tf_private.DRAWS
    with tf_private.draws_replaced(draw):
        layers.Dropout(0.5, seed=1)(tf.ones([4]), training=True)
    assert calls == ["stateless_random_uniform_v2"]


def test_the_keys_of_draws_may_be_made_elsewhere():
    seeds = []

    def key_and_counter(seed):
        seeds.append(seed)
        return tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)

    layer = layers.Dropout(0.5, seed=1)
    for alg in "auto_select", "philox":
        for draw in tf.random.stateless_uniform, tf.random.stateless_truncated_normal:
            expected = draw([3], [1, 2], alg=alg)
            with tf_private.keys_replaced(key_and_counter):
                np.testing.assert_array_equal(draw([3], [1, 2], alg=alg), expected)
    with tf_private.keys_replaced(key_and_counter):
        layer(tf.ones([4]), training=True)
    assert len(seeds) == 5


def test_functions_are_a_part_of_what_calls_them():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def inner(x):
        if tf.reduce_sum(x) > 0:  # AutoGraph
            x = x + 1.0
        return x, 2

    compiled = tf.function(lambda x: x + 1.0, jit_compile=True)

    def outer(x):
        y, two = inner([1.0, 2.0])
        assert tf.is_tensor(two)
        return compiled(x) + y + tf.cast(two, tf.float32)

    def calls_in(function):
        graph = tf.function(function).get_concrete_function(tf.zeros([2])).graph
        return sum(op.type.endswith("PartitionedCall") for op in graph.get_operations())

    with tf_private.functions_inlined():
        assert calls_in(outer) == 1
        np.testing.assert_array_equal(inner(tf.ones([2]))[0], [2.0, 2.0])
    assert calls_in(outer) == 2
    assert inner.experimental_get_tracing_count() == 1


def test_autograph_is_taken_over_where_it_is_on():
    def own(x):
        return x

    on, off = [], []
    tf.function(lambda: on.append(tf_private.converted_as_here(own)))()
    tf.function(lambda: off.append(tf_private.converted_as_here(own)), autograph=False)()
    assert off == [own] and on != [own] and on[0](1) == 1


# Layers.


def test_layers_are_found_in_order_each_once():
    shared = layers.Dense(2, name="shared")
    inner = keras.Sequential(
        [layers.Dense(2, name="a"), shared, layers.Dense(2, name="b")], name="in"
    )
    model = keras.Sequential(
        [keras.Input((2,)), inner, shared, layers.Dense(2, name="c")], name="out"
    )
    names = [x.name for x in tf_private.layers_of(model) if not isinstance(x, layers.InputLayer)]
    assert [name for name in names if name != "functional"] == "out in a shared b c".split()


def test_layers_are_numbered_from_the_start():
    layers.Dense(1), layers.Dense(1)
    with tf_private.named_as_in_a_new_process():
        assert [layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"]
    assert int(layers.Dense(1).name.partition("_")[2]) >= 2


def test_the_open_scope_has_what_layers_add_and_no_regularizer_of_weights():
    dense = keras.layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l1")
    model = keras.Sequential([keras.Input((3,)), Adds(), dense])
    inputs = tf.ones([4, 3])
    assert added_losses() == [] and tf_private.open_scope() is None
    with keras.StatelessScope(collect_losses=True) as scope:
        assert tf_private.open_scope() is scope
        outputs = model(inputs)
        found = [float(loss) for loss in added_losses()]
        with keras.StatelessScope():  # an inner one, which collects nothing
            model(inputs)
            assert added_losses() == []
    assert found == [12.0, float(0.01 * tf.reduce_sum(tf.abs(outputs)) / 4)]
    assert added_losses() == []


# Variables and optimizers.


def test_a_variable_has_its_own_value_and_gets_another():
    variable = keras.Variable(1.0)
    with keras.StatelessScope([(variable, tf.constant(2.0))]):
        assert float(variable) == 2.0 and float(tf_private.value_of(variable)) == 1.0
    with tf.device("/cpu:1"):
        tf_private.set_value_of(variable, tf.Variable(3.0))
    assert variable.value.device.endswith("CPU:1") and float(variable) == 3.0
    layer = layers.Dense(1)
    with keras.StatelessScope():
        assert tf_private.value_of(keras.Variable("zeros", shape=[2])) is None
    assert not layer.built


def test_a_variable_is_made_in_any_trace():
    def refuse(*_, **__):
        raise AssertionError("a creator scope sees it")

    made = []

    @tf.function
    def function(x):
        with tf.init_scope(), tf.variable_creator_scope(refuse):
            made.append(tf_private.make_variable(tf.zeros([])))
        return x + made[-1]

    assert float(function(tf.constant(1.0))) == float(function(tf.constant([1.0]))[0]) == 1.0
    assert len(made) == 2


def test_assignments_of_all_kinds_are_seen():
    calls = []

    def make(name):
        return lambda before: lambda *args, **kwargs: calls.append(name)

    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]))
    for variable in (tf.Variable([0.0]), tf_private.make_variable(tf.zeros([1]))):
        kinds = [name for name in dir(variable) if name.startswith(("assign", "scatter"))]
        with tf_private.assignments_replaced(make):
            for kind in kinds:
                getattr(variable, kind)(slices)
            variable.batch_scatter_update(slices)
        assert sorted(calls) == sorted([*kinds, "batch_scatter_update"])
        calls.clear()
        variable.assign([1.0])
        assert float(variable[0]) == 1.0


def test_reads_are_replaced_and_a_tape_finds_the_variable():
    variable, table, read = tf.Variable(2.0), tf.Variable([[3.0], [5.0]]), []

    def twice(variable, own):
        read.append(id(variable))
        return 2.0 * own(variable)

    @tf.function
    def function():
        with tf_private.reads_replaced(twice), tf.GradientTape() as tape:
            value = variable * variable + tf.reduce_sum(tf.gather(table, [1]))
        return value, tape.gradient(value, variable), variable + 0.0

    value, gradient, after = function()
    assert float(value) == 4.0 * 4.0 + 10.0
    assert float(gradient) == 8.0  # by the value that was read
    assert float(after) == 2.0 and set(read) == {id(variable), id(table)}


def test_an_optimizer_keeps_slots_and_updates_beside_weights():
    weights = []
    for device in ("/cpu:1", "/cpu:2"):
        with tf.device(device):
            weights.append(keras.Variable(tf.identity(tf.ones([2]))))
    optimizer = keras.optimizers.Adam(1.0)
    with tf_private.slots_beside_weights(optimizer):
        optimizer.build(weights)
    slots = [v.value.device[-5:] for v in optimizer.variables if v.shape == (2,)]
    assert slots == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]

    @tf.function
    def update():
        with tf_private.each_update_apart(optimizer):
            optimizer.apply([tf.ones([2])] * 2, weights)

    ops = update.get_concrete_function().graph.get_operations()
    assert {op.device[-5:] for op in ops if op.type == "AssignSubVariableOp"} >= {"CPU:1", "CPU:2"}
    update()
    np.testing.assert_allclose([w.numpy() for w in weights], 0.0, atol=1e-4)


@pytest.mark.parametrize(
    "name, more",
    [
        *((n, {}) for n in ("SGD", "AdamW", "Adamax", "Nadam", "Lion", "Adagrad", "Adadelta")),
        ("SGD", dict(momentum=0.5)),
        ("Adam", dict(amsgrad=True)),
        ("RMSprop", dict(momentum=0.5, centered=True)),
        ("Ftrl", {}),
    ],
)
def test_all_slots_of_an_optimizer_are_known(name, more):
    weights = [keras.Variable(tf.ones([2, i])) for i in (1, 2, 3)]
    optimizer = getattr(keras.optimizers, name)(0.1, **more)
    optimizer.build(weights)
    kinds = tf_private.elementwise_slots(optimizer)
    for weight in weights:
        for slots in kinds:
            assert slots[tf_private.unique_id(weight.value)].shape == weight.shape
    assert sum(map(len, kinds)) == len([v for v in optimizer.variables if v.shape != ()])
    optimizer.clipnorm = 1.0
    assert tf_private.elementwise_slots(optimizer) is None


def test_an_optimizer_tells_what_it_decays():
    weights = [keras.Variable(tf.ones([2])), keras.Variable(tf.ones([3]))]
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=weights[:1])
    assert [tf_private.decays(optimizer, w) for w in weights] == [False, True]
    assert not tf_private.decays(keras.optimizers.SGD(), weights[1])


def test_what_stands_in_for_a_variable_is_updated_without_a_strategy():
    class Stand:
        dtype, device, value, constraint = tf.float32, "/cpu:1", tf.ones([2]), None

        def __tf_tensor__(self, dtype=None, name=None):
            return self.value

        def assign_sub(self, value):
            self.value = self.value - value

    weight, stand = keras.Variable(tf.ones([3])), Stand()
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weight])
    stand._unique_id = tf_private.unique_id(weight.value)
    with tf_private.each_update_apart(optimizer):
        optimizer.apply([tf.constant([1.0, 2.0])], [stand])
    np.testing.assert_allclose(stand.value, [0.0, -1.0])


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 2e-6)])
@pytest.mark.parametrize(
    "more",
    [
        dict(),
        dict(momentum=0.9),
        dict(momentum=0.9, nesterov=True),
        dict(momentum=0.9, weight_decay=0.1, clipnorm=1.0, use_ema=True, ema_momentum=0.5),
    ],
)
def test_sgd_in_one_pass_computes_what_keras_does(more, dtype, tolerance):
    draws = np.random.default_rng(0)
    start, gradients = draws.normal(size=[4, 3]), draws.normal(size=[20, 4, 3])
    rows = tf.IndexedSlices(tf.ones([2, 3], dtype), tf.constant([0, 2]), tf.constant([4, 3]))

    def after_all(suits):
        weights = [keras.Variable(start, dtype=dtype) for _ in range(3)]
        weights[2].constraint = keras.constraints.UnitNorm()
        optimizer = keras.optimizers.SGD(0.1, **more)
        optimizer.build(weights)

        @tf.function
        def update(dense):
            with tf_private.in_one_pass(optimizer, lambda _: suits):
                optimizer.apply([dense, rows, dense], weights)

        for dense in gradients:
            update(tf.constant(dense, dtype))
        graph = update.get_concrete_function(tf.constant(start, dtype)).graph
        ops = [op.type for op in graph.get_operations()]
        return ops, [v.numpy() for v in (*weights, *optimizer.variables)]

    ops, results = zip(after_all(False), after_all(True), strict=True)
    kernel = "ResourceApplyKerasMomentum" if more else "ResourceApplyGradientDescent"
    assert [own.count(kernel) for own in ops] == [0, 2]  # but the sparse one
    for fused, keras_own in zip(*results, strict=True):
        np.testing.assert_allclose(fused, keras_own, rtol=tolerance, atol=tolerance)


def test_other_optimizers_than_keras_own_sgd_are_not_fused():
    class Mine(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign(variable, gradient)

    weight, optimizer = keras.Variable(tf.zeros([2])), Mine(0.1)
    optimizer.build([weight])
    with tf_private.in_one_pass(optimizer, lambda _: True):
        optimizer.apply([tf.ones([2])], [weight])
    np.testing.assert_array_equal(weight.numpy(), 1.0)


# Graphs.


def traced(function, *arguments):
    return tf.function(function).get_concrete_function(*arguments)


def test_ops_with_a_state_are_told_apart():
    stateful = ("AssignAddVariableOp", "PrintV2", "VarHandleOp", "EagerPyFunc")
    assert all(map(tf_private.is_stateful, stateful))
    assert not any(map(tf_private.is_stateful, ("AddV2", "StatelessRandomUniformV2", "NoSuchOp")))


def test_this_tensorflow_tells_its_kernels_for_gpus():
    """The wheel of PyPI is built for GPUs, whatever machine it is on."""
    assert [a.name for a in tf_private.op_definition("MatMul").input_arg] == ["a", "b"]
    assert tf_private.op_definition("NoSuchOp") is None
    (key,) = [
        kernel
        for kernel in tf_private.registered_kernels("StatelessRandomGetKeyCounter")
        if kernel.device_type == "GPU"
    ]
    assert list(key.host_memory_arg) == ["seed", "key", "counter"]
    assert tf_private.registered_kernels("NoSuchOp") == []


def test_made_up_gpus_are_optimized_for():
    gpu = "/job:localhost/replica:0/task:0/device:GPU:1"

    @tf.function
    def gradient(x, kernel):
        y = tf.nn.conv2d(x, kernel, 1, "SAME")
        return tf.gradients(tf.sin(y), kernel)[0]

    traced = gradient.get_concrete_function(tf.ones([2, 4, 4, 3]), tf.ones([3, 3, 3, 8])).graph
    graph = traced.as_graph_def()
    for node in graph.node:
        node.device = gpu
    result = tf_private.optimized_for_gpus(graph, ["Identity"], 2, "8.0")
    formats = {n.op: n.attr["data_format"].s for n in result.node if "data_format" in n.attr}
    assert formats == {"Conv2D": b"NCHW", "Conv2DBackpropFilter": b"NCHW"}
    assert "Transpose" in {node.op for node in result.node}


def test_the_graph_of_a_called_function_is_found():
    function = traced(lambda x: tf.while_loop(lambda x: x < 9.0, lambda x: [x + 2.0], [x]), 1.0)
    (loop,) = (op for op in function.graph.get_operations() if op.type.endswith("While"))
    types = [op.type for op in tf_private.called_graph(loop, "body").get_operations()]
    assert "AddV2" in types
    assert tf_private.called_graph(loop, "then_branch") is None
    assert tf_private.called_graph(loop, "parallel_iterations") is None


def test_an_op_gets_an_input_that_was_made_later():
    def function(x):
        early = tf.identity(tf.zeros([]))
        result = early + 1.0
        tf_private.set_input(early.op, x * 2.0)
        return result

    assert float(tf.function(function)(tf.constant(3.0))) == 7.0


def test_a_tensor_of_another_graph_is_told_from_other_errors():
    kept = []

    @tf.function
    def function(x):
        tf.function(lambda x: kept.append(x + 1.0))(x)
        return kept[0] * 2.0

    with pytest.raises(tf_private.InaccessibleTensorError):
        function(tf.zeros([]))


def test_a_shape_is_known_in_part():
    found = []
    spec = tf.TensorSpec([None, 3], tf.float32)
    traced(lambda x: found.append(tf_private.static_shape([tf.shape(x)[0], 2, 5])), spec)
    assert [shape.as_list() for shape in found] == [[None, 2, 5]]
    assert tf_private.static_shape((2, 3)).as_list() == [2, 3]


def test_a_function_without_an_end_is_ended():
    forever = traced(
        lambda x: tf.while_loop(lambda x: x >= 0.0, lambda x: [x + 1.0], [x]), tf.zeros([])
    )
    assert float(tf_private.call_for_at_most(600.0, forever, tf.constant(-1.0))[0]) == -1.0
    with pytest.raises(tf.errors.CancelledError):
        tf_private.call_for_at_most(0.5, forever, tf.constant(0.0))


def test_graphs_that_ran_tell_their_devices():
    @tf.function
    def function(x):
        with tf.device("/cpu:1"):
            return tf.sqrt(x)

    with tf_private.executed_graphs() as graphs:
        function(tf.ones([2, 2]))
    devices = [node.device for graph in graphs for node in graph.node if node.op == "Sqrt"]
    assert [device[-5:] for device in devices] == ["CPU:1"]


def test_the_start_and_the_devices():  # before it: tests/devices/test_gpus.py
    tf.config.list_logical_devices()
    assert tf_private.has_listed_devices() and tf_private.has_started()
    memory = tf_private.device_memory_bytes()
    assert list(memory) == ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
    assert set(memory.values()) == {256 * 2**20}  # what TensorFlow says of any CPU


# Precision.


HALF = keras.DTypePolicy("float16")
POLICIES = {
    "name": lambda: "float32",
    "mixed": lambda: "mixed_float16",
    "policy": lambda: keras.DTypePolicy("bfloat16"),
    "map": lambda: keras.dtype_policies.DTypePolicyMap("float32", {"other": HALF}),
    "map, by path": lambda: keras.dtype_policies.DTypePolicyMap("float32", {"layer": HALF}),
    "config": lambda: keras.dtype_policies.serialize(keras.DTypePolicy("float32")),
}


def dtypes(policy):
    """Return what a layer of that policy computes in, and keeps its weights in."""
    layer = layers.Dense(2, dtype=policy, name="layer")
    layer.build((None, 3))
    return layer.compute_dtype, layer.kernel.dtype


@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_gets_float64_in_the_block_alone(name):
    policy = POLICIES[name]
    before = dtypes(policy())
    given = policy()
    with all_in_float64():
        assert dtypes(given) == ("float64", "float64")
        later = layers.Dense(2)
        later.dtype_policy = policy()
    assert "float64" not in before
    assert dtypes(given) == dtypes(policy()) == before
    assert later.compute_dtype == "float64"


def test_a_wrapped_layer_and_one_from_a_configuration_get_float64():
    config = layers.Dense(2, dtype="float32").get_config()
    with all_in_float64():
        attention = layers.MultiHeadAttention(2, 3, dtype="float32")
        attention.build((None, 4, 5), (None, 4, 5))
        again = layers.Dense.from_config(config)
    assert {v.dtype for v in attention.weights} == {"float64"}
    assert again.compute_dtype == "float64"


def test_inputs_get_float64_and_whole_numbers_stay():
    with all_in_float64():
        assert keras.Input((3,), dtype="float32").dtype == "float64"
        assert keras.Input((3,), dtype="int32").dtype == "int32"
        assert keras.Input((3,)).dtype == keras.config.floatx()
        assert layers.Discretization([0.0], dtype="int64").compute_dtype == "int64"
        for given, wanted in ("float32", "float64"), ("int32", "int32"):
            config = layers.InputLayer((3,), dtype=given).get_config() | {"dtype": given}
            assert layers.InputLayer.from_config(config).dtype == wanted
    assert keras.Input((3,), dtype="float16").dtype == "float16"


def test_another_thread_and_an_error_are_left_alone():
    with pytest.raises(ZeroDivisionError), all_in_float64():
        assert in_a_thread(lambda: dtypes("float32")) == ("float32", "float32")
        raise ZeroDivisionError
    assert dtypes("float16")[0] == "float16"


def test_augmentation_of_keras_works_while_floatx_is_float64():
    images = tf.zeros((2, 8, 8, 3), tf.float64)
    with floatx_set("float64"):
        layer = layers.RandomRotation(0.1, dtype="float64")
        assert layer(images, training=True).dtype == tf.float64
        assert keras.random.uniform((2,)).dtype == tf.float64
        with pytest.raises(IndexError):
            layer(images[0, 0, 0, 0], training=True)
        assert keras.config.floatx() == "float64"
    assert keras.config.floatx() == "float32"


# What models are trained with.


def test_compile_arguments_are_those_that_were_given():
    model, arguments = keras.Sequential([layers.Dense(1)]), {"loss": lambda y, x: y - x}
    model.compile("sgd", **arguments, metrics=["mae"])
    found = tf_private.compile_arguments(model)
    assert found["loss"] is arguments["loss"] and list(found["metrics"]) == ["mae"]
    keras.Sequential([layers.Dense(1)]).compile(**found)


def test_batches_are_those_of_fit():
    x, y = np.arange(5.0), np.arange(5)
    for given in (
        (x, y, None, 2),
        (tf.data.Dataset.from_tensor_slices((x, y)).batch(2),) + 3 * (None,),
    ):
        batches = [[part.numpy().tolist() for part in b] for b in tf_private.batches_of(*given)]
        assert batches == [[[0, 1], [0, 1]], [[2, 3], [2, 3]], [[4], [4]]]


def evaluated_model():
    """Return a compiled model of two outputs that has seen a batch, and its batch."""
    x = keras.Input((2,))
    outputs = {name: layers.Dense(size, name=name)(x) for name, size in {"a": 1, "b": 3}.items()}
    model = keras.Model(x, outputs)
    own = keras.metrics.MeanMetricWrapper(lambda y, outputs: outputs, name="own")
    model.compile(
        loss={"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        metrics={"a": ["mae", own], "b": ["accuracy"]},
    )
    batch = tf.ones([4, 2]), {"a": tf.zeros([4, 1]), "b": tf.zeros([4, 1], tf.int32)}
    model.test_step(batch)
    return model, batch


def test_keras_knows_of_its_metrics_which_is_better():
    model, _ = evaluated_model()
    names = "loss", "b_loss", "a_mae", "b_accuracy", "a_own", "none"
    found = {name: tf_private.better(model, name) for name in names}
    known = {"loss": "min", "b_loss": "min", "a_mae": "min", "b_accuracy": "max"}
    assert found == known | {"a_own": None, "none": None}


def test_outputs_are_those_that_metrics_are_computed_of():
    model, (x, y) = evaluated_model()
    seen = []
    with tf_private.outputs_watched(model, seen.append):
        model.test_step((x, y))
    model.test_step((x, y))
    (outputs,) = seen
    tf.nest.map_structure(np.testing.assert_array_equal, outputs, model(x))


def test_the_losses_of_a_model_are_those_that_its_steps_compute():
    model, (x, y) = evaluated_model()
    seen = []

    def make(compute):
        return lambda *args, **kwargs: seen.append(compute(*args, **kwargs)) or seen[-1]

    with tf_private.computed_losses_replaced(model, make):
        logs = model.train_step((x, y))
    model.train_step((x, y))
    assert [float(loss) for loss in seen] == [float(logs["loss"])]


def test_draws_without_a_seed_go_by_one_state():
    keras.utils.set_random_seed(3)
    first = keras.random.uniform((2,))
    state = tf_private.state_of_unseeded_draws()
    before = tf.identity(state)
    second = keras.random.uniform((2,))
    state.assign(before)
    np.testing.assert_array_equal(keras.random.uniform((2,)), second)
    assert not np.array_equal(first, second)


# Files of weights.


def test_the_places_of_weights_are_those_in_a_file(tmp_path):
    inner = keras.Sequential([layers.Dense(2, name="a"), layers.BatchNormalization(name="b")])
    heads = layers.MultiHeadAttention(2, 3, name="heads")
    x = keras.Input([4, 5])
    model = keras.Model(x, [heads(x, x), inner(x), layers.Dense(1, name="c")(inner(x))])
    model.save_weights(tmp_path / "x.weights.h5")
    places = tf_private.places_in_file(model)
    assert {id(v) for _, _, v in places} == {id(v) for v in model.variables}
    with h5py.File(tmp_path / "x.weights.h5") as file:
        for place, name, variable in places:
            np.testing.assert_array_equal(file[place], variable.numpy())
            group, _, number = place.rpartition("/")
            assert name == f"{file[group].attrs['name']}/{number}"


# What is compiled.


def two_outputs(losses):
    inputs = keras.Input((2,))
    outputs = {name: layers.Dense(1, name=f"of_{name}")(inputs) for name in ("first", "second")}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", losses, metrics={"first": [keras.metrics.Precision(name="precise")]})
    return model


def test_losses_are_seen_and_known_by_their_outputs():
    model, seen = two_outputs({"second": "mse", "first": "mae"}), []

    def make(call):
        def watch(loss, *args, **kwargs):
            seen.append(loss)
            return call(loss, *args, **kwargs)

        return watch

    assert tf_private.loss_paths(model) == []
    y = {"first": np.ones((4, 1)), "second": np.ones((4, 1))}
    with tf_private.losses_replaced(make):
        model.compute_loss(None, y, model(np.ones((4, 2))))
    paths = tf_private.loss_paths(model)
    assert [path for path, _, _ in paths] == [("second",), ("first",)]
    assert [loss for _, _, loss in paths] == seen
    assert tf_private.loss_paths(keras.Sequential()) == []


def raise_own(y_true, y_pred):
    raise ValueError("of my own")


@pytest.mark.parametrize(
    "losses, shapes, expected",
    [
        ("binary_crossentropy", (3, 1), ""),
        ("mse", (1, 1), "precise"),
        (raise_own, (1, 1), None),
    ],
)
def test_it_is_known_whether_a_loss_or_a_metric_raised(losses, shapes, expected):
    model = two_outputs(losses)
    y = {name: np.full((4, n), 2.0) for name, n in zip(("first", "second"), shapes, strict=True)}
    outputs = model(np.ones((4, 2)))
    if expected == "precise":
        y["first"] = np.ones((4, 5))  # which mean_squared_error broadcasts
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as error:
        model.compute_loss(None, y, outputs)
        model.compute_metrics(None, y, outputs)
    assert tf_private.raised_in_compiled(error.value) == expected
    assert tf_private.raised_in_compiled(ValueError()) is None


def test_the_maker_of_a_symbolic_tensor_is_found():
    inputs = keras.Input((2,))
    layer = layers.Dense(1)
    first, second = layer(inputs), layer(inputs * 2)
    for tensor in first, second:
        maker, place, before = tf_private.maker_of(tensor)
        assert (maker, place, len(before)) == (layer, 0, 1)
    assert tf_private.maker_of(first)[2][0] is inputs


def test_a_number_is_new_at_each_call_of_a_function_in_its_loops_and_in_what_it_calls():
    numbers = iter(range(100))

    @tf.function(autograph=False)
    def inner():
        graph = tf_private.function_of(tf.compat.v1.get_default_graph())
        number = tf_private.at_each_call(graph, lambda: next(numbers), tf.int32)

        def body(i, _):
            assert tf_private.function_of(tf.compat.v1.get_default_graph()) is graph
            return i + 1, number

        return tf.while_loop(lambda i, _: i < 2, body, (0, -1))[1]

    outer = tf.function(lambda: (inner(), inner()))
    found = [int(n) for n in (inner(), inner(), *outer(), *outer())]
    assert len(set(found)) == len(found)


# Checkpoints.


def test_tensorflow_writes_the_graph_of_objects_that_is_made_here(tmp_path):
    """TensorFlow's own has the variables' names beside, which nothing reads that knows keys."""
    names = ["model/a.b", "step"]
    variables = {name: tf.Variable(1.0) for name in names}
    tf.train.Checkpoint(group=variables, other=tf.Variable("x")).write(str(tmp_path / "its"))
    theirs = TrackableObjectGraph.FromString(
        tf.train.load_variable(str(tmp_path / "its"), tf_private.OBJECT_GRAPH)
    )
    keys = {name: f"group/{name.replace('.', '..').replace('/', '.S')}" for name in names}
    suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
    keys, other = [f"{key}{suffix}" for key in keys.values()], f"other{suffix}"
    ours = TrackableObjectGraph.FromString(tf_private.object_graph("group", names, keys, other))
    for graph in theirs, ours:
        assert graph.nodes[0].has_checkpoint_values.value
    assert paths_of(ours) == paths_of(theirs)


def paths_of(graph):
    """Return {path from the root: keys of what stands there}."""
    found, left = {}, [((), graph.nodes[0])]
    while left:
        path, node = left.pop()
        found[path] = [(one.name, one.checkpoint_key) for one in node.attributes]
        left += [((*path, c.local_name), graph.nodes[c.node_id]) for c in node.children]
    return found


# Servers on other machines.

SERVER = """
import sys
import tensorflow as tf
address = f"127.0.0.1:{sys.argv[1]}"
cpus = tf.compat.v1.ConfigProto(device_count={"CPU": 2, "GPU": 0})
tf.distribute.Server({"worker": [address]}, job_name="worker", task_index=0, config=cpus)
print("ready", flush=True)
sys.stdin.read()
"""
CLIENT = """
import socket
import sys
import tensorflow as tf
from towers import tf_private

pick, taken = tf_private.pywrap_tfe.TF_PickUnusedPortOrDie, socket.create_server(("", 0))
ports = iter([taken.getsockname()[1]])  # which another process takes after it was picked
tf_private.pywrap_tfe.TF_PickUnusedPortOrDie = lambda: next(ports, None) or pick()

mine = tf.Variable([1.0, 2.0])

@tf.function
def local(x):
    return mine * x

@tf.function
def twice(device):
    with tf.device("/job:worker/task:1/cpu:1"):
        return tf.identity(mine) * 2.0

print(local(1.0).numpy().tolist())
for tasks in {1: sys.argv[1]}, {}, {1: sys.argv[1], 4: sys.argv[2]}:
    tf_private.connect({task: f"127.0.0.1:{port}" for task, port in tasks.items()}, "127.0.0.1")
    print([d.name for d in tf.config.list_logical_devices() if "worker" in d.name])
    print([local(3.0).numpy().tolist(), mine.numpy().tolist()])
    if tasks:
        print(twice("").numpy().tolist(), flush=True)
"""


def test_servers_are_connected_to_again_and_what_lies_here_stays():
    ports = [str(pywrap_tfe.TF_PickUnusedPortOrDie()) for _ in range(2)]
    run = [sys.executable, "-c"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    servers = [subprocess.Popen([*run, SERVER, port], **pipes) for port in ports]
    try:
        assert [server.stdout.readline() for server in servers] == ["ready\n"] * 2
        out = subprocess.check_output([*run, CLIENT, *ports], text=True, timeout=100)
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    first, *lines = [ast.literal_eval(line) for line in out.splitlines()]
    one, more = (
        [f"/job:worker/replica:0/task:{task}/device:CPU:{i}" for i in range(2)] for task in (1, 4)
    )
    here, there = [[3.0, 6.0], [1.0, 2.0]], [2.0, 4.0]
    assert first == [1.0, 2.0]
    assert lines == [one, here, there, [], here, one + more, here, there]
