"""Attributes and lists that copies of a function set: `self.z = z` in a layer, a list of features.

Each copy of a function reads these names as they were before the first copy. After the last copy
they have the values of one device: Python values of one call, and tensors joined as the analysis
has found.
"""

import dataclasses
import enum
import functools
import gc
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.sharding import num_rows

ROWS = "rows"  # policy: concatenate a tensor that has a row for each example
_LIBRARIES = {"tensorflow", "keras", "numpy", *sys.stdlib_module_names}
_SIMPLE = (bool, int, float, complex, str, bytes, enum.Enum, type(None), np.generic)
_CODE = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_HOLDING_CODE = (*_CODE[1:], types.MethodType, functools.partial)
_PYTHON = (*_SIMPLE, np.ndarray, tf.DType)
_MOST_VALUES = 100_000  # are followed
_MOST_PARTS = 1_000  # of a list that is looked through: a larger one holds data
_CONTENT = "content"  # stands for the name of all that a list holds
_MISSING = object()


@dataclasses.dataclass(frozen=True, eq=False)
class Holder:
    """A place with values that a function can set."""

    itself: Any  # a list; a dict, also an object's attributes or a module's; a class; a cell
    description: str  # of one of its names, with a place for it
    names: Collection[str] | None = None  # that are looked at; None: all
    layer: keras.Layer | None = None  # whose attribute it is, or is in

    def read(self) -> dict[Any, Any]:
        """Return {name: value}; all that a list holds has one name."""
        content = self.itself
        if isinstance(content, types.CellType):
            try:
                return dict.fromkeys(self.names, content.cell_contents)  # it has one name
            except ValueError:  # it is empty
                return {}
        if isinstance(content, list):
            return {_CONTENT: tuple(content)}
        content = vars(content) if isinstance(content, type) else content
        names = content if self.names is None else self.names
        return {name: content[name] for name in names if name in content}

    def users_values(self) -> dict[Any, Any]:
        """Return {name: value} without what Keras and TensorFlow keep in their objects."""
        own = _of_keras() if self.layer is not None else ()
        values = self.read().items()
        return {k: v for k, v in values if k not in own and not str(k).startswith("_self_")}

    def write(self, name: Any, value: Any) -> None:
        """Set a name that `read` has, without the tracking of Keras; _MISSING removes it.

        Args:
            name: that `read` has.
            value: its new one; _MISSING removes the name.
        """
        if isinstance(self.itself, list):
            is_tensorflows = type(self.itself).__module__.startswith("tensorflow")
            of_class = type(self.itself) if is_tensorflows else list
            of_class.__setitem__(self.itself, slice(None), list(value))
        elif isinstance(self.itself, dict) and value is _MISSING:
            dict.pop(self.itself, name, None)
        elif isinstance(self.itself, dict):
            dict.__setitem__(self.itself, name, value)
        else:
            owner, name = self.itself, name if isinstance(self.itself, type) else "cell_contents"
            delattr(owner, name) if value is _MISSING else setattr(owner, name, value)


Place = tuple[Holder, Any]  # a holder and a name in it


@functools.cache
def _of_keras() -> frozenset[str]:
    return frozenset(vars(keras.Layer(name="attributes"))) | {"_tower_steps"}


def description(place: Place) -> str:
    """Return what the place is, as "the attribute 'z' of layer encoder"."""
    holder, name = place
    return holder.description.replace("{!r}", repr(name))


# What a function can reach.


def reached_by(fn: Callable) -> list[Holder]:
    """Return what a function can read, through whatever it holds; libraries are left out."""
    found: dict[tuple, Holder] = {}
    seen: dict[int, tuple[Any, bool]] = {}  # {id: (value, whether the user's)}; it keeps its id
    # (value, where it is: None for an object of this library).
    waiting: list[tuple[Any, Place | None]] = [(fn, (Holder({}, ""), ""))]
    while waiting and len(seen) < _MOST_VALUES:
        value, inside = waiting.pop()
        known = id(value) in seen and (seen[id(value)][1] or inside is None)
        if known or isinstance(value, _SIMPLE):
            continue
        seen[id(value)] = value, inside is not None
        for holder in _holders_at(value, inside):
            # Functions of one module read different names of it.
            key = id(holder.itself), frozenset(holder.names or ())
            if key not in found:
                found[key] = holder
                for name, each in holder.read().items():
                    parts = each if isinstance(holder.itself, list) else [each]
                    is_method = isinstance(holder.itself, type) and isinstance(each, _CODE)
                    waiting += [(part, (holder, name)) for part in parts if not is_method]
        is_ours = _is_ours(getattr(value, "__module__", None))
        waiting += [(part, None if is_ours else inside) for part in _parts_of(value, is_ours)]
    return list(found.values())


def _holders_at(value: Any, inside: Place | None) -> Iterator[Holder]:
    of_class = type(value)
    if isinstance(value, types.FunctionType):
        if _is_of_library(value.__module__) or _is_ours(value.__module__):
            return
        code, known = value.__code__, value.__globals__
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            yield Holder(cell, "the variable {!r} around the towers' function", [name])
        names = _names_in(code)
        modules = [known[name] for name in names if isinstance(known.get(name), types.ModuleType)]
        for module in [known, *(vars(m) for m in modules if not _is_of_library(m.__name__))]:
            yield Holder(module, "the global variable {!r}", names)
    elif isinstance(value, keras.Layer):
        for layer in tf_internals.layers_of(value):
            where = f"the attribute {{!r}} of layer {layer.path or layer.name}"
            yield Holder(vars(layer), where, layer=layer)
    elif isinstance(value, type):
        if not (_is_of_library(value.__module__) or _is_ours(value.__module__)):
            yield Holder(value, f"the attribute {{!r}} of class {value.__name__}")
    elif issubclass(of_class, list | dict):
        if inside is not None and len(value) <= _MOST_PARTS:
            yield Holder(value, description(inside), layer=inside[0].layer)
    elif _has_attributes(value) and not _is_ours(of_class.__module__):
        yield Holder(vars(value), f"the attribute {{!r}} of a {of_class.__name__}")


def _has_attributes(value: Any) -> bool:
    if isinstance(value, types.SimpleNamespace | tf.Module):
        return True
    of_class = type(value).__module__
    is_data = not isinstance(value, type | types.ModuleType | types.MethodType)
    is_known = _is_of_library(of_class) or of_class.startswith("towers.builder")
    return is_data and not is_known and hasattr(value, "__dict__")


def _parts_of(value: Any, is_ours: bool) -> list[Any]:
    """Return what else a value leads to; of this library's objects and functions all."""
    if isinstance(value, types.FunctionType) and not _is_of_library(value.__module__):
        cells = value.__closure__ or () if is_ours else ()
        inner = [part for cell in cells for part in Holder(cell, "", [""]).read().values()]
        return [value.__defaults__, value.__kwdefaults__, *inner, vars(value).get("__wrapped__")]
    if isinstance(value, _HOLDING_CODE):
        return gc.get_referents(value)
    if isinstance(value, tuple | set | list | dict):
        parts = value.values() if isinstance(value, dict) else value
        return list(parts) if len(value) <= _MOST_PARTS else []
    if is_ours:
        return list(vars(value).values()) if _has_attributes(value) else []
    if isinstance(value, keras.Layer):
        objects = tf_internals.layers_of(value)
    else:
        objects = [value] if _has_attributes(value) else []
    classes = dict.fromkeys(each for x in objects for each in type(x).__mro__)
    users = [each for each in classes if not _is_of_library(each.__module__)]
    return users + [x for each in users for x in vars(each).values()]


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function's code, inner functions included."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*map(_names_in, inner))


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "towers"


# What copies leave there.


class Snapshot:
    """Holders' values of some time."""

    def __init__(self, holders: Iterable[Holder]):
        """Keep the values of holders."""
        self._before = {holder: holder.users_values() for holder in holders}

    def changed(self) -> list[Place]:
        """Return the names that now have other tensors or, of layers, other Python values."""
        return [
            (holder, name)
            for holder, before in self._before.items()
            for name, value in holder.users_values().items()
            if not is_same(before.get(name, _MISSING), value)
            and _is_kept(keras.tree.flatten(value), holder.layer is not None)
        ]

    def restore(self, places: Iterable[Place]) -> None:
        """Set names to their saved values."""
        for holder, name in places:
            holder.write(name, self._before[holder].get(name, _MISSING))


def is_same(before: Any, now: Any) -> bool:
    """Compare values: tensors and objects by identity, numbers and texts by ==.

    Args:
        before: a value.
        now: the value to compare with it.
    """
    if type(before) is not type(now):
        return False
    if isinstance(before, tuple):
        return len(before) == len(now) and all(map(is_same, before, now))
    return before is now or (isinstance(before, bool | int | float | str) and before == now)


def _is_kept(leaves: Sequence[Any], in_layer: bool) -> bool:
    # An object other than a layer may count calls on purpose: it is kept only if it has tensors.
    tensors = list(filter(tf.is_tensor, leaves))
    if not tf.executing_eagerly():  # a constant is of no slice
        tensors = [x for x in tensors if tf.is_symbolic_tensor(x) or not isinstance(x, tf.Tensor)]
    known = all(isinstance(x, _PYTHON) or tf.is_tensor(x) for x in leaves)
    made = any(isinstance(x, keras.Variable) for x in leaves)  # of a layer that was not built
    return bool(in_layer or tensors) and known and not made


def values_at(places: Iterable[Place]) -> list[Any]:
    """Return the values at places."""
    return [holder.read().get(name) for holder, name in places]


def tensors_in(values: Any) -> list[Any]:
    """Return the tensors in any structure, dense, sparse and ragged."""
    return list(filter(tf.is_tensor, keras.tree.flatten(values)))


class SideOutputs:
    """The tensors that copies of a function set as attributes, joined like their outputs."""

    def __init__(
        self,
        places: Sequence[Place] = (),
        policies: Mapping[Any, str | None] | None = None,
        reached: Sequence[Holder] = (),
    ):
        """Set what is joined.

        Args:
            places: attributes that the function sets.
            policies: {("attribute", place): policy} of each tensor in them; None if it cannot be
                joined.
            reached: of a function that is called once, on the whole batch: where to look for them.
        """
        self.places, self.policies, self.reached = places, policies or {}, reached
        self._values: list[Any] = []  # of the attributes, after the last call

    def wrap(self, fn: Callable) -> Callable:
        """Return a function that returns (the result of `fn`, the tensors that it sets)."""

        def with_side_outputs(*batch: Any) -> tuple[Any, list[Any]]:
            holders = self.reached or [holder for holder, _ in self.places]
            if not holders:
                return fn(*batch), []
            before = Snapshot(holders)
            result = fn(*batch)
            if self.reached:
                self.places = before.changed()
            self._values = values_at(self.places)
            if self.reached:
                found = enumerate(tensors_in(self._values))
                self.policies = {
                    ("attribute", i): ROWS if x.shape.rank else "first" for i, x in found
                }
            before.restore(self.places)
            rows = []
            for value, policy in self._tensors():
                if policy == "mean":
                    value = value * tf.cast(_num_examples(batch), value.dtype)
                if policy:
                    rows.append(value if policy == ROWS else value[tf.newaxis])
            return result, rows

        return with_side_outputs

    def assign(self, joined: Sequence[Any], batch: Sequence[Any]) -> None:
        """Set the attributes to the values of the whole batch.

        Args:
            joined: the tensors that the wrapped function returned, joined over the towers.
            batch: the global batch.
        """
        reduce = {"sum": tf.reduce_sum, "mean": tf.reduce_sum, "max": tf.reduce_max}
        reduce |= {"min": tf.reduce_min, "first": lambda rows, axis: rows[0]}
        reduce["each"] = lambda rows, axis: rows  # in a check
        rest, aggregated = iter(joined), []
        for value, policy in self._tensors():
            if policy:
                value = next(rest)
                value = value if policy == ROWS else reduce[policy](value, axis=0)
            if policy == "mean":
                value /= tf.cast(_num_examples(batch), value.dtype)
            aggregated.append(value)
        tensors = iter(aggregated)

        def replaced(leaf: Any) -> Any:
            return next(tensors) if tf.is_tensor(leaf) else leaf

        for (holder, name), value in zip(self.places, self._values, strict=True):
            holder.write(name, keras.tree.map_structure(replaced, value))

    def _tensors(self) -> Iterator[tuple[Any, str | None]]:
        known = [key for key in self.policies if isinstance(key, tuple) and key[0] == "attribute"]
        return zip(tensors_in(self._values), map(self.policies.get, known), strict=True)


def _num_examples(batch: Any) -> Any:
    return num_rows(next(filter(tf.is_tensor, tf.nest.flatten(batch))))
