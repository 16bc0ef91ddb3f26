"""When functions are analyzed and checked, and what is done with what the checks find."""

import dataclasses
import hashlib
import os
import pathlib
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import tf_internals
from towers.builder import function_analysis
from towers.builder.attributes import is_same
from towers.builder.check import Check
from towers.builder.function_analysis import FunctionAnalysis, analyze, parts_of, unsplit
from towers.builder.replica_scope import ReplicaScope
from towers.builder.sharding import is_split
from towers.builder.traces import MOST_ROWS
from towers.errors import InputError, RunError

_CACHE_SIZE = 8  # analyses: a training and its evaluation have a few functions
# Steps, runs of a graph, or calls without one, after which a check is made again.
_AGAIN = {"once": [100], "always": [10**n for n in range(1, 9)], "off": []}
_SHARE = 0.01  # of the time since the last check, that a check may take
_ONE_AT_A_TIME = threading.Lock()  # two checks would hold two of TensorFlow's threads


@dataclasses.dataclass
class _Entry:
    """A function that was analyzed."""

    parts: list[Any]
    graph: Callable | None  # returns the graph that it is for; None: for all
    analysis: FunctionAnalysis
    check: Check | None  # None: there is none to make
    is_checked: bool = False
    is_on_towers: bool = False  # otherwise one device may be all that calls it
    calls: int = 1  # while no graph is built
    runs: tf.Variable | None = None  # counts the runs of a graph that hands over real rows

    @property
    def inexact(self) -> list[str]:
        """The messages on what differs, or that towers raise an error where one device does not."""
        is_unchecked = function_analysis.is_unchecked
        return [x for x in self.analysis.lines if self.analysis.refusal or not is_unchecked(x)]

    def serves(self, parts: Sequence[Any], graph: Any) -> bool:
        """Return whether it is of a function with these parts in a graph; None: in none."""
        if self.graph is not None and self.graph() is not graph:
            return False
        return len(parts) == len(self.parts) and all(map(is_same, parts, self.parts))


class Checks:
    """Analyzes and checks the functions that a builder copies, and reports what is found.

    Attributes:
        is_deferred: whether whoever makes the steps calls `after_step`.
        passed: keys of functions that have passed a check, on this code, model and versions.
        inexact: messages of what differs.
    """

    def __init__(self, builder: Any, on_warning: Callable[[str], None], when: str, on_inexact: str):
        """Start with nothing analyzed.

        Args:
            builder: the `TowerBuilder`.
            on_warning: called with each message.
            when: `check` of the builder.
            on_inexact: of the builder.

        Raises:
            ValueError: one of the last two is not among its values.
        """
        for name, value, allowed in (
            ("check", when, _AGAIN),
            ("on_inexact", on_inexact, ("warn", "stop", "one_device")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")
        self._builder, self._on_warning = builder, on_warning
        self.when, self.on_inexact = when, on_inexact
        self.is_deferred = False
        self.passed: set[str] = set()
        self.inexact: list[str] = []
        self.observe: Callable | None = None  # called with the towers' scopes
        self.slice_sizes: Sequence[int] | None = None  # in place of even ones
        self._held: FunctionAnalysis | None = None
        self._warned: set[str] = set()
        self._entries: list[_Entry] = []  # the newest first
        self._next_step = float("inf") if when == "off" else 1  # after which a check is due
        self._last = time.monotonic()

    def hold(self, analysis: FunctionAnalysis, sizes: Sequence[int], observe: Callable) -> None:
        """Take one analysis and sizes of slices for all functions: the builder is that of a check.

        `observe` is called with the towers' scopes before their assignments are made.

        Args:
            analysis: of all functions.
            sizes: of the slices.
            observe: called with the towers' scopes before their assignments are made.
        """
        self._held, self.slice_sizes, self.observe = analysis, sizes, observe

    def analyze(
        self,
        fn: Callable,
        *batch: Any,
        num_slices: int | None = None,
        silent: bool = False,
        backward: bool = True,
    ) -> FunctionAnalysis:
        """Return what towers must know of a function; check it, or leave that to `after_step`.

        The builder's methods call it. A function is analyzed once for each graph that is traced,
        and without a graph at its 1st, 10th, 100th call. The batch's values are tried if they are
        known, otherwise made-up ones of its types and shapes.

        Args:
            fn: the function.
            *batch: its arguments.
            num_slices: of the batch, by default as `gradients` splits it; one needs no analysis.
            silent: report nothing: the function may not run on towers at all. Without a graph,
                the analysis is that of all graphs to come.
            backward: compare gradients, too.

        Raises:
            RunError: towers differ from one device, and `on_inexact` is "stop".
        """
        if self._held is not None:
            return self._held
        if isinstance(tf_internals.open_scope(), ReplicaScope):
            raise InputError("a tower cannot have its own towers; call the function directly")
        if not is_split(batch):
            return FunctionAnalysis()
        if (num_slices or self._builder.num_slices) == 1:
            return unsplit(fn)
        entry = self._entry_of(fn, batch, silent, backward)
        if entry.check and not entry.is_checked and self._is_due(entry, silent):
            self._make(entry)
        if not silent:
            entry.is_on_towers = True
            self._report(entry)
            self._watch(entry)
            if self._builder.num_slices == 1:  # from here on
                return unsplit(fn)
        return entry.analysis

    def check(self, fn: Callable, variables: Iterable[Any], *batch: Any) -> list[str]:
        """Return messages on how towers would differ from one device on these rows.

        Args:
            fn: a tower function.
            variables: whose gradients are compared; none for all.
            *batch: its arguments.
        """
        analysis = analyze(fn, batch)
        if analysis.trace is None:
            return [function_analysis.not_checked(analysis.reason)]
        check = Check(analysis, self._builder)
        values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        check.weights = set(map(id, values)) or None
        return check.run()

    def after_step(self, step: int) -> list[str]:
        """Make the checks that are due after a step; return messages of what differs.

        Args:
            step: number of steps so far, 1 after the first.

        Raises:
            RunError: towers differ from one device, and `on_inexact` is "stop".
        """
        entries = [e for e in self._entries if e.is_on_towers]
        waiting = [e for e in entries if e.check and not e.is_checked]
        if not waiting and step < self._next_step:
            return []
        known, start, last = len(self.inexact), time.monotonic(), self._last
        for entry in waiting:
            self._make(entry)
        if step >= self._next_step:
            for entry in entries:
                if entry.check and entry not in waiting and not entry.analysis.lines:
                    self._found(entry, entry.check.run(True))
            self._last = time.monotonic()
            is_cheap = self._last - start <= _SHARE * (start - last)
            later = [*(n for n in _AGAIN[self.when] if n > step), float("inf"), float("inf")]
            self._next_step = later[0 if is_cheap or step < 10 else 1]
            if self._next_step == float("inf"):  # the traces of both sides are not needed again
                for entry in self._entries:
                    entry.check = None
        for entry in entries:
            self.warn(entry.analysis.lines)
        found = self.inexact[known:]
        if found and self.on_inexact == "stop":
            raise RunError(found[0])
        return found

    def forget(self, graph: tf.Graph | None = None) -> None:
        """Forget the analyses for a graph that was given up, or all if the model was replaced."""
        self._entries = [e for e in self._entries if graph and not (e.graph and e.graph() is graph)]

    def warn(self, lines: Iterable[str]) -> None:
        """Report lines that have not been reported yet, whatever the size of a difference."""
        for line in lines:
            what = line.partition(" differs between ")[0]
            if what not in self._warned:
                self._warned.add(what)
                self._on_warning(line)

    def _entry_of(self, fn: Callable, batch: Sequence[Any], silent: bool, backward: bool) -> _Entry:
        eager, parts = tf.executing_eagerly(), [backward, *parts_of(fn, batch)]
        graph = None if eager else tf.compat.v1.get_default_graph()
        entry = next((entry for entry in self._entries if entry.serves(parts, graph)), None)
        calls = entry.calls + (eager and not silent) if entry else 1
        if entry is not None:
            entry.calls = calls
            if silent or not eager or calls not in _AGAIN["always"]:
                return entry
            self._entries.remove(entry)  # what Python holds may be another
        analysis = analyze(fn, batch)
        place = None if silent and eager else (lambda: None) if eager else weakref.ref(graph)
        check = Check(analysis, self._builder, backward) if analysis.trace else None
        if check is None:
            analysis.lines = (
                [function_analysis.not_checked(analysis.reason)] if self.when != "off" else []
            )
        elif self.when == "off" or (self.passed and _key(analysis) in self.passed):
            check = check if analysis.needs_check else None
        entry = _Entry(parts, place, analysis, check, calls=calls)
        self._entries = [entry, *self._entries[: _CACHE_SIZE - 1]]
        return entry

    def _is_due(self, entry: _Entry, silent: bool) -> bool:
        """Return whether a check cannot wait until the first step is made."""
        if entry.analysis.needs_check:
            return True  # towers are made by what it chooses
        if silent and self.on_inexact == "warn":
            return False
        return not self.is_deferred or self.on_inexact != "warn"

    def _make(self, entry: _Entry) -> None:
        entry.is_checked = True
        self._found(entry, entry.check.run())

    def _found(self, entry: _Entry, lines: list[str]) -> None:
        if self.when == "off":
            lines = []
        elif not lines:
            self.passed.add(_key(entry.analysis))
        entry.analysis.lines = lines
        self.inexact += entry.inexact

    def _report(self, entry: _Entry) -> None:
        """Report the analysis of a function that towers are about to call, or refuse it."""
        analysis, inexact = entry.analysis, entry.inexact
        if inexact and self.on_inexact == "stop":
            raise RunError(inexact[0])
        if inexact and self.on_inexact == "one_device":
            if self.is_deferred:  # whoever makes the steps calls it on one device
                raise InputError(inexact[0])
            builder = self._builder
            builder.devices, builder.accumulate_steps = builder.devices[:1], 1
            builder.num_slices = 1
            self.warn([f"runs on one device (on_inexact='one_device'): {inexact[0]}"])
            return
        self.warn(inexact)
        self.warn(() if self.when == "off" else analysis.not_joined)

    def _watch(self, entry: _Entry) -> None:
        """Let the graph around hand over real rows when it runs, and check the function on these.

        A variable counts the runs, so that all but a few of them do not call Python.
        """
        check, graph = entry.check, tf.compat.v1.get_default_graph()
        made_up = check and check.towers and check.tracer.real is None
        if not made_up or self.is_deferred or entry.runs is not None or entry.inexact:
            return
        if tf.executing_eagerly() or self.when == "off" or tf_internals.is_compiled_by_xla(graph):
            return
        # Python that a graph calls holds one of the threads that run ops; a check needs another.
        threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
        batch = check.tracer.batch
        of_graph = all(isinstance(x, tf.Tensor) and x.graph is graph for x in batch)
        if not batch or not of_graph:
            return
        entry.analysis.lines = []  # real rows may suit the function

        def compare(*rows: tf.Tensor) -> None:
            if not check.tracer.keep_rows(rows):
                check.towers = None  # both sides are traced again
            self._found(entry, check.run(True))
            self.warn(entry.analysis.lines)

        def look(*rows: tf.Tensor) -> None:
            if entry.analysis.lines:
                return
            if threads < 2:
                threading.Thread(target=compare, args=rows, daemon=False).start()
            elif _ONE_AT_A_TIME.acquire(blocking=False):
                try:
                    compare(*rows)
                finally:
                    _ONE_AT_A_TIME.release()
            else:
                entry.runs.assign(0)  # in the next run
            if self.on_inexact != "warn" and entry.inexact:
                raise RunError(
                    f"{entry.inexact[0]}. Only real rows show it, and the tf.function is already "
                    "traced for towers; create it with a TowerBuilder of one device"
                )

        def hand_over() -> tf.Operation:
            rows = [x[:MOST_ROWS] for x in batch]
            if self.on_inexact != "warn":  # updates wait for what reads
                for variable in check.one.variables:
                    variable.read_value()
            return tf.group(tf.py_function(look, rows, [], name="check_of_towers"))

        with tf.init_scope(), tf.device("/cpu:0"):
            entry.runs = tf_internals.make_variable(tf.zeros([], tf.int64))
        with tf.device("/cpu:0"), tf.name_scope("check"):
            due = tf.constant([1, *_AGAIN[self.when]], tf.int64)
            is_due = tf.reduce_any(entry.runs.assign_add(1) == due)
            tf.cond(is_due, hand_over, tf.no_op)


def _key(analysis: FunctionAnalysis) -> str:
    """Return a key of a function's graph and of the code that computes and checks it."""
    definition = analysis.trace.function.graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    hashed = hashlib.sha256(f"{tf.__version__} {keras.__version__}".encode())
    for file in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        hashed.update(file.read_bytes())
    for node in nodes:  # whose names have numbers that depend on what was traced before
        name = re.sub(r"\d+", "", node.name)
        hashed.update(f"{name} {node.op}".encode())
        for key, value in sorted(node.attr.items()):
            if not value.HasField("func"):
                text = value.SerializeToString(deterministic=True)
                is_function = value.HasField("s") and b"__" in value.s  # the name of one
                hashed.update(key.encode() + (b"" if is_function else text))
    return hashed.hexdigest()[:16]
