"""A Keras model's own steps, with its forward passes on towers.

While a step of the model is traced, each outermost layer that it calls, usually the model itself,
runs on towers, and its outputs are concatenated (`TowerBuilder.concat`). Loss, metrics and update
are Keras' or the user's own, computed once, over the global batch.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder import batch_norm, trials
from towers.builder.device_names import HOST
from towers.builder.passes import CopiesError, Passes, TowerGradients, concat
from towers.builder.replica_context import WeightCopies, integers_on
from towers.builder.replica_scope import SEED_STATE, ReplicaScope
from towers.builder.sharding import slices_of
from towers.builder.tower import TowerBuilder
from towers.errors import InputError, RunError, first_line
from towers.formatting import count
from towers.training.step import fused_update, train_state
from towers.training.step.train_state import optimizers_of
from towers.training.step.weight_copies import (
    KeptCopies,
    acts_on_batches,
    can_keep,
    is_linear,
    send,
)

_STEPS = ("train_step", "test_step", "predict_step")
_BATCH = object()  # stands for a tensor among arguments
_PROBABILITIES = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}  # Keras looks for such ops
_CONSTANTS = (bool, int, float, str, type(None))
_MAKERS = ("make_train_function", "make_test_function", "make_predict_function")
_CallbackList = keras.callbacks.CallbackList
_CALLS = (
    "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
)  # fmt: skip


def put_on(model: keras.Model, builder: TowerBuilder, replicated: bool = False) -> keras.Model:
    """Run the steps of a model on towers; return the model.

    Args:
        model: any Keras model, changed in place.
        builder: of the towers.
        replicated: whether each tower has the weights on its device; otherwise all read the same.
    """
    unparallelize(model)
    steps = _Steps(model, builder, replicated)
    steps.of_instance = {n: vars(model)[n] for n in _Steps.REPLACED if n in vars(model)}
    vars(model)["_tower_steps"] = steps
    for name in _STEPS:
        step = functools.partial(lambda name, *args: steps.method(name)(*args), name)
        vars(model)[name] = steps.outermost_on_towers(step, name)
    vars(model).update({name: steps.made_for_towers(name) for name in _MAKERS})
    vars(model).update({name: steps.called_for_towers(name) for name in _CALLS})
    return model


def idle_notes(batch_size: int, num_towers: int) -> list[str]:
    """Return a note if a batch leaves towers without examples.

    Args:
        batch_size: number of examples.
        num_towers: number of towers.
    """
    idle = max(num_towers - batch_size, 0)
    note = f"no example for {count(idle, 'tower')}; use a batch size of at least {num_towers}"
    return [note] if idle else []


def unparallelize(model: keras.Model) -> keras.Model:
    """Run a model on one device again, as plain Keras does; return it."""
    if steps := vars(model).pop("_tower_steps", None):
        for name in _Steps.REPLACED:
            vars(model).pop(name, None)
        vars(model).update(steps.of_instance)
    for name in ("train_function", "test_function", "predict_function"):  # traced before
        if name in vars(model):
            delattr(model, name)  # None alone would leave it to TensorFlow, as part of a checkpoint
        setattr(model, name, None)
    return model


def builder_of(model: keras.Model) -> TowerBuilder | None:
    """Return the builder of a model's towers; None if it runs on one device."""
    steps = vars(model).get("_tower_steps")
    return steps and steps.builder


def method_of(model: keras.Model, name: str) -> Callable:
    """Return a method of a model without towers.

    Args:
        model: on towers or not.
        name: "train_step", "test_step" or "predict_step".
    """
    steps = vars(model).get("_tower_steps")
    return steps.method(name) if steps else getattr(model, name)


def traced(model: keras.Model, trace: Callable[[], Any]) -> Any:
    """Trace a step; trace it again on one device, with a warning, if it fails on towers.

    Args:
        model: the model of the step; it may be on no towers.
        trace: traces the step, or calls a function that does; returns any value.
    """
    steps = vars(model).get("_tower_steps")
    while True:
        try:
            return trace()
        except Exception:
            if steps is None or not (steps.give_up_copies() or steps.give_up_towers()):
                raise


def passes_of(model: keras.Model) -> Passes:
    """Return the passes of a model's last traced step on towers."""
    steps = vars(model).get("_tower_steps")
    return steps.passes if steps else Passes()


class _Steps:
    """A model's steps on towers."""

    REPLACED = (*_STEPS, *_MAKERS, *_CALLS)

    def __init__(self, model: keras.Model, builder: TowerBuilder, replicated: bool = False):
        self.model, self.builder, self._device = model, builder, builder.gather_device
        self._replicated = replicated and len(builder.devices) > 1
        self._kept: KeptCopies | None = None  # which the train function updates
        self._traced: KeptCopies | None = None  # those of the step that is traced
        self._are_old = True  # whether something else may have changed the weights since then
        # Whether only Keras' own code runs between two steps, as in `fit`; None: nobody knows.
        self._is_undisturbed: bool | None = None
        self._must_give_up = False  # the copies that are kept
        self.of_instance: dict[str, Callable] = {}  # methods that were set on the model itself
        self.passes = Passes()  # of the step that is traced
        self._graph = tf.compat.v1.get_default_graph()  # of it
        self._assigned: list[tf.Variable] = []  # by it, on no tower and by no optimizer
        self._placed: set[int] = set()  # ids of variables
        self._batch: Any = None  # real, while a function is traced for the first time
        self._is_first = False  # whether the next trace is the first of its function
        self._failed: tuple[str, Exception] | None = None  # a step that was traced on towers
        self._on_one_device: dict[str, str] = {}  # {step: why}
        self._num_steps = {True: 0, False: 0}  # that were made: whether of training
        self._may_be_due = False  # a check of them
        self._is_on_one_device = False  # the step that is traced
        self._functions: dict[tuple, Callable] = {}  # each is analyzed once

    def method(self, name: str) -> Callable:
        """Return the model's method without towers, as it is now."""
        of_class = functools.partial(getattr(type(self.model), name), self.model)
        return self.of_instance.get(name, of_class)

    def outermost_on_towers(self, fn: Callable, name: str) -> Callable:
        """Return a function, step `name` of the model, with its outermost layers on towers."""

        def with_towers(*args: Any) -> Any:
            self.passes, self._graph = Passes(), tf.compat.v1.get_default_graph()
            self._traced = self._kept if name == "train_step" else None
            optimizer = getattr(self.model, "optimizer", None)
            self.builder.dense_gradients = self._replicated and is_linear(optimizer)
            self._is_on_one_device = name in self._on_one_device
            is_first, self._is_first = self._is_first, False
            self._failed, can_fail = None, not tf.executing_eagerly()
            update = functools.partial(self._update, args)
            joined = fused_update.updates_joined(optimizers_of(self.model), update)
            calls = tf_internals.replaced((keras.Layer, "__call__", self._make_call))
            known = trials.feed_values(args, self._batch)
            plain = tf_internals.convolve_without_xla()  # where layers run on one device, too
            owners = (tf, tf.compat.v1) if self._replicated and not self._is_on_one_device else ()
            taped = tf_internals.replaced(*((o, "gradients", self._taped_only) for o in owners))
            with contextlib.ExitStack() as stack:
                for each in (tf.device(self._device), joined, calls, known, plain, taped):
                    stack.enter_context(each)
                if is_first and can_fail:
                    stack.enter_context(tf.variable_creator_scope(tf_internals.created_outside))
                stack.enter_context(integers_on(self._device))
                try:
                    with self._assignments_checked():
                        result = fn(*args)
                except Exception as error:
                    refused = _found_in(error, RunError)  # by a check, for on_inexact="stop"
                    if not self._on_one_device.pop(name, "") and can_fail and not refused:
                        self._failed = name, error
                        self.builder.forget(self._graph)
                    self._must_give_up = _found_in(error, CopiesError) is not None
                    raise
            if why := self._on_one_device.get(name):
                self._warn(f"{name} of model {self.model.name} runs on one device: {why}")
            return result

        with_towers.__qualname__ = f"{type(self.model).__name__}.{name}"  # TensorFlow may print it
        # TensorFlow counts the traces of a function's code, which all models would share.
        return functools.partial(with_towers)

    def _taped_only(self, original: Callable) -> Callable:
        """Return tf.gradients without use in the step itself."""

        def gradients(*args: Any, **kwargs: Any) -> Any:
            if tf.compat.v1.get_default_graph() is self._graph:
                raise InputError(
                    "tf.gradients does not see the weights of all towers; use tf.GradientTape, or "
                    'towers.parallelize(model, variables="cpu")'
                )
            return original(*args, **kwargs)

        return gradients

    def give_up_copies(self) -> bool:
        """Send the weights in each step, if the towers have just refused copies that are kept."""
        given_up, self._must_give_up = self._must_give_up, False
        if given_up:
            self._kept = None
        return given_up

    def give_up_towers(self) -> bool:
        """Trace the step that has just failed on towers on one device; return if there is one."""
        failed, self._failed = self._failed, None
        if failed:
            name, error = failed
            self._on_one_device[name] = _reason(error)
        return failed is not None

    def run_on_one_device(self, step: str, reason: str) -> None:
        """Run a step that was made on one device from its next call on, with a warning.

        Args:
            step: "train_step", "test_step" or "predict_step".
            reason: end of the warning.
        """
        function = step.replace("step", "function")
        if getattr(self.model, function):
            getattr(self.model, f"make_{function}")(force=True)
            self._on_one_device[step] = reason

    def _update(self, batch: Any, optimizer: keras.optimizers.Optimizer, *args: Any) -> None:
        """Make an optimizer's update, of copies of the weights, too."""
        gradients, weights, update = args
        with self._assignments_known():
            update()
        if self._traced:
            self._traced.update(optimizer, gradients, weights, self.passes.gradients)
        is_here = tf.compat.v1.get_default_graph() is self._graph
        if self.passes.gradients is None and is_here:
            self.passes.gradients = TowerGradients.of_one_tower(batch, gradients)

    @contextlib.contextmanager
    def _assignments_checked(self) -> Iterator[None]:
        """Raise CopiesError if copies of variables do not follow an assignment in the block."""
        if not self._traced:
            yield
            return
        try:
            with train_state.record_assignments(self._assigned):
                yield
            self._traced.check(self._assigned)
        finally:
            self._assigned.clear()  # a variable that is held cannot be moved

    @contextlib.contextmanager
    def _assignments_known(self) -> Iterator[None]:
        """Do not note the assignments in the block: copies of variables follow them."""
        number = len(self._assigned)
        yield
        del self._assigned[number:]

    def made_for_towers(self, name: str) -> Callable:
        """Return a replacement of a `make_*_function` method, whose function runs on towers.

        XLA does not compile the function as a whole, which would put it on one device.
        """
        attribute = name.removeprefix("make_")  # of the model

        @functools.wraps(getattr(type(self.model), name))
        def make_for_towers(force: bool = False) -> Any:
            model, by_xla, before = self.model, self.model.jit_compile, vars(self.model)[attribute]
            model.jit_compile = False
            try:
                self.method(name)(force)
            finally:
                model.jit_compile = by_xla
            function = vars(model)[attribute]
            if function is before:
                return function
            self._functions.clear()  # a stage of the model's own may be another
            self._on_one_device.pop(attribute.replace("function", "step"), None)
            self.builder.forget()
            new = [optimizer for optimizer in optimizers_of(model) if not optimizer.built]
            self._place([v for part in (model, *model.metrics, *new) for v in part.variables])
            trains, is_first = name == "make_train_function", True
            if trains:
                self._kept = self._make_copies()

            @functools.wraps(function)
            def placed(*args: Any) -> Any:
                nonlocal is_first
                if trains:
                    self._check_if_due()  # Keras has shown the step before
                    if (instead := getattr(model, attribute)) not in (None, placed):
                        return instead(*args)
                if is_first and self.builder.num_slices > 1:
                    args = tuple(map(self._with_first_batch_kept, args))
                    rows = next(filter(_is_batch, tf.nest.flatten(self._batch)), None)
                    if trains and rows is not None:
                        self.builder.warn(idle_notes(rows.shape[0], len(self.builder.devices)))
                self._is_first, is_first = is_first, False
                # Keras' loop over steps waits for its condition, which is on the host. For a
                # single step nothing is copied to the host.
                if trains and self._kept and self._are_old:
                    self._kept.set()
                deferred, self.builder.checks.is_deferred = self.builder.checks.is_deferred, True
                try:
                    with tf.device(HOST if model.steps_per_execution > 1 else self._device):
                        result = traced(model, lambda: function(*args))
                    self._num_steps[trains] += model.steps_per_execution
                    self._may_be_due = True
                    return result
                finally:
                    self.builder.checks.is_deferred = deferred
                    self._batch, self._is_first = None, False
                    self._are_old = not (trains and self._is_undisturbed)

            setattr(model, attribute, placed)
            return placed

        return make_for_towers

    def called_for_towers(self, name: str) -> Callable:
        """Return a method such as `fit`, with its input and loose ops on the first tower's GPU.

        It notes whether code of the user's runs between two steps.
        """
        first = self.builder.devices[0]
        is_second = first.startswith("/gpu:") and first != "/gpu:0"  # where they would run

        @functools.wraps(getattr(self.model, name))
        def call(*args: Any, **kwargs: Any) -> Any:
            is_undisturbed = None
            if name == "fit":
                is_undisturbed, args, kwargs = self._with_boundaries(*args, **kwargs)
            elif name == "train_on_batch":
                is_undisturbed = False
            before, self._is_undisturbed = self._is_undisturbed, is_undisturbed
            try:
                with tf.device(first) if is_second else contextlib.nullcontext():
                    result = self.method(name)(*args, **kwargs)
                self._check_if_due()
                return result
            finally:
                self._is_undisturbed, self._are_old = before, True

        return call

    def _check_if_due(self) -> None:
        """Make the checks that are due after the steps that were made since the last ones."""
        may_be_due, self._may_be_due = self._may_be_due, False
        checks = self.builder.checks
        found = may_be_due and checks.after_step(self._num_steps[True] or self._num_steps[False])
        for step in _STEPS if found and checks.on_inexact == "one_device" else ():
            self.run_on_one_device(step, found[0])

    def _with_boundaries(self, *args: Any, **kwargs: Any) -> tuple[bool, tuple, dict]:
        """Return whether only Keras' code runs between steps, and arguments of `fit` to know it."""
        is_keras = type(self.model).fit is keras.Model.fit and "fit" not in self.of_instance
        given = inspect.signature(self.method("fit")).bind(*args, **kwargs)
        callbacks = given.arguments.get("callbacks")
        if not (is_keras and self._replicated) or isinstance(callbacks, _CallbackList):
            return False, args, kwargs
        callbacks = tf.nest.flatten(callbacks) if callbacks else []
        # Other callbacks may act at an epoch; calls of `fit` and `evaluate` are noted anyway.
        begin = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_: setattr(self, "_are_old", True)
        )
        given.arguments["callbacks"] = [*callbacks, begin]
        return not any(map(acts_on_batches, callbacks)), given.args, given.kwargs

    def _make_copies(self) -> KeptCopies | None:
        """Return copies of the weights for a train function to update, if it can be followed."""
        model, is_own = self.model, type(self.model).train_step is not keras.Model.train_step
        if is_own or "train_step" in self.of_instance or self._is_undisturbed is False:
            return None
        can = self._replicated and can_keep(model.optimizer) and not model.run_eagerly
        return KeptCopies(self.builder.devices, model) if can else None

    def _with_first_batch_kept(self, iterator: Any) -> Any:
        """Keep the first batch for the analysis; return an iterator of one call's batches."""
        batches: list[Any] = []
        try:
            spec = iterator.element_spec
            taken = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
        except (AttributeError, TypeError, ValueError):  # no iterator of tf.data
            return iterator
        batches += itertools.islice(iterator, self.model.steps_per_execution)
        self._batch = batches[0] if batches else None
        return iter(taken)

    def _make_call(self, keras_call: Callable) -> Callable:
        self._keras_call = keras_call

        def call(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            leaves = tf.nest.flatten((args, kwargs))
            inside = isinstance(tf_internals.open_scope(), ReplicaScope)
            if inside or any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                return keras_call(layer, *args, **kwargs)
            if any(isinstance(leaf, tf.experimental.ExtensionType) for leaf in leaves):
                reason = "an argument is an ExtensionType; pass a dict of its tensors"
                self._warn(f"layer {layer.name} runs on one device: {reason}")
                with self._plain():
                    return keras_call(layer, *args, **kwargs)
            if not any(map(_is_batch, leaves)):
                return keras_call(layer, *args, **kwargs)
            if tf.executing_eagerly():  # towers would run one after the other
                self._warn("run_eagerly=True: all steps run on one device")
                return keras_call(layer, *args, **kwargs)
            return self._call_on_towers(layer, (args, kwargs))

        return call

    def _warn(self, line: str) -> None:
        """Report what runs on one device, unless there is one tower anyway."""
        self.builder.warn([line] if self.builder.num_slices > 1 else [])

    def _call_on_towers(self, layer: keras.Layer, arguments: tuple) -> Any:
        leaves = tf.nest.flatten(arguments)
        fn, batch = self._function(layer, arguments, leaves)
        self._build(layer, fn, batch)
        self._place(layer.variables)
        if self._is_on_one_device:
            return self._call_alone(layer, arguments)
        if self.builder.num_slices == 1 and not self.builder.jit_compile:
            tower = self.builder.devices[0]
            fused = batch_norm.over_all_towers(None, "local", tower)
            with tf.device(tower), tf.name_scope("tower_0"), integers_on(tower), fused:
                return self._call_alone(layer, arguments)
        if reason := self._reason_against(layer, fn, batch):
            with tf.device(self._device):
                outputs = self._call_alone(layer, arguments)
            # Last: a call that Keras refuses, too, as of a wrong shape, fails for that reason.
            self._warn(f"layer {layer.name} runs on one device: {reason}")
            return outputs
        self.passes.copy = functools.partial(self._weights_of_towers, layer)
        with self._assignments_known():
            return _with_logits(*concat(self.builder, fn, batch, self.passes))

    def _call_alone(self, layer: keras.Layer, arguments: tuple) -> Any:
        """Call a layer as Keras does; note the values before its assignments, as towers do."""

        def assign(before: Callable, variable: tf.Variable, *args: Any, **kwargs: Any) -> Any:
            with self._graph.as_default():
                self.passes.note_value(variable)
            return before(variable, *args, **kwargs)

        noted = tf_internals.patch_assignments(lambda _: lambda b: functools.partial(assign, b))
        with self._plain(), noted:
            return layer(*arguments[0], **arguments[1])

    def _weights_of_towers(self, layer: keras.Layer, devices: Sequence[str]) -> WeightCopies:
        """Return what towers on these devices read in place of a layer's weights."""
        weights = [v for v in layer.trainable_variables if v.value.dtype.is_floating]
        if not self._replicated or len(devices) == 1 or not weights:
            return ()
        graphs = tf_internals.graphs_around(tf.compat.v1.get_default_graph())
        inner = itertools.takewhile(lambda around: around[0] is not self._graph, graphs)
        if any(is_in_branch for _, is_in_branch in inner):  # whose gradients no tape makes
            return ()
        if self._traced is None or len(devices) < len(self.builder.devices):
            return send(weights, devices)
        return self._traced.of([*weights, *(v for v in layer.variables if v.name == SEED_STATE)])

    def _reason_against(self, layer: keras.Layer, fn: Callable, batch: Sequence[Any]) -> str:
        """Return why a layer cannot run on towers, each with a part of the batch; or ""."""
        if tf_internals.are_followed([v.value for v in layer.trainable_variables]):
            return "a tf.autodiff.ForwardAccumulator follows its weights"
        if self.builder.num_slices == 1:
            return ""
        if len(sizes := list(dict.fromkeys(x.shape[0] for x in batch))) > 1:
            known = " and ".join("any number of" if n is None else str(n) for n in sizes)
            return f"its arguments have {known} rows, not all one for each example"
        analysis = self.builder.analyze(
            fn, *batch, silent=True, backward=tf_internals.is_recording()
        )
        known = trials.is_known
        hint = "" if all(map(known, batch)) else "; set shapes in the data set: tf.ensure_shape"
        if analysis.trace is None:
            return f"it cannot be called with another number of examples ({analysis.reason}){hint}"
        if analysis.unjoinable_reason:
            return f"{analysis.unjoinable_reason}{hint or '; compute this outside of the layer'}"
        number = next((x.shape[0] for x in batch if x.shape[0]), 1)
        slices = slices_of(number, len(self.builder.devices), self.builder.accumulate_steps)
        return analysis.single_example_reason if any(size == 1 for _, size in slices) else ""

    def _function(
        self, layer: keras.Layer, arguments: tuple, leaves: Sequence[Any]
    ) -> tuple[Callable, list[Any]]:
        """Return the towers' function, cached by call, and its batch: the leaves with rows."""
        batch = [leaf for leaf in leaves if _is_batch(leaf)]
        fixed = [_BATCH if _is_batch(leaf) else leaf for leaf in leaves]
        structure = tf.nest.map_structure(lambda _: 0, arguments)
        if not all(leaf is _BATCH or isinstance(leaf, _CONSTANTS) for leaf in fixed):
            return _function_of(layer, structure, fixed), batch
        key = layer, repr((structure, fixed))
        if key not in self._functions:
            self._functions[key] = _function_of(layer, structure, fixed)
        return self._functions[key], batch

    def _build(self, layer: keras.Layer, fn: Callable, batch: Sequence[Any]) -> None:
        """Build layers as Keras does, in a trace that is dropped: towers create no variables."""
        if all(below.built for below in tf_internals.layers_of(layer)):
            return

        def build(*tensors: Any) -> None:
            fn(*tensors)  # which may return more than tensors

        following, known = tf_internals.recording_restarted(), self._assignments_known()
        with tf.init_scope(), tf.device(self._device), self._plain(), following, known:
            specs = map(tf.type_spec_from_value, batch)
            tf.function(build, autograph=False).get_concrete_function(*specs)

    def _plain(self) -> contextlib.AbstractContextManager:
        """Call layers in the block as Keras does."""
        return tf_internals.replaced((keras.Layer, "__call__", lambda _: self._keras_call))

    def _place(self, variables: Sequence[keras.Variable]) -> None:
        """Move new variables to their device, before a function that is kept reads them.

        Weights of an optimizer that is already built stay beside its slots, and variables where
        another function reads them.
        """
        new = [v for v in variables if id(v) not in self._placed]
        self._placed |= {id(v) for v in new}
        optimizers = optimizers_of(self.model)
        with_slots = {id(v) for optimizer in optimizers for v in tf_internals.weights_of(optimizer)}
        weights, others = [], []
        for v in new:
            if id(v) not in with_slots:
                (weights if v.trainable and self._replicated else others).append(v)
        with tf.init_scope():
            stay = train_state.move_all(weights, self.builder.devices[0])
            stay += train_state.move_all(others, self._device)
        if stay:
            self.builder.warn([
                f"{len(stay)} variables, such as {stay[0].path}, cannot be moved, because "
                "an earlier tf.function reads them. Results are the same, but each step copies "
                "more; call towers.parallelize first"
            ])  # fmt: skip


def _reason(error: Exception) -> str:
    """Return why towers cannot run a step whose trace has raised an error."""
    if refusal := _found_in(error, InputError):
        return str(refusal)
    return f"it raises {type(error).__name__} on towers: {first_line(error)}"


def _found_in(error: BaseException | None, kind: type) -> Any:
    """Return the error of towers that led to an error, as tf.vectorized_map raises another."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _function_of(layer: keras.Layer, structure: tuple, fixed: Sequence[Any]) -> Callable:
    """Return the towers' function: a layer's tensors -> (outputs, {output index: logits}).

    Keras' losses use the logits of outputs that are probabilities, which round to 0 and 1.
    """

    def fn(*batch: Any) -> tuple[Any, dict[int, dict[str, tf.Tensor]]]:
        tensors = iter(batch)
        leaves = [next(tensors) if leaf is _BATCH else leaf for leaf in fixed]
        args, kwargs = tf.nest.pack_sequence_as(structure, leaves)
        outputs = layer(*args, **kwargs)
        by_output = {i: _logits_of(output) for i, output in enumerate(tf.nest.flatten(outputs))}
        return outputs, {i: logits for i, logits in by_output.items() if logits}

    return fn


def _logits_of(output: Any) -> dict[str, tf.Tensor]:
    """Return {op that makes probabilities, or "": logits} of an output, {} without logits."""
    if (logits := tf_internals.logits_of(output)) is not None:
        return {"": logits}
    made_by = output.op.type if isinstance(output, tf.Tensor) else ""
    return {made_by: output.op.inputs[0]} if made_by in _PROBABILITIES else {}


def _with_logits(outputs: Any, logits: dict[int, dict[str, tf.Tensor]]) -> Any:
    """Return joined outputs with the logits where Keras' losses look for them."""
    flat = tf.nest.flatten(outputs)
    for i, of_output in logits.items():
        ((made_by, value),) = of_output.items()
        if made_by:
            flat[i] = _PROBABILITIES[made_by](value)
        else:
            tf_internals.set_logits(flat[i], value)
    return tf.nest.pack_sequence_as(outputs, flat)


def _is_batch(leaf: Any) -> bool:
    """Return whether an argument of a layer has a row for each example."""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    return isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and leaf.shape.rank != 0
