"""Finds, reads and restores the Python variables that a function can reach.

These are those of its closures, globals, objects, layers and containers.
"""

import argparse
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals

_LIBRARIES = {"tensorflow", "keras", "numpy", *sys.stdlib_module_names}
_SIMPLE = (bool, int, float, complex, str, bytes, enum.Enum, type(None), np.generic)
_MOST_VALUES = 100_000  # are followed
MOST_PARTS = 1_000  # of a list that is looked through: a larger one holds data
CONTAINERS = (dict, list, tuple, set)


@dataclasses.dataclass(frozen=True, eq=False)
class Namespace:
    """Names and their values: a layer's, an object's, a closure's, some of a module's."""

    owner: Any  # a layer, an object, a class, a function's closure cell, a module's dict
    description: str  # of one of its names, with a place for it
    names: Collection[str] = ()  # of a cell, a module or arguments
    is_users: bool = True  # not of this library

    @property
    def key(self) -> tuple:
        """The owner and the names: functions of one module read different names of it."""
        return id(self.owner), frozenset(self.names)

    def values(self) -> dict[str, Any]:
        """Return {name: value}."""
        if isinstance(self.owner, types.CellType):
            (name,) = self.names
            try:
                return {name: self.owner.cell_contents}
            except ValueError:  # it is empty
                return {}
        if isinstance(self.owner, dict):
            return {name: self.owner[name] for name in self.names if name in self.owner}
        return vars(self.owner)

    def users_values(self) -> dict[str, Any]:
        """Return {name: value} without what Keras keeps in layers, and TensorFlow in modules."""
        own = _of_keras() if isinstance(self.owner, keras.Layer) else ()
        values = self.values().items()
        return {name: x for name, x in values if name not in own and not name.startswith("_self_")}

    def set(self, name: str, value: Any) -> None:
        """Set a value, without the tracking of Keras and TensorFlow.

        Args:
            name: one of the names.
            value: its new value.
        """
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        else:
            (self.owner if isinstance(self.owner, dict) else vars(self.owner))[name] = value

    def remove(self, name: str) -> None:
        """Remove a name."""
        if isinstance(self.owner, types.CellType):
            del self.owner.cell_contents
        else:
            (self.owner if isinstance(self.owner, dict) else vars(self.owner)).pop(name, None)


def namespace_of(layer: keras.Layer) -> Namespace:
    """Return the attributes of a layer."""
    return Namespace(layer, f"the attribute {{!r}} of layer {layer.path or layer.name}")


def reached_by(fn: Callable) -> list[Namespace]:
    """Return what a function can read, through whatever it holds; libraries are left out."""
    found: dict[tuple, Namespace] = {}
    seen: dict[int, Any] = {}  # {id: value}; what is held keeps its id
    waiting = [fn]
    while waiting and len(seen) < _MOST_VALUES:
        value = waiting.pop()
        if isinstance(value, _SIMPLE) or id(value) in seen:
            continue
        seen[id(value)] = value
        for namespace in _namespaces_at(value):
            if namespace.key not in found:
                found[namespace.key] = namespace
                waiting += namespace.values().values()
        waiting += _parts_of(value)
    return list(found.values())


def _namespaces_at(value: Any) -> Iterator[Namespace]:
    if isinstance(value, types.FunctionType):
        if _is_of_library(value.__module__):
            return
        code, is_users = value.__code__, not _is_ours(value.__module__)
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            yield Namespace(cell, "the variable {!r} around the towers' function", [name], is_users)
        names, known = _names_in(code), value.__globals__
        modules = [known[name] for name in names if isinstance(known.get(name), types.ModuleType)]
        for module in [known, *(vars(m) for m in modules if not _is_of_library(m.__name__))]:
            yield Namespace(module, "the global variable {!r}", names, is_users)
    elif isinstance(value, functools.partial):
        yield Namespace(value.keywords, "the argument {!r} of a partial function", value.keywords)
    elif isinstance(value, keras.Layer):
        for layer in tf_internals.layers_of(value):
            yield from (namespace_of(layer), *_classes_of(layer))
    elif _has_attributes(value):
        of_class = type(value)
        description = f"the attribute {{!r}} of a {of_class.__name__}"
        yield Namespace(value, description, is_users=not _is_ours(of_class.__module__))
        yield from _classes_of(value)


def _classes_of(value: Any) -> Iterator[Namespace]:
    for of_class in type(value).__mro__:
        if not _is_of_library(of_class.__module__):
            yield Namespace(of_class, f"{of_class.__name__}.{{}}", is_users=False)


def _has_attributes(value: Any) -> bool:
    if isinstance(value, types.SimpleNamespace | argparse.Namespace | tf.Module):
        return True
    try:
        vars(value)
    except TypeError:
        return False
    of_class = type(value).__module__
    is_data = not isinstance(value, type | types.ModuleType | types.MethodType)
    return is_data and not _is_of_library(of_class) and not of_class.startswith("towers.builder")


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType) and not _is_of_library(value.__module__):
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*defaults, getattr(value, "__wrapped__", None)]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property | functools.cached_property):
        return [getattr(value, name, None) for name in ("fget", "func")]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, CONTAINERS) and len(value) <= MOST_PARTS:
        return list(value.values() if isinstance(value, dict) else value)
    return []


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function's code, inner functions included."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "towers"


@functools.cache
def _of_keras() -> frozenset[str]:
    return frozenset(vars(keras.Layer(name="attributes"))) | {"_tower_steps"}
