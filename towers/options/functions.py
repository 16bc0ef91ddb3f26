"""What is loaded by its name: functions of the command line, and public names on first use."""

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import tokenize
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from towers.errors import InputError
from towers.options.given import PREFIX, Given

_CHECKOUT = Path(__file__).parents[2]  # unless the package was installed without it
_DYNAMIC = {"exec", "eval", "globals", "locals", "setattr", "vars"}  # calls that may make a name


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
        is_module = home[name].rpartition(".")[2] == name and not hasattr(module, name)
        return module if is_module else getattr(module, name)

    return load


def load_function(flag: str, name: str) -> Callable:
    """Return the function that a flag names as "package.module:function", or that was given.

    Raises:
        InputError: one line: the name is malformed, there is no such module or function, or nobody
            can tell how it is called. What the module itself raises when it is imported comes
            through as it is.
    """
    function = _given(flag, name) if name.startswith(PREFIX) else _named(flag, name)
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        raise InputError(
            f"--{flag}={name} does not tell which arguments it takes, as some that are not written "
            "in Python: name a function of your own that calls it"
        ) from None
    return function


def is_shipped(name: str) -> bool:
    """Tell whether a name is that of a model that comes with towers."""
    module_name = name.partition(":")[0]
    parts = module_name.split(".")
    return parts[0] == "models" and _CHECKOUT.joinpath(*parts).with_suffix(".py").is_file()


def call_plainly(flag: str, name: str) -> object:
    """Return what a function that takes no arguments returns; an InputError if it needs any."""
    function = load_function(flag, name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(
            f"--{flag}={name} is called without arguments, but there is a {error}"
        ) from None
    return function()


def _named(flag: str, name: str) -> Callable:
    """Return what is imported by a name."""
    module_name, function_name = _parts(flag, name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # one that the module itself needs
            raise
        raise _no_module(flag, name) from None
    function = getattr(module, function_name, None)
    if callable(function):
        return function
    callables = [n for n, value in vars(module).items() if callable(value)]
    raise _no_function(flag, name, callables)


def _given(flag: str, name: str) -> Callable:
    """Return what a program has given under a name."""
    values = name.values if isinstance(name, Given) else {}
    if name in values:
        return values[name]
    raise InputError(
        f"--{flag}={name} was given in Python: give it again there, as {flag}=..., or name it as "
        "module:function"
    )


def check_function(flag: str, name: str) -> None:
    """Refuse a name that `load_function` would refuse, as far as sources tell; import nothing.

    Raises:
        InputError: the same line, before anything that takes long.
    """
    module_name, function_name = _parts(flag, name)
    if module_name in sys.modules or name.startswith(PREFIX):
        load_function(flag, name)
        return
    folders: list[str] | None = None
    for part in module_name.split("."):
        try:  # a dotted name would import its packages
            find = PathFinder.find_spec if folders is not None else importlib.util.find_spec
            spec = find(part, folders)
        except (ImportError, ValueError):
            return
        if spec is None:
            raise _no_module(flag, name)
        source = _source(spec)
        if "__path__" in source:  # a package that looks for its modules elsewhere
            return
        folders = list(spec.submodule_search_locations or ())
    names = _names(source)
    if names and function_name not in names:
        raise _no_function(flag, name, names)


def _parts(flag: str, name: str) -> tuple[str, str]:
    """Return module and function of a name; let the shipped models be found if it is of those.

    They lie in the checkout, which is searched last, and only where no other `models` is.
    """
    module_name, colon, function_name = name.partition(":")
    if not (colon and function_name and all(module_name.split("."))):
        raise InputError(f"--{flag}={name} must be module:function, such as models.cnn:cnn")
    if f"{module_name}.".startswith("models.") and "models" not in sys.modules:
        if importlib.util.find_spec("models") is None and (_CHECKOUT / "models").is_dir():
            sys.path.append(str(_CHECKOUT))
    return module_name, function_name


def _no_module(flag: str, name: str) -> InputError:
    module_name, _, function_name = name.partition(":")
    line = (
        f"--{flag}={name}: there is no module {module_name} in the current folder or the installed "
        "packages"
    )
    here = list(pkgutil.iter_modules([os.getcwd()]))
    modules = [module.name for module in here]
    for package in ["models", *(module.name for module in here if module.ispkg)]:
        folders = [os.path.join(folder, package) for folder in (os.getcwd(), _CHECKOUT)]
        modules += [module.name for module in pkgutil.iter_modules(folders, f"{package}.")]
    meant = module_name.removesuffix(".py").replace("/", ".")
    if close := difflib.get_close_matches(meant, modules, n=1, cutoff=0.7):
        return InputError(f"{line}; did you mean {close[0]}:{function_name}?")
    if module_name.startswith("models.") and not (_CHECKOUT / "models").is_dir():
        line += (
            "; the models that come with towers lie in the folder models of its checkout: start "
            "there, or type towers init for a model of your own"
        )
    return InputError(line)


def _no_function(flag: str, name: str, names: Iterable[str]) -> InputError:
    module_name, _, function_name = name.partition(":")
    public = [n for n in names if n[0] != "_"]
    close = difflib.get_close_matches(function_name, public, n=1)
    hint = f"; did you mean {module_name}:{close[0]}?" if close else ""
    return InputError(f"--{flag}={name}: {module_name} has no function {function_name}{hint}")


def _source(spec: ModuleSpec) -> str:
    """Return the source of a module, nothing if it has none that can be read."""
    try:
        with tokenize.open(spec.origin or "") as file:
            return file.read() if file.name.endswith(".py") else ""
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _names(source: str) -> set[str]:
    """Return the names that a module gets, nothing if its source does not tell all of them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    if any(map(_makes_names, ast.walk(tree))):
        return set()
    names, nodes = set(), list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes.extend(ast.iter_child_nodes(node))
    return names


def _makes_names(node: ast.AST) -> bool:
    """Tell whether a node may give the module a name that does not stand at its top level."""
    if isinstance(node, ast.ImportFrom):
        return node.names[0].name == "*"
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _DYNAMIC
    if isinstance(node, ast.FunctionDef):
        return node.name == "__getattr__"
    return isinstance(node, ast.Global) or getattr(node, "attr", "") == "modules"
