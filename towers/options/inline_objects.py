"""Functions and data that a program passes in place of names.

    towers.train(model=build, dataset=((x, y), (x_test, y_test)))

The option is still a string, for `flags.cfg`: "my_net:build" if an import finds the function
there, else "given_in_python:build". The string carries the objects, so that no global table keeps
them alive or confuses two functions of one name.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from towers.errors import InputError

PREFIX = "given_in_python:"
_DATA = {"dataset": "data", "callbacks": "callbacks"}  # options that take other objects, too


class InlineObject(str):
    """An option's string with an attribute `objects`: {name in the string: object}."""

    objects: Mapping[str, Any]

    def __new__(cls, text: str, objects: Mapping[str, Any]) -> "InlineObject":
        """Return `text` with these objects."""
        instance = super().__new__(cls, text)
        instance.objects = objects
        return instance

    def split(self, *args: Any, **kwargs: Any) -> list[str]:
        """Return the parts, with the same objects."""
        return [InlineObject(part, self.objects) for part in super().split(*args, **kwargs)]

    def __deepcopy__(self, memo: dict) -> "InlineObject":
        """Return self: an object may be a large data set."""
        return self


def option_text(option: str, value: Any) -> Any:
    """Return the string for a value that a program passes for an option.

    A list becomes its items, separated by commas. Other values are returned unchanged, for the
    caller to reject.

    Args:
        option: name of the option.
        value: what the program passes.

    Raises:
        InputError: the value is a model or an optimizer instead of a function that builds it.
    """
    objects: dict[str, Any] = {}
    if isinstance(value, list | tuple):
        if option not in _DATA or all(isinstance(item, str | os.PathLike) for item in value):
            texts = [_item_text(item, objects) for item in value]
            return value if None in texts else InlineObject(",".join(texts), objects)
    elif isinstance(value, int | float | None):
        return value
    keras = sys.modules.get("keras")  # unless it is imported, there are no such values
    if keras and isinstance(value, keras.Model | keras.optimizers.Optimizer):
        kind, is_model = type(value).__name__, isinstance(value, keras.Model)
        example = "build" if is_model else f"lambda: keras.optimizers.{kind}(...)"
        raise InputError(
            f"{option}={kind}(...) is already built: give the function that builds it, such as "
            f"{option}={example}; each run builds its own"
        )
    if option in _DATA and not callable(value) and not isinstance(value, str | os.PathLike):
        text = f"{PREFIX}{_DATA[option]}"
        return InlineObject(text, {text: lambda: value})
    text = _item_text(value, objects)
    return value if text is None else text


def may_be_same_object(before: str, now: str) -> bool:
    """Return whether an option that was an object is now a name, perhaps of the same object.

    Args:
        before: text of the option, as in a run's flags.cfg.
        now: text of the option that is given now.
    """
    return before.startswith(PREFIX) and ":" in now and not now.startswith(PREFIX)


def _item_text(value: Any, objects: dict[str, Any]) -> str | None:
    """Return a value's string, and add its object to `objects`."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if not callable(value):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return str(value) if is_number else None
    python_name = getattr(value, "__name__", type(value).__name__).strip("<>")  # <lambda>
    module = getattr(value, "__module__", "")
    if module != "__main__" and getattr(sys.modules.get(module), python_name, None) is value:
        return InlineObject(f"{module}:{python_name}", objects)  # found by any process
    name, number = f"{PREFIX}{python_name}", 1
    while objects.get(name, value) is not value:
        number += 1
        name = f"{PREFIX}{python_name}_{number}"
    objects[name] = value
    return InlineObject(name, objects)
