"""Profiles: which steps are in them, how they are opened, and that nothing stops a run."""

import contextlib
import re
import types

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers import devices
from towers.builder.tower import TowerBuilder
from towers.monitoring.profiler import Profiler

pytestmark = pytest.mark.graph


@pytest.fixture(scope="module")
def step():
    """Return a step of two towers, one MatMul each."""
    builder = TowerBuilder(devices.tower_devices(2, "cpu"))

    @tf.function
    def train_loop(x):
        return builder.sum(lambda a: tf.reduce_sum(tf.matmul(a, a, transpose_b=True)), x)

    x = tf.random.stateless_normal([256, 256], [0, 0])  # TensorFlow leaves out quick ops
    return lambda: train_loop(x)


def profiler_of(folder, plan, say):
    return Profiler(folder, plan, types.SimpleNamespace(say=say, pause=contextlib.nullcontext))


def run(folder, make_step, plan, step=0, stop=40):
    """Profile a train loop with calls of up to 4 steps; return its lines."""
    said = []
    with profiler_of(folder, plan, said.append) as profiler:
        while step < stop:
            most = min(4, stop - step)
            num_steps = next((n for n in range(1, most) if profiler.due(step + n)), most)
            with profiler.call(step, num_steps):
                for _ in range(num_steps):
                    make_step()
            step += num_steps
    return said


def num_steps_in(folder):
    """Return how many steps each trace in a folder has."""
    numbers = []
    for path in folder.glob("train/plugins/profile/*/*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        plane = next(plane for plane in space.planes if plane.name == "/host:CPU")
        name = r".*:(_Mkl(Native)?)?MatMul(#.*)?"
        kinds = {m.id for m in plane.event_metadata.values() if re.fullmatch(name, m.name)}
        events = [event for line in plane.lines for event in line.events]
        numbers.append(sum(event.metadata_id in kinds for event in events) / 2)
    return numbers


@pytest.mark.parametrize(
    ("plan", "given", "expected"),
    [
        ((6, 20), {}, [14]),
        ((2, 11), {"step": 9}, [2]),  # what is left of a plan
        ((40, 50), {}, []),
    ],
)
def test_exactly_the_steps_asked_for(tmp_path, step, plan, given, expected):
    said = run(tmp_path, step, plan, **given)
    assert num_steps_in(tmp_path) == expected
    if expected:
        assert f"tensorboard --logdir={tmp_path} " in said[-1]
    else:  # a plan that could not be is told
        assert len(said) == (plan is not None) and not list(tmp_path.iterdir())
