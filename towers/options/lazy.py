"""Public names of a package that are imported when they are first used.

Imports nothing but importlib: `python -m towers` comes here while the current folder is still
searched first.
"""

import importlib


def lazily(package: str, home: dict[str, str]):  # noqa: ANN201 - collections.abc is not here yet
    """Return the module-level `__getattr__` of a package.

    Args:
        package: its name.
        home: {public name: module of the package, or "towers.other.module"}; a module that is
            public itself has its own name.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = home[name] if home[name].startswith("towers.") else f"{package}.{home[name]}"
        module = importlib.import_module(path)
        is_module = path.rpartition(".")[2] == name and not hasattr(module, name)
        return module if is_module else getattr(module, name)

    return load
