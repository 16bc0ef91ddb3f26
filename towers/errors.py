"""What goes wrong for reasons that the user can mend."""


class InputError(ValueError):
    """Bad input: one line that says what was given, what is allowed and what to type.

    The command line prints it and exits with 2. Any other exception is shown with its traceback: it
    comes from the user's own code, from TensorFlow, or from a fault of ours.
    """

    # Keras puts a page about a layer's arguments around what is raised inside of its call, unless
    # it finds this mark of its own.
    _keras_call_info_injected = True
    # AutoGraph makes a StagingError of what has another constructor than this.
    __init__ = Exception.__init__


class RunError(RuntimeError):
    """A run that cannot go on, as with a loss that is NaN: one line; exit code 1."""
