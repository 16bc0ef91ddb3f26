"""Private parts of Keras: they still are what towers take them for."""

import threading

import keras
import pytest
import tensorflow as tf

from towers.tf_private import added_losses, all_in_float64, floatx_set

layers = keras.layers
HALF = keras.DTypePolicy("float16")
POLICIES = {
    "name": lambda: "float32",
    "mixed": lambda: "mixed_float16",
    "policy": lambda: keras.DTypePolicy("bfloat16"),
    "map": lambda: keras.dtype_policies.DTypePolicyMap("float32", {"other": HALF}),
    "map, by path": lambda: keras.dtype_policies.DTypePolicyMap("float32", {"layer": HALF}),
    "config": lambda: keras.dtype_policies.serialize(keras.DTypePolicy("float32")),
}


def dtypes(policy):
    """Return what a layer of that policy computes in, and keeps its weights in."""
    layer = layers.Dense(2, dtype=policy, name="layer")
    layer.build((None, 3))
    return layer.compute_dtype, layer.kernel.dtype


@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_gets_float64_in_the_block_alone(name):
    policy = POLICIES[name]
    before = dtypes(policy())
    given = policy()
    with all_in_float64():
        assert dtypes(given) == ("float64", "float64")
        later = layers.Dense(2)
        later.dtype_policy = policy()
    assert "float64" not in before
    assert dtypes(given) == dtypes(policy()) == before
    assert later.compute_dtype == "float64"


def test_a_wrapped_layer_and_one_from_a_configuration_get_float64():
    config = layers.Dense(2, dtype="float32").get_config()
    with all_in_float64():
        attention = layers.MultiHeadAttention(2, 3, dtype="float32")
        attention.build((None, 4, 5), (None, 4, 5))
        again = layers.Dense.from_config(config)
    assert {v.dtype for v in attention.weights} == {"float64"}
    assert again.compute_dtype == "float64"


def test_inputs_get_float64_and_whole_numbers_stay():
    with all_in_float64():
        assert keras.Input((3,), dtype="float32").dtype == "float64"
        assert keras.Input((3,), dtype="int32").dtype == "int32"
        assert keras.Input((3,)).dtype == keras.config.floatx()
        assert layers.Discretization([0.0], dtype="int64").compute_dtype == "int64"
    assert keras.Input((3,), dtype="float16").dtype == "float16"


def test_another_thread_and_an_error_are_left_alone():
    found = []
    with pytest.raises(ZeroDivisionError), all_in_float64():
        thread = threading.Thread(target=lambda: found.append(dtypes("float32")))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert found == [("float32", "float32")] and dtypes("float16")[0] == "float16"


class Adds(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_sum(inputs))
        return inputs


def test_the_open_scope_has_what_layers_add_and_no_regularizer_of_weights():
    dense = keras.layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l1")
    model = keras.Sequential([keras.Input((3,)), Adds(), dense])
    inputs = tf.ones([4, 3])
    assert added_losses() == []
    with keras.StatelessScope(collect_losses=True):
        outputs = model(inputs)
        found = [float(loss) for loss in added_losses()]
        with keras.StatelessScope():  # an inner one, which collects nothing
            model(inputs)
            assert added_losses() == []
    assert found == [12.0, float(0.01 * tf.reduce_sum(tf.abs(outputs)) / 4)]
    assert added_losses() == []


def test_augmentation_of_keras_works_while_floatx_is_float64():
    images = tf.zeros((2, 8, 8, 3), tf.float64)
    with floatx_set("float64"):
        layer = layers.RandomRotation(0.1, dtype="float64")
        assert layer(images, training=True).dtype == tf.float64
        assert keras.random.uniform((2,)).dtype == tf.float64
        with pytest.raises(IndexError):
            layer(images[0, 0, 0, 0], training=True)
        assert keras.config.floatx() == "float64"
    assert keras.config.floatx() == "float32"
