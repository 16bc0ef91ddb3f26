"""Translates TensorFlow's errors that the user can fix into one line with a remedy."""

import contextlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from towers.builder.op_names import layer_of
from towers.devices import memory
from towers.errors import InputError, RunError
from towers.formatting import first_line
from towers.graphs.placement import short_device_name
from towers.options.code_trust import CODE
from towers.options.error_origin import locate_in_user_code
from towers.options.run import Options
from towers.training.run import out_of_memory

# Text around a reason, besides that which `first_line` removes.
_NOISE = re.compile(
    r"\[\[.*?\]\]|\[Op:.*|assertion failed:"
    r"|InputError: |Error in user-defined function passed to .*? with iterator: \S+ "
)
# Without soft placement: for an op in a graph, or for one that runs eagerly.
_DEVICE_REFUSED = re.compile(
    r"Cannot assign a device for operation (?P<op>\S+?):.*explicitly assigned to (?P<device>\S+)"
    r"|Could not satisfy device specification '(?P<specification>\S+)'",
    re.DOTALL,
)
# The device exists, and has no kernel for the op's types; or no device has one.
_NO_KERNEL = re.compile(
    r"Cannot assign a device for operation '?(?P<name>[^\s':]+).*?device specification "
    r"'(?P<device>\S+?)' because no supported kernel(?:.*\nOp: (?P<op>\w+))?",
    re.DOTALL,
)
_NOWHERE = re.compile(
    r"No OpKernel was registered to support Op '(?P<op>\w+)' used by \{\{node (?P<name>\S+?)\}\}"
)
_XLA_REFUSED = re.compile(
    r"unsupported operations .*?: (?P<op>\w+) \(.*?\{\{node (?P<name>\S+?)\}\}"
)
# TensorFlow's text of an error in Python code that a pipeline calls.
_TRACEBACK = re.compile(r"(?s)Traceback \(most recent call last\):\n.*?\n(?=\n\n|\s*\[\[|\Z)")
_BATCH = re.compile(r"(?m)^in \S.* batch \d+$")  # the note of a `keras.utils.PyDataset`
# Text in other errors, and its meaning.
_MEANINGS = {
    "IteratorGetNext": "--dataset={0.dataset} cannot be read{1}",
    "SummaryWriter": "--train_dir={0.train_dir} cannot be written",
    "tf2xla": "--jit_compile: XLA cannot compile the towers",
}


@contextlib.contextmanager
def user_facing_errors(
    options: Options,
    step: Callable[[], int] | None = None,
    largest_batch: Callable[[], int] | None = None,
) -> Iterator[None]:
    """Translate TensorFlow's errors in the block that the user can fix into one line.

    Args:
        options: of the run.
        step: returns the number of steps done.
        largest_batch: returns the largest batch size that is expected to fit the memory.

    Raises:
        InputError: a device does not exist, or has no kernel for an op, without soft placement;
            or no device has one.
        RunError: the data set cannot be read, the event files cannot be written, XLA cannot compile
            the model, or memory is too small. A traceback of the user's pipeline is a note of it.
    """
    try:
        yield
    except MemoryError as error:
        host = memory.in_words(memory.of_host())
        line = f"out of memory: {first_line(error)}; the host has {host}"
        raise RunError(_with_own_code(line, error, options)) from error
    except ValueError as error:
        if "custom_gradient decorator currently supports keywords" not in str(error):
            raise
        named = re.search(r"when calling (\w+)", str(error))
        raise InputError(
            f"--model={options.model}: Keras cannot recompute {named[1] if named else 'a layer'} "
            "in a graph of TensorFlow's, with towers or without (remat takes no keyword arguments "
            "there): use keras.remat(lambda x: ...)(x) within the layer, or leave remat out"
        ) from None
    except tf.errors.OpError as error:
        text = str(error)
        if line := out_of_memory.line(text, options, largest_batch):
            raise _with_traceback(line, error, options) from None
        if refused := _NO_KERNEL.search(text) or _NOWHERE.search(text):
            raise InputError(_no_kernel(**refused.groupdict())) from None
        if refused := _DEVICE_REFUSED.search(text):
            raise InputError(_no_device(**refused.groupdict())) from None
        if refused := _XLA_REFUSED.search(text):
            raise RunError(
                f"--jit_compile: XLA cannot compile {refused['op']}, of layer "
                f"{layer_of(refused['name'])}: leave the flag out, or do it without that op"
            ) from None
        meaning = next((meaning for part, meaning in _MEANINGS.items() if part in text), None)
        if meaning is None:
            raise
        reason = first_line(type(error)(None, None, _NOISE.sub("", text)), 1000)
        if "assertion failed:" in text:  # its texts and numbers are in brackets
            reason = re.sub(r"\] \[", " ", reason).strip("[]")
        if batch := _BATCH.search(text):
            reason += f" {batch[0]}"
        where = f" at step {step()}" if step else ""
        line = f"{meaning.format(options, where)}: {reason[:300]}"
        raise _with_traceback(line, error, options) from None


def _with_traceback(line: str, error: tf.errors.OpError, options: Options) -> RunError:
    """Return a RunError with the traceback of Python code that a pipeline called, as a note."""
    match = _TRACEBACK.search(str(error))
    # An InputError of towers' own pipeline is clear without a traceback.
    if not match or "InputError:" in match[0]:
        return RunError(line)
    raised = RunError(_with_own_code(line, error, options))
    raised.add_note("\n".join(filter(str.strip, match[0].splitlines())))
    return raised


def _with_own_code(line: str, error: Exception, options: Options) -> str:
    """Return the line with the place in the user's code that raised the error, if any."""
    named = {flag: value for flag in CODE if ":" in (value := getattr(options, flag))}
    origin = locate_in_user_code(error, named)
    return f"{line}; {origin}" if origin else line


def _no_kernel(name: str, op: str | None, device: str = "") -> str:
    node = f"{op or re.sub('_[0-9]+$', '', name.rpartition('/')[2])}, of layer {layer_of(name)}"
    if not device:
        return (
            f"{node}: TensorFlow has no kernel for it on the devices of this machine, with these "
            "types: do it without that op, or cast its inputs"
        )
    return (
        f"--allow_soft_placement=false: {node}, has no kernel for {short_device_name(device)} with "
        "these types: leave the flag out, and it runs on the CPU; `towers plan` names all such ops"
    )


def _no_device(op: str | None, device: str | None, specification: str | None) -> str:
    there = [short_device_name(device.name) for device in tf.config.list_logical_devices()]
    return (
        f"--allow_soft_placement=false: {f'layer {layer_of(op)}' if op else 'the model'} asks for "
        f"{short_device_name(device or specification)}, which is not there or cannot run it; "
        f"TensorFlow has {', '.join(there)}: let the model choose no device, or leave the flag out"
    )
