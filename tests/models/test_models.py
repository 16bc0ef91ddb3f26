"""What every model of the project does."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.cnn import cnn
from models.densenet import densenet_bc
from models.fast import fast
from models.preact_resnet import preact_resnet
from models.resnet import resnet
from models.resnext import resnext
from models.vgg import vgg16_bn
from models.vit import vit
from models.wide_resnet import wide_resnet
from tests.runs import rare

MODELS = {
    "cnn": (cnn, 24),
    "resnet": (functools.partial(resnet, depth=8), 32),
    "preact_resnet": (functools.partial(preact_resnet, 11, bottleneck=True, drop_path=0.3), 32),
    "wide_resnet": (functools.partial(wide_resnet, 10, 1, 0.3, 0.3), 32),
    "vgg": (functools.partial(vgg16_bn, width=4), 32),
    "densenet": (functools.partial(densenet_bc, 10, dropout=0.2), 32),
    "resnext": (functools.partial(resnext, 11, 2, 4, 8), 32),
    "vit": (functools.partial(vit, 2, 24, 3), 32),
    "fast": (functools.partial(fast, width=9, small_size=16, small_steps=1), 32),
}
TYPES = [  # of computation, and of weights and logits
    ("float64", "float64"), ("bfloat16", "float32"), rare("float32", "float32"),
    rare("float16", "float32"),
]  # fmt: skip

pytestmark = pytest.mark.run  # slow to build
of_each = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def policy():
    """Let a test set Keras' policy."""
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def images(name, dtype=tf.float32):
    size = MODELS[name][1]
    return tf.random.stateless_normal([4, size, size, 3], seed=(1, 2), dtype=dtype)


@of_each
@pytest.mark.parametrize(("dtype", "full_precision"), TYPES)
def test_layers_compute_in_the_policys_type_and_logits_in_full_precision(
    name, dtype, full_precision
):
    keras.config.set_dtype_policy(dtype if dtype == full_precision else f"mixed_{dtype}")
    model = MODELS[name][0]()
    dtypes = {layer.compute_dtype for layer in model.layers if layer.weights}
    assert dtypes == {dtype, full_precision}  # the last layer's
    if dtype == "float64":
        exact = images(name, tf.float64)  # which are not rounded to float32
        assert np.any(model(exact) != model(tf.cast(tf.cast(exact, tf.float32), tf.float64)))
    with tf.GradientTape() as tape:
        logits = model(images(name), training=True)
        loss = tf.reduce_sum(logits**2)
    assert logits.dtype == full_precision
    gradients = tape.gradient(loss, model.trainable_variables)
    assert {gradient.dtype.name for gradient in gradients} == {full_precision}
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


# Of the fast network: its patterns, and kernels that hand on as many channels as they see.
CONSTANT = r"(patterns|group[123]_conv2|group3_conv1)/kernel$"


@of_each
def test_the_seed_decides_the_initial_values_and_a_model_of_any_shape_survives_saving(
    name, tmp_path
):
    models, weights = [], []
    for seed in (5, 5, 6):
        keras.utils.set_random_seed(seed)
        models.append(MODELS[name][0](num_classes=7, image_shape=(32, 36, 1)))
        own = [w for w in models[-1].weights if not re.search(CONSTANT, w.path)]
        weights.append([w.numpy() for w in own if len(w.shape) > 1 and w.numpy().any()])
    assert all(np.array_equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(weights[0], weights[2], strict=True))
    # Keras numbers the layers that were not named: conv2d_3.
    names, again, _ = ([layer.name for layer in model.layers] for model in models)
    assert names == again and names[0] == "images" and names[-1] == "logits"
    images = tf.random.stateless_normal([3, 32, 36, 1], seed=(1, 2))
    assert models[0](images).shape == (3, 7)
    models[0].save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(images), models[0](images))


# Bad arguments, as `--model_args` may give them.
