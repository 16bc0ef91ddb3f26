"""What a program gives in place of a name: a function, a class, or a data set.

    towers.train(model=build, dataset=((x, y), (x_test, y_test)))

An option stays a text, which `flags.cfg` can hold: "my_net:build" where that is what an import
finds, else "given_in_python:build". That text carries what was given, so nothing is kept anywhere
else: of two functions with one name each run has its own, and none outlives its run.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from towers.errors import InputError

PREFIX = "given_in_python:"
_AS_THEY_ARE = {"dataset": "data", "callbacks": "callbacks"}  # options, and what they are called


class Given(str):
    """The text of an option, which carries by name what was given in its place."""

    values: Mapping[str, Any]

    def __new__(cls, text: str, values: Mapping[str, Any]) -> "Given":
        """Make the text; `values` are {name: what was given}."""
        given = super().__new__(cls, text)
        given.values = values
        return given

    def split(self, *args: Any, **kwargs: Any) -> list[str]:
        """Return the parts, which carry the same."""
        return [Given(part, self.values) for part in super().split(*args, **kwargs)]

    def strip(self, *args: Any) -> str:
        """Return the text without what is at its ends; it carries the same."""
        return Given(super().strip(*args), self.values)

    def __deepcopy__(self, memo: dict) -> "Given":
        """Return the same: what was given may be a large data set."""
        return self


def as_text(option: str, value: Any) -> Any:
    """Return the text of an option that a program gives a value for.

    A list or tuple stands for its items with commas between; a path is its text. What has no text
    is returned as it is, to be refused.

    Raises:
        InputError: it is a model that is already built.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple) and (option not in _AS_THEY_ARE or _are_texts(value)):
        values: dict[str, Any] = {}
        parts = [_of_item(item, values) for item in value]
        return Given(",".join(parts), values) if None not in parts else value
    if keras := sys.modules.get("keras"):  # without it there is none of these
        if isinstance(value, keras.Model):
            raise InputError(
                f"{option}={value.name}, a {type(value).__name__} that is already built: give the "
                "function that builds it, such as model=build; each run builds its own"
            )
        if isinstance(value, keras.optimizers.Optimizer):
            raise InputError(
                f"{option}={type(value).__name__}(...): give a function that makes it, such as "
                f"{option}=lambda: keras.optimizers.{type(value).__name__}(...); each run has its "
                "own"
            )
    if own := not (callable(value) or isinstance(value, int | float | None)) and (
        _AS_THEY_ARE.get(option)
    ):
        return Given(f"{PREFIX}{own}", {f"{PREFIX}{own}": lambda: value})
    return _of_callable(value, {}) if callable(value) else value


def is_named_now(before: str, now: str) -> bool:
    """Tell whether what a program had given is now named, as module:function, which may be it."""
    return before.startswith(PREFIX) and ":" in now and not now.startswith(PREFIX)


def _are_texts(values: Any) -> bool:
    return all(isinstance(value, str | os.PathLike) for value in values)


def _of_item(value: Any, values: dict[str, Any]) -> str | None:
    """Return the text of an item of a list, and put into `values` what it stands for."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if callable(value):
        return _of_callable(value, values)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else None


def _of_callable(value: Any, values: dict[str, Any]) -> Given:
    """Return the name of a callable, which `values` have from now on."""
    own = getattr(value, "__name__", type(value).__name__).strip("<>")  # <lambda>
    module = getattr(value, "__module__", "")
    if module != "__main__" and getattr(sys.modules.get(module), own, None) is value:
        return Given(f"{module}:{own}", values)  # found by anybody
    name, number = f"{PREFIX}{own}", 1
    while values.get(name, value) is not value:
        number += 1
        name = f"{PREFIX}{own}_{number}"
    values[name] = value
    return Given(name, values)
