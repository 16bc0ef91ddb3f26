"""Public names of a package that are loaded when they are first used.

It imports nothing but importlib: `python -m towers` comes here while the current folder is still
searched first.
"""

import importlib


def lazily(package: str, home: dict[str, str]):  # noqa: ANN201 - collections.abc is not here yet
    """Return the `__getattr__` of a package that loads its public names when they are first used.

    Args:
        package: its name.
        home: in which of its modules each name is; of a module, where that is itself. What begins
            with "towers." is in another package.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = home[name]
        path = path if path.startswith("towers.") else f"{package}.{path}"
        module = importlib.import_module(path)
        is_module = home[name].rpartition(".")[2] == name and not hasattr(module, name)
        return module if is_module else getattr(module, name)

    return load
