"""Profiles on demand: which steps are in them, what is written, and that nothing stops a run."""

import os
import re
import signal
import threading

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers import devices
from towers.builder.tower import TowerBuilder
from towers.monitoring.profiler import Profiler

pytestmark = pytest.mark.graph


def handler():
    return signal.getsignal(signal.SIGUSR2)


@pytest.fixture(scope="module")
def step():
    """Return a step of two towers, one MatMul each."""
    builder = TowerBuilder(devices.tower_devices(2, "cpu"))

    @tf.function
    def train_loop(x):
        return builder.sum(lambda a: tf.reduce_sum(tf.matmul(a, a, transpose_b=True)), x)

    x = tf.random.stateless_normal([256, 256], [0, 0])  # TensorFlow leaves out quick ops
    return lambda: train_loop(x)


class Run:
    """A profiled train loop of 40 steps: calls of up to 4, in any of which a signal comes."""

    def __init__(self, folder, step, steps=None):
        self.folder, self.make_step, self.said, self.calls = folder, step, [], []
        self.profiler = Profiler(folder, steps, last_step=40, say=self.said.append)

    def __call__(self, first=0, stop=40, signals=()):
        """Run from step `first`; signals come during the calls that start at these steps."""
        step = first
        with self.profiler as profiler:
            while step < stop:
                profiler.begin(step)
                most = min(4, stop - step)
                num_steps = next((n for n in range(1, most) if profiler.due(step + n)), most)
                with profiler.trace(step):
                    for _ in range(num_steps):
                        self.make_step()
                    for _ in range(signals.count(step)):
                        os.kill(os.getpid(), signal.SIGUSR2)
                self.calls.append((step, step + num_steps))
                step += num_steps
                profiler.end(step)
        return self

    def traces(self):
        """Return {steps in a trace's name: the host's part of it}."""
        found = {}
        for path in self.folder.glob("train/plugins/profile/*/*.xplane.pb"):
            space = xplane_pb2.XSpace.FromString(path.read_bytes())
            plane = next(plane for plane in space.planes if plane.name == "/host:CPU")
            found[path.parent.name.partition("_steps_")[2]] = plane
        return found


def events_of(plane, name):
    """Return the events of a trace whose names match."""
    kinds = {m.id for m in plane.event_metadata.values() if re.fullmatch(name, m.name)}
    return [event for line in plane.lines for event in line.events if event.metadata_id in kinds]


@pytest.mark.parametrize(
    ("steps", "given", "signals", "expected"),
    [
        (None, {}, (), []),
        (None, {}, (0, 4, 4, 22), ["14_24", "24_34", "4_14"]),  # the next one after this one
        (None, {}, (28,), ["32_40"]),  # near the end
        ((6, 20), {}, (0,), ["14_20", "4_14"]),
        ((6, 20), {"stop": 9}, (), ["6_9"]),
        ((2, 11), {"first": 9}, (), ["9_11"]),  # what is left of a plan
        ((2, 8), {"first": 8}, (), []),
        ((40, 50), {}, (), []),
    ],
)
def test_exactly_the_steps_asked_for(tmp_path, step, steps, given, signals, expected):
    before = handler()
    run = Run(tmp_path, step, steps)(**given, signals=signals)
    traces = run.traces()
    assert sorted(traces) == expected
    assert handler() == before
    for name, plane in traces.items():
        first, last = map(int, name.split("_"))
        products = events_of(plane, r".*:(_Mkl(Native)?)?MatMul(#.*)?")
        assert len(products) == 2 * (last - first)
        # the plugin is told of the calls as its steps
        number = {m.name: m.id for m in plane.stat_metadata.values()}["step_num"]
        stats = [stat for event in events_of(plane, "train") for stat in event.stats]
        told = sorted(stat.int64_value for stat in stats if stat.metadata_id == number)
        assert told == [start for start, end in run.calls if first <= start < last]
    if not traces:
        assert len(run.said) == (steps is not None)  # a plan that could not be is told
        assert not list(tmp_path.iterdir())


def test_another_thread_takes_no_signal(tmp_path, step):
    run = Run(tmp_path, step, (2, 5))
    before, seen = handler(), []

    def work():
        with run.profiler:
            seen.append(handler())
        run()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    assert [*run.traces()] == ["2_5"]


@pytest.mark.parametrize(("num_steps", "traces"), [(1, ["0_1"]), (0, [])])
def test_an_error_passes_and_the_steps_before_it_are_written(tmp_path, step, num_steps, traces):
    run = Run(tmp_path, step, (0, 20))
    with pytest.raises(ZeroDivisionError), run.profiler as profiler:
        profiler.begin(0)
        for done in range(num_steps):
            run.make_step()
            profiler.end(done + 1)
        raise ZeroDivisionError
    assert [*run.traces()] == traces
    assert [*Run(tmp_path / "next", step, (0, 2))().traces()] == ["0_2"]


def test_another_profiler_is_running_or_a_trace_cannot_be_written(tmp_path, step):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        busy = Run(tmp_path / "run", step, (2, 5))()
    finally:
        tf.profiler.experimental.stop()  # which fails if it had been stopped
    (tmp_path / "train").write_text("a file")
    full = Run(tmp_path, step, (2, 5))()
    assert len(busy.said) == 1 and "Another profiler is running" in busy.said[0]
    assert "steps 2 to 5 failed" in full.said[-1]
    for run in busy, full:
        assert run.calls[-1][1] == 40 and run.traces() == {}
