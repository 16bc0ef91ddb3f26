"""Translates TensorFlow's out-of-memory errors into one line with a remedy."""

import contextlib
import math
import re
from collections.abc import Callable

import tensorflow as tf

from towers import tf_internals
from towers.builder.op_names import layer_of
from towers.devices import memory
from towers.graphs.placement import short_device_name
from towers.options.run import Options

# From TensorFlow's allocators.
_TENSOR = re.compile(
    r"OOM when allocating tensor with shape\[(?P<shape>[\d,]*)\] and type (?P<type>[\w ]+?) on "
    r"(?P<device>/\S+)"
)
# From XLA, and from the libraries below it.
_BYTES = re.compile(
    r"(?:out of memory (?:while )?(?:trying to allocate|allocating) |failed to allocate [^(\n]*\()"
    r"(?P<bytes>\d+) ?b",
    re.IGNORECASE,
)
_ORDINAL = re.compile(r"device ordinal (\d+)")
# A copy to a GPU found no room there.
_COPY = re.compile(r"Failed copying input tensor from \S+ to (\S+) in order to run (\w+)")
_NO_ROOM = "Dst tensor is not initialized"
_TYPES = {"float": "float32", "double": "float64", "half": "float16"}
_TOWER = re.compile(r"tower_(\d+)/[^\s}]*")


def line(text: str, options: Options, largest_batch: Callable[[], int] | None = None) -> str | None:
    """Return the line for an out-of-memory error, None for any other error.

    Args:
        text: of the error.
        options: of the run, for the remedy.
        largest_batch: returns the largest batch size that is expected to fit; None: it is unknown.
    """
    if match := _TENSOR.search(text):
        sizes = [int(size) for size in match["shape"].split(",") if size]
        kind = _TYPES.get(match["type"], match["type"].replace(" ", ""))
        each = 1
        with contextlib.suppress(TypeError):
            each = tf.as_dtype(kind).size
        asked = f"{memory.in_words(math.prod(sizes) * each)}, {kind}{sizes}"
        device = short_device_name(match["device"])
    elif match := _BYTES.search(text):
        ordinal = _ORDINAL.search(text)
        asked = memory.in_words(int(match["bytes"]))
        device = f"/gpu:{ordinal[1]}" if ordinal else ""
    elif _NO_ROOM in text or "CUDA_ERROR_OUT_OF_MEMORY" in text:
        copied = _COPY.search(text)
        asked, device = "room for a copy", short_device_name(copied[1]) if copied else ""
    else:
        return None
    tower = _TOWER.search(text)
    layer = f", in layer {layer_of(tower[0])}" if tower else ""
    where = f"tower {tower[1]} on {device or 'a GPU'}" if tower else device or "a device"
    return (
        f"out of memory: {where} asked for {asked}{layer}{_limit_of(device)}; "
        f"{_remedy(options, largest_batch)}"
    )


def _limit_of(device: str) -> str:
    if "gpu" not in device:
        return f"; the host has {memory.in_words(memory.of_host())}" if device else ""
    limit = tf_internals.device_memory_bytes().get(device)
    if not limit:
        return ""
    used = memory.of_device(device)
    in_use = f", of which {memory.in_words(used[0] * memory.MIB)} were in use" if used else ""
    return f"; it may take {memory.in_words(limit)}{in_use}"


def _remedy(options: Options, largest_batch: Callable[[], int] | None) -> str:
    advice = "type a lower --batch_size, or more --accumulate_steps for the same update"
    try:
        fitting = largest_batch() if largest_batch else None
    except Exception:  # a failing estimate must not hide the error
        fitting = None
    if fitting is None:
        return advice
    if fitting < 1:
        return "no batch is expected to fit, by the reckoning of towers plan: take a smaller model"
    if fitting >= options.batch_size:
        return f"{advice}; towers plan would have expected {fitting} examples to fit"
    parts = options.accumulate_steps * -(-options.batch_size // fitting)
    return (
        f"the largest batch that is expected to fit, by the reckoning of towers plan, is {fitting}:"
        f" type --batch_size={fitting}, or --accumulate_steps={parts} for the same update"
    )
