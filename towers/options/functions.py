"""Finds and loads functions that the command line names as module:function."""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from towers.errors import InputError
from towers.formatting import first_of
from towers.options import search_path
from towers.options.inline_objects import PREFIX

_CHECKOUT = Path(search_path.CHECKOUT)  # unless the package was installed without it
SHIPPED = "towers_models"  # the name under which its models are imported
_STDLIB = [folder := sysconfig.get_path("stdlib"), os.path.join(folder, "lib-dynload")]


def load_function(flag: str, name: str) -> Callable:
    """Return the function that a flag names as "package.module:function", or that was passed.

    Errors of the module's own code are not caught.

    Args:
        flag: which is named in messages.
        name: the value of the flag.

    Raises:
        InputError: there is no such function, or it is one of unknown signature.
    """
    if name.startswith(PREFIX):
        function = getattr(name, "objects", {}).get(name)
        if function is None:
            raise InputError(
                f"--{flag}={name} was given in Python: give it to this call, too, as {flag}=..., "
                "or name it as module:function"
            )
    else:
        function = _import(flag, name)
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        raise InputError(
            f"--{flag}={name} does not tell which arguments it takes, as some that are not written "
            "in Python: name a function of your own that calls it"
        ) from None
    return function


def call_without_arguments(flag: str, name: str) -> object:
    """Load a function like `load_function`, call it without arguments, and return its result."""
    function = load_function(flag, name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"--{flag}={name} is called without arguments, and is {error}: give its arguments "
            "default values"
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


def _import(flag: str, name: str) -> Callable:
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
    if function is not None and function_name.isidentifier():
        raise InputError(
            f"--{flag}={name}: {function_name} is of type {type(function).__name__}, and a "
            f"function is needed: write `def make(): return {function_name}`, and type "
            f"--{flag}={module_name}:make"
        )
    public = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
    close = difflib.get_close_matches(function_name, public, n=1)
    hint = f"; did you mean {module_name}:{close[0]}?" if close else ""
    raise InputError(f"--{flag}={name}: {module_name} has no function {function_name}{hint}")


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

    It is searched before installed packages, and after the standard library unless the module has a
    name from there. Afterwards it stays last on the path: functions may import others.
    """
    here, name = os.getcwd(), module_name.partition(".")[0]
    stdlib_places = [i for i, folder in enumerate(sys.path) if folder in _STDLIB]
    place = 0 if name in sys.stdlib_module_names else max(stdlib_places, default=-1) + 1
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
    if not (colon and function_name and all(module_name.split("."))):
        usual = "build" if flag == "model" else "make"
        hint = f", such as {'models.cnn:cnn' if flag == 'model' else f'my_{flag}:{usual}'}"
        *modules, last = name.split(".")
        if all(map(str.isidentifier, [*modules, last])):
            shipped = filter(is_shipped, (f"models.{name}:{name}", f"{name}:{last}"))
            defined = []
            if not modules or last == "py":
                modules = modules or [last]
                defined = _functions_in(Path(*modules).with_suffix(".py"))
                last = defined[0] if defined and usual not in defined else usual
            own = f"{'.'.join(modules)}:{last}"  # what is in the current folder is meant first
            hint = f"; did you mean {own if defined else next(shipped, own)}?"
            if flag == "callbacks" and (kind := name.rpartition(".")[2])[0].isupper():
                hint = (
                    f": write `def make(): return [keras.callbacks.{kind}(...)]` in my_callbacks.py"
                    ", and type --callbacks=my_callbacks:make"
                )
        raise InputError(f"--{flag}={name} must be module:function{hint}")
    return module_name, function_name


def _functions_in(path: Path) -> list[str]:
    """Return the names of the public functions that a file of Python defines."""
    try:
        return re.findall(r"^def ([a-zA-Z]\w*)", path.read_text(encoding="utf-8"), re.M)
    except (OSError, ValueError):
        return []


def _no_module(flag: str, name: str) -> InputError:
    module_name, _, function_name = name.partition(":")
    shipped = _functions_in(_CHECKOUT.joinpath(*module_name.split(".")).with_suffix(".py"))
    if module_name.startswith("models.") and shipped:
        return InputError(
            f"--{flag}={name}: {module_name} has no function {function_name}; it has "
            f"{first_of(shipped)}"
        )
    modules = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
    for package in ["models", *modules]:
        folders = [os.path.join(folder, package) for folder in (os.getcwd(), _CHECKOUT)]
        modules += [module.name for module in pkgutil.iter_modules(folders, f"{package}.")]
    meant = module_name.removesuffix(".py").replace("/", ".")
    close = difflib.get_close_matches(meant, modules, n=1, cutoff=0.7)
    hint = f"go to the folder in which {module_name.partition('.')[0]} lies"
    hint = f"did you mean {close[0]}:{function_name}?" if close else hint
    return InputError(
        f"--{flag}={name}: there is no module {module_name} in the current folder or the installed "
        f"packages; {hint}"
    )
