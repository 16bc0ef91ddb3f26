"""Functions and data that options name as module:function, or that a program passes itself.

    towers.train(model=build, dataset=((x, y), (x_test, y_test)))

The option is still a string, for `flags.cfg`: "my_net:build" if an import finds the function there,
otherwise "given_in_python:build". The string carries the objects, so that no global table keeps
them alive or confuses two functions of one name.
"""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from towers.errors import InputError, kind_of
from towers.options import search_path

PREFIX = "given_in_python:"
SHIPPED = "towers_models"  # the name under which the models of the checkout are imported
_CHECKOUT = Path(search_path.CHECKOUT)  # unless the package was installed without it
_STDLIB = [folder := sysconfig.get_path("stdlib"), os.path.join(folder, "lib-dynload")]
_DATA = {"dataset": "data", "callbacks": "callbacks"}  # options that take other objects, too


def load_function(flag: str, name: str) -> Callable:
    """Return the function that a flag names as "package.module:function", or that was passed.

    Errors of the module's own code are not caught.

    Args:
        flag: which is named in messages.
        name: the value of the flag.

    Raises:
        InputError: there is no such function.
    """
    if name.startswith(PREFIX):
        function = getattr(name, "objects", {}).get(name)
        if function is None:
            raise InputError(
                f"--{flag}={name} was defined in Python; pass it to this call, too, as {flag}=..., "
                "or name it as module:function"
            )
        return function
    module_name, function_name = _split_name(flag, name)
    try:
        if shipped := _shipped(name):
            module = _import_shipped(module_name, shipped)
        else:
            with _current_folder_searched(module_name):
                module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # a module that it imports
            raise
        raise _no_module(flag, name) from None
    if callable(function := getattr(module, function_name, None)):
        return function
    close = difflib.get_close_matches(function_name, vars(module), n=1)
    hint = f"; did you mean {module_name}:{close[0]}?" if close else ""
    raise InputError(f"--{flag}={name}: {module_name} has no function {function_name}{hint}")


def call_without_arguments(flag: str, name: str) -> object:
    """Load a function like `load_function`, call it without arguments, and return its result."""
    function = load_function(flag, name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"--{flag}={name} is called without arguments, but {error}; give its arguments default "
            "values"
        ) from None
    return function()


def check_function(flag: str, name: str) -> None:
    """Raise InputError, like `load_function`, if there is no such module; import nothing."""
    module_name, _ = _split_name(flag, name)
    if is_shipped(name):
        return
    if module_name in sys.modules or name.startswith(PREFIX):
        load_function(flag, name)
        return
    top, dot, _ = module_name.partition(".")
    if top in sys.modules:
        return
    with _current_folder_searched(module_name):
        spec = importlib.util.find_spec(top)
    if spec is None or (dot and spec.submodule_search_locations is None):
        raise _no_module(flag, name)


def is_shipped(name: str) -> bool:
    """Return whether a name is that of a model that comes with towers."""
    return _shipped(name) is not None


def shadowing_file(name: str) -> str:
    """Return the file in the current folder that a shipped model hides, "" if there is none."""
    shipped, path = _shipped(name), Path(*name.partition(":")[0].split("."))
    files = (path.with_suffix(".py"), path / "__init__.py") if shipped else ()
    return next((str(f) for f in files if f.is_file() and not f.samefile(shipped)), "")


def _shipped(name: str) -> Path | None:
    module_name, _, function_name = name.partition(":")
    package, _, module = module_name.partition(".")
    path = _CHECKOUT / "models" / f"{module}.py"
    if package != "models" or not module.isidentifier() or not path.is_file():
        return None
    source = path.read_text(encoding="utf-8")
    return path if re.search(rf"^def {re.escape(function_name)}\(", source, re.M) else None


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
            f"{option}={kind}(...) is already built, but each run builds its own; pass the "
            f"function that builds it, such as {option}={example}"
        )
    if (kind := kind_of(value)) != type(value).__name__:
        raise InputError(f"{option} is {kind}")
    if option in _DATA and not callable(value) and not isinstance(value, str | os.PathLike):
        text = f"{PREFIX}{_DATA[option]}"
        return InlineObject(text, {text: lambda: value})
    text = _item_text(value, objects)
    return value if text is None else text


def may_be_same_object(before: str, now: str) -> bool:
    """Return whether an object's text is now a name, perhaps of the same; see `option_text`."""
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


def _import_shipped(module_name: str, path: Path) -> object:
    """Import a module of the checkout's `models` under another package name.

    The current folder may have another `models`, in which its own imports would be looked up.
    """
    known = getattr(sys.modules.get(module_name), "__file__", None)
    if known and os.path.realpath(known) == str(path.resolve()):
        return sys.modules[module_name]
    if SHIPPED not in sys.modules:
        init = path.with_name("__init__.py")
        spec = importlib.util.spec_from_file_location(SHIPPED, init)
        sys.modules[SHIPPED] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[SHIPPED])
    return importlib.import_module(f"{SHIPPED}.{path.stem}")


@contextlib.contextmanager
def _current_folder_searched(module_name: str) -> Iterator[None]:
    """Search the current folder for modules in the block, if it contains the named one.

    It is searched after the standard library and before installed packages. If the module was
    imported from there, it stays last on the path: functions may import others.
    """
    here, name = os.getcwd(), module_name.partition(".")[0]
    place = max([i for i, folder in enumerate(sys.path) if folder in _STDLIB], default=-1) + 1
    spec = PathFinder.find_spec(name, [here])
    if spec is None or here in sys.path[:place]:
        yield
        return
    sys.path.insert(place, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module itself may have changed it
            sys.path.remove(here)
        known = getattr(sys.modules.get(name), "__spec__", None)
        if known and known.origin == spec.origin and here not in sys.path:
            sys.path.append(here)


def _split_name(flag: str, name: str) -> tuple[str, str]:
    module_name, colon, function_name = name.partition(":")
    parts = module_name.split(".")
    if not (colon and function_name and all(parts)) or parts[-1] == "py":
        example = "my_net:build" if flag == "model" else f"my_{flag}:make"
        raise InputError(f"--{flag}={name} must be module:function, such as {example}")
    return module_name, function_name


def _no_module(flag: str, name: str) -> InputError:
    module_name = name.partition(":")[0]
    return InputError(
        f"--{flag}={name}: there is no module {module_name} in the current folder or the installed "
        f"packages; change to the folder that holds {module_name.partition('.')[0]}"
    )
