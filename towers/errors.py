"""Errors that the user can fix."""


class InputError(ValueError):
    """Bad input; its one line says what was given, what is allowed and what to type.

    The command line prints it and exits with 2.
    """

    _keras_call_info_injected = True  # else Keras adds a page about the layer
    __init__ = Exception.__init__  # else AutoGraph converts it to a StagingError


class RunError(RuntimeError):
    """A run cannot continue, as when the loss is NaN; one line, exit code 1."""

    __init__ = Exception.__init__  # else AutoGraph converts it to a StagingError
