"""Four tiers of tests by what a test may do, and guards that hold each test to its own.

    unit      builds no TensorFlow graph
    graph     traces a model at most twice
    run       trains and verifies
    process   starts processes

Each test is marked with one of them, by its own decorator or by `pytestmark` of its module; the
mark that stands closest to the test counts. Tests that are also marked `extended` are left to
`scripts/test --all`. A test that does what only a higher tier may fails with the marker to write.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

TIERS = ("unit", "graph", "run", "process")
_MAX_TRACES = 2
_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
# A run's manifest asks these about the checkout and the machine.
_HARMLESS = ("git", "lscpu", "uname", "file", "nvidia-smi")
# What trains or verifies: functions that are looked up by these names whenever they are called.
_TRAINS = (
    ("towers.training.train", "_train"),
    ("towers.commands.verify.report", "compare"),
    ("keras", "Model.fit"),
)


class TierError(AssertionError):
    """A test does what only a higher tier may."""


class _Current:
    """The test that runs now: its tier, and what it has done so far."""

    def __init__(self) -> None:
        self.tier = TIERS[-1]
        self.num_traces = 0
        self.broken = ""  # kept in case the test, or what it tests, catches the error


_current = _Current()
_tracing = threading.local()


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test: that of its parameters, its decorators, or its module."""
    own = [mark.name for mark in getattr(getattr(item, "callspec", None), "marks", [])]
    for name in [*own, *(mark.name for mark in item.iter_markers())]:
        if name in TIERS:
            return name
    raise pytest.UsageError(
        f"{item.nodeid} has no tier: write @pytest.mark.{TIERS[0]}, or one of {', '.join(TIERS)}"
    )


def enter(tier: str) -> None:
    """Hold what follows to a tier, until the next call."""
    _current.tier, _current.num_traces, _current.broken = tier, 0, ""


def check() -> None:
    """Raise TierError if the tier that was entered was not kept, whoever caught that error."""
    if _current.broken:
        raise TierError(_current.broken)


def _require(tier: str, what: str) -> None:
    """Raise TierError if the test's tier is below the one that `what` it does needs."""
    if TIERS.index(_current.tier) < TIERS.index(tier):
        _current.broken = (
            f"a test that is marked {_current.tier} {what}: mark it @pytest.mark.{tier}, "
            "or let it do less"
        )
        raise TierError(_current.broken)


def install() -> None:
    """Put the guards in place, for good; those of TensorFlow only where it has been imported."""
    sys.addaudithook(_audit)
    if "tensorflow" not in sys.modules:
        return
    from tensorflow.python.framework import func_graph, ops

    ops.get_default_graph()  # which is made once in a process, by whoever asks for it first
    _wrap(ops.Graph, "__init__", _needs("graph", "builds a TensorFlow graph"))
    for name, module in list(sys.modules.items()):  # some have it by `from ... import`
        if name.startswith("tensorflow.") and hasattr(module, "func_graph_from_py_func"):
            _wrap(module, "func_graph_from_py_func", _counts_as_trace)
    assert hasattr(func_graph, "func_graph_from_py_func")
    _wrap(importlib.import_module("keras").Layer, "__call__", _notes_models)
    for module, path in _TRAINS:
        owner, _, name = path.rpartition(".")
        module = importlib.import_module(module)
        owner = getattr(module, owner) if owner else module
        _wrap(owner, name, _needs("run", f"trains or verifies ({path})"))


def _wrap(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replace an attribute by what `make` returns of it."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _audit(event: str, arguments: tuple) -> None:
    """Refuse to start a process; Python calls this before it does."""
    if event in _STARTS and _current.tier != "process":
        program = str(arguments[0] if arguments else "").rpartition("/")[2]
        if program not in _HARMLESS:
            _require("process", f"starts a process ({event} {program})")


def _needs(tier: str, what: str) -> Callable[[Callable], Callable]:
    def wrapped(function: Callable) -> Callable:
        def called(*args: Any, **kwargs: Any) -> Any:
            _require(tier, what)
            return function(*args, **kwargs)

        return called

    return wrapped


def _counts_as_trace(trace: Callable) -> Callable:
    """Count the outermost traces in which a Keras model is called."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        if getattr(_tracing, "calls_a_model", None) is not None:  # within another trace
            return trace(*args, **kwargs)
        _tracing.calls_a_model = False
        try:
            return trace(*args, **kwargs)
        finally:
            _current.num_traces += _tracing.calls_a_model
            _tracing.calls_a_model = None
            if _current.num_traces > _MAX_TRACES and sys.exc_info()[0] is None:
                _require("run", f"traces a model more than {_MAX_TRACES} times")

    return traced


def _notes_models(call: Callable) -> Callable:
    import keras

    def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(layer, keras.Model) and getattr(_tracing, "calls_a_model", None) is False:
            _tracing.calls_a_model = True
        return call(layer, *args, **kwargs)

    return called
