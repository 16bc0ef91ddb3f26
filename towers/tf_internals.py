"""All uses of private parts of TensorFlow and Keras, and the functions that towers patch there.

A tower draws random numbers, normalizes batches and calls inner `tf.function`s in its own way, by
patching functions that Keras and TensorFlow call. A patch holds for one thread and one block, so
that other threads, which may trace other towers or a plain model, never see it.

FUNCTIONS and ATTRIBUTES list what is used. A part is compared with its row when it is first used:
of a release that has changed it, one line is reported, before any number is wrong. Each docstring
names the closest public interface, or the one that is missing ("Public").
"""

import contextlib
import functools
import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.errors import InputError

Make = Callable[[Callable], Callable]  # from the current function to its replacement
Block = contextlib.AbstractContextManager[None]

TESTED = "TensorFlow 2.18 to 2.21 and Keras 3.12 to 3.15"
INSTALL = "pip install 'tensorflow>=2.18,<2.22' 'keras>=3.12,<3.16'"

# {op that draws random numbers: what it takes beside a shape, a key and a counter}
DRAWS = {
    "stateless_random_uniform_v2": "dtype=tf.float32",
    "stateless_random_normal_v2": "dtype=tf.float32",
    "stateless_random_uniform_int_v2": "minval, maxval",
    "stateless_random_uniform_full_int_v2": "dtype=tf.uint64",
    "stateless_truncated_normal_v2": "dtype=tf.float32",
}
_COMPARISONS = "equal not_equal less less_equal greater greater_equal".split()

# What is called or replaced, with the parameters that it takes in the releases of TESTED. If it is
# not written in Python, only the name is compared.
FUNCTIONS = {
    "keras": (
        "Layer._clear_losses(self)",
        "Optimizer._all_reduce_sum_gradients(self, grads_and_vars)",
        "Optimizer._get_variable_index(self, variable)",
        "Optimizer._use_weight_decay(self, variable)",
        "layers.BatchNormalization._moments(self, inputs, mask)",
        "layers.BatchNormalization.call(self, inputs, training=None, mask=None)",
    ),
    "keras.src": (
        "backend.common.global_state.get_global_attribute(name, default=None, "
        "set_to_default=False)",
        "backend.common.global_state.set_global_attribute(name, value)",
        "backend.common.stateless_scope.get_stateless_scope()",
        "backend.get_keras_mask(x)",
        "backend.set_keras_mask(x, mask)",
        "backend.tensorflow.numpy.signbit(x)",
        "backend.tensorflow.numpy.take(x, indices, axis=None)",
        *(f"backend.tensorflow.numpy.{name}(x1, x2)" for name in _COMPARISONS),
        "dtype_policies.get(identifier)",
        "layers.core.input_layer.InputLayer(shape=None, batch_size=None, dtype=None, sparse=None, "
        "ragged=None, batch_shape=None, input_tensor=None, optional=False, name=None, **kwargs)",
        "layers.preprocessing.data_layer.DataLayer.__call__(self, inputs, **kwargs)",
        "random.seed_generator.global_seed_generator()",
        "trainers.compile_utils.CompileLoss.__call__(self, y_true, y_pred, sample_weight=None)",
        "trainers.data_adapters.get_data_adapter(x, y=None, sample_weight=None, batch_size=None, "
        "steps_per_epoch=None, shuffle=False, class_weight=None)",
    ),
    "tensorflow": (
        "GradientTape.__enter__(self)",
        "Graph._get_function(self, name)",
        "Operation._update_input(self, index, tensor)",
        "__internal__.autograph.control_status_ctx()",
        "__internal__.autograph.tf_convert(f, ctx, convert_by_default=True, user_requested=False)",
        "autodiff.ForwardAccumulator.__enter__(self)",
        "core.function.capture.capture_container.FunctionCaptures.add_or_replace(self, key, "
        "external, internal, tracetype=None, is_by_ref=False)",
    ),
    "tensorflow.python": (
        "autograph.core.config.CONVERSION_RULES()",
        "autograph.core.config_lib.DoNotConvert(module_prefix)",
        "client.pywrap_tf_session.TF_DeleteDeviceList()",
        "client.pywrap_tf_session.TF_DeviceListCount()",
        "client.pywrap_tf_session.TF_DeviceListMemoryBytes()",
        "client.pywrap_tf_session.TF_DeviceListName()",
        "eager.cancellation.CancellationManager()",
        "eager.cancellation.CancellationManager.get_cancelable_function(self, concrete_function)",
        "eager.cancellation.CancellationManager.start_cancel(self)",
        "eager.context.context()",
        "eager.context.Context.disable_graph_collection(self)",
        "eager.context.Context.enable_graph_collection(self)",
        "eager.context.Context.export_run_metadata(self)",
        "eager.forwardprop_util.pack_tangents(tensors)",
        "eager.polymorphic_function.autograph_util.py_func_from_autograph(python_func, "
        "autograph_options=None)",
        "eager.polymorphic_function.polymorphic_function.Function.__call__(self, *args, **kwds)",
        "eager.polymorphic_function.polymorphic_function.Function._clone(self, python_function)",
        "eager.record.could_possibly_record()",
        "eager.record.record_operation(op_type, output_tensors, input_tensors, backward_function, "
        "forward_function=None)",
        "eager.record.should_record_backprop(tensors)",
        "eager.record.stop_recording()",
        "framework.config.is_op_determinism_enabled()",
        "framework.func_graph.FuncGraph(name, collections=None, capture_by_value=None, "
        "structured_input_signature=None, structured_outputs=None)",
        "framework.func_graph.FuncGraph.capture_call_time_value(self, closure, spec, key=None, "
        "default_value=None, placeholder=None)",
        "framework.function.Defun(*input_types, **kwargs)",
        "framework.op_def_registry.get(name)",
        "framework.tensor_util.constant_value_as_shape(tensor)",
        "ops.control_flow_util.GraphOrParentsInXlaContext(graph)",
        "ops.gen_nn_ops.bias_add_grad(out_backprop, data_format='NHWC', name=None)",
        "ops.gradients_util.PossibleTapeGradientTypes(tensors)",
        *(
            f"ops.gen_stateless_random_ops_v2.{name}(shape, key, counter, alg, {more}, name=None)"
            for name, more in DRAWS.items()
        ),
        "ops.random_ops_util._get_key_counter(seed, alg)",
        "ops.resource_variable_ops.BaseResourceVariable._read_variable_op(self, no_copy=False)",
        "ops.resource_variable_ops.BaseResourceVariable.sparse_read(self, indices, name=None)",
        "ops.resource_variable_ops.ResourceVariable(*args, **kwargs)",
        "ops.resource_variable_ops.variable_accessed(variable)",
        "ops.resource_variable_ops.BaseResourceVariable.assign(self, value, use_locking=None, "
        "name=None, read_value=True)",
        "pywrap_tfe.TFE_ContextListDevices()",
        "pywrap_tfe.TFE_Py_TapeSetRestartOnThread()",
    ),
}
# What is read of an object, or set on it.
ATTRIBUTES = {
    "keras.KerasTensor": "_keras_history",
    "keras.Layer": "_layers _losses",
    "keras.Model": "_compile_config _compile_loss",
    "keras.Operation": "_inbound_nodes",
    "keras.Optimizer": "_learning_rate _trainable_variables",
    "keras.Variable": "_value",
    "tensorflow.Tensor": "_keras_logits",
    "tensorflow.Variable": "_read_variable_op _unique_id",
    "tensorflow.python.eager.context.Context": "_handle _initialized _physical_devices "
    "function_call_options",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function": "_autograph "
    "_jit_compile",
    "tensorflow.python.framework.func_graph.FuncGraph": "_function_captures is_control_flow_graph "
    "outer_graph",
}

_LOCK = threading.Lock()
_SWITCHES: dict[tuple[int, str], "_Switch"] = {}


@functools.cache
def path_of(name: str) -> str:
    """Return the whole path of a function of FUNCTIONS, of which `name` is the end."""
    paths = [f"{top}.{row.partition('(')[0]}" for top, rows in FUNCTIONS.items() for row in rows]
    return next(path for path in paths if f".{path}".endswith(f".{name}"))


@functools.cache
def function(name: str) -> Any:
    """Return a function of FUNCTIONS.

    Args:
        name: the end of its path, such as "Function._clone".

    Raises:
        InputError: the installed release has none, or takes other parameters.
    """
    path = path_of(name)
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        raise _changed(f"{path} is missing") from None
    try:
        taken = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # no function, or one of C++
        return found
    row = f"{path}({', '.join(str(one.replace(annotation=one.empty)) for one in taken)})"
    if row not in (f"{top}.{known}" for top, rows in FUNCTIONS.items() for known in rows):
        raise _changed(f"there is {row}")
    return found


def attribute(owner: Any, name: str) -> Any:
    """Return an attribute of ATTRIBUTES.

    Args:
        owner: has it.
        name: of the attribute.

    Raises:
        InputError: the owner has none.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = type(owner)
        raise _changed(f"{kind.__module__}.{kind.__qualname__}.{name} is missing") from None


def _changed(what: str) -> InputError:
    return InputError(
        f"{what} in TensorFlow {tf.__version__} with Keras {keras.__version__}, which Towers does "
        f"not know: it is tested with {TESTED}; type {INSTALL}"
    )


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


def patched(*changes: tuple[str, Make]) -> Block:
    """Replace functions of FUNCTIONS in the block, by (name, make); see `replaced`."""
    parts = []
    for name, make in changes:
        function(name)
        owner, _, own_name = path_of(name).rpartition(".")
        parts.append((pkgutil.resolve_name(owner), own_name, make))
    return replaced(*parts)


# Layers.


def losses_of(layer: keras.Layer) -> list[Any]:
    """Return the list of losses that a layer has added. Public: `losses`, also of those below."""
    return attribute(layer, "_losses")


def patch_clearing_of_losses(make: Make) -> Block:
    """Replace the method by which a layer forgets the losses that it has added. Public: none."""
    return patched(("Layer._clear_losses", make))


def patch_batch_norm(make_call: Make, make_moments: Make) -> Block:
    """Replace BatchNormalization's `call` and `_moments`. Public: moments from elsewhere.

    Args:
        make_call: maps the current `call` to its replacement.
        make_moments: maps the current `_moments` to its replacement.
    """
    return patched(
        ("BatchNormalization.call", make_call), ("BatchNormalization._moments", make_moments)
    )


def has_own_moments(layer: keras.layers.BatchNormalization) -> bool:
    """Return whether a layer has a `_moments` of its own. Public: none to override."""
    classes = type(layer).__mro__[: type(layer).__mro__.index(keras.layers.BatchNormalization)]
    return any("_moments" in vars(one) for one in classes)


def layers_of(layer: keras.Layer) -> list[keras.Layer]:
    """Return a layer and all below it, each once, in order. Public: `layers`, of models only."""
    layers: dict[int, keras.Layer] = {}
    waiting = [layer]
    while waiting:
        layer = waiting.pop()
        if id(layer) not in layers:  # it may be shared, or refer to its parent
            layers[id(layer)] = layer
            waiting += reversed(attribute(layer, "_layers"))
    return list(layers.values())


@contextlib.contextmanager
def named_as_in_a_new_process() -> Iterator[None]:
    """Restart Keras' numbering of layers at dense, dense_1. Public: clear_session, drops more."""
    get, assign = (function(f"{name}_global_attribute") for name in ("get", "set"))
    before = get("object_name_uids")
    assign("object_name_uids", None)
    try:
        yield
    finally:
        assign("object_name_uids", before)


# Compiled models.


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return the arguments of `compile`. Public: get_compile_config, only names."""
    return dict(attribute(model, "_compile_config").config)


def batches_of(x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> tf.data.Dataset:
    """Return the batches of arguments like `keras.Model.fit`. Public: none; `fit` keeps them."""
    adapter = function("get_data_adapter")(x, y, sample_weight, batch_size=batch_size)
    return adapter.get_tf_dataset()


def direction_of(metric: keras.metrics.Metric) -> str | None:
    """Return "up" or "down", whichever is better, None if Keras does not know. Public: none."""
    return getattr(metric, "_direction", None)


def compiled_loss(model: keras.Model, y: Any, outputs: Any, weights: Any) -> Any:
    """Return the loss that `compile` was given, without what layers add.

    Its trackers of each output's loss are updated. Arguments: see `keras.Model.compute_loss`.
    Public: that function, which has all losses.
    """
    loss = attribute(model, "_compile_loss")
    function("CompileLoss.__call__")
    return loss(y, outputs, weights)


def maker_of(tensor: keras.KerasTensor) -> tuple[Any, int, list[Any]]:
    """Return a symbolic tensor's operation, the index of that output, and the op's inputs.

    Public: `layer.output`, for a layer that is called once.
    """
    operation, node, place = attribute(tensor, "_keras_history")
    nodes = attribute(operation, "_inbound_nodes")
    return operation, place, list(nodes[node].input_tensors) if node < len(nodes) else []


def open_scope() -> keras.StatelessScope | None:
    """Return the `keras.StatelessScope` of this thread. Public: none."""
    return function("get_stateless_scope")()


# Variables.


def value_of(variable: keras.Variable) -> tf.Variable | None:
    """Return a variable's own value, None before it has one. Public: `value`, by the scope."""
    return attribute(variable, "_value")


def set_value_of(variable: keras.Variable, value: tf.Variable) -> None:
    """Replace the `tf.Variable` of a Keras variable. Public: a device for add_weight.

    The new one has the id of the old one, by which optimizers know the variables that they were
    built for, and those that weight decay spares.

    Args:
        variable: keeps its name and path.
        value: of the same shape and type.
    """
    vars(value)["_unique_id"] = unique_id(value_of(variable))
    vars(variable)["_value"] = value


def make_variable(value: tf.Tensor) -> tf.Variable:
    """Return a variable that bypasses creator scopes. Public: tf.Variable, once in a function.

    Call it outside of the function's graph, and keep it as long as that is used.
    """
    return function("ResourceVariable")(value, trainable=False)


def created_outside(next_creator: Callable, **kwargs: Any) -> tf.Variable:
    """Create a variable outside of a function that is traced, for tf.variable_creator_scope.

    TensorFlow drops a function's first trace if it creates variables. Public: none; in
    tf.init_scope the function's own creator is still called.
    """
    if hasattr(kwargs["initial_value"], "graph"):  # a tensor of the function
        return next_creator(**kwargs)
    with tf.init_scope():
        return function("ResourceVariable")(**kwargs)


def patch_assignments(make: Callable[[str], Make]) -> Block:
    """Replace the methods, by name, that assign to a `tf.Variable`. Public: none."""
    function("BaseResourceVariable.assign")
    module = pkgutil.resolve_name(path_of("ResourceVariable").rpartition(".")[0])
    owners = module.BaseResourceVariable, module.ResourceVariable
    kinds = "assign", "scatter", "batch_scatter"
    names = [(owner, n) for owner in owners for n in vars(owner) if n.startswith(kinds)]
    return replaced(*((owner, name, make(name)) for owner, name in names))


def patch_reads(read: Callable[[tf.Variable, Callable], tf.Tensor]) -> Block:
    """Read each `tf.Variable` by `read(variable, before)`; `before(variable)` is TensorFlow's read.

    Tapes connect the value with the variable, as for TensorFlow's own read. Public: none; a
    variable creator could only make variables of another class.
    """

    def make_read(before: Callable) -> Callable:
        def read_recorded(variable: tf.Variable, no_copy: bool = False) -> tf.Tensor:
            function("variable_accessed")(variable)
            with function("stop_recording")():
                value = read(variable, before)
            function("record_operation")(
                "ReadVariableOp", [value], [variable.handle], lambda x: [x], lambda x: [x]
            )
            return value

        return read_recorded

    def make_read_rows(_: Callable) -> Callable:
        return lambda variable, indices, name=None: tf.gather(
            attribute(variable, "_read_variable_op")(), indices, name=name
        )

    owner = "BaseResourceVariable"
    return patched(
        (f"{owner}._read_variable_op", make_read), (f"{owner}.sparse_read", make_read_rows)
    )


# Calls of functions.


@contextlib.contextmanager
def graph_optimizer_set(**options: Any) -> Iterator[None]:
    """Set fields of `RewriterConfig` for the calls of functions in the block, in this thread.

    Public: tf.config.optimizer.set_experimental_options, after which TensorFlow optimizes all
    functions again.
    """
    context = function("context.context")()
    before = attribute(context, "function_call_options")
    config = tf.compat.v1.ConfigProto.FromString(before.config_proto_serialized)
    config.MergeFrom(tf.compat.v1.ConfigProto(graph_options={"rewrite_options": options}))
    context.function_call_options = type(before)(before.executor_type, config)
    try:
        yield
    finally:
        context.function_call_options = before


# Tapes, for which towers are one op.


def is_recording(tensors: Sequence[tf.Tensor] | None = None) -> bool:
    """Return whether a tape or accumulator records, if given one of these tensors. Public: none."""
    followed = function("pack_tangents")(list(tensors or ())).indices  # by each accumulator
    if tensors is None:
        return bool(followed) or function("could_possibly_record")()
    return any(followed) or function("should_record_backprop")(list(tensors))


def are_followed(variables: Sequence[tf.Variable]) -> bool:
    """Return whether a forward accumulator follows any of these. Public: none."""
    handles = [tf.convert_to_tensor(getattr(v, "handle", v)) for v in variables]
    return any(function("pack_tangents")(handles).indices)


def bias_gradients_alone() -> Block:
    """Compute gradients of biases apart from those of kernels, on a CPU.

    There TensorFlow fuses them, and a convolution's takes up to twice as long. Public: none.
    """

    def make(before: Callable) -> Callable:
        def gradient(out_backprop: tf.Tensor, data_format: Any = "NHWC", name: Any = None) -> Any:
            channels = out_backprop.shape[-1]
            if channels is not None and data_format in (None, "NHWC", b"NHWC"):
                out_backprop = tf.reshape(out_backprop, [-1, channels])  # which is not fused
            return before(out_backprop, data_format, name)

        return gradient

    return patched(("gen_nn_ops.bias_add_grad", make))


def gradients_of_outer_tapes(tape: tf.GradientTape) -> Block:
    """Prepare functions and loops for as many gradients as without this tape in other tapes.

    For gradients of gradients, TensorFlow traces each loop four times. A tape in a tape looks like
    that. Public: none.

    Args:
        tape: is active; the others see the calls that it records as one op.
    """

    def make(before: Callable) -> Callable:
        def order(tensors: Sequence[Any]) -> int:
            if not (own := before(tensors)):
                return own
            with tape.stop_recording():
                return max(1, before(tensors))

        return order

    return patched(("PossibleTapeGradientTypes", make))


def recording_restarted() -> Block:
    """Make new tapes and accumulators record within tf.init_scope. Public: none."""

    def make(before: Callable) -> Callable:
        def enter(recorder: Any) -> Any:
            function("TFE_Py_TapeSetRestartOnThread")()
            return before(recorder)

        return enter

    recorders = "GradientTape", "ForwardAccumulator"
    return patched(*((f"{recorder}.__enter__", make) for recorder in recorders))


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
    with function("stop_recording")():
        outputs = [tf.identity(value) for value in outputs]
    sources = [v.handle if isinstance(v, tf.Variable) else v for v in inputs]
    function("record_operation")(name, outputs, sources, backward)
    return outputs


def mask_of(tensor: Any) -> tf.Tensor | None:
    """Return the mask that Keras has attached to a tensor, None for none. Public: none."""
    return function("get_keras_mask")(tensor)


def set_mask(tensor: Any, mask: tf.Tensor | None) -> None:
    """Attach a mask of its first axes to a tensor, see `keras.layers.Masking`. Public: none."""
    function("set_keras_mask")(tensor, mask)


def logits_of(tensor: Any) -> tf.Tensor | None:
    """Return the logits that Keras has attached to probabilities, None for none. Public: none."""
    _check_logits()
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: tf.Tensor) -> None:
    """Attach their logits to probabilities, like `keras.activations.softmax`. Public: none."""
    _check_logits()
    vars(tensor)["_keras_logits"] = logits


@functools.cache
def _check_logits() -> None:
    with tf.init_scope(), tf.device("/cpu:0"):
        attribute(keras.ops.softmax(tf.zeros([1, 2])), "_keras_logits")


# Keras' optimizers, which know one device.


def weights_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the weights that an optimizer has been built for. Public: none."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return attribute(optimizer, "_trainable_variables") if optimizer.built else []


def schedule_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return the learning-rate schedule, None without one. Public: `learning_rate`, its value."""
    rate = attribute(optimizer, "_learning_rate")
    return None if isinstance(rate, keras.Variable) else rate


def gradients_kept(optimizer: keras.optimizers.Optimizer) -> Block:
    """Keep Keras from sending all gradients through one op on one device. Public: none."""
    function("Optimizer._all_reduce_sum_gradients")
    return replaced((optimizer, "_all_reduce_sum_gradients", lambda _: list))


def index_of(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> int:
    """Return the place of a variable's slot in each list of slots. Public: none.

    Args:
        optimizer: built.
        variable: that it updates.
    """
    return function("Optimizer._get_variable_index")(optimizer, variable)


def unique_id(variable: tf.Variable) -> str:
    """Return a Keras optimizer's key of a variable. Public: `ref()`, which Keras does not use."""
    return attribute(variable, "_unique_id")


def decays(optimizer: keras.optimizers.Optimizer, weight: keras.Variable) -> bool:
    """Return whether a built optimizer decays a weight apart from the gradient. Public: none.

    Args:
        optimizer: of Keras.
        weight: one of its weights.
    """
    uses = function("Optimizer._use_weight_decay")
    return optimizer.weight_decay is not None and uses(optimizer, weight.value)


# Random draws: tf.random.stateless_* and Keras use these ops, which take key and counter. Public:
# these functions take a seed, with which a draw cannot start in the middle.


def patch_draws(draw: Callable) -> Block:
    """Call `draw(name, ...)` in place of the ops in DRAWS, in this thread."""
    makes = {name: lambda _, name=name: functools.partial(draw, name) for name in DRAWS}
    return patched(*makes.items())


def patch_keys(key_and_counter: Callable) -> Block:
    """Take key and counter of draws from `key_and_counter(seed)`. Public: none takes a key."""
    make = lambda _: lambda seed, _alg: key_and_counter(seed)  # noqa: E731
    return patched(("_get_key_counter", make))


def state_of_unseeded_draws() -> tf.Variable:
    """Return the state of Keras' generator for draws without a seed. Public: set_random_seed."""
    return function("global_seed_generator")().state.value


def draw_op(name: str) -> Callable:
    """Return TensorFlow's own op of a name in DRAWS, even if it is patched."""
    return function(name)


# Functions and graphs.


# Do not convert this package in the user's `tf.function`s: that takes seconds, and nothing here
# branches on tensors. Public: `do_not_convert`, which would exclude called user functions, too.
vars(pkgutil.resolve_name(path_of("CONVERSION_RULES").rpartition(".")[0]))["CONVERSION_RULES"] = (
    function("DoNotConvert")("towers"),
    *function("CONVERSION_RULES"),
)


def converted_as_here(fn: Callable) -> Callable:
    """Return `fn` converted by AutoGraph if that is enabled here. Public: none."""
    status = function("control_status_ctx")()
    if status.status.name != "ENABLED":
        return fn
    return function("tf_convert")(fn, status)


def called_graph(op: tf.Operation, name: str) -> tf.Graph | None:
    """Return the graph of the function that an op calls. Public: only its name.

    Args:
        op: a call, a loop, a branch, or any other op.
        name: of the attribute that names the function: "f", "body", "then_branch" ...

    Returns:
        The graph; None if the op has no such attribute or the function is unknown to its graph.
    """
    if name not in _function_attributes(op.type):
        return None
    found = function("Graph._get_function")(op.graph, op.get_attr(name).name)
    return found and found.graph


@functools.cache  # a graph has many ops of few types, and reading an attribute takes 20 us
def _function_attributes(op_type: str) -> frozenset[str]:
    attributes = getattr(function("op_def_registry.get")(op_type), "attr", ())
    return frozenset(one.name for one in attributes if one.type == "func")


def set_input(op: tf.Operation, tensor: tf.Tensor) -> None:
    """Replace an op's first input. Public: none.

    Args:
        op: of a graph.
        tensor: of the same graph and type; it may be made later than the op.
    """
    function("Operation._update_input")(op, 0, tensor)


def graphs_around(graph: tf.Graph) -> Iterator[tuple[tf.Graph, bool]]:
    """Yield a graph and those around it, and whether each is a loop's or branch's. Public: none."""
    while isinstance(graph, function("FuncGraph")):
        yield graph, attribute(graph, "is_control_flow_graph")
        graph = attribute(graph, "outer_graph")
    if graph is not None:
        yield graph, False


def function_of(graph: tf.Graph) -> tf.Graph:
    """Return the graph of the function around a loop's or branch's graph. Public: none."""
    return next(around for around, is_inner in graphs_around(graph) if not is_inner)


def patch_integer_ops(make: Callable[[str], Make]) -> Block:
    """Replace Keras' ops, by name, that compute with int32 on the host. Public: none."""
    return patched(*((f"numpy.{name}", make(name)) for name in ("take", "signbit", *_COMPARISONS)))


def is_to_be_compiled(tf_function: Any) -> bool:
    """Return whether XLA compiles a `tf.function`. Public: none."""
    return bool(attribute(tf_function, "_jit_compile"))


def convolve_without_xla() -> Block:
    """Compute convolutions with groups on GPUs by their own kernels, as those without groups.

    Keras compiles them by XLA, since CPUs have no kernel for their gradients. Public: none.
    """

    def make(before: Callable) -> Callable:
        def call(tf_function: Any, *args: Any, **kwargs: Any) -> Any:
            inner = tf_function.python_function
            of_keras = inner.__module__ == "keras.src.backend.tensorflow.nn"
            if of_keras and is_to_be_compiled(tf_function) and _on_gpu():
                return inner(*args, **kwargs)
            return before(tf_function, *args, **kwargs)

        return call

    return patched(("Function.__call__", make))


def _on_gpu() -> bool:
    """Return whether ops that are made here run on a GPU."""
    device = tf.zeros([]).device
    return "GPU" in device or (not device and bool(tf.config.list_logical_devices("GPU")))


def clone_of(tf_function: Any) -> Any:
    """Return a `tf.function` that is traced again. Public: none, with the same options."""
    return function("Function._clone")(tf_function, None)


def converted_function_of(tf_function: Any) -> Callable:
    """Return the function of a `tf.function`, as AutoGraph converts it. Public: unconverted."""
    inner = tf_function.python_function
    return (
        function("py_func_from_autograph")(inner) if attribute(tf_function, "_autograph") else inner
    )


def captured_by_call(graph: tf.Graph, value: Callable, spec: tf.TensorSpec) -> tf.Tensor:
    """Return a tensor that has the value of `value()` in each call of a graph's function.

    `value` is called where the function is called: with its own closure, calls from another
    function would all get one value. Public: an argument of the function.

    Args:
        graph: of a function.
        value: returns a list of one tensor.
        spec: of the tensor.
    """
    key, capture = object(), function("FuncGraph.capture_call_time_value")
    placeholder = capture(graph, lambda: None, spec, key)
    value.output_spec = spec
    captures = attribute(graph, "_function_captures")
    add_or_replace = function("FunctionCaptures.add_or_replace")
    add_or_replace(captures, key, value, placeholder, spec, is_by_ref=True)
    return placeholder


def cancelable(concrete: Any) -> tuple[Callable, Callable]:
    """Return a concrete function, and a function that cancels its call. Public: none."""
    manager = function("CancellationManager")()
    called = function("CancellationManager.get_cancelable_function")(manager, concrete)
    return called, functools.partial(function("CancellationManager.start_cancel"), manager)


def is_compiled_by_xla(graph: tf.Graph) -> bool:
    """Return whether XLA will compile a graph that is being traced. Public: none."""
    return function("GraphOrParentsInXlaContext")(graph)


def static_shape(shape: Any) -> tf.TensorShape:
    """Return the static part of a shape or tensor. Public: get_static_value, all or none."""
    shape = tf.convert_to_tensor(shape, tf.int32)
    return function("tensor_util.constant_value_as_shape")(shape)


@contextlib.contextmanager
def executed_graphs() -> Iterator[list[list[tf.compat.v1.GraphDef]]]:
    """Collect the graphs, by device, of each function that runs in the block. Public: none."""
    graphs: list[list[tf.compat.v1.GraphDef]] = []
    context = function("context")()
    function("Context.enable_graph_collection")(context)
    try:
        yield graphs
        for function_graphs in function("Context.export_run_metadata")(context).function_graphs:
            graphs.append(list(function_graphs.partition_graphs))
    finally:
        function("Context.disable_graph_collection")(context)


# The start of TensorFlow, and its devices.


def has_listed_devices() -> bool:
    """Return whether TensorFlow has listed the devices. Public: none."""
    return attribute(function("context")(), "_physical_devices") is not None


def has_started() -> bool:
    """Return whether TensorFlow has started. Public: none."""
    return attribute(function("context")(), "_initialized")


def ops_are_deterministic() -> bool:
    """Return whether op determinism is on, by a call or TF_DETERMINISTIC_OPS=1. Public: none."""
    return function("config.is_op_determinism_enabled")()


def device_memory_bytes() -> dict[str, int]:
    """Return {"/gpu:0": bytes that TensorFlow may use} of this process' devices. Public: none.

    TensorFlow must have started.
    """
    devices = function("TFE_ContextListDevices")(attribute(function("context")(), "_handle"))
    try:
        result = {}
        for i in range(function("TF_DeviceListCount")(devices)):
            name = function("TF_DeviceListName")(devices, i)
            kind, _, number = name.rpartition("device:")[2].partition(":")
            if tf.DeviceSpec.from_string(name).job not in (None, "localhost"):
                continue  # of another process
            result[f"/{kind.lower()}:{number}"] = function("TF_DeviceListMemoryBytes")(devices, i)
        return result
    finally:
        function("TF_DeleteDeviceList")(devices)
