"""What a tower on a GPU meets in place of Keras' ways: the same numbers, without the host."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import TowerBuilder
from towers.builder import device_types
from towers.builder.replica_context import integers_on

pytestmark = pytest.mark.graph


def test_a_gpu_and_a_cpu_look_up_the_same_tokens(float64):
    tokens = np.arange(6, dtype=np.int32).reshape(3, 2)
    embedding = keras.layers.Embedding(9, 3)
    embedding(tokens)

    def loss_fn(tokens):
        return tf.reduce_sum(embedding(tokens) ** 3, axis=[1, 2])

    def gradient(*devices):
        step = TowerBuilder(devices).gradients
        found = tf.function(lambda: step(loss_fn, embedding.trainable_variables, tokens)[1][0])()
        return tf.convert_to_tensor(found)

    with device_types.cpus_for_gpus():
        np.testing.assert_array_equal(gradient("/cpu:1", "/cpu:0"), gradient("/cpu:0"))


@pytest.mark.run
def test_tokens_are_looked_up_and_masked_where_they_are(float64):
    tokens = np.random.default_rng(0).integers(0, 9, [5, 7]).astype(np.int32)
    x = keras.Input((7,), dtype="int32")
    model = keras.Model(x, keras.layers.GRU(3)(keras.layers.Embedding(9, 3, mask_zero=True)(x)))

    def loss_fn(tokens):
        return tf.reduce_sum(model(tokens) ** 3, axis=1)

    def gradients():
        builder = TowerBuilder(["/cpu:1", "/cpu:2"])
        step = tf.function(lambda x: builder.gradients(loss_fn, model.trainable_variables, x)[1])
        graph = step.get_concrete_function(tokens).graph
        of_integers = ("Less", "NotEqual", "GatherV2", "ResourceGather")
        made = [op for op in graph.get_operations() if op.type in of_integers]
        narrow = {
            op.type for op in made for t in op.inputs if t.dtype == tf.int32 and t.shape.rank == 2
        }
        return [tf.convert_to_tensor(g) for g in step(tokens)], narrow

    expected, of_cpus = gradients()
    with device_types.cpus_for_gpus():
        found, of_gpus = gradients()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14)  # rows are summed in another order
    assert {"Less", "NotEqual"} <= of_cpus
    assert not of_gpus


def test_the_largest_is_found_without_the_host():
    x = tf.constant([[0.0, -0.0, 0.0], [-1.0, np.inf, 2.0], [-0.0, 0.0, -1e-300]], tf.float64)

    def largest(device):
        with integers_on(device):
            find = tf.function(lambda: keras.ops.argmax(x, axis=1))
            return find(), [op.type for op in find.get_concrete_function().graph.get_operations()]

    expected, of_cpu = largest("/cpu:1")
    with device_types.cpus_for_gpus():
        found, of_gpu = largest("/cpu:1")
    np.testing.assert_array_equal(found, expected)
    assert "BitwiseAnd" in of_cpu and "BitwiseAnd" not in of_gpu


def test_rows_of_a_table_of_integers_have_its_type():
    table = tf.constant([[3, 4], [5, 6]], tf.int32)
    with device_types.cpus_for_gpus(), integers_on("/cpu:1"):
        rows = keras.ops.take(table, tf.constant([1, 0]), axis=0)
        rows -= tf.constant([[1, 1], [1, 1]], tf.int32)  # as Equalization goes on
    np.testing.assert_array_equal(rows, [[4, 5], [2, 3]])
