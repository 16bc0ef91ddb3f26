"""A run whose towers are on GPUs, for which logical CPU devices stand in: /cpu:0 is the host."""

import contextlib
import dataclasses
import io

import keras
import pytest
import tensorflow as tf

from tests import runs, tiny
from tests.tensorboard_server import read_scalars
from towers.builder import device_names
from towers.data.pipeline import NUM_DRAWS
from towers.devices.shown_names import short_device_name
from towers.graphs.placement import read_placement
from towers.options.run import Options
from towers.training.callbacks import best_checkpoint
from towers.training.evaluate import evaluate
from towers.training.run.setup import assemble, prepare
from towers.training.train import train

pytestmark = pytest.mark.run


@pytest.fixture(autouse=True)
def stand_ins():
    with device_names.cpus_for_gpus():
        yield


def loop_of(num_towers, variables, **more):
    return tiny.Loop(tiny.options("unused", num_towers=num_towers, variables=variables, **more))


def homes(loop):
    return {name: short_device_name(v.device) for name, v in loop.train_state.variables().items()}


@pytest.mark.graph
def test_one_gpu_keeps_everything_and_the_tutorials_way_stays_on_the_host():
    loop = loop_of(1, "default", ema_decay=0.9, model="tests.tiny:cnn")
    assert set(homes(loop).values()) == {loop.run.builder.gather_device} == {"/cpu:1"}
    assert set(homes(loop_of(2, "cpu")).values()) == {"/cpu:0"}


def test_the_numbers_are_those_of_cpus():
    """A replica computes its own learning rate."""
    given = dict(dtype="float64", ema_decay=0.9, batch_size=7)
    theirs = tiny.Loop(tiny.options("unused", devices="/cpu:0", **given))
    batches = [(tiny.arrays(7), tf.ones([7]))]
    before = theirs.run.task.test_step.evaluate(batches, 7).metrics
    theirs(3)
    ours = loop_of(2, "replicated", **given)
    tiny.assert_close(ours.run.task.test_step.evaluate(batches, 7).metrics, before, 1e-9)
    ours(3)
    tiny.assert_close(ours.state(), theirs.state(), 1e-9)
    assert [int(replica.examples) for replica in ours.train_state.replicas] == [3 * 7] * 2


def noisy(num_classes, image_shape):
    """Return a model with a penalty that is random."""
    model, seed = tiny.dense(num_classes, image_shape), keras.random.SeedGenerator(0)

    def penalty(weight):
        factors = keras.random.uniform(weight.shape, seed=seed, dtype=weight.dtype)
        return keras.ops.sum(factors * weight**2)

    model.trainable_variables[0].regularizer = penalty
    return model


def test_a_random_penalty_is_drawn_once():
    given = dict(dtype="float64", model="tests.training.test_on_gpus:noisy")
    theirs, ours = loop_of(1, "cpu", **given), loop_of(2, "replicated", **given)
    assert ours(2)["penalty"] == pytest.approx(theirs(2)["penalty"], rel=1e-9)
    tiny.assert_close(ours.state(), theirs.state(), 1e-9)


@pytest.fixture(scope="module")
def run_with_a_best(tmp_path_factory):
    """The folder of a run on two, its result, and what it said; weights only get worse."""
    folder, out = tmp_path_factory.mktemp("best"), io.StringIO()
    given = dict(num_towers=2, variables="replicated", dtype="float64", max_steps=8)
    given |= dict(log_every_steps=5, steps_per_loop=2, learning_rate=30.0, schedule="constant")
    given |= dict(keep_best=True, validation_fraction=0.2, evaluate_every_epochs=0.2)
    with device_names.cpus_for_gpus(), contextlib.redirect_stdout(out):
        result = train(tiny.options(folder, **given))
    return folder, result, out.getvalue()


def test_every_tower_evaluates_the_weights_that_were_restored(run_with_a_best):
    """Those of a checkpoint, and at the end of a run those of its best one."""
    folder, result, _ = run_with_a_best
    assert best_checkpoint.step_of(folder) < 8
    of_run = dict(train_dir=str(folder), say=lambda line: None)
    on_two, on_one = evaluate(**of_run), evaluate(**of_run, devices="/cpu:0", num_towers=1)
    found = [result["test_loss"], on_two["loss"]]
    assert found == pytest.approx([on_one["loss"]] * 2, rel=1e-9)


@runs.by_the_clock
def test_seconds_of_towers_are_measured_where_a_point_is_due(run_with_a_best):
    """And it is told where the data lie."""
    folder, _, out = run_with_a_best
    tag = "speed/compute_seconds"
    points = [p[tag] for p in read_scalars(folder / "train").values() if tag in p]
    assert points and all(0 < seconds < 10 for seconds in points)
    assert "data        0.0 MiB on each GPU; the host sends" in out


def test_a_step_that_nobody_looks_at_sends_nothing_to_the_host():
    loop = loop_of(2, "replicated", model="tests.tiny:cnn", clip_global_norm=1.0)
    placement = read_placement(loop.loop, loop.batches, tf.constant(0))
    back = [t.name for t in placement.transfers if t.target == "/cpu:0" and t.bytes]
    assert [name for name in back if "telemetry" not in name] == []


@pytest.mark.graph
def test_the_default_place_of_variables(tmp_path):
    options = tiny.options(tmp_path, num_towers=2)
    run = prepare(options)
    assert run.options.variables == "replicated" and run.given.variables == "default"
    assert assemble(options, ["/gpu:0", "/gpu:0"], run.data).options.variables == "cpu"
    compiled = dataclasses.replace(options, loss="sparse_categorical_crossentropy")
    assert assemble(compiled, run.builder.devices, run.data).options.variables == "replicated"


def test_data_that_lie_on_gpus_give_the_same_numbers():
    given = dict(augment="resnet", batch_size=7, validation_fraction=0.2)
    ours, theirs = (loop_of(2, "default", **given) for _ in range(2))
    assert ours.run.on_towers
    ours.batches = iter(ours.run.batches(0, 0))
    ours(5), theirs(5)
    tiny.assert_identical(ours.state(), theirs.state())


@pytest.mark.graph
def test_of_data_that_lie_on_gpus_the_host_sends_row_numbers():
    loop = loop_of(2, "replicated", batch_size=7, augment="resnet")
    batches = iter(loop.run.batches(0, 0))
    placement = read_placement(loop.run.train_loop(telemetry=False), batches, tf.constant(0))
    sent = [(t.target, t.bytes) for t in placement.transfers if t.source == "/cpu:0" and t.bytes]
    # Whether to go on, and the key of the collectives, which GPUs read in the host's memory.
    of_loop = [(name, size) for name in ("/cpu:1", "/cpu:2") for size in (1, 4)]
    draws, rows = ([("/cpu:1", 4 * size), ("/cpu:2", 3 * size)] for size in (4 * NUM_DRAWS, 8))
    assert sorted(sent) == sorted([*of_loop, *draws, *rows])


@pytest.mark.graph
def test_what_a_gpu_makes_of_all_examples_does_not_come_back_to_be_split():
    given = dict(model="tests.tasks:images", dataset="tests.tasks:images_data", augment="resnet")
    loop = loop_of(1, "default", learning_rate=Options.learning_rate, batch_size=7, **given)
    batches = iter(loop.run.batches(0, 0))
    placement = read_placement(loop.run.train_loop(telemetry=False), batches, tf.constant(0))
    assert all(t.bytes <= 8 for t in placement.transfers if t.source == "/cpu:1" and t.bytes)
    metrics = loop.train_state.model.metrics_variables
    assert {short_device_name(v.value.device) for v in metrics} == {"/cpu:1"}
