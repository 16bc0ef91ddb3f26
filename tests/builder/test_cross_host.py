"""Towers on workers, which are processes of this machine: the numbers, and what crosses between."""

from collections import defaultdict

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builder import test_equality as equality
from tests.builder.test_equality import Way
from towers import TowerBuilder
from towers.builder.device_types import HOST, PROGRAM, machine_of
from towers.graphs.placement import read_placement
from towers.options.run import Options
from towers.training.run.setup import assemble, load_data
from towers.workers import cluster

pytestmark = pytest.mark.process
layers = keras.layers
SMALL = 200  # bytes of counts and losses


@pytest.fixture(scope="module")
def far(two_addresses):
    """Return the devices of four towers, two on each of two workers."""
    found = cluster.connect(two_addresses, towers_per_worker=2)
    yield found.devices
    found.close()


def network():
    tokens = np.random.default_rng(0).integers(0, 11, [13, 6]).astype("int32")
    body = [layers.Embedding(11, 5), layers.Flatten(), layers.Dense(40, "tanh")]
    body += [layers.BatchNormalization(), layers.Dropout(0.3, seed=2), layers.Dense(3)]
    return equality.of_model(keras.Sequential([keras.Input([6], dtype="int32"), *body]), tokens)


FOUR = Way("four", 4)
JOINED = FOUR._replace(joined=True)


def step_of(devices, case, way):
    way = way._replace(num_towers=len(devices))
    return equality.step_of(case, way, devices, PROGRAM + HOST)


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.extended)])
@pytest.mark.parametrize("way", [FOUR, JOINED])
def test_towers_on_workers_compute_what_one_device_computes(far, way, parts):
    found = []
    for devices in far, ["/cpu:0"]:
        case = equality.case_of(network)
        values = equality.outcome(case, step_of(devices, case, way._replace(parts=parts)))
        found.append({name: tf.convert_to_tensor(value) for name, value in values.items()})
    equality.assert_equal(*found)


@pytest.mark.extended
def test_sparse_gradients_of_workers_are_those_of_one_device(far):
    case = equality.case_of(equality.embeddings)
    found = equality.outcome(case, step_of(far, case, FOUR))
    equality.assert_equal(found, equality.of_one_device(equality.embeddings))
    builder = TowerBuilder(far, PROGRAM + HOST)
    assert builder.sum(tf.reduce_sum, tf.reshape(tf.range(22.0), [11, 2])).numpy() == 231.0


def crossing(placement, always=False):
    """Return {(machine, machine): [bytes]} of what one sends to another, perhaps in each step."""
    found = defaultdict(list)
    for t in placement.transfers:
        source, target = machine_of(t.source), machine_of(t.target)
        if source != target and not (always and t.in_some_steps):
            found[source, target].append(t.bytes or 0)
    return found


def of_layers(num_examples, *sizes):
    """Return a case of dense layers, and how many bytes their weights have."""
    keras.utils.set_random_seed(1)
    body = [layers.Dense(size, "tanh") for size in sizes[1:]]
    model = keras.Sequential([keras.Input([sizes[0]]), *body])
    return equality.of_model(model, tf.ones([num_examples, sizes[0]])), model.count_params() * 4


@pytest.mark.parametrize("way", [FOUR, JOINED])
def test_a_weight_and_a_sum_of_gradients_cross_once_for_each_worker(far, way):
    case, size = of_layers(8, 50, 60, 3)
    found = crossing(read_placement(step_of(far, case, way), *case.batch))
    its_batch = 4 * (50 + 3 * 2 + 1) * 4  # losses, and their gradients, in the other way
    for worker in {machine_of(device) for device in far}:
        for route in ("", worker), (worker, ""):
            assert size <= sum(found[route]) <= size + its_batch + SMALL


def test_small_weights_and_gradients_cross_as_one(far):
    case, size = of_layers(4, *[5] * 10)
    found = crossing(read_placement(step_of(far[::2], case, FOUR), *case.batch))
    for worker in map(machine_of, far[::2]):
        for route in ("", worker), (worker, ""):
            assert size in found[route]
            assert sum(found[route]) <= size + SMALL


def loop_of(devices, options):
    """Return the train loop of a run, its batches, and where a loop of no step ran."""
    run = assemble(options, devices, load_data(options))
    loop, batches = run.train_loop(), iter(run.batches(0, 0))
    return run, loop, batches, read_placement(loop, batches, tf.constant(0))


@pytest.mark.extended
@pytest.mark.parametrize("variables", ["cpu", "sharded"])
def test_in_a_step_of_a_run_too_sums_cross_once_for_each_worker(far, variables):
    options = Options(
        model="tests.tiny:dense", model_args="width=40", dataset="tests.tiny:images",
        augment="none", variables=variables, batch_size=8, devices="cpu",
    )  # fmt: skip
    run, loop, batches, placement = loop_of(far, options)
    size = sum(v.shape.num_elements() * 4 for v in run.train_state.model.trainable_variables)
    images = 8 * 4 * 8 * 8 * 3
    sent = sum(map(sum, crossing(placement, always=True).values()))
    assert sent <= (4 if variables == "cpu" else 2) * size + images
    values = loop(batches, tf.constant(1))
    assert (values["tower_gradient_norm"].numpy() > 0).all()


def deep(num_classes, image_shape, depth):
    model = keras.Sequential([keras.Input(image_shape), layers.Flatten()])
    for _ in range(depth):
        model.add(layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.01)))
    model.add(layers.Dense(num_classes))
    return model


@pytest.mark.parametrize(
    ("towers", "update"),
    [
        pytest.param(slice(None), {"optimizer": "adam"}, marks=pytest.mark.extended),
        (slice(0, 4, 2), {"optimizer": "sgd", "clip_global_norm": 1.0}),
    ],
    ids=["2x2", "2x1"],
)
def test_of_masters_on_workers_as_many_tensors_cross_however_many_they_are(far, update, towers):
    def num_transfers(depth):
        options = Options(
            model=f"{__name__}:deep", model_args=f"depth={depth}", dataset="tests.tiny:images",
            augment="none", variables="sharded", batch_size=8, devices="cpu", ema_decay=0.9,
            **update,
        )  # fmt: skip
        found = crossing(loop_of(far[towers], options)[-1])
        return {route: len(values) for route, values in found.items()}

    depth = len(far[towers])  # so each tower has some of them
    found = num_transfers(depth)
    assert found == num_transfers(2 * depth)
    one_each = far[towers] != far
    for worker in {machine_of(device) for device in far} if one_each else ():
        # Its loss when its gradients are there, its norms, its squares; its means, its update.
        assert found[worker, ""] == 5
