"""Attributes and lists that copies of a function set: `self.z = z` in a layer, a list of features.

Each copy of a function reads these names as they were before the first copy. After the last copy
they have the values of one device: Python values of one call, and tensors joined as the analysis
has found. Using a tensor that cannot be joined raises InputError.
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
from towers.builder.namespaces import CONTAINERS, MOST_PARTS, Namespace, namespace_of
from towers.builder.op_names import NO_LAYER, layer_of, tower_of
from towers.builder.sharding import num_rows
from towers.errors import InputError

ROWS = "rows"  # policy: concatenate a tensor that has a row for each example
Place = tuple[Namespace, str]  # where a name is, and the name
_PYTHON = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic, tf.DType)
_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


class Attributes:
    """A snapshot of namespaces: attributes of layers and objects, variables around functions."""

    def __init__(self) -> None:
        """Begin without namespaces."""
        self._before: dict[tuple, tuple[Namespace, dict[str, Any]]] = {}
        self._layers: set[int] = set()  # ids of those that are saved

    def save(self, namespace: Namespace) -> None:
        """Save the values of a namespace, unless they are saved already."""
        if namespace.key not in self._before and namespace.is_users:
            values = {name: _snapshot(value) for name, value in namespace.users_values().items()}
            self._before[namespace.key] = namespace, values

    def save_layers(self, layer: keras.Layer) -> None:
        """Save the attributes of a layer and its sublayers, unless they are saved already."""
        if id(layer) not in self._layers:
            self._layers |= {id(sublayer) for sublayer in tf_internals.layers_of(layer)}
            for sublayer in tf_internals.layers_of(layer):
                self.save(namespace_of(sublayer))

    def changed(self) -> list[Place]:
        """Return the names that now have other tensors or, of layers, other Python values."""
        places = {
            (id(namespace.owner), name): (namespace, name)
            for namespace, before in self._before.values()
            for name, value in namespace.users_values().items()
            if not (name in before and _is_same(before[name], _snapshot(value)))
            and _is_kept(_leaves(_snapshot(value)), isinstance(namespace.owner, keras.Layer))
        }
        return list(places.values())

    def restore(self, places: Iterable[Place]) -> None:
        """Set names to their saved values."""
        for namespace, name in places:
            before = self._before[namespace.key][1]
            if name in before:
                namespace.set(name, _restored(before[name]))
            else:
                namespace.remove(name)


class SideOutputs:
    """The tensors that copies of a function set as attributes, joined like their outputs."""

    def __init__(
        self,
        places: Sequence[Place] = (),
        policies: Sequence[str | None] = (),
        reached: Sequence[Namespace] = (),
    ):
        """Set what is joined.

        Args:
            places: attributes that the function sets.
            policies: of each tensor in them; None if it cannot be joined.
            reached: of a function that is called once, on the whole batch: where to look for them.
        """
        self.places, self.policies, self.reached = places, policies, reached
        self._values: list[Any] = []  # of the attributes, after the last call

    def wrap(self, fn: Callable) -> Callable:
        """Return a function that returns (the result of `fn`, the tensors that it sets)."""

        def with_side_outputs(*batch: Any) -> tuple[Any, list[Any]]:
            namespaces = self.reached or [namespace for namespace, _ in self.places]
            if not namespaces:
                return fn(*batch), []
            attributes = Attributes()
            for namespace in namespaces:
                attributes.save(namespace)
            result = fn(*batch)
            if self.reached:
                self.places = attributes.changed()
                found = tensors_at(self.places)
                self.policies = [ROWS if x.shape.rank else "first" for x in found]
            self._values = _values_at(self.places)
            attributes.restore(self.places)
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
            return next(tensors) if isinstance(leaf, _TENSORS) else leaf

        for place, snapshot in zip(self.places, self._values, strict=True):
            namespace, name = place
            namespace.set(name, _restored(snapshot, replaced))
            for tensor in filter(tf.is_symbolic_tensor, _tensors_in(snapshot)):
                joins = _JOINS.setdefault(tensor.graph, _Joins())
                joins.not_joined[tensor.name] = description(place)

    def _tensors(self) -> Iterator[tuple[Any, str | None]]:
        tensors = _tensors_in(self._values)
        known = self.policies if len(self.policies) == len(tensors) else [None] * len(tensors)
        return zip(tensors, known, strict=True)


def description(place: Place) -> str:
    """Return what the place is, as "the attribute 'z' of layer encoder"."""
    namespace, name = place
    return namespace.description.replace("{!r}", repr(name))


def tensors_at(places: Iterable[Place]) -> list[Any]:
    """Return the tensors at places."""
    return _tensors_in(_values_at(places))


def _values_at(places: Iterable[Place]) -> list[Any]:
    return [_snapshot(namespace.values().get(name)) for namespace, name in places]


def _is_kept(leaves: Sequence[Any], in_layer: bool) -> bool:
    # An object other than a layer may count calls on purpose: it is kept only if it has tensors.
    tensors = [leaf for leaf in leaves if isinstance(leaf, _TENSORS)]
    if not tf.executing_eagerly():  # a constant is of no slice
        tensors = [x for x in tensors if tf.is_symbolic_tensor(x) or not isinstance(x, tf.Tensor)]
    return bool(in_layer or tensors) and all(isinstance(x, _PYTHON + _TENSORS) for x in leaves)


def _tensors_in(snapshots: Any) -> list[Any]:
    return [leaf for leaf in _leaves(snapshots) if isinstance(leaf, _TENSORS)]


def _num_examples(batch: Any) -> Any:
    return num_rows(next(x for x in tf.nest.flatten(batch) if isinstance(x, _TENSORS)))


@dataclasses.dataclass(frozen=True)
class _Container:
    """The snapshot of a list, tuple, dict or set."""

    itself: Any
    keys: Sequence[Any]  # of a dict
    parts: Sequence[Any]  # snapshots of its content


def _snapshot(value: Any) -> Any:
    if isinstance(value, CONTAINERS) and len(value) > MOST_PARTS:
        return value
    if isinstance(value, dict):
        return _Container(value, list(value), [_snapshot(part) for part in value.values()])
    if isinstance(value, CONTAINERS):
        return _Container(value, (), [_snapshot(part) for part in value])
    return value


def _restored(snapshot: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    # Lists and dicts stay the same objects and get their content again.
    if not isinstance(snapshot, _Container):
        return leaf(snapshot)
    itself, parts = snapshot.itself, [_restored(part, leaf) for part in snapshot.parts]
    library = type(itself).__module__.partition(".")[0]
    if library == "tensorflow":  # a tf.Module's, which compares its content: one without tracking
        return dict(zip(snapshot.keys, parts, strict=True)) if isinstance(itself, dict) else parts
    # Keras' own containers track what their methods are given, not those of the class below.
    container = super(type(itself), itself) if library == "keras" else itself
    if isinstance(itself, dict):
        container.clear()
        for key, part in zip(snapshot.keys, parts, strict=True):
            container.__setitem__(key, part)
    elif isinstance(itself, list):
        container.__setitem__(slice(None), parts)
    elif isinstance(itself, set):
        container.clear()
        container.update(parts)
    elif any(new is not old for new, old in zip(parts, itself, strict=True)):
        return type(itself)(*parts) if hasattr(itself, "_fields") else type(itself)(parts)
    return itself


def _leaves(snapshot: Any) -> list[Any]:
    if isinstance(snapshot, list):
        return [leaf for part in snapshot for leaf in _leaves(part)]
    return _leaves(list(snapshot.parts)) if isinstance(snapshot, _Container) else [snapshot]


def _is_same(before: Any, now: Any) -> bool:
    # Tensors and objects are compared by identity, numbers and texts by value.
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


# Uses of one tower's tensors outside of the towers.

_SAME = ("Placeholder", "Const", "ReadVariableOp")  # have the same output in all towers


class _Joins:
    """The ops of a graph that join what towers return."""

    def __init__(self) -> None:
        self.own: set[str] = set()  # names of ops that may use one tower's tensors
        self.of_towers: set[str] = set()  # names of the towers' ops
        self.num_checked = 0  # of the graph's ops, see `refuse_uses`
        self.returned: set[str] = set()  # names of joined tensors
        self.not_joined: dict[str, str] = {}  # {name of a tensor: the attribute that holds it}


_JOINS: MutableMapping[tf.Graph, _Joins] = weakref.WeakKeyDictionary()


def joins_towers(fn: Callable) -> Callable:
    """Decorate a function that joins towers: its ops may use one tower's tensors."""

    @functools.wraps(fn)
    def joining(*args: Any) -> Any:
        if tf.executing_eagerly():
            return fn(*args)
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        result = fn(*args)
        joins = _JOINS.setdefault(graph, _Joins())
        new_names = [op.name for op in graph.get_operations()[start:]]
        joins.own.update(new_names)
        joins.of_towers.update(name for name in new_names if tower_of(name) is not None)
        leaves = tf.nest.flatten(result, expand_composites=True)
        joins.returned |= {leaf.name for leaf in leaves if tf.is_symbolic_tensor(leaf)}
        return result

    return joining


def refuse_uses() -> None:
    """Raise InputError if an op outside of the towers uses one tower's tensor."""
    graph = tf.compat.v1.get_default_graph()
    joins = _JOINS.get(graph)
    if joins is None:
        return
    ops = graph.get_operations()[joins.num_checked :]
    joins.num_checked += len(ops)
    for op in ops:
        # Ops of a tape that goes back through the towers' backward passes belong to no tower. For
        # each op in a tower, tf.vectorized_map, as in batch_jacobian, makes ops in its scope.
        vectorized = "/pfor/" in op.name and tower_of(op.name) is not None
        known = op.name in joins.own or "gradient_tape" in op.name or vectorized
        for x in () if known else op.inputs:
            used = x.op.name in joins.of_towers and x.op.type not in _SAME
            if used and x.name not in joins.returned:
                layer = layer_of(x.op.name)
                made_by = layer if layer == NO_LAYER else f"layer {layer}"
                description = f"a tensor that {made_by} makes"
                raise InputError(
                    f"{joins.not_joined.get(x.name, description)} is used outside of the "
                    "towers, each of which has another one, of its slice, and these do not make "
                    "that of the batch: return it from the layer's call, with a row "
                    "for each example, and compute from that"
                )
