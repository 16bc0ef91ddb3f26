"""Private parts of TensorFlow and Keras: they still are what towers take them for.

Whatever of this fails with a new release is to be mended in `towers/tf_internals.py`.
"""

import ast
import contextlib
import inspect
import pkgutil
import re
import threading
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import towers
from towers import tf_internals
from towers.builder import traces
from towers.errors import InputError
from towers.training.run.precision import force_float64
from towers.training.run.setup import metric_direction
from towers.training.step import train_state

pytestmark = pytest.mark.graph

PACKAGE = Path(tf_internals.__file__).parent
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


FOUND = """
from tensorflow.python.eager import context
def f(): import keras.src.layers
from unittest import mock
from unittest.mock import patch
def f(layer): return layer._layers
def f(variable): variable._value = 0
tf.__internal__.autograph
"""


@pytest.mark.unit
def test_private_parts_are_in_one_place():
    for line in FOUND.strip().splitlines():
        assert len(private_parts([line])) == 1, line
    sources = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    assert private_parts(sources) == set()


def in_a_thread(function):
    """Return what a function returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


# What is used, and what is said of a release that has changed it.

NAMES = list(dict.fromkeys(
    f"{top}.{row.partition('(')[0]}" for top, rows in tf_internals.FUNCTIONS.items() for row in rows
))  # fmt: skip
SAID = rf"{tf.__version__} with Keras {keras.__version__}, .* {tf_internals.TESTED}; type pip ins"


@pytest.fixture
def looked_up_anew():
    tf_internals.function.cache_clear()
    yield
    tf_internals.function.cache_clear()


@pytest.mark.unit
@pytest.mark.parametrize("path", NAMES)
def test_a_function_that_is_missing_or_takes_something_else_is_named(
    path, monkeypatch, looked_up_anew
):
    assert tf_internals.path_of(path) == path
    found = tf_internals.function(path)
    owner, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    monkeypatch.setattr(owner, name, lambda self, other=3: None)
    tf_internals.function.cache_clear()
    said = re.escape(f"there is {path}(self, other=3) in TensorFlow ") + SAID
    with pytest.raises(InputError, match=said):
        tf_internals.function(path)
    monkeypatch.undo()
    if name in vars(owner):
        monkeypatch.delattr(owner, name)
        if not hasattr(owner, name):  # else it is inherited
            with pytest.raises(
                InputError, match=f"^{re.escape(path)} is missing in Tensor.* {SAID}"
            ):
                tf_internals.function(path)
        monkeypatch.undo()
    assert tf_internals.function(path) is found


@pytest.mark.unit
@pytest.mark.parametrize("name", " ".join(tf_internals.ATTRIBUTES.values()).split())
def test_an_attribute_that_is_missing_is_named(name):
    with pytest.raises(
        InputError, match=rf"^builtins.object.{name} is missing in TensorFlow {SAID}"
    ):
        tf_internals.attribute(object(), name)


def test_a_changed_part_ends_a_step_with_that_line(monkeypatch, looked_up_anew):
    monkeypatch.setattr(layers.BatchNormalization, "_moments", lambda self, inputs: None)
    builder = towers.TowerBuilder(["/cpu:0", "/cpu:1"])
    with pytest.raises(InputError, match=r"BatchNormalization._moments\(self, inputs\) in TensorF"):
        tf.function(builder.concat)(lambda x: x + 1.0, tf.ones([4, 2]))


SIGNATURES = {
    keras.Layer: {"__call__": "self *args **kwargs", "add_loss": "self loss"},
    keras.Model: {
        "compute_metrics": "self x y y_pred sample_weight",
        "compute_loss": "self x y y_pred sample_weight training",
    },
    keras.Loss: {"__call__": "self y_true y_pred sample_weight"},
    keras.optimizers.SGD: {
        "add_variable_from_reference": "self reference_variable name initializer",
        "update_step": "self gradient variable learning_rate",
    },
    type(tf.distribute.get_strategy().extended): {"update": "self var fn args kwargs group"},
}


@pytest.mark.unit
def test_public_functions_that_are_replaced_take_what_they_took():
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for owner, functions in SIGNATURES.items():
        for name, before in functions.items():
            found = inspect.signature(getattr(owner, name)).parameters.values()
            assert " ".join(stars.get(one.kind, "") + one.name for one in found) == before, name


def test_replacements_are_nested_and_taken_back():
    class Owner:
        def say(self):
            return "own"

    def saying(word):
        return Owner, "say", lambda before: lambda owner: f"{word} {before(owner)}"

    with pytest.raises(KeyError), tf_internals.replaced(saying("outer")):
        with tf_internals.replaced(saying("inner"), saying("innermost")):
            assert Owner().say() == "innermost inner outer own"
            assert in_a_thread(Owner().say) == "own"
        assert Owner().say() == "outer own"
        raise KeyError
    assert Owner().say() == "own" and not tf_internals._SWITCHES


def test_convolutions_with_groups_need_no_xla_on_gpus(monkeypatch):
    """On CPUs they have no gradient without. A function of the user's stays compiled."""
    convolve = layers.Conv2D(4, 3, groups=2)
    convolve.build((None, 8, 8, 2))
    own = tf.function(lambda x: x + 1.0, jit_compile=True)

    def num_compiled(fn, device):
        def program(x):
            with tf.device(device):
                return fn(x)

        traced = tf.function(program).get_concrete_function(tf.zeros([1, 8, 8, 2]))
        functions = traced.graph.as_graph_def().library.function
        return sum(f.attr["_XlaMustCompile"].b for f in functions)

    with tf_internals.convolve_without_xla():
        for device, compiled in ("/cpu:1", 1), ("/gpu:0", 0), ("", 1):
            assert num_compiled(convolve, device) == compiled
            assert num_compiled(own, device) == 1
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["GPU:0"])
        assert num_compiled(convolve, "") == 0


# Layers.


# Variables and optimizers.


def test_a_variable_has_its_own_value_and_gets_another():
    variable = keras.Variable(1.0)
    with keras.StatelessScope([(variable, tf.constant(2.0))]) as scope:
        assert tf_internals.open_scope() is scope
        assert float(variable) == 2.0 and float(tf_internals.value_of(variable)) == 1.0
        assert tf_internals.value_of(keras.Variable("zeros", shape=[2])) is None
    with tf.device("/cpu:1"):
        tf_internals.set_value_of(variable, tf.Variable(3.0))
    assert variable.value.device.endswith("CPU:1") and float(variable) == 3.0


def test_what_holds_a_variable_is_told_from_garbage():
    variable = keras.Variable(1.0)
    cycle = [variable.value]
    cycle.append(cycle)
    assert train_state.held_elsewhere([variable]) == [variable]
    del cycle
    assert train_state.held_elsewhere([variable]) == []


def test_assignments_of_all_kinds_are_seen():
    calls = []

    def make(name):
        return lambda before: lambda *args, **kwargs: calls.append(name)

    slices = tf.IndexedSlices(tf.ones([1]), tf.constant([0]))
    for variable in (tf.Variable([0.0]), tf_internals.make_variable(tf.zeros([1]))):
        kinds = [name for name in dir(variable) if name.startswith(("assign", "scatter"))]
        with tf_internals.patch_assignments(make):
            for kind in kinds:
                getattr(variable, kind)(slices)
            variable.batch_scatter_update(slices)
        assert sorted(calls) == sorted([*kinds, "batch_scatter_update"])
        calls.clear()
        variable.assign([1.0])
        assert float(variable[0]) == 1.0


# Graphs.


def test_a_function_without_an_end_is_ended():
    @tf.function
    def forever(x):
        return tf.while_loop(lambda x: x >= 0.0, lambda x: [x + 1.0], [x])

    forever = forever.get_concrete_function(tf.zeros([]))
    assert float(traces.call_for_at_most(600.0, forever, tf.constant(-1.0))[0]) == -1.0
    with pytest.raises(tf.errors.CancelledError):
        traces.call_for_at_most(0.5, forever, tf.constant(0.0))


def test_the_start_and_the_devices():  # before it: tests/devices/test_gpus.py
    tf.config.list_logical_devices()
    assert tf_internals.has_listed_devices() and tf_internals.has_started()
    memory = tf_internals.device_memory_bytes()
    assert list(memory) == ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
    assert set(memory.values()) == {256 * 2**20}  # what TensorFlow says of any CPU


# Precision.


def dtypes(policy):
    """Return what a layer of that policy computes in, and keeps its weights in."""
    layer = layers.Dense(2, dtype=policy, name="layer")
    layer.build((None, 3))
    return layer.compute_dtype, layer.kernel.dtype


def test_layers_get_float64_in_the_block_and_thread_alone():
    """Those of policies of all kinds: tests/commands/test_verify.py."""
    given = keras.dtype_policies.serialize(keras.DTypePolicy("mixed_float16"))
    config = layers.Dense(2, dtype="float32").get_config()
    with pytest.raises(ZeroDivisionError), force_float64():
        assert dtypes(given) == ("float64", "float64")
        assert layers.Dense.from_config(config).compute_dtype == "float64"
        attention = layers.MultiHeadAttention(2, 3, dtype="float32")
        attention.build((None, 4, 5), (None, 4, 5))
        assert {v.dtype for v in attention.weights} == {"float64"}
        assert in_a_thread(lambda: dtypes(given)) == ("float16", "float32")
        assert keras.Input((3,)).dtype == keras.config.floatx()
        assert layers.Discretization([0.0], dtype="int64").compute_dtype == "int64"
        for own, wanted in ("float32", "float64"), ("int32", "int32"):
            assert keras.Input((3,), dtype=own).dtype == wanted
            of_input = layers.InputLayer((3,), dtype=own).get_config() | {"dtype": own}
            assert layers.InputLayer.from_config(of_input).dtype == wanted
        raise ZeroDivisionError
    assert dtypes(given) == ("float16", "float32")
    assert keras.Input((3,), dtype="float16").dtype == "float16"


# What models are trained with.


def test_keras_knows_of_its_metrics_which_is_better():
    x = keras.Input((2,))
    outputs = {name: layers.Dense(size, name=name)(x) for name, size in {"a": 1, "b": 3}.items()}
    model = keras.Model(x, outputs)
    own = keras.metrics.MeanMetricWrapper(lambda y, outputs: outputs, name="own")
    model.compile(
        loss={"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        metrics={"a": ["mae", own], "b": ["accuracy"]},
    )
    model.test_step((tf.ones([4, 2]), {"a": tf.zeros([4, 1]), "b": tf.zeros([4, 1], tf.int32)}))
    known = {"loss": "min", "b_loss": "min", "a_mae": "min", "b_accuracy": "max"}
    for name, which in (known | {"a_own": None, "none": None}).items():
        assert metric_direction(model, name) == which, name


def test_what_records_is_seen_and_does_so_where_init_scope_has_stopped_that():
    x, v = tf.ones([2]), tf.Variable([1.0, 2.0])
    assert not tf_internals.is_recording()
    with tf.autodiff.ForwardAccumulator(x, x):
        assert tf_internals.is_recording() and tf_internals.is_recording([x])
        assert not tf_internals.is_recording([2 * tf.ones([2])])
        assert not tf_internals.are_followed([v])
    with tf.autodiff.ForwardAccumulator(v, x):
        assert tf_internals.are_followed([v])
    restarted = tf_internals.recording_restarted
    for block, seen in (contextlib.nullcontext, False), (restarted, True):
        with tf.init_scope(), block(), tf.autodiff.ForwardAccumulator(x, x) as accumulator:
            y = x * 3
        assert (accumulator.jvp(y) is not None) == seen
        with tf.init_scope(), block(), tf.GradientTape() as tape:
            tape.watch(x)
            y = x * 3
        assert (tape.gradient(y, x) is not None) == seen
