"""Layers that ask for a precision of their own get float64, where all is to be float64."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
from keras.src import dtype_policies
from keras.src.dtype_policies import DTypePolicyMap
from keras.src.layers.core import input_layer


@contextlib.contextmanager
def all_in_float64() -> Iterator[None]:
    """Let layers that are made in the block, by this thread, compute and keep weights in float64.

    Guides tell users to make the last layer of a model in mixed precision with dtype="float32". In
    float64 it would round, and rounding hides faults. Keras gives each layer its policy by
    `dtype_policies.get`, and each `keras.Input` its dtype through `InputLayer`; nothing public lets
    one choose.
    """
    get: Callable = dtype_policies.get
    make_input: Callable = input_layer.InputLayer
    thread = threading.get_ident()

    def get_wide(identifier: Any) -> Any:
        policy = get(identifier)
        return _wide(policy) if threading.get_ident() == thread else policy

    def make_wide_input(*args: Any, dtype: Any = None, **keywords: Any) -> Any:
        if dtype is not None and threading.get_ident() == thread:
            dtype = "float64" if "float" in keras.backend.standardize_dtype(dtype) else dtype
        return make_input(*args, dtype=dtype, **keywords)

    with (
        mock.patch.object(dtype_policies, "get", get_wide),
        mock.patch.object(input_layer, "InputLayer", make_wide_input),
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
