"""Imports a package's public names when they are first used.

It imports only importlib: `python -m towers` runs it while the current folder is still first on the
search path.
"""

import importlib


def lazily(package: str, home: dict[str, str]):  # noqa: ANN201 - collections.abc is not here yet
    """Return the module-level `__getattr__` of a package.

    Args:
        package: name of the package.
        home: {public name: module of the package, or "towers.other.module"}; a public module maps
            to itself.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = home[name] if home[name].startswith("towers.") else f"{package}.{home[name]}"
        if not path.startswith(("towers.errors", "towers.options.")):
            importlib.import_module("towers.options.environment").import_keras()
        module = importlib.import_module(path)
        is_module = path.rpartition(".")[2] == name and not hasattr(module, name)
        return module if is_module else getattr(module, name)

    return load
