"""Finds TensorFlow's GPU kernel for an op, and which of its arguments are in the host's memory.

TensorFlow's wheel has the registry of GPU kernels on any machine. An op of oneDNN, or of another
rewrite for CPUs, is looked up as the op that it replaces.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from towers import tf_internals

NodeDef = tf.compat.v1.NodeDef

# Ops that launch no kernel: other names of a buffer, control flow, transfers.
_NO_LAUNCH = frozenset(
    "Identity IdentityN Reshape Squeeze ExpandDims Bitcast StopGradient PreventGradient Const NoOp "
    "PlaceholderWithDefault ReadVariableOp AssignVariableOp Enter Exit Merge Switch LoopCond "
    "NextIteration _Send _Recv _HostSend _HostRecv _Arg _Retval CollectiveReduceV2 "
    "CollectiveGatherV2 Assert".split()
)
_ALWAYS_ON_HOST = (tf.string, tf.resource)


class Argument(NamedTuple):
    """An input or output of an op."""

    dtype: tf.DType
    on_host: bool  # in the host's memory, even if the op runs on a GPU


@dataclasses.dataclass(frozen=True)
class GpuKernel:
    """An op's kernel on a GPU.

    Attributes:
        type: the op that users know.
        exists: whether there is a kernel for these types; without one the op runs on the host.
        inputs, outputs: the arguments; () for an unregistered op.
        launches: least number of kernels that it launches. 0 for other names of a buffer (Reshape,
            Identity, reading and plainly assigning a variable, rows of a tensor, which are assumed
            to be a multiple of 64 bytes), control flow, constants, and ops whose outputs are all
            lists or in the host's memory, such as shapes and int32 counters. Transfers and
            collectives are not launches.
    """

    type: str
    exists: bool
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    launches: int


def gpu_kernel(node: NodeDef, traced_type: str) -> GpuKernel:
    """Return the GPU kernel of an executed node.

    Args:
        node: of the graph for CPUs.
        traced_type: type of the op that was traced, "" if none was.
    """
    kind, num_ops = _replaced_ops(node, traced_type)
    definition = tf_internals.op_definition(kind)
    if definition is None:  # a call of a function
        return GpuKernel(kind, True, (), (), 1)
    kernel = next((k for k in _kernels(kind) if k.fits(node, definition)), None)
    inputs = _arguments(node, definition.input_arg, kernel)
    outputs = _arguments(node, definition.output_arg, kernel)
    computes = not outputs or any(not a.on_host and a.dtype != tf.variant for a in outputs)
    free = kind in _NO_LAUNCH or (kind == "Unpack" and not node.attr["axis"].i)
    launches = num_ops if kernel and computes and not free else 0
    return GpuKernel(kind, kernel is not None, inputs, outputs, launches)


def _replaced_ops(node: NodeDef, traced_type: str) -> tuple[str, int]:
    # The first op that an op for CPUs replaces, and the number of ops.
    if node.op == "_UnaryOpsComposition":
        names = node.attr["op_names"].list.s
        return names[0].decode(), len(names)
    if not node.op.startswith("_Mkl"):
        return node.op, 1
    name = re.sub(r"^_Mkl(Native)?", "", node.op)
    plain = re.sub(r"WithBias$|^PadWith", "", name)
    if tf_internals.op_definition(plain) is None:
        return traced_type or plain, 1
    return plain, 1 + (plain != name)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    allowed_types: tuple[tuple[str, frozenset], ...]  # by the name of an attribute
    on_host: frozenset[str]  # names of arguments

    def fits(self, node: NodeDef, definition: Any) -> bool:
        return all(_values(node, name, definition) <= types for name, types in self.allowed_types)


@functools.cache
def _kernels(op_type: str) -> list[_Kernel]:
    registered = tf_internals.registered_kernels(op_type)
    return [
        _Kernel(
            tuple((c.name, frozenset(_items(c.allowed_values.list))) for c in kernel.constraint),
            frozenset(kernel.host_memory_arg),
        )
        for device in ("GPU", "DEFAULT")
        for kernel in registered
        if kernel.device_type == device
    ]


def _values(node: NodeDef, name: str, definition: Any) -> frozenset:
    value = node.attr[name] if name in node.attr else None
    if value is None:
        defaults = (a.default_value for a in definition.attr if a.name == name)
        value = next(defaults, tf.compat.v1.AttrValue())
    if value.HasField("list"):
        return frozenset(_items(value.list))
    return frozenset([value.s] if value.HasField("s") else [value.type])


def _items(values: Any) -> list:
    return list(values.type) or list(values.s)


def _arguments(
    node: NodeDef, arguments: Iterable[Any], kernel: _Kernel | None
) -> tuple[Argument, ...]:
    # An argument of an op may be a list of tensors.
    expanded = []
    for argument in arguments:
        if argument.type_list_attr:
            types = list(node.attr[argument.type_list_attr].list.type)
        else:
            kind = argument.type or node.attr[argument.type_attr].type
            types = [kind] * (node.attr[argument.number_attr].i if argument.number_attr else 1)
        for dtype in map(tf.as_dtype, types):
            on_host = kernel is None or argument.name in kernel.on_host
            expanded.append(Argument(dtype, on_host or dtype in _ALWAYS_ON_HOST))
    return tuple(expanded)
