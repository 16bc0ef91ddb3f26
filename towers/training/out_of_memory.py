"""What TensorFlow says where a device has too little memory, as a line that says what to change."""

import math
import re
from collections.abc import Callable

import tensorflow as tf

from towers import tf_private
from towers.devices import memory
from towers.graphs.placement import Op, short
from towers.options.run import Options

# Of TensorFlow's allocators.
_TENSOR = re.compile(
    r"OOM when allocating tensor with shape\[(?P<shape>[\d,]*)\] and type (?P<type>[\w ]+?) on "
    r"(?P<device>/\S+)"
)
# Of XLA, and of what is under it.
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
    """Return the line for an error of TensorFlow that says so, None for any other.

    Args:
        text: of the error.
        options: of the run.
        largest_batch: returns the batch size that is expected to fit.
    """
    if found := _TENSOR.search(text):
        sizes = [int(size) for size in found["shape"].split(",") if size]
        kind = _TYPES.get(found["type"], found["type"].replace(" ", ""))
        asked = f"{memory.in_words(math.prod(sizes) * _size_of(kind))}, {kind}{sizes}"
        device = short(found["device"])
    elif found := _BYTES.search(text):
        ordinal = _ORDINAL.search(text)
        asked, device = (
            memory.in_words(int(found["bytes"])),
            f"/gpu:{ordinal[1]}" if ordinal else "",
        )
    elif _NO_ROOM in text or "CUDA_ERROR_OUT_OF_MEMORY" in text:
        copied = _COPY.search(text)
        asked, device = "room for a copy", short(copied[1]) if copied else ""
    else:
        return None
    tower = _TOWER.search(text)
    layer = f", in layer {Op(tower[0], '', '', '').layer}" if tower else ""
    where = f"tower {tower[1]} on {device or 'a GPU'}" if tower else device or "a device"
    return (
        f"out of memory: {where} asked for {asked}{layer}{_of(device)}; "
        f"{_remedy(options, largest_batch)}"
    )


def _size_of(kind: str) -> int:
    try:
        return tf.as_dtype(kind).size
    except TypeError:
        return 1


def _of(device: str) -> str:
    """Return how much there is on a device, and how much of it is in use."""
    if "gpu" not in device:
        return f"; the host has {memory.in_words(memory.of_host())}" if device else ""
    limit = tf_private.device_memory_bytes().get(device)
    used = memory.of_device(device) if limit else None
    in_use = f", of which {memory.in_words(used[0] * memory.MIB)} were in use" if used else ""
    return f"; it may take {memory.in_words(limit)}{in_use}" if limit else ""


def _remedy(options: Options, largest_batch: Callable[[], int] | None) -> str:
    size, fitting = options.batch_size, None
    if largest_batch:
        try:
            fitting = largest_batch()
        except Exception:  # the estimate is a help, and its failure would hide what happened
            fitting = None
    advice = "type a lower --batch_size, or more --accumulate_steps for the same update"
    if fitting is None:
        return advice
    if fitting < 1:
        return "no batch is expected to fit, by the reckoning of towers plan: take a smaller model"
    if fitting >= size:
        return f"{advice}; towers plan would have expected {fitting} examples to fit"
    parts = options.accumulate_steps * -(-size // fitting)
    return (
        f"the largest batch that is expected to fit, by the reckoning of towers plan, is {fitting}:"
        f" type --batch_size={fitting}, or --accumulate_steps={parts} for the same update"
    )
