"""What is loaded by its name: functions of the command line, and public names on first use."""

import difflib
import importlib
from collections.abc import Callable, Mapping

from towers.errors import InputError


def lazily(package: str, home: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package that loads its public names when they are first used.

    Args:
        package: its name.
        home: in which of its modules each name is; of a module, where that is itself.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{home[name]}")
        return module if home[name].rpartition(".")[2] == name else getattr(module, name)

    return load


def load_function(flag: str, name: str) -> Callable:
    """Return the function that a flag names as "package.module:function".

    Raises:
        InputError: one line: the name is malformed, or there is no such module or function. What
            the module itself raises when it is imported comes through as it is.
    """
    module_name, colon, function_name = name.partition(":")
    if not (colon and function_name and all(module_name.split("."))):
        raise InputError(f"--{flag}={name} must be module:function, such as models.cnn:cnn")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # one that the module itself needs
            raise
        raise InputError(
            f"--{flag}={name}: there is no module {module_name} in the current folder or the "
            "installed packages"
        ) from None
    function = getattr(module, function_name, None)
    if callable(function):
        return function
    callables = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
    close = difflib.get_close_matches(function_name, callables, n=1)
    hint = f"; did you mean {module_name}:{close[0]}?" if close else ""
    raise InputError(f"--{flag}={name}: {module_name} has no function {function_name}{hint}")
