"""Models, data sets and helpers that are small enough to train in a test.

Models and data sets are named as a user names them: --model=tests.tiny:dense.
"""

import keras
import numpy as np
import tensorflow as tf

from towers.options.run import Options
from towers.training.run import checkpoint
from towers.training.run.setup import prepare

TRAIN_SIZE, TEST_SIZE, NUM_CLASSES, IMAGE_SHAPE = 60, 23, 3, (8, 8, 3)


def arrays(size, seed=0):
    """Return random images and labels."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (size, *IMAGE_SHAPE)).astype(np.uint8)
    return images, random.integers(0, NUM_CLASSES, size).astype(np.int32)


def images():
    return arrays(TRAIN_SIZE), arrays(TEST_SIZE, seed=1), NUM_CLASSES


def dense(num_classes, image_shape, width=5, l2=0.0, scale=1.0, activation="tanh"):
    """Two dense layers: N towers compute what one device computes."""
    regularizer = keras.regularizers.L2(l2) if l2 else None
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Flatten(),
            keras.layers.Rescaling(scale),
            keras.layers.Dense(width, activation, kernel_regularizer=regularizer),
            keras.layers.Dense(num_classes),
        ]
    )


def cnn(num_classes, image_shape, width=4):
    """Convolution, BatchNorm and dropout."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(width, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(num_classes),
        ]
    )


class Centered(keras.layers.Layer):
    """Subtracts the mean over the batch, of which a tower has only its slice."""

    def __init__(self, when):
        super().__init__(name="centered")
        self.when = when

    def call(self, x, training=False):
        if self.when == ("training" if training else "inference"):
            x -= keras.ops.mean(x, axis=0, keepdims=True)
        return x


def mixing(num_classes, image_shape, when="training", compiled=False):
    """Let examples see each other in training or in inference."""
    model = dense(num_classes, image_shape)
    model = keras.Sequential([keras.Input(image_shape), *model.layers[:-1], Centered(when)])
    model.add(keras.layers.Dense(num_classes))
    if compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def options(train_dir, **changes):
    """Return the options of a run of a few steps."""
    given = dict(
        train_dir=str(train_dir),
        model="tests.tiny:dense",
        dataset="tests.tiny:images",
        augment="standardize",
        batch_size=7,
        num_towers=1,
        learning_rate=0.1,
        log_every_steps=5,
        checkpoint_every_steps=0,
        evaluate_every_epochs=0,
    )
    if not {"max_steps", "num_epochs"} & set(changes):
        given["max_steps"] = 12
    return Options(**(given | changes))


class Loop:
    """The compiled train loop of a run, without folder, evaluation or monitor."""

    def __init__(self, options, batches=None):
        self.run = prepare(options)
        self.train_state = self.run.train_state
        self.loop = self.run.train_loop()
        if batches is None:
            batches = self.run.data.train.train_batches(options.batch_size, seed=options.seed)
        self.batches = iter(batches)

    def __call__(self, num_steps=1):
        """Make some steps; return the metrics of the last."""
        values = self.loop(self.batches, tf.constant(num_steps))
        return {name: float(values[name]) for name in self.run.task.step_names}

    def state(self):
        """Return {name: value} of the master variables."""
        return {name: v.numpy() for name, v in self.train_state.variables().items()}


def flat(batch):
    """Return (*example, draws) of a batch, as `Task.tower_function` takes it."""
    example, draws = batch
    return (*example, draws)


def saved(train_dir, step=None):
    """Return {name: value} of the variables in a run's checkpoint, by default the newest."""
    prefixes = dict(checkpoint.find(f"{train_dir}/checkpoints"))
    reader = tf.train.load_checkpoint(prefixes[max(prefixes) if step is None else step])
    return {
        name.removeprefix("variables/").split("/.ATTR")[0]: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        if name.startswith("variables/")
    }


def saved_steps(train_dir):
    return [step for step, _ in checkpoint.find(f"{train_dir}/checkpoints")]


def assert_identical(left, right):
    """Compare bit for bit."""
    assert left.keys() == right.keys()
    different = [n for n in left if np.asarray(left[n]).tobytes() != np.asarray(right[n]).tobytes()]
    assert not different


def assert_close(left, right, tolerance):
    """Compare by the largest difference, relative to the variable's largest value."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        error = np.max(np.abs(value - right[name]), initial=0)
        size = np.max(np.abs(right[name]), initial=1e-300)
        assert error <= tolerance * size, f"{name} differs by {error / size:.1e}"


def files(folder):
    """Return {path: (content, modification time)} of all that is in a folder."""
    return {
        path.relative_to(folder): (path.is_file() and path.read_bytes(), path.stat().st_mtime_ns)
        for path in [folder, *folder.rglob("*")]
    }


def records(folder):
    """Return [(step, value of a summary)] of a folder's event files, as TensorBoard shows them."""
    found = []
    for path in sorted(folder.glob("events.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            if event.session_log.status == tf.compat.v1.SessionLog.START:
                found = [(step, value) for step, value in found if step < event.step]
            found += [(event.step, value) for value in event.summary.value]
    return found


def events(folder):
    """Return [(step, tag, value)] of the scalars in a folder's event files.

    What is tower/loss of the run tower_0 in it is tower_0/loss here.
    """
    found = [
        (step, value.tag, value.simple_value)
        for step, value in records(folder)
        if value.HasField("simple_value")
    ]
    for run in sorted(path for path in folder.glob("*_*") if path.is_dir()):
        kind = run.name.partition("_")[0]
        found += [(step, tag.replace(kind, run.name, 1), value) for step, tag, value in events(run)]
    return found
