"""Towers on workers, which are processes of this machine: the numbers, and what crosses between."""

import dataclasses
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.workers import workers
from towers.builder.kinds import HOST, PROGRAM, machine_of
from towers.devices import cluster
from towers.graphs.placement import read_placement
from towers.options.run import Options
from towers.training.run import assemble, load_data

layers = keras.layers
SMALL = 200  # bytes of counts and losses


@pytest.fixture(scope="module")
def far():
    """Return the devices of four towers, two on each of two workers."""
    with workers(2) as addresses:
        found = cluster.connect(addresses, towers_per_worker=2)
        yield found.devices
        found.close()


def network(dtype="float64"):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input([6], dtype="int32"),
            layers.Embedding(11, 5, dtype=dtype),
            layers.Flatten(dtype=dtype),
            layers.Dense(40, "tanh", dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.Dropout(0.3, seed=2, dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )


def stepper(devices, model, way, **options):
    """Return a compiled step that gives loss and gradients, as (loss, [gradient])."""
    builder = towers.TowerBuilder(devices, PROGRAM + HOST, batch_norm="sync", **options)
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits

    @tf.function
    def by_example(tokens, labels):
        def loss_fn(tokens, labels):
            return cross_entropy(labels, model(tokens, training=True))

        return builder.gradients(loss_fn, model.trainable_variables, tokens, labels)

    @tf.function
    def by_outputs(tokens, labels):
        with tf.GradientTape() as tape:
            logits = builder.concat(lambda tokens: model(tokens, training=True), tokens)
            loss = tf.reduce_mean(cross_entropy(labels, logits))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    return {"by_example": by_example, "by_outputs": by_outputs}[way]


def batch(size):
    random = np.random.default_rng(0)
    tokens, labels = random.integers(0, 11, [size, 6]), random.integers(0, 3, size)
    return tf.constant(tokens, tf.int32), tf.constant(labels, tf.int32)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("way", ["by_example", "by_outputs"])
def test_towers_on_workers_compute_what_one_device_computes(far, way, parts):
    found = []
    for devices in far, ["/cpu:0"]:
        model = network()
        loss, gradients = stepper(devices, model, way, accumulate_steps=parts)(*batch(13))
        statistics = [v.numpy() for v in model.non_trainable_variables if "moving" in v.path]
        found.append([loss, *map(tf.convert_to_tensor, gradients), *statistics])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["by_example", "by_outputs"])
def test_a_weight_and_a_sum_of_gradients_cross_once_for_each_worker(far, way):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([50]), layers.Dense(60, "tanh"), layers.Dense(3)])
    size = sum(v.shape.num_elements() * 4 for v in model.trainable_variables)
    x, y = tf.ones([8, 50]), tf.zeros([8], tf.int32)
    placement = read_placement(stepper(far, model, way), x, y)
    crossing = {}
    for (source, target), number in placement.crossing_bytes().items():
        if machine_of(source) != machine_of(target):
            route = machine_of(source), machine_of(target)
            crossing[route] = crossing.get(route, 0) + number
    for worker in {machine_of(device) for device in far}:
        its_batch = 4 * (50 + 3 * 2 + 1) * 4  # outputs there and back in the other way
        assert size <= crossing["", worker] <= size + its_batch + SMALL
        assert size <= crossing[worker, ""] <= size + its_batch + SMALL


@pytest.mark.parametrize("num_layers", [2, 9])
def test_small_weights_and_gradients_cross_as_one(far, num_layers):
    model = keras.Sequential([keras.Input([5])])
    for _ in range(num_layers):
        model.add(layers.Dense(5))
    one_each = far[::2]
    placement = read_placement(
        stepper(one_each, model, "by_example"), tf.ones([4, 5]), tf.zeros([4], tf.int32)
    )
    size = model.count_params() * 4
    for worker in map(machine_of, one_each):
        for route in ("", worker), (worker, ""):
            sizes = [
                t.bytes
                for t in placement.transfers
                if (machine_of(t.source), machine_of(t.target)) == route
            ]
            assert size in sizes
            assert sum(sizes) <= size + SMALL


@pytest.mark.parametrize("variables", ["cpu", "sharded"])
def test_in_a_step_of_a_run_too_sums_cross_once_for_each_worker(far, variables):
    options = Options(variables=variables, batch_size=8, devices="cpu")
    run = assemble(options, far, load_data(options))
    size = sum(v.shape.num_elements() * 4 for v in run.masters.model.trainable_variables)
    loop, batches = run.train_loop(), iter(run.batches(0, 0))
    placement = read_placement(loop, batches, tf.constant(0))
    sent = Counter()
    for (source, target), number in placement.always_crossing_bytes().items():
        if machine_of(source) != machine_of(target):
            sent[machine_of(source)] += number
    images = 8 * 4 * 24 * 24 * 3
    assert sum(sent.values()) <= (4 if variables == "cpu" else 2) * size + images
    values = loop(batches, tf.constant(1))
    norms, cosines = values["tower_gradient_norm"].numpy(), values["tower_cosine"].numpy()
    assert (norms > 0).all()
    assert (np.abs(cosines) <= 1).all()
    assert (cosines > 0).any()


def deep(num_classes, image_shape, depth):
    model = keras.Sequential([keras.Input(image_shape), layers.Flatten()])
    for _ in range(depth):
        model.add(layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.01)))
    model.add(layers.Dense(num_classes))
    return model


@pytest.mark.parametrize("towers", [slice(None), slice(0, 4, 2)], ids=["2x2", "2x1"])
@pytest.mark.parametrize(
    "update", [{"optimizer": "adam"}, {"optimizer": "sgd", "clip_global_norm": 1.0}]
)
def test_of_masters_on_workers_as_many_tensors_cross_however_many_they_are(far, update, towers):
    def num_transfers(depth):
        options = Options(
            model=f"{__name__}:deep", model_args=f"depth={depth}", variables="sharded", **update
        )
        options = dataclasses.replace(options, batch_size=8, devices="cpu", ema_decay=0.9)
        run = assemble(options, far[towers], load_data(options))
        loop, batches = run.train_loop(), iter(run.batches(0, 0))
        placement = read_placement(loop, batches, tf.constant(0))
        ends = [(machine_of(t.source), machine_of(t.target)) for t in placement.transfers]
        return Counter(end for end in ends if end[0] != end[1])

    found = num_transfers(8)
    assert found == num_transfers(16)  # each tower has some of them
    one_each = far[towers] != far
    for worker in {machine_of(device) for device in far} if one_each else ():
        # Its loss when its gradients are there, its norms, its products; its means, its update.
        assert found[worker, ""] == 5


def test_sums_and_sparse_sums_are_those_of_one_device(far):
    builder = towers.TowerBuilder(far, PROGRAM + HOST)
    x = tf.reshape(tf.range(22.0), [11, 2])
    assert builder.sum(tf.reduce_sum, x).numpy() == 231.0
    table = tf.Variable(tf.ones([7, 2]))

    @tf.function
    def gradients(rows):
        return builder.gradients(
            lambda rows: tf.reduce_sum(tf.nn.embedding_lookup(table, rows), axis=1), [table], rows
        )

    _, (found,) = gradients(tf.constant([1, 1, 2, 6, 0, 6, 6]))
    assert isinstance(found, tf.IndexedSlices)
    dense = tf.convert_to_tensor(found).numpy() * 7
    np.testing.assert_allclose(dense[:, 0], [1, 2, 1, 0, 0, 0, 3], rtol=1e-6)
