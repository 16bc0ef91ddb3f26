"""What all tests share: four CPU devices that stand in for GPUs, tiers, trained runs, an end."""

import atexit
import collections
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests import leftovers, trained_runs

TIERS = ("unit", "graph", "run", "process")
_FOLDER = Path(__file__).parent
_DURATIONS = _FOLDER / "durations.json"
_KEY = pytest.StashKey[str]()  # marks what this process starts
_LEFT = pytest.StashKey[list[str]]()
_records: dict[str, list] = {}  # {test: [tier, seconds]}

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Runs of the tests are not those of whoever starts them; all processes of a session share the key.
if "PYTEST_XDIST_WORKER" not in os.environ:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        os.environ[name] = tempfile.mkdtemp(prefix="towers-tests-")
        atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
# So a shell starts what runs in the background, or under nohup, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    parser.addoption("--keep-durations", action="store_true", help=f"write {_DURATIONS.name}")
    parser.addoption("--checked", action="store_true", help="check the towers of all tests")


def pytest_ignore_collect(collection_path, config):
    """Leave out what is to run with GPUs, unless it is named."""
    named = any(collection_path.name in argument for argument in config.args)
    return True if collection_path == _FOLDER / "gpu" and not named else None


def pytest_configure(config):
    """Make the devices before a test is read, which may make tensors.

    The process that hands tests out to the others needs none. Keras' first import may start a
    process, for matplotlib's fonts, of which no test is to be blamed.
    """
    is_worker = hasattr(config, "workerinput")
    config.stash[_LEFT] = []
    if is_worker:
        config.stash[_KEY] = f"{os.environ[leftovers.VARIABLE]}/{config.workerinput['workerid']}"
        os.environ[leftovers.VARIABLE] = config.stash[_KEY]
    else:
        config.stash[_KEY] = leftovers.begin()
    if config.getoption("numprocesses", None) and not is_worker:
        return
    import keras  # noqa: F401
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )


# Tiers.


def _tier_of(item):
    """Return the tier of a test: that of its parameters, its decorators, or its module."""
    own = [mark.name for mark in getattr(getattr(item, "callspec", None), "marks", [])]
    for name in [*own, *(mark.name for mark in item.iter_markers())]:
        if name in TIERS:
            return name
    raise pytest.UsageError(f"{item.nodeid} has no tier: mark it with one of {', '.join(TIERS)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Give each test its one tier, which -m goes by, and begin with the slowest modules."""
    seconds = json.loads(_DURATIONS.read_text())["modules"] if _DURATIONS.exists() else {}
    of_items = [(item, _tier_of(item)) for item in items]
    for item, tier in of_items:
        for node in item.listchain():  # -m would also find a module's mark, which is further away
            node.own_markers = [m for m in node.own_markers if m.name not in TIERS]
        item.user_properties.append(("tier", tier))
    for item, tier in of_items:
        item.add_marker(tier)
    items.sort(key=lambda item: -seconds.get(os.path.relpath(item.path, _FOLDER), 0.0))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Keep the garbage collector from looking through what has been imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # tracing makes many objects that live


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    try:
        return (yield)
    finally:
        last = nextitem is None or nextitem.path != item.path
        if last and dict(item.user_properties)["tier"] in ("run", "process"):
            gc.collect()  # models and graphs refer to themselves: a process grew to 7 GiB
            gc.freeze()  # what a module leaves for ever is not looked through again
        if "trained" in item.funcargs:  # a test that is skipped has none
            item.funcargs["trained"].assert_unchanged()


# How long they take.


def pytest_runtest_logreport(report):
    """Add up what the parts of a test take."""
    tier = dict(report.user_properties).get("tier", "?")
    _records.setdefault(report.nodeid, [tier, 0.0])[1] += report.duration


def pytest_terminal_summary(terminalreporter, config):
    """Print what was left behind; keep what each tier and module takes where that is asked for."""
    for line in config.stash[_LEFT]:
        terminalreporter.write_line(f"left behind by a test: {line}", red=True)
    if _records and config.getoption("keep_durations"):
        tiers, modules = collections.defaultdict(list), collections.Counter()
        for name, (tier, seconds) in _records.items():
            tiers[tier].append(seconds)
            modules[name.partition("::")[0].removeprefix("tests/")] += seconds
        kept = {
            "tiers": {tier: [len(taken), round(sum(taken))] for tier, taken in tiers.items()},
            "modules": {name: round(modules[name], 1) for name in sorted(modules)},
        }
        _DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


# What is left.


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Let a session fail whose tests leave processes behind; the watchdog ends them."""
    config = session.config
    left = [f"process {pid}: {line}" for pid, line in leftovers.marked(config.stash[_KEY]).items()]
    if hasattr(config, "workerinput"):
        config.workeroutput["left"] = left
        return
    if not config.getoption("numprocesses", None):
        config.stash[_LEFT].extend(left)
    if config.stash[_LEFT] and session.exitstatus == 0:
        session.exitstatus = 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[_LEFT].extend(getattr(node, "workeroutput", {}).get("left", []))


# What tests ask for.


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Runs that are trained once for all tests, which read them; see `trained_runs`."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all processes of the session
    return trained_runs.Runs(folder / "trained")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stand in an empty folder, and leave the search path as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture(autouse=True)
def unchecked(request, monkeypatch):
    """Check no towers, which takes as long as a first step, but in tests that are marked so."""
    if request.node.get_closest_marker("checked") or request.config.getoption("checked"):
        return
    if dict(request.node.user_properties)["tier"] == "unit":
        return  # there are none
    from towers.builder.checks import Checks

    make = Checks.__init__

    def make_unchecked(self, builder, on_warning, when, on_inexact):
        make(self, builder, on_warning, "off" if when == "once" else when, on_inexact)

    monkeypatch.setattr(Checks, "__init__", make_unchecked)


@pytest.fixture
def float64():
    """Let Keras compute in float64, so that rounding cannot hide a fault."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy(before)


@pytest.fixture
def install(monkeypatch):
    """Return `install(*cards)`, which lets this process have those GPUs."""
    from tests import fake_gpus

    return lambda *cards, **details: fake_gpus.install(monkeypatch, *cards, **details)
