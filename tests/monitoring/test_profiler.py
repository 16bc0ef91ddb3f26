"""Profiles on demand: which steps are in them, what is written, and that nothing stops a run."""

import os
import signal
import threading

import pytest
import tensorflow as tf

from towers import devices
from towers.builder.tower import TowerBuilder
from towers.graphs import profile_summary
from towers.graphs.placement import read_placement
from towers.monitoring.profiler import Profiler


def handler():
    return signal.getsignal(signal.SIGUSR2)


@pytest.fixture(scope="module")
def step():
    """Return a step of two towers, one MatMul each, and its placement."""
    builder = TowerBuilder(devices.tower_devices(2, "cpu"))

    @tf.function
    def train_loop(x):
        return builder.sum(lambda a: tf.reduce_sum(tf.matmul(a, a, transpose_b=True)), x)

    x = tf.random.stateless_normal([256, 256], [0, 0])  # TensorFlow leaves out quick ops
    placement = read_placement(train_loop, x)
    return lambda: train_loop(x), placement


class Run:
    """A train loop with a profiler: calls of up to `most` steps, at any of which a signal comes."""

    def __init__(self, folder, step, steps=None, *, last_step=40, most=4):
        self.make_step, placement = step
        self.folder, self.last_step, self.most = folder, last_step, most
        self.said, self.calls = [], []
        self.profiler = Profiler(
            folder, steps, last_step=last_step, placement=placement, say=self.said.append
        )

    def __call__(self, first=0, stop=None, signals=()):
        """Run from step `first`; signals come during the calls that start at these steps."""
        step = first
        with self.profiler as profiler:
            while step < (stop or self.last_step):
                profiler.begin(step)
                most = min(self.most, (stop or self.last_step) - step)
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

    def texts(self):
        return {path.name: path.read_text() for path in sorted(self.folder.glob("profile_*"))}

    def traces(self):
        """Return the last words of the folders of traces."""
        found = self.folder.glob("train/plugins/profile/*/*.xplane.pb")
        return sorted(path.parent.name.partition("_steps_")[2] for path in found)

    def lines(self, words):
        return [line for line in self.said if words in line]


def matmuls(text):
    """Return {device: number of calls} of MatMul in a summary."""
    found, device = {}, None
    for line in text.splitlines():
        if line.startswith(("/", "outside")):
            device = line.split(":  ")[0].split(": busy")[0]
        elif "MatMul" in line:
            found[device] = int(line.split()[0])
    return found


def test_exactly_the_steps_asked_for(tmp_path, step):
    run = Run(tmp_path, step, (6, 11))()
    assert {(0, 4), (4, 6), (6, 10), (10, 11), (11, 15)} <= set(run.calls)
    assert run.traces() == ["6_11"]
    [(name, text)] = run.texts().items()
    assert name == "profile_6_11.txt"
    assert matmuls(text) == {"/cpu:0": 5, "/cpu:1": 5}
    assert text.splitlines()[0] == "steps 6 to 11"
    heading = " ".join(text.splitlines()[2].split())
    assert heading == "calls total ms % of busy ms/step pass type op"
    assert all(f"  {line}" in run.said for line in text.splitlines()[1:])
    [path] = tmp_path.glob("train/plugins/profile/*/*.xplane.pb")
    [plane] = [p for p in profile_summary.read_trace(path).planes if p.name == "/host:CPU"]
    names = {m.name: m.id for m in plane.event_metadata.values()}
    events = [e for line in plane.lines for e in line.events if e.metadata_id == names["train"]]
    number = {m.name: m.id for m in plane.stat_metadata.values()}["step_num"]
    shown = [s.int64_value for e in events for s in e.stats if s.metadata_id == number]
    assert sorted(shown) == [6, 10]  # steps of the plugin


def test_no_profile_without_being_asked(tmp_path, step):
    run = Run(tmp_path, step)()
    assert run.said == [] and list(tmp_path.iterdir()) == []
    assert {b - a for a, b in run.calls} == {4}


# ---------------------------------------------------------------------------- Signals


def test_a_signal_profiles_the_next_ten_steps(tmp_path, step):
    before = handler()
    run = Run(tmp_path, step)(signals=(8,))
    assert run.traces() == ["12_22"]
    assert matmuls(run.texts()["profile_12_22.txt"]) == {"/cpu:0": 10, "/cpu:1": 10}
    assert handler() == before


def test_a_signal_while_one_is_made_is_answered(tmp_path, step):
    run = Run(tmp_path, step)(signals=(0, 4, 4, 22))
    assert run.traces() == ["26_36", "4_14"]
    [answer] = run.lines("already")
    assert "steps 4 to 14" in answer


def test_a_signal_near_the_end(tmp_path, step):
    assert Run(tmp_path, step, last_step=12)(signals=(4,)).traces() == ["8_12"]
    run = Run(tmp_path / "late", step, last_step=12)(signals=(8,))
    assert run.traces() == []
    assert "too late" in run.said[-1]


def test_a_plan_and_a_signal(tmp_path, step):
    run = Run(tmp_path, step, (6, 20))(signals=(0,))
    assert run.traces() == ["14_20", "4_14"]


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
    assert run.traces() == ["2_5"]


# ---------------------------------------------------------------------------- Stops, restarts


def test_a_stop_in_the_middle_writes_what_there_is(tmp_path, step):
    run = Run(tmp_path, step, (6, 20))(stop=9)
    assert run.traces() == ["6_9"]
    assert matmuls(run.texts()["profile_6_9.txt"]) == {"/cpu:0": 3, "/cpu:1": 3}


@pytest.mark.parametrize(("num_steps", "traces"), [(1, ["0_1"]), (0, [])])
def test_an_error_passes_and_the_steps_before_it_are_written(tmp_path, step, num_steps, traces):
    run = Run(tmp_path, step, (0, 20))
    with pytest.raises(ZeroDivisionError), run.profiler as profiler:
        profiler.begin(0)
        for done in range(num_steps):
            run.make_step()
            profiler.end(done + 1)
        raise ZeroDivisionError
    assert run.traces() == traces
    assert Run(tmp_path / "next", step, (0, 2))().traces() == ["0_2"]


@pytest.mark.parametrize(
    "steps, why",
    [((2, 8), "the run is at step 8"), ((40, 50), "the run ends at step 40")],
)
def test_a_plan_that_cannot_be_is_skipped_once(tmp_path, step, steps, why):
    run = Run(tmp_path, step, steps)(first=8)
    first, last = steps
    assert run.said == [f"profile     --profile_steps={first}:{last} is skipped: {why}"]
    assert run.traces() == []


def test_what_is_left_of_a_plan_is_profiled(tmp_path, step):
    run = Run(tmp_path, step, (2, 11))(first=9)
    assert run.traces() == ["9_11"]
    assert run.lines("skipped") == []


# ---------------------------------------------------------------------------- Failures are lines


def test_another_profiler_is_running(tmp_path, step):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        run = Run(tmp_path / "run", step, (2, 5))()
    finally:
        tf.profiler.experimental.stop()  # which fails if it had been stopped
    assert len(run.said) == 1 and "Another profiler is running" in run.said[0]
    assert run.calls[-1][1] == 40
    assert run.traces() == []


def test_no_permission(tmp_path, step, monkeypatch):
    def refuse(folder):
        raise tf.errors.PermissionDeniedError(None, None, "CUPTI_ERROR_INSUFFICIENT\nmore\n")

    monkeypatch.setattr(tf.profiler.experimental, "start", refuse)
    run = Run(tmp_path, step, (2, 5))()
    assert run.said == ["profile     none of steps 2 to 5: CUPTI_ERROR_INSUFFICIENT"]


@pytest.mark.parametrize(
    ("hindrance", "said", "traces"),
    [
        ("no folder", "steps 2 to 5 failed", []),
        ("no summary", "profile_2_5.txt cannot be written", ["2_5"]),
        ("too large", "too much for a summary", ["2_5"]),
    ],
)
def test_what_cannot_be_written(tmp_path, step, monkeypatch, hindrance, said, traces):
    if hindrance == "no folder":
        (tmp_path / "train").write_text("a file")
    elif hindrance == "no summary":
        (tmp_path / "profile_2_5.txt").mkdir()
    else:
        monkeypatch.setattr(profile_summary, "_MAX_MIB", 0)
    run = Run(tmp_path, step, (2, 5))()
    assert said in run.said[-1]
    assert run.calls[-1][1] == 40
    assert run.traces() == traces
