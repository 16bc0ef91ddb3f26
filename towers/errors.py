"""What goes wrong for reasons that the user can mend."""


class InputError(ValueError):
    """Bad input: one line that says what was given, what is allowed and what to type.

    The command line prints it and exits with 2. Any other exception is shown with its traceback.
    """

    _keras_call_info_injected = True  # else Keras adds a page about the layer that it went through
    __init__ = Exception.__init__  # else AutoGraph makes a StagingError of it


class RunError(RuntimeError):
    """A run that cannot go on, as with a loss that is NaN: one line; exit code 1."""
