"""All uses of private parts of TensorFlow and Keras, and the functions that towers patch there.

A tower draws random numbers, normalizes batches and calls inner `tf.function`s in its own way, by
patching functions that Keras and TensorFlow call. A patch holds for one thread and one block, so
that other threads, which may trace other towers or a plain model, never see it. Each docstring
names the closest public interface, or the one that is missing ("Public");
`tests/test_tf_internals.py` fails when a release changes what a function relies on.
"""

import contextlib
import functools
import gc
import itertools
import operator
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import dtype_policies
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.layers.core import input_layer
from keras.src.layers.preprocessing.data_layer import DataLayer
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.data_adapters import get_data_adapter
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.core.config_lib import DoNotConvert
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import cancellation, context, forwardprop_util, record
from tensorflow.python.eager.polymorphic_function import autograph_util
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import config as tf_config
from tensorflow.python.framework import function as defuns
from tensorflow.python.framework import op_def_registry, tensor_util
from tensorflow.python.ops import control_flow_util, random_ops_util
from tensorflow.python.ops import gen_stateless_random_ops_v2 as draw_ops
from tensorflow.python.ops import resource_variable_ops as variable_ops

Make = Callable[[Callable], Callable]  # from the current function to its replacement
Block = contextlib.AbstractContextManager[None]

_LOCK, _NUMBERS = threading.Lock(), itertools.count()
_SWITCHES: dict[tuple[int, str], "_Switch"] = {}


class _Switch:
    """Patches a function while any thread needs it, and dispatches to the thread's version."""

    def __init__(self, owner: Any, name: str):
        self.owner, self.name, self.num_users = owner, name, 0
        self.inherited, self.original = name not in vars(owner), getattr(owner, name)
        self.here = threading.local()

        @functools.wraps(self.original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return self.current()(*args, **kwargs)

        setattr(owner, name, dispatch)

    def current(self) -> Callable:
        stack = getattr(self.here, "stack", None)
        return stack[-1] if stack else self.original

    def leave(self) -> None:
        with _LOCK:
            self.num_users -= 1
            if self.num_users:
                return
            del _SWITCHES[id(self.owner), self.name]
            if self.inherited:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.original)


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Make]) -> Iterator[None]:
    """Replace functions in the block, for this thread. Public: hooks, which layers and losses lack.

    Args:
        *changes: (owner, name of its function, make); `make` maps the function to its replacement.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, make in changes:
            with _LOCK:
                key = id(owner), name
                switch = _SWITCHES[key] = _SWITCHES.get(key) or _Switch(owner, name)
                switch.num_users += 1
            stack.callback(switch.leave)
            replacements = vars(switch.here).setdefault("stack", [])
            replacements.append(make(switch.current()))
            stack.callback(replacements.pop)
        yield


# Layers.


@contextlib.contextmanager
def keep_losses() -> Iterator[None]:
    """Keep the losses of layers that are called again in the block. Public: none."""
    saved: dict[int, tuple[keras.Layer, list[Any]]] = {}

    def make(before: Callable) -> Callable:
        def clear(layer: keras.Layer) -> None:
            saved.setdefault(id(layer), (layer, list(layer._losses)))
            before(layer)

        return clear

    with replaced((keras.Layer, "_clear_losses", make)):
        yield
    for layer, losses in saved.values():
        layer._losses[:] = losses


def patch_batch_norm(make_call: Make, make_moments: Make) -> Block:
    """Replace BatchNormalization's `call` and `_moments`. Public: moments from elsewhere.

    Args:
        make_call: maps the current `call` to its replacement.
        make_moments: maps the current `_moments` to its replacement.
    """
    layer = keras.layers.BatchNormalization
    return replaced((layer, "call", make_call), (layer, "_moments", make_moments))


def has_own_moments(layer: keras.layers.BatchNormalization) -> bool:
    """Return whether a layer has a `_moments` of its own. Public: none to override."""
    return type(layer)._moments is not keras.layers.BatchNormalization._moments


def layers_of(layer: keras.Layer) -> list[keras.Layer]:
    """Return a layer and all below it, each once, in order. Public: `layers`, of models only."""
    layers: dict[int, keras.Layer] = {}
    waiting = [layer]
    while waiting:
        layer = waiting.pop()
        if id(layer) not in layers:  # it may be shared, or refer to its parent
            layers[id(layer)] = layer
            waiting += reversed(layer._layers)
    return list(layers.values())


@contextlib.contextmanager
def named_as_in_a_new_process() -> Iterator[None]:
    """Restart Keras' numbering of layers at dense, dense_1. Public: clear_session, drops more."""
    before = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", before)


# Compiled models.


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return the arguments of `compile`. Public: get_compile_config, only names."""
    return dict(model._compile_config.config)


def batches_of(x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> tf.data.Dataset:
    """Return the batches of arguments like `keras.Model.fit`. Public: none; `fit` keeps them."""
    return get_data_adapter(x, y, sample_weight, batch_size=batch_size).get_tf_dataset()


def metric_direction(model: keras.Model, name: str) -> str | None:
    """Return the better direction of a metric, "max" or "min", None if Keras does not know.

    Public: `ModelCheckpoint(mode="auto")`, after training.

    Args:
        model: compiled.
        name: of the metric, or of a loss, as in the logs of `fit`.
    """
    if name == "loss" or name.endswith("_loss"):
        return "min"
    for metric in [m for one in model.metrics for m in (one, *getattr(one, "metrics", ()))]:
        is_it = f"_{name}".endswith(f"_{metric.name}")  # one of several follows the output's name
        if is_it and (direction := getattr(metric, "_direction", None)):
            return {"up": "max", "down": "min"}[direction]
    return None


def compiled_loss(model: keras.Model, y: Any, outputs: Any, weights: Any) -> Any:
    """Return the loss that `compile` was given, without what layers add.

    Its trackers of each output's loss are updated. Arguments: see `keras.Model.compute_loss`.
    Public: that function, which has all losses.
    """
    return model._compile_loss(y, outputs, weights)


def maker_of(tensor: keras.KerasTensor) -> tuple[Any, int, list[Any]]:
    """Return a symbolic tensor's operation, the index of that output, and the op's inputs.

    Public: `layer.output`, for a layer that is called once.
    """
    operation, node, place = tensor._keras_history
    nodes = operation._inbound_nodes
    return operation, place, list(nodes[node].input_tensors) if node < len(nodes) else []


def open_scope() -> keras.StatelessScope | None:
    """Return the `keras.StatelessScope` of this thread. Public: none."""
    return get_stateless_scope()


def added_losses() -> list[Any]:
    """Return what `add_loss` and activity regularizers have added in the open scope so far."""
    return list(getattr(get_stateless_scope(), "losses", []))


# Variables.


def value_of(variable: keras.Variable) -> tf.Variable | None:
    """Return a variable's own value, None before it has one. Public: `value`, by the scope."""
    return variable._value


def set_value_of(variable: keras.Variable, value: tf.Variable) -> None:
    """Replace the `tf.Variable` of a Keras variable. Public: a device for add_weight.

    The new one has the id of the old one, by which optimizers know the variables that they were
    built for, and those that weight decay spares.

    Args:
        variable: keeps its name and path.
        value: of the same shape and type.
    """
    value._unique_id = variable._value._unique_id
    variable._value = value


def held_elsewhere(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Return the variables whose `tf.Variable` is held by more than the Keras variable.

    A function that was traced holds the handles that it reads. Public: none.
    """

    def references(variable: Any) -> tuple[int, int]:
        return sys.getrefcount(variable._value), sys.getrefcount(variable._value._handle)

    with tf.init_scope():
        alone = references(types.SimpleNamespace(_value=make_variable(tf.zeros([]))))

    def held() -> list[keras.Variable]:
        return [v for v in variables if any(map(operator.gt, references(v), alone))]

    for pause in (0.0, 0.01, 0.1):  # gc.collect returns at once while another thread collects
        if not held():
            break
        time.sleep(pause)
        gc.collect()  # functions that are gone are in cycles
    return held()


def make_variable(value: tf.Tensor) -> tf.Variable:
    """Return a variable that bypasses creator scopes. Public: tf.Variable, once in a function.

    Call it outside of the function's graph, and keep it as long as that is used.
    """
    return variable_ops.ResourceVariable(value, trainable=False)


_ASSIGNMENTS = (
    "assign assign_add assign_sub scatter_add scatter_sub scatter_max scatter_min scatter_mul "
    "scatter_div scatter_update batch_scatter_update scatter_nd_add scatter_nd_sub "
    "scatter_nd_max scatter_nd_min scatter_nd_update"
).split()


def patch_assignments(make: Callable[[str], Make]) -> Block:
    """Replace the methods, by name, that assign to a `tf.Variable`. Public: none."""
    owners = variable_ops.BaseResourceVariable, variable_ops.ResourceVariable
    names = [(owner, name) for owner in owners for name in _ASSIGNMENTS if name in vars(owner)]
    return replaced(*((owner, name, make(name)) for owner, name in names))


def record_assignments(assigned: list[tf.Variable]) -> Block:
    """Append each `tf.Variable` that is assigned in the block to `assigned`. Public: none."""

    def assign(before: Callable, variable: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        assigned.append(variable)
        return before(variable, *args, **kwargs)

    return patch_assignments(lambda _: lambda before: functools.partial(assign, before))


def patch_reads(read: Callable[[tf.Variable, Callable], tf.Tensor]) -> Block:
    """Read each `tf.Variable` by `read(variable, before)`; `before(variable)` is TensorFlow's read.

    Tapes connect the value with the variable, as for TensorFlow's own read. Public: none; a
    variable creator could only make variables of another class.
    """

    def make_read(before: Callable) -> Callable:
        def read_recorded(variable: tf.Variable, no_copy: bool = False) -> tf.Tensor:
            variable_ops.variable_accessed(variable)
            with record.stop_recording():
                value = read(variable, before)
            record.record_operation(
                "ReadVariableOp", [value], [variable.handle], lambda x: [x], lambda x: [x]
            )
            return value

        return read_recorded

    def make_read_rows(_: Callable) -> Callable:
        return lambda variable, indices, name=None: tf.gather(
            variable._read_variable_op(), indices, name=name
        )

    owner = variable_ops.BaseResourceVariable
    return replaced((owner, "_read_variable_op", make_read), (owner, "sparse_read", make_read_rows))


# Tapes, for which towers are one op.


def is_recording(tensors: Sequence[tf.Tensor] | None = None) -> bool:
    """Return whether a tape or accumulator records, if given one of these tensors. Public: none."""
    followed = forwardprop_util.pack_tangents(list(tensors or ())).indices  # by each accumulator
    if tensors is None:
        return bool(followed) or record.could_possibly_record()
    return any(followed) or record.should_record_backprop(list(tensors))


def are_followed(variables: Sequence[tf.Variable]) -> bool:
    """Return whether a forward accumulator follows any of these. Public: none."""
    handles = [tf.convert_to_tensor(getattr(v, "handle", v)) for v in variables]
    return any(forwardprop_util.pack_tangents(handles).indices)


def recording_restarted() -> Block:
    """Make new tapes and accumulators record within tf.init_scope. Public: none."""

    def make(before: Callable) -> Callable:
        def enter(recorder: Any) -> Any:
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
            return before(recorder)

        return enter

    recorders = tf.GradientTape, tf.autodiff.ForwardAccumulator
    return replaced(*((recorder, "__enter__", make) for recorder in recorders))


def record_as_one_op(
    name: str, outputs: Sequence[tf.Tensor], inputs: Sequence[Any], backward: Callable
) -> list[tf.Tensor]:
    """Return tensors that tapes see as the outputs of one op.

    Public: tf.custom_gradient, but it refuses variables that are found only while it runs.

    Args:
        name: of the op.
        outputs: whose copies are returned.
        inputs: tensors and `tf.Variable`s.
        backward: takes the gradients of the outputs as arguments, and returns a list of those of
            the inputs.
    """
    with record.stop_recording():
        outputs = [tf.identity(value) for value in outputs]
    sources = [v.handle if isinstance(v, tf.Variable) else v for v in inputs]
    record.record_operation(name, outputs, sources, backward)
    return outputs


def attached(tensor: Any, kind: str) -> tf.Tensor | None:
    """Return what Keras has attached to a tensor, None for nothing. Public: none.

    Args:
        tensor: any.
        kind: "mask", or "logits" of probabilities.
    """
    return getattr(tensor, f"_keras_{kind}", None)


def attach(tensor: Any, kind: str, value: tf.Tensor | None) -> None:
    """Attach a mask or logits to a tensor, as Keras does. Public: `compute_mask`, `from_logits`.

    Args:
        tensor: gets them.
        kind: "mask" or "logits".
        value: a mask of the tensor's first axes, or logits of its shape; None for none.
    """
    setattr(tensor, f"_keras_{kind}", value)


# Keras' optimizers, which know one device.


def slots_beside_weights(optimizer: keras.optimizers.Optimizer) -> Block:
    """Create an optimizer's slots on their weights' devices. Public: a device for slots."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer

    def make(add: Callable) -> Callable:
        def beside(reference_variable: keras.Variable, *args: object, **kwargs: object) -> object:
            with tf.device(reference_variable.value.device):
                return add(reference_variable, *args, **kwargs)

        return beside

    return replaced((optimizer, "add_variable_from_reference", make))


def will_make_metrics(model: keras.Model) -> bool:
    """Return whether the next step creates metrics that `compile` has by name. Public: none."""
    metrics = getattr(model, "_compile_metrics", None)
    if metrics is None or metrics.built:
        return False
    user_metrics = tf.nest.flatten([metrics._user_metrics, metrics._user_weighted_metrics])
    return not all(one is None or isinstance(one, keras.metrics.Metric) for one in user_metrics)


def weights_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the weights that an optimizer has been built for. Public: none."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(optimizer, "_trainable_variables", [])


def share_settings(
    optimizer: keras.optimizers.Optimizer, other: keras.optimizers.Optimizer
) -> None:
    """Give an optimizer the constants and the learning-rate schedule of another. Public: config.

    A schedule of the user's may have attributes that its config does not tell.

    Args:
        optimizer: built.
        other: of the same class, also built.
    """
    inner, own = (getattr(each, "inner_optimizer", each) for each in (optimizer, other))
    for source, target in (optimizer, other), (inner, own):
        constants = bool | int | float | str | None
        vars(target).update({k: v for k, v in vars(source).items() if isinstance(v, constants)})
    if not isinstance(inner._learning_rate, keras.Variable):
        own.learning_rate = inner._learning_rate


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """Return (slot, its weight) for each slot of an optimizer that is built. Public: none."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    weights = weights_of(optimizer)
    by_weight = [v for v in vars(optimizer).values() if isinstance(v, list) and v is not weights]
    pairs = [p for v in by_weight if len(v) == len(weights) for p in zip(v, weights, strict=True)]
    return [(slot, w) for slot, w in pairs if isinstance(slot, keras.Variable) and slot is not w]


def each_update_apart(optimizer: keras.optimizers.Optimizer, update_flat: Callable) -> Block:
    """Compute each update of a Keras optimizer on its variable's device, as soon as possible.

    Keras sends all gradients through one op on one device. Public: an `apply` for one variable.

    Args:
        optimizer: of Keras.
        update_flat: updates a stand-in for variables: (stand-in, Keras' function, *arguments).
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)

    def make(update: Callable) -> Callable:  # which Keras hands each variable
        def update_there(variable: Any, fn: Callable, *args: Any, **kwargs: Any) -> Any:
            with tf.device(variable.device):
                if isinstance(variable, tf.Variable):
                    return update(variable, fn, *args, **kwargs)
                return update_flat(variable, fn, *kwargs.get("args", ()))

        return update_there

    extended = tf.distribute.get_strategy().extended
    gathered = lambda _: list  # noqa: E731
    return replaced((extended, "update", make), (optimizer, "_all_reduce_sum_gradients", gathered))


def fused_sgd(optimizer: keras.optimizers.Optimizer, suits: Callable[[tf.Variable], bool]) -> Block:
    """Update variables by TensorFlow's fused kernels in Keras' SGD.

    These compute the same as Keras' chain of ops in one pass over memory. Those of Adam and RMSprop
    do not, because they compute 1 - beta in the weights' dtype. In float32 1 - 0.999 is off by
    5e-5. Adagrad's adds epsilon after the root. Keras still does clipping, decay, averages,
    constraints, and sparse gradients. Public: a function that returns a weight's slots.

    Args:
        optimizer: SGD itself, also in a LossScaleOptimizer; others stay as they are.
        suits: returns whether a variable, of float32 or float64, is updated so.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if type(optimizer) is not keras.optimizers.SGD:
        return contextlib.nullcontext()

    def make(update_step: Callable) -> Callable:
        def update(gradient: Any, variable: Any, learning_rate: Any) -> None:
            fits = isinstance(variable, tf.Variable) and isinstance(gradient, tf.Tensor)
            if not (fits and variable.dtype in (tf.float32, tf.float64) and suits(variable)):
                update_step(gradient, variable, learning_rate)
                return
            rate, delta = (keras.ops.cast(v, variable.dtype) for v in (learning_rate, gradient))
            if optimizer.momentum == 0:
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=rate, delta=delta
                )
                return
            slot = optimizer.momentums[optimizer._get_variable_index(variable)]
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.handle, accum=slot.value.handle, lr=rate, grad=delta,
                momentum=keras.ops.cast(optimizer.momentum, variable.dtype),
                use_nesterov=optimizer.nesterov,
            )  # fmt: skip

        return update

    return replaced((optimizer, "update_step", make))


# Keras' optimizers that update each element by itself, and the attributes of their slots.
_ELEMENTWISE = {
    keras.optimizers.SGD: ("momentums",),
    keras.optimizers.Adam: ("_momentums", "_velocities", "_velocity_hats"),
    keras.optimizers.AdamW: ("_momentums", "_velocities", "_velocity_hats"),
    keras.optimizers.Adamax: ("_m", "_u"),
    keras.optimizers.Nadam: ("_momentums", "_velocities"),
    keras.optimizers.Lion: ("_momentums",),
    keras.optimizers.RMSprop: ("_velocities", "_momentums", "_average_gradients"),
    keras.optimizers.Adagrad: ("_accumulators",),
    keras.optimizers.Adadelta: ("_accumulated_grads", "_accumulated_delta_vars"),
    keras.optimizers.Ftrl: ("_accumulators", "_linears"),
}
_OF_ITS_OWN = "clipnorm", "use_ema", "loss_scale_factor", "gradient_accumulation_steps"


def elementwise_slots(
    optimizer: keras.optimizers.Optimizer,
) -> list[dict[str, keras.Variable]] | None:
    """Return {`unique_id` of a weight: slot} for each kind of slot of an elementwise optimizer.

    None if it is of another class, or also clips each weight, averages or scales. Public:
    `variables`, which does not tell to which weight a slot belongs.
    """
    if type(optimizer) not in _ELEMENTWISE or any(getattr(optimizer, n) for n in _OF_ITS_OWN):
        return None
    kinds = [getattr(optimizer, name, None) for name in _ELEMENTWISE[type(optimizer)]]
    places = optimizer._trainable_variables_indices
    return [{key: slots[i] for key, i in places.items()} for slots in kinds if slots]


def unique_id(variable: tf.Variable) -> str:
    """Return a Keras optimizer's key of a variable. Public: `ref()`, which Keras does not use."""
    return variable._unique_id


def decays(optimizer: keras.optimizers.Optimizer, weight: keras.Variable) -> bool:
    """Return whether a built optimizer decays a weight apart from the gradient. Public: none.

    Args:
        optimizer: of Keras.
        weight: one of its weights.
    """
    return optimizer.weight_decay is not None and optimizer._use_weight_decay(weight.value)


# Random draws: tf.random.stateless_* and Keras use these ops, which take key and counter. Public:
# these functions take a seed, with which a draw cannot start in the middle.

DRAWS = (
    "stateless_random_uniform_v2",
    "stateless_random_normal_v2",
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_full_int_v2",
    "stateless_truncated_normal_v2",
)


def patch_draws(draw: Callable) -> Block:
    """Call `draw(name, ...)` in place of the ops in DRAWS, in this thread."""
    makes = {name: lambda _, name=name: functools.partial(draw, name) for name in DRAWS}
    return replaced(*((draw_ops, name, make) for name, make in makes.items()))


def patch_keys(key_and_counter: Callable) -> Block:
    """Take key and counter of draws from `key_and_counter(seed)`. Public: none takes a key."""
    make = lambda _: lambda seed, _alg: key_and_counter(seed)  # noqa: E731
    return replaced((random_ops_util, "_get_key_counter", make))


def state_of_unseeded_draws() -> tf.Variable:
    """Return the state of Keras' generator for draws without a seed. Public: set_random_seed."""
    return global_seed_generator().state.value


def draw_op(name: str) -> Callable:
    """Return TensorFlow's own op of a name in DRAWS, even if it is patched."""
    switch = _SWITCHES.get((id(draw_ops), name))
    return switch.original if switch else getattr(draw_ops, name)


# Ops on integers.

_OF_INTEGERS = "take signbit equal not_equal less less_equal greater greater_equal".split()


def integers_as_int64() -> Block:
    """Make Keras' ops compare int32 tensors as int64; Embedding calls `take`, argmax `signbit`.

    Public: none; TensorFlow computes with int32 on the host, also for a GPU.
    """

    def wide(name: str, value: Any) -> Any:
        if not tf.is_tensor(value) or value.shape.rank == 0:  # a scalar is of a shape: the host
            return value
        if name == "signbit" and value.dtype.is_floating:  # Keras computes it by an int32
            value = tf.bitcast(tf.cast(value, tf.float32), tf.int32)
        return tf.cast(value, tf.int64) if value.dtype == tf.int32 else value

    def make(name: str) -> Make:
        def call(keras_op: Callable, *args: Any, **kwargs: Any) -> Any:
            result = keras_op(*(wide(name, value) for value in args), **kwargs)
            if name == "take" and tf.is_tensor(args[0]):  # rows of a table have its type
                result = tf.cast(result, args[0].dtype)
            return result

        return lambda keras_op: functools.partial(call, keras_op)

    return replaced(*((keras_backend.numpy, name, make(name)) for name in _OF_INTEGERS))


# Functions and graphs.


def inline_functions(around: Callable[[], Block] = contextlib.nullcontext) -> Block:
    """Inline each `tf.function` into its caller, converted by AutoGraph, in this thread.

    A single trace would give all towers the first one's random draws. Functions that XLA compiles
    or that are called eagerly stay functions, traced for each block, and called within `around()`.
    Public: tf.config.run_functions_eagerly, for all threads and without AutoGraph.
    """
    twins: dict[int, tuple[Function, Function]] = {}

    def make(before: Callable) -> Callable:
        def call(function: Function, *args: Any, **kwargs: Any) -> Any:
            if function._jit_compile or tf.executing_eagerly():
                twin = twins.setdefault(id(function), (function._clone(None), function))[0]
                with around():
                    return before(twin, *args, **kwargs)
            inline = function.python_function
            if function._autograph:
                inline = autograph_util.py_func_from_autograph(inline)
            signature = function.input_signature
            if signature is not None and not kwargs:
                specs = [*signature, *[None] * (len(args) - len(signature))]
                args = [
                    tf.convert_to_tensor(x, spec.dtype) if isinstance(spec, tf.TensorSpec) else x
                    for x, spec in zip(args, specs, strict=False)
                ]
            # A function would return tensors for numbers.
            return tf.nest.map_structure(
                lambda x: tf.convert_to_tensor(x) if isinstance(x, bool | int | float) else x,
                inline(*args, **kwargs),
            )

        return call

    return replaced((Function, "__call__", make))


def loops_of_their_own() -> Block:
    """Give the bodies of TensorFlow's oldest loops, such as ctc_loss has, names of their own.

    TensorFlow names them by their ops without shapes. Those of towers with other numbers of
    examples would be taken for one, and the graph would not be optimized. Public: none.
    """

    def make(defun: Callable) -> Callable:
        return lambda *types, **keywords: defun(
            *types, **{"func_name": f"loop_{next(_NUMBERS)}"} | keywords
        )

    return replaced((defuns, "Defun", make))


def convolve_without_xla() -> Block:
    """Compute convolutions with groups on GPUs by their own kernels, as those without groups.

    Keras compiles them by XLA, since CPUs have no kernel for their gradients. Public: none.
    """

    def make(before: Callable) -> Callable:
        def call(function: Function, *args: Any, **kwargs: Any) -> Any:
            inner = function.python_function
            if (
                function._jit_compile
                and inner.__module__ == keras_backend.nn.__name__
                and _on_gpu()
            ):
                return inner(*args, **kwargs)
            return before(function, *args, **kwargs)

        return call

    return replaced((Function, "__call__", make))


def _on_gpu() -> bool:
    """Return whether ops that are made here run on a GPU."""
    device = tf.zeros([]).device
    return "GPU" in device or (not device and bool(tf.config.list_logical_devices("GPU")))


# Do not convert this package in the user's `tf.function`s: that takes seconds, and nothing here
# branches on tensors. Public: `do_not_convert`, which would exclude called user functions, too.
autograph_config.CONVERSION_RULES = (DoNotConvert("towers"), *autograph_config.CONVERSION_RULES)


def converted_as_here(fn: Callable) -> Callable:
    """Return `fn` converted by AutoGraph if that is enabled here. Public: none."""
    status = tf.__internal__.autograph.control_status_ctx()
    if status.status.name != "ENABLED":
        return fn
    return tf.__internal__.autograph.tf_convert(fn, status)


def is_stateful(op_type: str) -> bool:
    """Return whether an op is stateful. Public: `op_def`, except for ops in a function."""
    return getattr(op_def_registry.get(op_type), "is_stateful", False)


def called_graph(op: tf.Operation, attribute: str) -> tf.Graph | None:
    """Return the graph of the function that an op calls. Public: only its name.

    Args:
        op: a call, a loop, a branch, or any other op.
        attribute: that names the function: "f", "body", "then_branch" ...

    Returns:
        The graph; None if the op has no such attribute or the function is unknown to its graph.
    """
    if attribute not in _function_attributes(op.type):
        return None
    function = op.graph._get_function(op.get_attr(attribute).name)
    return function and function.graph


@functools.cache  # a graph has many ops of few types, and reading an attribute takes 20 us
def _function_attributes(op_type: str) -> frozenset[str]:
    attributes = getattr(op_def_registry.get(op_type), "attr", ())
    return frozenset(attribute.name for attribute in attributes if attribute.type == "func")


def set_input(op: tf.Operation, tensor: tf.Tensor) -> None:
    """Replace an op's first input. Public: none.

    Args:
        op: of a graph.
        tensor: of the same graph and type; it may be made later than the op.
    """
    op._update_input(0, tensor)


def is_in_branch(outer: tf.Graph) -> bool:
    """Return whether the current graph is that of a branch or a loop. Public: none.

    Args:
        outer: in which it is; its own branch does not count.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not outer:
        if getattr(graph, "is_control_flow_graph", False):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def function_of(graph: tf.Graph) -> tf.Graph:
    """Return the graph of the function around a loop's or branch's graph. Public: none."""
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


def number_of_place(graph: tf.Graph, numbers: Iterator[int]) -> tf.Tensor:
    """Return a number that tells apart the places where a graph's function is called.

    Each place takes a number when it is first called, and another one in each thread. Calls by a
    program outside of functions are all one place. Public: an argument of the function.

    Args:
        graph: in which the number is used.
        numbers: from which each place takes its own.
    """
    kept = threading.local()

    def own() -> tf.Tensor:
        if not hasattr(kept, "number"):
            kept.number = next(numbers)
        with tf.device("/cpu:0"):
            return tf.constant(kept.number, tf.int32)

    if not getattr(graph, "building_function", False):
        return own()

    def value() -> list[tf.Tensor]:
        if tf.executing_eagerly():
            return [own()]
        return [number_of_place(function_of(tf.compat.v1.get_default_graph()), numbers)]

    with graph.as_default(), tf.device("/cpu:0"):
        key, spec = object(), tf.TensorSpec([], tf.int32)
        placeholder = graph.capture_call_time_value(lambda: None, spec, key)
        # With its own closure, calls from another function would all get one value.
        value.output_spec = spec
        graph._function_captures.add_or_replace(key, value, placeholder, spec, is_by_ref=True)
        return placeholder


def captured_as(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor | None:
    """Return a function's own placeholder of a tensor that it captures, or None. Public: none.

    Args:
        graph: of the function.
        tensor: of another graph, or eager.
    """
    return next((inner for outer, inner in graph.captures if outer is tensor), None)


def is_compiled_by_xla(graph: tf.Graph) -> bool:
    """Return whether XLA will compile a graph that is being traced. Public: none."""
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def static_shape(shape: Any) -> tf.TensorShape:
    """Return the static part of a shape or tensor. Public: get_static_value, all or none."""
    return tensor_util.constant_value_as_shape(tf.convert_to_tensor(shape, tf.int32))


def call_for_at_most(seconds: float, function: Any, *arguments: Any) -> Any:
    """Call a concrete function, and cancel it if it takes too long. Public: none.

    Args:
        seconds: that it may take.
        function: a concrete function.
        *arguments: of the call.

    Raises:
        tf.errors.CancelledError: it took longer.
    """
    manager = cancellation.CancellationManager()
    timer = threading.Timer(seconds, manager.start_cancel)
    timer.daemon = True
    timer.start()
    try:
        return manager.get_cancelable_function(function)(*arguments)
    finally:
        timer.cancel()


@contextlib.contextmanager
def executed_graphs() -> Iterator[list[list[tf.compat.v1.GraphDef]]]:
    """Collect the graphs, by device, of each function that runs in the block. Public: none."""
    graphs: list[list[tf.compat.v1.GraphDef]] = []
    context.context().enable_graph_collection()
    try:
        yield graphs
        for function_graphs in context.context().export_run_metadata().function_graphs:
            graphs.append(list(function_graphs.partition_graphs))
    finally:
        context.context().disable_graph_collection()


# The start of TensorFlow, and its devices.


def has_listed_devices() -> bool:
    """Return whether TensorFlow has listed the devices. Public: none."""
    return context.context()._physical_devices is not None


def has_started() -> bool:
    """Return whether TensorFlow has started. Public: none."""
    return context.context()._initialized


def ops_are_deterministic() -> bool:
    """Return whether op determinism is on, by a call or TF_DETERMINISTIC_OPS=1. Public: none."""
    return tf_config.is_op_determinism_enabled()


def device_memory_bytes() -> dict[str, int]:
    """Return {"/gpu:0": bytes that TensorFlow may use} of this process' devices. Public: none.

    TensorFlow must have started.
    """
    devices = pywrap_tfe.TFE_ContextListDevices(context.context()._handle)
    try:
        result = {}
        for i in range(pywrap_tf_session.TF_DeviceListCount(devices)):
            name = pywrap_tf_session.TF_DeviceListName(devices, i)
            kind, _, number = name.rpartition("device:")[2].partition(":")
            if tf.DeviceSpec.from_string(name).job not in (None, "localhost"):
                continue  # of another process
            memory = pywrap_tf_session.TF_DeviceListMemoryBytes(devices, i)
            result[f"/{kind.lower()}:{number}"] = memory
        return result
    finally:
        pywrap_tf_session.TF_DeleteDeviceList(devices)


# Precision.


def force_float64() -> Block:
    """Give layers created in the block, by this thread, variables and computation in float64.

    Layers that ask for float32, as guides to mixed precision advise, would round, and rounding
    hides faults. Public: the global policy, which layers override.
    """

    def make_get(get: Callable) -> Callable:
        return lambda identifier: _wide(get(identifier))

    def wide(dtype: Any) -> Any:
        is_float = dtype is not None and "float" in keras.backend.standardize_dtype(dtype)
        return "float64" if is_float else dtype

    def make_input(make: Callable) -> Callable:
        return lambda *args, dtype=None, **keywords: make(*args, dtype=wide(dtype), **keywords)

    def make_from_config(from_config: Callable) -> Callable:
        return lambda config: from_config(config | {"dtype": wide(config["dtype"])})

    def make_add_weight(add_weight: Callable) -> Callable:
        def add(layer: keras.Layer, *args: Any, dtype: Any = None, **keywords: Any) -> Any:
            if layer.quantization_mode is None:
                dtype = wide(dtype)
            return add_weight(layer, *args, dtype=dtype, **keywords)

        return add

    return replaced(
        (keras.Layer, "add_weight", make_add_weight),
        (dtype_policies, "get", make_get),
        (input_layer, "InputLayer", make_input),
        (keras.layers.InputLayer, "from_config", make_from_config),
    )


def _wide(policy: Any) -> Any:
    """Return a policy with float64 for all floating types except quantized ones."""
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        wide = {name: _wide(of_layer) for name, of_layer in policy.items()}
        return keras.dtype_policies.DTypePolicyMap(_wide(policy.default_policy), wide)
    if policy.quantization_mode is None and "float" in policy.compute_dtype:
        return keras.DTypePolicy("float64")
    return policy


@contextlib.contextmanager
def floatx_set(dtype: str) -> Iterator[None]:
    """Set floatx in the block, except in Keras' augmentation.

    Those layers mix floatx with float32: in Keras 3.15 RandomRotation and RandAugment raise a
    TypeError unless floatx is float32. They still compute in their own dtype policy.
    """

    @contextlib.contextmanager
    def floatx(value: str) -> Iterator[None]:
        before = keras.config.floatx()
        keras.config.set_floatx(value)
        try:
            yield
        finally:
            keras.config.set_floatx(before)

    make = floatx("float32")  # a decorator, too
    with replaced((DataLayer, "__call__", make)), floatx(dtype):
        yield


@contextlib.contextmanager
def floatx_of(dtype: str) -> Iterator[None]:
    """Make float64 Keras' default type, if `dtype` is float64, where layers are built or called."""
    keras.config.dtype_policy()  # if none is set, Keras takes it from floatx and keeps it
    with floatx_set(dtype) if dtype == "float64" else contextlib.nullcontext():
        yield
