"""Translates TensorFlow's errors that the user can fix into one line with a remedy."""

import contextlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from towers import tf_internals
from towers.builder.device_names import layer_of
from towers.devices import memory
from towers.devices.shown_names import new_name
from towers.errors import InputError, RunError, first_line
from towers.graphs.placement import short_device_name
from towers.options.error_origin import locate_in_user_code

# Text around a reason, besides that which `first_line` removes.
_NOISE = re.compile(
    r"\[\[.*?\]\]|\[Op:.*|assertion failed:"
    r"|InputError: |Error in user-defined function passed to .*? with iterator: \S+ "
)
# TensorFlow's text of an error in Python code that a pipeline calls.
_TRACEBACK = re.compile(r"(?s)Traceback \(most recent call last\):\n.*?\n(?=\n\n|\s*\[\[|\Z)")
# Text in other errors, the class to raise, and its meaning; TensorFlow's own words follow.
_SOFT = "--allow_soft_placement=false (leave it out, or remove tf.device from the model)"
_DATA = "--dataset cannot be read"
_KNOWN = {
    "Cannot assign a device": (InputError, _SOFT),
    "Could not satisfy device spec": (InputError, _SOFT),
    "No OpKernel was registered": (InputError, "--model has an op that no device here runs"),
    "IteratorGetNext": (RunError, _DATA),
    "tf2xla": (RunError, "--jit_compile: XLA cannot compile the towers"),
    # The text above is at the end, which TensorFlow cuts off after 8 KiB of stack traces.
    "when trying to compile graph": (RunError, "--jit_compile: XLA cannot compile the towers"),
}
# Of TensorFlow's allocators, of XLA and the libraries below it, of a copy to a GPU.
_OUT_OF_MEMORY = re.compile(
    r"OOM when allocating|out of memory|failed to allocate|Dst tensor is not initialized"
    r"|CUDA_ERROR_OUT_OF_MEMORY",
    re.IGNORECASE,
)
_DEVICE = re.compile(r"(?:.*(?: to | on ))?(/\S*device:GPU:\d+)", re.DOTALL)
_TOWER = re.compile(r"tower_(\d+)/[^\s}]*")


@contextlib.contextmanager
def user_facing_errors(step: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """Translate TensorFlow's errors in the block that the user can fix into one line.

    Args:
        step: returns the number of steps done, None before the first one can be made.

    Raises:
        InputError: no device runs an op as it is asked to.
        RunError: the data set cannot be read, XLA cannot compile the model, or memory is too small.
            A traceback of the user's pipeline is a note of it.
    """
    try:
        yield
    except MemoryError as error:
        raise _run_error(f"out of memory: {first_line(error)}", error) from error
    except ValueError as error:
        if "custom_gradient decorator currently supports keywords" not in str(error):
            raise
        raise InputError(
            "--model: keras.remat does not work here, since tf.recompute_grad takes no keyword "
            "arguments in a graph; leave it out"
        ) from None
    except tf.errors.OpError as error:
        text = str(error)
        if line := out_of_memory(text):
            raise _run_error(line, error) from None
        part = next((part for part in _KNOWN if part in text), None)
        if part is None:
            raise
        kind, meaning = _KNOWN[part]
        reason = first_line(type(error)(None, None, _NOISE.sub("", text)), 1000)
        if "assertion failed:" in text:  # its texts and numbers are in brackets
            reason = re.sub(r"\] \[", " ", reason).strip("[]")
        done = step() if meaning == _DATA else None
        line = f"{meaning}{'' if done is None else f' at step {done}'}: {reason[:300]}"
        raise (_run_error(line, error) if kind is RunError else kind(line)) from None


def _run_error(line: str, error: Exception) -> RunError:
    """Return a RunError that names the user's code which raised it, with its traceback as a note.

    An InputError of towers' own pipeline is clear without one.
    """
    match = _TRACEBACK.search(str(error))
    if not isinstance(error, MemoryError) and (not match or "InputError:" in match[0]):
        return RunError(line)
    origin = locate_in_user_code(error)
    raised = RunError(f"{line}; {origin}" if origin else line)
    if match:
        raised.add_note("\n".join(filter(str.strip, match[0].splitlines())))
    return raised


def out_of_memory(text: str) -> str | None:
    """Return the line for an out-of-memory error of this text, None for any other error."""
    if not _OUT_OF_MEMORY.search(text):
        return None
    tower, named = _TOWER.search(text), _DEVICE.match(text)
    device = short_device_name(named[1]) if named else "a device"
    where = f"tower {tower[1]} on {device}, in layer {layer_of(tower[0])}" if tower else device
    limit = tf_internals.device_memory_bytes().get(new_name(device)) if named else None
    may_take = f"; its limit is {limit / memory.MIB:.0f} MiB" if limit else ""
    return (
        f"out of memory: {where}: {first_line(RunError(text))}{may_take}; try a lower "
        "--batch_size, or more --accumulate_steps for the same update"
    )
