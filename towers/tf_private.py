"""What towers replace inside of TensorFlow and Keras while they trace, bound to one thread.

Keras layers and TensorFlow's functions know nothing of towers: how a tower draws, normalises or
calls an inner `tf.function` is put in the place of what they call. Another thread, which may trace
towers of its own or a plain model, never meets it, and nothing is left behind.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import dtype_policies
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.dtype_policies import DTypePolicyMap
from keras.src.layers.core import input_layer
from keras.src.layers.preprocessing.data_layer import DataLayer
from tensorflow.python.eager import cancellation
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import gen_stateless_random_ops_v2 as draw_ops
from tensorflow.python.ops import resource_variable_ops as variable_ops

_LOCK = threading.Lock()
_SWITCHES: dict[tuple[int, str], "_Switch"] = {}


class _Switch:
    """Stands in the place of a function while any thread replaces it."""

    def __init__(self, owner: Any, name: str):
        self.owner, self.name = owner, name
        self.inherited = name not in vars(owner)
        self.original = getattr(owner, name)
        self.num_users = 0
        self.here = threading.local()

        @functools.wraps(self.original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return self.current()(*args, **kwargs)

        setattr(owner, name, dispatch)

    def current(self) -> Callable:
        """Return what the calling thread is to call."""
        stack = getattr(self.here, "stack", None)
        return stack[-1] if stack else self.original

    def remove(self) -> None:
        """Put the function back."""
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """Let the calling thread call something else in place of `owner.name` in the block.

    Args:
        owner: a module, class or object.
        name: of one of its functions.
        make: gets what this thread has called until here, which may be an outer block's
            replacement, and returns what it is to call.
    """
    key = id(owner), name
    with _LOCK:
        switch = _SWITCHES.get(key)
        if switch is None:
            switch = _SWITCHES[key] = _Switch(owner, name)
        switch.num_users += 1
    try:
        replacement = make(switch.current())
        stack = vars(switch.here).setdefault("stack", [])
        stack.append(replacement)
        try:
            yield
        finally:
            stack.pop()
    finally:
        with _LOCK:
            switch.num_users -= 1
            if not switch.num_users:
                switch.remove()
                del _SWITCHES[key]


@contextlib.contextmanager
def all_replaced(
    owner: Any, make: Callable[[str, Callable], Callable], names: Any
) -> Iterator[None]:
    """Replace several functions of `owner`, as `replaced` does; `make` gets the name, too."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced(owner, name, functools.partial(make, name)))
        yield


# Keras' BatchNorm: no public place gives a layer its moments from elsewhere.


@contextlib.contextmanager
def batch_norm_replaced(make_call: Callable, make_moments: Callable) -> Iterator[None]:
    """Replace `call` and `_moments` of Keras' BatchNormalization, as `replaced` does."""
    layer = keras.layers.BatchNormalization
    with replaced(layer, "call", make_call), replaced(layer, "_moments", make_moments):
        yield


# TensorFlow's draws: all of tf.random.stateless_* and of Keras come through these ops, which take
# key and counter. The public functions take a seed, from which no draw can begin in the middle.

DRAWS = (
    "stateless_random_uniform_v2",
    "stateless_random_normal_v2",
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_full_int_v2",
    "stateless_truncated_normal_v2",
)


@contextlib.contextmanager
def draws_replaced(draw: Callable) -> Iterator[None]:
    """Let the thread call `draw(name, ...)` in place of the ops in DRAWS.

    The ops themselves, whoever has replaced them, are what `draw_op` returns.
    """
    make = lambda name, _: functools.partial(draw, name)  # noqa: E731
    with all_replaced(draw_ops, make, DRAWS):
        yield


def draw_op(name: str) -> Callable:
    """Return TensorFlow's own op of one of the names in DRAWS."""
    switch = _SWITCHES.get((id(draw_ops), name))
    return switch.original if switch else getattr(draw_ops, name)


# A tf.function inside of a tower: its one trace would serve all towers, with the first one's rows
# of each draw. TensorFlow has a switch for inlining, tf.config.run_functions_eagerly, but for the
# whole process, and it leaves AutoGraph out.


@contextlib.contextmanager
def functions_inlined() -> Iterator[None]:
    """Let the thread run each `tf.function` as a part of what calls it, converted by AutoGraph.

    One that XLA is to compile, or that is called eagerly, stays a function, with a trace for each
    block.
    """
    own: dict[int, tuple[Function, Function]] = {}

    def make(before: Callable) -> Callable:
        def call(function: Function, *args: Any, **kwargs: Any) -> Any:
            if function._jit_compile or tf.executing_eagerly():
                twin = own.setdefault(id(function), (function._clone(None), function))[0]
                return before(twin, *args, **kwargs)
            inline = function.python_function
            if function._autograph:
                inline = autograph_util.py_func_from_autograph(inline)
            if function.input_signature is not None and not kwargs:
                args = _as_signed(function.input_signature, args)
            result = inline(*args, **kwargs)
            return tf.nest.map_structure(_as_returned, result)

        return call

    with replaced(Function, "__call__", make):
        yield


def _as_signed(signature: Any, args: Any) -> Any:
    """Return arguments as tensors where an input_signature makes them so."""
    specs = [*signature, *[None] * (len(args) - len(signature))]
    return [
        tf.convert_to_tensor(arg, spec.dtype) if isinstance(spec, tf.TensorSpec) else arg
        for arg, spec in zip(args, specs, strict=False)
    ]


def _as_returned(value: Any) -> Any:
    """Return a number as the tensor that a function returns for it."""
    return tf.convert_to_tensor(value) if isinstance(value, bool | int | float) else value


# Assignments to a tf.Variable.

ASSIGNMENTS = (
    "assign assign_add assign_sub scatter_add scatter_sub scatter_max scatter_min scatter_mul "
    "scatter_div scatter_update batch_scatter_update scatter_nd_add scatter_nd_sub "
    "scatter_nd_max scatter_nd_min scatter_nd_update"
).split()


@contextlib.contextmanager
def assignments_replaced(make: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """Replace the methods that assign to a `tf.Variable`, as `all_replaced` does."""
    with contextlib.ExitStack() as stack:
        for owner in (variable_ops.BaseResourceVariable, variable_ops.ResourceVariable):
            names = [name for name in ASSIGNMENTS if name in vars(owner)]
            stack.enter_context(all_replaced(owner, make, names))
        yield


# What may run on made-up examples, of ops that TensorFlow counts as stateful: it leaves no trace.
_HARMLESS = re.compile(
    r"VarHandleOp|ReadVariableOp|DisableCopyOnRead|ResourceGather|Assert|StatefulPartitionedCall|"
    r"(Stateful)?(While|If|Case)$|LookupTable(Find|Size)|AnonymousHashTable|TensorArray|Placeholder|"
    r"Random(Uniform|UniformInt|StandardNormal|Shuffle|Gamma|Poisson)|TruncatedNormal|Multinomial"
)


def effects_of(graph: tf.Graph) -> set[tuple[str, str]]:
    """Return (op type, name) of what leaves a trace when a graph runs; the registry tells of each.

    `Operation.op_def` is public, but not of the ops in the functions that a graph calls.
    """
    found = set()
    for name, kind in ops_of(graph):
        known = op_def_registry.get(kind)
        if known is not None and known.is_stateful and not _HARMLESS.match(kind):
            found.add((kind, name))
    return found


def ops_of(graph: tf.Graph) -> list[tuple[str, str]]:
    """Return (name, type) of the ops of a graph and of all functions that it calls."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    return [(node.name, node.op) for node in nodes]


def set_input(op: tf.Operation, tensor: tf.Tensor) -> None:
    """Give an op another first input, which may have been made after it; nothing public does."""
    op._update_input(0, tensor)


def make_variable(value: tf.Tensor) -> tf.Variable:
    """Return a variable that no creator scope sees: a `tf.function` refuses them after one trace.

    To be called outside of the function's graph, and to be kept by whoever uses it there.
    """
    return variable_ops.ResourceVariable(value, trainable=False)


def call_for_at_most(seconds: float, function: Any, *arguments: Any) -> Any:
    """Return what a concrete function returns; nothing public ends one that runs too long.

    Raises:
        tf.errors.CancelledError: it did not end in time.
    """
    manager = cancellation.CancellationManager()
    timer = threading.Timer(seconds, manager.start_cancel)
    timer.daemon = True
    timer.start()
    try:
        return manager.get_cancelable_function(function)(*arguments)
    finally:
        timer.cancel()


# Layers that ask for a precision of their own.


@contextlib.contextmanager
def all_in_float64() -> Iterator[None]:
    """Let layers that are made in the block, by this thread, compute and keep weights in float64.

    Guides tell users to make the last layer of a model in mixed precision with dtype="float32". In
    float64 it would round, and rounding hides faults. Keras gives each layer its policy by
    `dtype_policies.get`, and each `keras.Input` its dtype through `InputLayer`; nothing public lets
    one choose.
    """

    def make_get(get: Callable) -> Callable:
        return lambda identifier: _wide(get(identifier))

    def make_input(make: Callable) -> Callable:
        def make_wide_input(*args: Any, dtype: Any = None, **keywords: Any) -> Any:
            if dtype is not None and "float" in keras.backend.standardize_dtype(dtype):
                dtype = "float64"
            return make(*args, dtype=dtype, **keywords)

        return make_wide_input

    with (
        replaced(dtype_policies, "get", make_get),
        replaced(input_layer, "InputLayer", make_input),
    ):
        yield


def _wide(policy: Any) -> Any:
    """Return a policy with float64 for all floating types; integers and quantised ones stay."""
    if isinstance(policy, DTypePolicyMap):
        wide = {name: _wide(own) for name, own in policy.items()}
        return DTypePolicyMap(default_policy=_wide(policy.default_policy), policy_map=wide)
    if policy.quantization_mode is None and "float" in policy.compute_dtype:
        return keras.DTypePolicy("float64")
    return policy


@contextlib.contextmanager
def floatx_set(dtype: str) -> Iterator[None]:
    """Let what names no type have `dtype` in the block, except in Keras' augmentation.

    Those layers mix floatx with float32: in Keras 3.15 RandomRotation and RandAugment raise a
    TypeError unless floatx is float32. They compute in their own dtype policy all the same.
    """
    before = keras.config.floatx()

    def make_call(call: Callable) -> Callable:
        def call_with_float32(*args: Any, **kwargs: Any) -> Any:
            keras.config.set_floatx("float32")
            try:
                return call(*args, **kwargs)
            finally:
                keras.config.set_floatx(dtype)

        return call_with_float32

    with replaced(DataLayer, "__call__", make_call):
        keras.config.set_floatx(dtype)
        try:
            yield
        finally:
            keras.config.set_floatx(before)


# The scope that keeps what layers assign and the losses that they add: Keras hands it to those who
# open one, and tells nobody else which is open.


def open_scope() -> keras.StatelessScope | None:
    """Return the `keras.StatelessScope` that is open in this thread."""
    return get_stateless_scope()


def added_losses() -> list[Any]:
    """Return what `add_loss` and activity regularizers have added in the open scope so far."""
    scope = get_stateless_scope()
    return [] if scope is None else list(scope.losses)
