"""Side effects on attributes of Keras layers: `self.z = z`, a counter, a list of features.

Each copy of a function finds these attributes as they were before the first copy. After the last
one they are what one device would leave: Python values are those of one call, and tensors are
joined as a rehearsal has found. What cannot be joined is refused where it is used.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import tf_internals
from towers.builder.op_names import layer_of, tower_of
from towers.builder.sharding import num_rows
from towers.errors import InputError

ROWS = "rows"  # how a tensor with a row for each example is joined; else as states are
Place = tuple[keras.Layer, str]  # a layer and the name of an attribute
_PYTHON = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic, tf.DType)
_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


class Attributes:
    """A snapshot of the attributes of layers."""

    def __init__(self) -> None:
        """Begin with no layer."""
        self._before: dict[int, tuple[keras.Layer, dict[str, Any]]] = {}

    def note(self, layer: keras.Layer) -> None:
        """Save the attributes of a layer and of those below it, unless they are saved already."""
        if id(layer) in self._before:
            return
        for own in tf_internals.layers_of(layer):
            if id(own) not in self._before:
                values = {k: _noted(v) for k, v in vars(own).items() if k not in _of_keras()}
                self._before[id(own)] = own, values

    def changed(self) -> list[Place]:
        """Return which attributes hold other tensors or Python values now."""
        return [
            (layer, name)
            for layer, before in self._before.values()
            for name, value in vars(layer).items()
            if name not in _of_keras()
            and not (name in before and _is_same(before[name], _noted(value)))
            and all(isinstance(leaf, _PYTHON + _TENSORS) for leaf in _leaves(_noted(value)))
        ]

    def restore(self, places: Iterable[Place]) -> None:
        """Set attributes to what they were."""
        for layer, name in places:
            before = self._before[id(layer)][1]
            if name in before:
                vars(layer)[name] = _restored(before[name])
            else:
                vars(layer).pop(name, None)


class SideOutputs:
    """The tensors that copies of a function leave in attributes, joined like their outputs."""

    def __init__(self, places: Sequence[Place], policies: Sequence[str | None]):
        """Set which attributes it changes, and how each tensor in them is joined, if it can be."""
        self.places, self.policies = places, policies
        self._left: list[Any] = []  # by one call

    def around(self, fn: Callable) -> Callable:
        """Return a function that returns (what `fn` returns, the tensors that it leaves)."""

        def with_side_outputs(*batch: Any) -> tuple[Any, list[Any]]:
            if not self.places:
                return fn(*batch), []
            attributes = Attributes()
            for layer, _ in self.places:
                attributes.note(layer)
            result = fn(*batch)
            self._left = [_noted(vars(layer).get(name)) for layer, name in self.places]
            attributes.restore(self.places)
            rows = []
            for value, policy in self._tensors():
                if policy == "mean":
                    value = value * tf.cast(_num_examples(batch), value.dtype)
                if policy:
                    rows.append(value if policy == ROWS else value[tf.newaxis])
            return result, rows

        return with_side_outputs

    def leave(self, joined: Sequence[Any], batch: Sequence[Any]) -> None:
        """Set the attributes to the values of all towers, each joined along axis 0."""
        reduce = {"sum": tf.reduce_sum, "mean": tf.reduce_sum, "max": tf.reduce_max}
        reduce |= {"min": tf.reduce_min, "first": lambda rows, axis: rows[0]}
        rest, found = iter(joined), []
        for value, policy in self._tensors():
            if policy:
                value = next(rest)
                value = value if policy == ROWS else reduce[policy](value, axis=0)
            if policy == "mean":
                value /= tf.cast(_num_examples(batch), value.dtype)
            found.append(value)
        tensors = iter(found)

        def replaced(leaf: Any) -> Any:
            return next(tensors) if isinstance(leaf, _TENSORS) else leaf

        for (layer, name), left in zip(self.places, self._left, strict=True):
            vars(layer)[name] = _restored(left, replaced)
            for own in filter(tf.is_symbolic_tensor, _tensors_in(left)):
                holder = f"the attribute {name!r} of layer {layer.path or layer.name}"
                _JOINS.setdefault(own.graph, _Joins()).not_joined[own.name] = holder

    def _tensors(self) -> Iterator[tuple[Any, str | None]]:
        """Yield each tensor that a call has left, and how it is joined."""
        found = _tensors_in(self._left)
        known = self.policies if len(self.policies) == len(found) else [None] * len(found)
        return zip(found, known, strict=True)


def tensors_at(places: Iterable[Place]) -> list[Any]:
    """Return the tensors in attributes."""
    return _tensors_in([_noted(vars(layer).get(name)) for layer, name in places])


def _tensors_in(left: Any) -> list[Any]:
    return [leaf for leaf in _leaves(left) if isinstance(leaf, _TENSORS)]


def _num_examples(batch: Any) -> Any:
    return num_rows(next(x for x in tf.nest.flatten(batch) if isinstance(x, _TENSORS)))


# Values, and what is in them.


@dataclasses.dataclass(frozen=True)
class _Container:
    """A list, tuple, dict or set, and what was in it when it was noted."""

    itself: Any
    keys: Sequence[Any]  # of a dict
    parts: Sequence[Any]


def _noted(value: Any) -> Any:
    """Return a snapshot of a value, which may hold others."""
    if isinstance(value, dict):
        return _Container(value, list(value), [_noted(part) for part in value.values()])
    if isinstance(value, list | tuple | set):
        return _Container(value, (), [_noted(part) for part in value])
    return value


def _restored(noted: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return a value with its noted content again; lists and dicts stay the same objects."""
    if not isinstance(noted, _Container):
        return leaf(noted)
    itself, parts = noted.itself, [_restored(part, leaf) for part in noted.parts]
    if isinstance(itself, dict):  # Keras' own containers track what their methods are given
        dict.clear(itself)
        for key, part in zip(noted.keys, parts, strict=True):
            dict.__setitem__(itself, key, part)
    elif isinstance(itself, list):
        list.__setitem__(itself, slice(None), parts)
    elif isinstance(itself, set):
        set.clear(itself)
        set.update(itself, parts)
    elif any(new is not old for new, old in zip(parts, itself, strict=True)):
        return type(itself)(*parts) if hasattr(itself, "_fields") else type(itself)(parts)
    return itself


def _leaves(noted: Any) -> list[Any]:
    if isinstance(noted, list):
        return [leaf for part in noted for leaf in _leaves(part)]
    return _leaves(list(noted.parts)) if isinstance(noted, _Container) else [noted]


def _is_same(before: Any, now: Any) -> bool:
    """Return whether a value is what it was: the same objects, or the same numbers and texts."""
    if isinstance(before, _Container):
        return (
            isinstance(now, _Container)
            and type(before.itself) is type(now.itself)
            and list(before.keys) == list(now.keys)
            and len(before.parts) == len(now.parts)
            and all(map(_is_same, before.parts, now.parts))
        )
    if isinstance(before, np.ndarray) and isinstance(now, np.ndarray):
        return np.array_equal(before, now)
    simple = isinstance(before, bool | int | float | str)
    return before is now or (simple and type(before) is type(now) and before == now)


@functools.cache
def _of_keras() -> frozenset[str]:
    return frozenset(vars(keras.Layer(name="attributes"))) | {"_tower_steps"}


# What is used outside of the towers, although it is of one of them.

_SAME = ("Placeholder", "Const", "ReadVariableOp")  # what they give is the same in all towers


class _Joins:
    """The joins in a graph of what towers return."""

    def __init__(self) -> None:
        self.own: set[str] = set()  # names of ops that may use what is of one tower
        self.of_towers: set[str] = set()  # and of those that are of one tower
        self.num_checked = 0  # of the graph's ops, see `refuse_uses`
        self.returned: set[str] = set()  # names of tensors
        self.not_joined: dict[str, str] = {}  # {name of a tensor: what holds it}


_JOINS: MutableMapping[tf.Graph, _Joins] = weakref.WeakKeyDictionary()


def joins_towers(fn: Callable) -> Callable:
    """Permit the ops that `fn` makes to use what is of one tower: it joins that."""

    @functools.wraps(fn)
    def joining(*args: Any) -> Any:
        if tf.executing_eagerly():
            return fn(*args)
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        result = fn(*args)
        joins = _JOINS.setdefault(graph, _Joins())
        made = [op.name for op in graph.get_operations()[start:]]
        joins.own.update(made)
        joins.of_towers.update(name for name in made if tower_of(name) is not None)
        leaves = tf.nest.flatten(result, expand_composites=True)
        joins.returned |= {leaf.name for leaf in leaves if tf.is_symbolic_tensor(leaf)}
        return result

    return joining


def refuse_uses() -> None:
    """Raise InputError if another op of this graph uses what is of one tower, with the layer."""
    graph = tf.compat.v1.get_default_graph()
    joins = _JOINS.get(graph)
    if joins is None:
        return
    ops = graph.get_operations()[joins.num_checked :]
    joins.num_checked += len(ops)
    for op in ops:
        # A tape may go back through towers' backward passes: what it makes is of no tower.
        known = op.name in joins.own or "gradient_tape" in op.name
        for x in () if known else op.inputs:
            used = x.op.name in joins.of_towers and x.op.type not in _SAME
            if used and x.name not in joins.returned:
                made = f"a tensor that layer {layer_of(x.op.name)} makes"
                raise InputError(
                    f"{joins.not_joined.get(x.name, made)} is used outside of the towers, each of "
                    "which has another one, of its slice, and these do not make that of the batch: "
                    "return it from the layer's call, with a row for each example, and compute "
                    "from that"
                )
