"""float64 for every layer, also for those that ask for another type."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from towers import tf_internals


@contextlib.contextmanager
def force_float64() -> Iterator[None]:
    """Give layers created in the block, by this thread, variables and computation in float64.

    Layers that ask for float32, as guides to mixed precision advise, would round, and rounding
    hides faults.
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
        def add(
            layer: Any, shape: Any = None, initializer: Any = None, dtype: Any = None,
            *args: Any, **keywords: Any,
        ) -> Any:  # fmt: skip
            if layer.quantization_mode is None:
                dtype = wide(dtype)
            return add_weight(layer, shape, initializer, dtype, *args, **keywords)

        return add

    owners = (
        (keras.Layer, "add_weight", make_add_weight),
        (keras.layers.InputLayer, "from_config", make_from_config),
    )
    private = ("dtype_policies.get", make_get), ("input_layer.InputLayer", make_input)
    with tf_internals.replaced(*owners), tf_internals.patched(*private):
        yield


def _wide(policy: Any) -> Any:
    """Return a policy with float64 for all floating types except quantized ones."""
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        wide = {name: _wide(of_layer) for name, of_layer in policy.items()}
        return keras.dtype_policies.DTypePolicyMap(_wide(policy.default_policy), wide)
    if policy.quantization_mode is None and "float" in policy.compute_dtype:
        return keras.DTypePolicy("float64")
    return policy
