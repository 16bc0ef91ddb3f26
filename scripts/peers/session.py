"""Peer: the classic session program, in the manner of TensorFlow's CIFAR-10 multi-GPU tutorial.

    python scripts/peers/session.py CONFIG_JSON         the lane protocol, see lane.py

It follows the tutorial of 2015, with `tf.compat.v1`. The input is a reader of fixed-length records
in a file, 16 threads that augment image by image, shuffle_batch, and a queue of batches from which
each tower takes one. Towers share variables through a variable scope, with `tf.nn.lrn` and weight
decay in each tower's loss. Gradients are averaged by expand_dims, concat and reduce_mean. A step is
one `session.run`, which returns the loss of the last tower. A tower's batch is `batch_size /
num_devices`. Without data one constant batch stands in the place of the queues. The program has no
reduced precision.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator

import lane

with lane.package("tensorflow"):
    import numpy as np
    import tensorflow.compat.v1 as tf

NUM_THREADS = 16
MIN_QUEUE_FRACTION = 0.4  # of the examples, before the first batch is drawn
PADDING = 4  # pixels on each side, "resnet"


def inference(images: tf.Tensor, config: lane.Config, lrn: bool = True) -> tf.Tensor:
    """Map images `[b, H, W, C]` to logits `[b, num_classes]`; in a scope that may be reused."""

    def weights(shape: list[int], deviation: float) -> tf.Tensor:
        initializer = tf.truncated_normal_initializer(stddev=deviation, seed=config.seed)
        with tf.device("/cpu:0"):
            return tf.get_variable("weights", shape, initializer=initializer)

    def biases(size: int, value: float) -> tf.Tensor:
        with tf.device("/cpu:0"):
            return tf.get_variable("biases", [size], initializer=tf.constant_initializer(value))

    def conv(x: tf.Tensor, name: str, bias: float) -> tf.Tensor:
        with tf.variable_scope(name):
            kernel = weights([5, 5, x.shape[-1], 64], 0.05)
            x = tf.nn.conv2d(x, kernel, [1, 1, 1, 1], padding="SAME")
            return tf.nn.relu(tf.nn.bias_add(x, biases(64, bias)))

    def pool(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.max_pool(x, [1, 3, 3, 1], [1, 2, 2, 1], padding="SAME")

    def norm(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.lrn(x, 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75) if lrn else x

    def local(x: tf.Tensor, name: str, units: int) -> tf.Tensor:
        with tf.variable_scope(name):
            return tf.nn.relu(tf.matmul(x, weights([x.shape[1], units], 0.04)) + biases(units, 0.1))

    x = norm(pool(conv(images, "conv1", 0.0)))
    x = pool(norm(conv(x, "conv2", 0.1)))
    x = tf.reshape(x, [x.shape[0], -1])
    x = local(local(x, "local3", 384), "local4", 192)
    with tf.variable_scope("softmax_linear"):
        return tf.matmul(x, weights([192, config.num_classes], 1 / 192)) + biases(
            config.num_classes, 0.0
        )


def tower_loss(images: tf.Tensor, labels: tf.Tensor, config: lane.Config) -> tf.Tensor:
    """Return the loss of one tower's batch, with the penalty for its weights."""
    logits = inference(images, config, config.model_args.get("lrn", True))
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    terms = [tf.reduce_mean(losses)]
    of_model = config.model_args.get("weight_decay", 0.004)
    for variable in tf.trainable_variables():
        hidden = variable.op.name in ("local3/weights", "local4/weights")
        decay = of_model * hidden + config.weight_decay * (variable.shape.ndims > 1)
        if decay:
            terms.append(decay * tf.nn.l2_loss(variable))
    return tf.add_n(terms)


def average_gradients(tower_gradients: list[list[tuple]]) -> list[tuple]:
    """Return (mean over the towers, variable) for each variable."""
    averages = []
    for of_towers in zip(*tower_gradients, strict=True):
        stacked = tf.concat([tf.expand_dims(g, 0) for g, _ in of_towers], axis=0)
        averages.append((tf.reduce_mean(stacked, 0), of_towers[0][1]))
    return averages


def build(config: lane.Config, path: str, num_images: int) -> tuple[tf.Operation, tf.Tensor]:
    """Build the graph of all towers; returns the training op and the last tower's loss."""
    kind = "gpu" if config.gpus else "cpu"
    with tf.device("/cpu:0"):
        global_step = tf.train.get_or_create_global_step()
        rate, nesterov = config.learning_rate, config.optimizer == "nesterov"
        optimizer = tf.train.GradientDescentOptimizer(rate)
        if config.optimizer != "sgd":
            optimizer = tf.train.MomentumOptimizer(rate, config.momentum, use_nesterov=nesterov)
        next_batch = make_input(config, path, num_images)
        tower_gradients = []
        with tf.variable_scope(tf.get_variable_scope()):
            for i in range(config.num_devices):
                with tf.device(f"/{kind}:{i}"), tf.name_scope(f"tower_{i}"):
                    loss = tower_loss(*next_batch(), config)
                    tf.get_variable_scope().reuse_variables()
                    tower_gradients.append(optimizer.compute_gradients(loss))
        train_op = optimizer.apply_gradients(average_gradients(tower_gradients), global_step)
        if config.ema_decay:
            averages = tf.train.ExponentialMovingAverage(config.ema_decay, global_step)
            # After the update: the tutorial left the order of the two open.
            with tf.control_dependencies([train_op]):
                train_op = averages.apply(tf.trainable_variables())
    return train_op, loss


def make_input(config: lane.Config, path: str, num_images: int) -> Callable:
    """Return a function that gives a tower its images `[b, h, w, C]` and labels `[b]`."""
    size = config.slice_size()
    if not config.data:
        batch = lane.synthetic_batch(config)
        # Variables: a constant would be copied into the graph, and what follows it folded.
        slices = (
            tuple(tf.Variable(part[start : start + size], trainable=False) for part in batch)
            for start in range(0, config.batch_size, size)
        )
        return slices.__next__
    image, label = read_image(config, path)
    min_after_dequeue = int(num_images * MIN_QUEUE_FRACTION)
    batch = tf.train.shuffle_batch(
        [augmented(image, config.augment), label], size, min_after_dequeue + 3 * size,
        min_after_dequeue, num_threads=NUM_THREADS, seed=config.seed,
    )  # fmt: skip
    queue = tf.FIFOQueue(2 * config.num_devices, [t.dtype for t in batch], [t.shape for t in batch])
    tf.train.add_queue_runner(tf.train.QueueRunner(queue, [queue.enqueue(batch)]))
    return queue.dequeue


def read_image(config: lane.Config, path: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the next image, uint8 `[H, W, C]`, and label, int32, of the file of records."""
    shape = stored_shape(config)
    reader = tf.FixedLengthRecordReader(record_bytes=4 + int(np.prod(shape)))
    _, value = reader.read(tf.train.string_input_producer([path]))
    record = tf.decode_raw(value, tf.uint8)
    label = tf.bitcast(tf.reshape(record[:4], [4]), tf.int32)
    return tf.reshape(record[4:], shape), label


def augmented(image: tf.Tensor, kind: str) -> tf.Tensor:
    """Augment one image, uint8 `[H, W, C]`, as the tutorial does: in float32 from the start."""
    height, width, channels = map(int, image.shape)
    image = tf.cast(image, tf.float32)
    if kind == "tutorial":
        size = [max(1, height * 3 // 4), max(1, width * 3 // 4), channels]
        image = tf.image.random_flip_left_right(tf.random_crop(image, size))
        image = tf.image.random_contrast(tf.image.random_brightness(image, 63), 0.2, 1.8)
    elif kind == "resnet":
        padded = tf.image.resize_image_with_crop_or_pad(
            image, height + 2 * PADDING, width + 2 * PADDING
        )
        image = tf.random_crop(padded, [height, width, channels])
        image = tf.image.random_flip_left_right(image)
    return image if kind == "off" else tf.image.per_image_standardization(image)


@contextlib.contextmanager
def records(config: lane.Config) -> Iterator[tuple[str, int]]:
    """Write a file of label and pixels, one image after the other; yields its path and length."""
    if not config.data:
        yield "", 0
        return
    images, labels = lane.stored_images(config)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "images.bin")
        pixels = images.reshape(len(labels), -1)
        np.concatenate([labels[:, None].view(np.uint8), pixels], axis=1).tofile(path)
        yield path, len(labels)


def stored_shape(config: lane.Config) -> tuple[int, int, int]:
    """Return the shape of the file's images, (H, W, C)."""
    with np.load(config.data) as arrays:
        return arrays["images"].shape[1:]


def program(config: lane.Config) -> None:
    """Train as the lane protocol asks."""
    config.require(
        model=("models.cnn:cnn",),
        dtype=("float32", "mixed_bfloat16"),
        optimizer=("sgd", "momentum", "nesterov"),
    )
    seen = len(tf.config.list_physical_devices("GPU")) if config.gpus else config.num_devices
    if seen < config.num_devices:
        raise lane.Skipped(f"num_devices={config.num_devices} with gpus; TensorFlow sees {seen}")
    note = "float32: the tutorial's program has no mixed precision"
    note = note if config.dtype != "float32" else ""
    count = {} if config.gpus else {"CPU": config.num_devices, "GPU": 0}
    proto = tf.ConfigProto(allow_soft_placement=True, device_count=count)
    with tf.Graph().as_default(), records(config) as (path, num_images):
        tf.set_random_seed(config.seed)
        train_op, loss = build(config, path, num_images)
        initializer, coordinator = tf.global_variables_initializer(), tf.train.Coordinator()
        with tf.Session(config=proto) as session:
            session.run(initializer)
            threads = tf.train.start_queue_runners(session, coordinator)
            with lane.Lane(config, {"tensorflow": tf.__version__}, note) as turns:
                value = None
                while turns.more(value):
                    for _ in range(config.steps_per_loop):
                        _, value = session.run([train_op, loss])
            coordinator.request_stop()
            runners = tf.get_collection(tf.GraphKeys.QUEUE_RUNNERS)
            session.run([runner.queue.close(True) for runner in runners])
            coordinator.join(threads, stop_grace_period_secs=10)


if __name__ == "__main__":
    lane.run(program)
