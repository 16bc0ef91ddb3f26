"""What GPUs would do with a step: small graphs whose answers are known, on logical CPU devices."""

import keras
import pytest
import tensorflow as tf

from tests import tiny
from towers.builder import device_types
from towers.graphs import gpu_estimate
from towers.training.run.setup import prepare

pytestmark = pytest.mark.graph

GPU, OTHER = "/cpu:1", "/cpu:2"  # in place of /gpu:0 and /gpu:1


def view_of(step, *values, loop_device="/cpu:0"):
    """Return the view of a loop whose body maps values on the host to values there."""

    @tf.function(autograph=False)
    def loop(num_steps, values):
        def body(i, values):
            return i + 1, step(*values)

        with tf.device(loop_device):
            loop = tf.while_loop(lambda i, _: i < num_steps, body, (0, values))
            return loop[1]

    return gpu_estimate.read(loop, tf.constant(0), tuple(map(tf.constant, values)))


def on_gpu(compute):
    """Return a step that computes on the first GPU, below a tower's name."""

    def step(*values):
        with tf.device(GPU), tf.name_scope("tower_0"):
            result = compute(*values)
        with tf.device("/cpu:0"):
            return tuple(map(tf.identity, result))

    return step


def kinds_of(transfers):
    return sorted((t.type, t.dtype, t.source, t.target) for t in transfers)


def test_a_value_goes_to_the_gpu_and_back_and_its_bytes_are_told():
    view = view_of(on_gpu(lambda x: [tf.tanh(x) * 2]), [[1.0, 2.0, 3.0]])
    assert [t.bytes for t in view.transfers("host", "/gpu:0")] == [12]
    assert [t.bytes for t in view.transfers("/gpu:0", "host")] == [12]
    assert len(view.transfers()) == 2
    assert view.without_kernel == [] and view.undirected == ()
    assert view.launches("tower_0") == 2


def test_an_op_without_a_kernel_is_named_with_its_layer_and_goes_by_the_host():
    def crop(images, rows):
        with tf.name_scope("augment"):
            return [tf.bitwise.invert(tf.gather(tf.bitwise.invert(images), rows)), rows]

    view = view_of(on_gpu(crop), tf.ones([2, 5], tf.uint8), [0, 1])
    (gather,) = view.without_kernel
    assert (gather.type, gather.dtype, gather.layer) == ("GatherV2", "uint8", "augment")
    assert gather.kernel.launches == 0
    assert ("Invert", "uint8", "/gpu:0", "host") in kinds_of(view.copies)
    assert ("GatherV2", "uint8", "host", "/gpu:0") in kinds_of(view.copies)


def test_a_key_of_draws_is_read_from_the_host():
    def draw(seed):
        key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.bitwise.invert(seed))
        drawn = tf.raw_ops.StatelessRandomUniformV2(shape=[3], key=key, counter=counter, alg=1)
        return [seed + tf.cast(drawn[:2], tf.int64)]

    view = view_of(on_gpu(draw), tf.constant([1, 2], tf.int64))
    assert view.without_kernel == []
    assert kinds_of(view.copies) == [
        ("AddV2", "int64", "/gpu:0", "host"),
        ("Identity", "int64", "host", "/gpu:0"),
        ("Invert", "int64", "/gpu:0", "host"),
        ("StatelessRandomGetKeyCounter", "uint64", "host", "/gpu:0"),
        ("StatelessRandomGetKeyCounter", "uint64", "host", "/gpu:0"),
    ]


def test_whole_numbers_that_only_shapes_need_stay_on_the_host():
    view = view_of(on_gpu(lambda i: [i + tf.constant([1, 2])]), [3, 4])
    assert view.transfers() == [] and view.launches("tower_0") == 0


def test_gpus_send_to_each_other_and_a_value_goes_once():
    def step(x):
        with tf.device(GPU):
            x = tf.tanh(x)
        with tf.device(OTHER):
            x = tf.sin(x) + tf.cos(x)
        with tf.device("/cpu:0"):
            return (tf.identity(x),)

    view = view_of(step, [1.0, 2.0])
    assert len(view.transfers("/gpu:0", "/gpu:1")) == 1 == len(view.transfers("/gpu:1", "host"))
    assert len(view.transfers(gpu="/gpu:0")) == 2


def test_a_branch_for_telemetry_is_left_out():
    def step(x, norm):
        with tf.device(GPU):
            x = tf.tanh(x)

            def look():
                with tf.device(GPU):
                    return tf.reduce_sum(x * x)

            with tf.device("/cpu:0"), tf.name_scope("telemetry"):
                norm = tf.cond(norm > 1, look, lambda: 0.0)
        with tf.device("/cpu:0"):
            return tf.identity(x), norm

    view = view_of(step, [1.0, 2.0], 2.0)
    assert len(view.transfers("/gpu:0", "host")) == 1
    assert view.launches("telemetry") == 0


def test_what_stands_in_a_loop_of_the_model_is_marked():
    def last(x):
        x = tf.sin(x)  # what a loop carries lies where it comes from
        return [tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(x)), (0, x))[1]]

    view = view_of(on_gpu(last), [1.0, 2.0])
    (tanh,) = [op for op in view.ops if op.type == "Tanh"]
    assert tanh.repeated and tanh.kernel.launches == 1
    # It counts in host memory.
    assert len(view.transfers()) == 2 and not any(t.repeated for t in view.transfers())


def test_an_op_that_asks_for_no_device_is_told():
    def step(x):
        with tf.device(None):
            return (tf.sin(x),)

    names = view_of(step, [1.0], loop_device=None).undirected
    assert any(name.endswith("Sin") for name in names)
    assert view_of(step, [1.0]).undirected == ()  # it goes where the loop is


def test_a_constant_is_copied_if_it_lies_on_the_other_side():
    def draw(x):
        shape = tf.constant([3], tf.int64)  # int32 would lie in the host's memory
        counter = tf.cast(x[:2], tf.uint64)
        drawn = tf.raw_ops.StatelessRandomUniformV2(shape=shape, key=[1], counter=counter, alg=1)
        return [x * drawn]

    view = view_of(on_gpu(draw), [1.0, 2.0, 3.0])
    assert kinds_of(view.copies) == [
        ("Const", "int64", "/gpu:0", "host"),
        ("Identity", "float32", "host", "/gpu:0"),
        ("Mul", "float32", "/gpu:0", "host"),
    ]


def test_ops_that_a_cpu_does_as_one_are_those_that_users_know():
    view = view_of(on_gpu(lambda x: [x * tf.exp(-tf.sqrt(tf.abs(x)))]), [1.0, 2.0])
    assert view.without_kernel == [] and view.launches("tower_0") >= 4
    layer = keras.layers.Conv2D(4, 3, activation="relu")
    layer.build([None, 8, 8, 3])
    kernel, bias = (tf.constant(v) for v in layer.get_weights())

    def convolve(x):
        y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias))
        return [x * tf.reduce_sum(y)]

    view = view_of(on_gpu(convolve), tf.ones([2, 8, 8, 3]))
    assert view.without_kernel == []
    assert view.launches("tower_0") == 5
    assert "Conv2D" in {op.type for op in view.ops}


@pytest.mark.run
def test_a_train_loop_of_two_towers():
    with device_types.cpus_for_gpus():
        options = tiny.options("unused", num_towers=2, batch_size=8, variables="replicated")
        run = prepare(options)
        batches = iter(run.data.train.train_batches(8, seed=0))
        view = gpu_estimate.read(run.train_loop(), batches, tf.constant(0))
    assert view.without_kernel == []
    weights = sum(4 * v.shape.num_elements() for v in run.train_state.model.trainable_variables)
    assert {c.gpu for c in view.collectives} == {"/gpu:0", "/gpu:1"}
    assert sum(c.bytes for c in view.collectives) >= 2 * weights
    images, labels = 8 * 8 * 8 * 3, 8 * 4
    assert sum(t.bytes for t in view.transfers("host")) >= images + labels
    assert 0 < view.launches("tower_0") == view.launches("tower_1")
    assert view.launches("update") > 0
