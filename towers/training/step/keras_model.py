"""What a user's Keras model overrides of a step, and the type in which its layers compute."""

import contextlib
from collections.abc import Callable, Iterator

import keras

from towers.tf_internals import floatx_set

_OF_A_STEP = ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics",
              "make_train_function", "make_test_function", "make_predict_function")  # fmt: skip


def overrides(model: keras.Model, *names: str) -> bool:
    """Return whether a model or its class overrides a method of `keras.Model`.

    Args:
        model: any Keras model; methods that towers replace do not count.
        *names: names of methods; one that is overridden is enough.
    """
    of_class = (getattr(type(model), name) is not getattr(keras.Model, name) for name in names)
    return any(of_class) or not methods_set_on(model).keys().isdisjoint(names)


def methods_set_on(model: keras.Model) -> dict[str, Callable]:
    """Return {name: method} of a step that were set on the model itself, not by towers."""
    methods, steps = vars(model), vars(model).get("_tower_steps")
    if steps:
        methods = {n: x for n, x in methods.items() if n not in steps.REPLACED} | steps.of_instance
    return {name: methods[name] for name in _OF_A_STEP if name in methods}


@contextlib.contextmanager
def floatx_of(dtype: str) -> Iterator[None]:
    """Make float64 Keras' default type, if `dtype` is float64, where layers are built or called."""
    keras.config.dtype_policy()  # if none is set, Keras takes it from floatx and keeps it
    with floatx_set(dtype) if dtype == "float64" else contextlib.nullcontext():
        yield
