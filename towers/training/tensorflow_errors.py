"""TensorFlow's errors that the user can mend, as one line that says how."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from towers.errors import InputError, RunError
from towers.graphs.placement import Op, short
from towers.options.run import Options

# What TensorFlow puts around the sentence that says what is wrong.
_NOISE = re.compile(
    r"(?m)^Graph execution error.*|^Detected at node.*|^<stack.*|.*root error\(s\) found.*"
    r"|\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*|\(\d\) [A-Z_]+:|assertion failed:"
    r"|InputError: |Error in user-defined function passed to .*? with iterator: \S+ "
)
# Without soft placement: of an op in a graph, or of one that runs at once.
_DEVICE_REFUSED = re.compile(
    r"Cannot assign a device for operation (?P<op>\S+?):.*explicitly assigned to (?P<device>\S+)"
    r"|Could not satisfy device specification '(?P<specification>\S+)'",
    re.DOTALL,
)
# The device is there, and has no kernel for the op's types; or no device at all has one.
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
# What stands in other errors: what that means.
_MEANINGS = {
    "IteratorGetNext": "--dataset={0.dataset} cannot be read",
    "SummaryWriter": "--train_dir={0.train_dir} cannot be written",
    "tf2xla": "--jit_compile: XLA cannot compile the towers",
}


@contextlib.contextmanager
def one_line_errors(options: Options) -> Iterator[None]:
    """Turn TensorFlow's errors that the user can mend into one line.

    Raises:
        InputError: the model asks for a device that does not exist, or that has no kernel for an
            op, without soft placement; or no device has one.
        RunError: the data set, which may be a pipeline of the user's own, cannot be read, the
            event files cannot be written, or XLA cannot compile the model.
    """
    try:
        yield
    except tf.errors.OpError as error:
        text = str(error)
        if refused := _NO_KERNEL.search(text) or _NOWHERE.search(text):
            raise InputError(_no_kernel(**refused.groupdict())) from None
        if refused := _DEVICE_REFUSED.search(text):
            raise InputError(_no_device(**refused.groupdict())) from None
        if refused := _XLA_REFUSED.search(text):
            raise RunError(
                f"--jit_compile: XLA cannot compile {refused['op']}, of layer "
                f"{_layer(refused['name'])}: leave the flag out, or do it without that op"
            ) from None
        meaning = next((meaning for part, meaning in _MEANINGS.items() if part in text), None)
        if meaning is None:
            raise
        lines = [line.strip() for line in _NOISE.sub("", text).splitlines()]
        reason = next(filter(None, lines), type(error).__name__)
        raise RunError(f"{meaning.format(options)}: {reason[:300]}") from None


def _no_kernel(name: str, op: str | None, device: str = "") -> str:
    """Return the line for an op without a kernel for its types, on a device or anywhere."""
    what = f"{op or re.sub('_[0-9]+$', '', name.rpartition('/')[2])}, of layer {_layer(name)}"
    if not device:
        return (
            f"{what}: TensorFlow has no kernel for it on the devices of this machine, with these "
            "types: do it without that op, or cast its inputs"
        )
    return (
        f"--allow_soft_placement=false: {what}, has no kernel for {short(device)} with these types:"
        " leave the flag out, and it runs on the CPU; `towers plan` names all such ops"
    )


def _no_device(op: str | None, device: str | None, specification: str | None) -> str:
    """Return the line for a device that does not exist, with those that do."""
    there = [short(device.name) for device in tf.config.list_logical_devices()]
    return (
        f"--allow_soft_placement=false: {f'layer {_layer(op)}' if op else 'the model'} asks for "
        f"{short(device or specification)}, which is not there or cannot run it; TensorFlow has "
        f"{', '.join(there)}: let the model choose no device, or leave the flag out"
    )


def _layer(op: str) -> str:
    return Op(op, "", "", "").layer
