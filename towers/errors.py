"""Errors that the user can fix, and what errors of others say in one line."""

import re


class InputError(ValueError):
    """Bad input; its message says what was given, what is allowed and what to type.

    The command line prints it and exits with 2.
    """

    _keras_call_info_injected = True  # else Keras adds a page about the layer
    __init__ = Exception.__init__  # else AutoGraph converts it to a StagingError


class RunError(RuntimeError):
    """A run cannot continue, for example because the loss is NaN; exit code 1."""

    __init__ = Exception.__init__  # else AutoGraph converts it to a StagingError


def kind_of(value: object) -> str:
    """Return the class of a value that is no `keras.Model`, and what to do if it was to be one."""
    kind = type(value).__name__
    if any(base.__module__.startswith("tf_keras.") for base in type(value).__mro__):
        return f"{kind} of tf_keras (unset TF_USE_LEGACY_KERAS, and build it by `import keras`)"
    return kind


# Text that TensorFlow puts around the actual message, such as the traceback of the op.
_AROUND = re.compile(
    r'(?m)^Graph execution error.*|^Detected at node.*\n(\s*(File ".*", line \d+.*)?\n)*|^<stack.*'
    r"|.*root error\(s\) found.*|\(\d\) [A-Z_]+:|\[\[\{\{.*?\}\}\]\]|\{\{.*?\}\} *"
    r"|^Exception encountered when .*|^Arguments received by .*|\x1b\[\d+m"
    r"|\Ain user code:\n(.*\n)*\s*\n"
)


def first_line(error: BaseException, widest: int = 200) -> str:
    """Return the first line of an error's message that is not TensorFlow's or Keras', or its class.

    Args:
        error: of TensorFlow, of Keras or of others.
        widest: how many characters are returned at most.
    """
    text = error.args[0] if isinstance(error, KeyError) and error.args else error  # else quoted
    lines = _AROUND.sub("", str(text)).splitlines()
    return next(filter(None, map(str.strip, lines)), type(error).__name__)[:widest]


def reason(error: BaseException) -> str:
    """Return why a file cannot be written or read, without the path and op that TensorFlow adds.

    TensorFlow says "/proc/self/fd/9/ckpt-0.index; No space left on device [Op:SaveV2]".
    """
    said = re.sub(r"^/[^;]*; | \[Op:\w+\]$", "", first_line(error, 500))
    return getattr(error, "strerror", None) or said
