"""N towers compute what one device computes: a table of what is computed, in several ways.

Loss, gradients and all that is assigned, in two steps, beside plain TensorFlow and Keras.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import PerTower, TowerBuilder
from towers.builder.device_names import cpus_for_gpus

layers = keras.layers
DEVICES = ["/cpu:1", "/cpu:2", "/cpu:3", "/cpu:1"]  # where no weight is, but of GPUs
X = np.random.default_rng(0).normal(size=(7, 3))
ROWS = []  # of the table


class Case(NamedTuple):
    """What is computed."""

    losses: Callable  # of a batch, one for each example
    weights: Sequence[Any]
    batch: Sequence[Any] = (tf.constant(X),)
    state: Sequence[Any] = ()  # what `losses` assigns
    plain: Callable | None = None  # what one device is to compute, if not `losses`
    outside: tuple[Callable, Callable] | None = None  # what is joined, and what is read after it


class Way(NamedTuple):
    """How towers compute it."""

    name: str
    num_towers: int
    compiled: bool = True
    known: bool = True  # the number of examples
    size: int | None = None  # all examples
    joined: bool = False  # a loss of what `concat` gives, in place of `gradients`
    parts: int = 1
    batch_norm: str = "sync"
    by_xla: bool = False
    on_gpus: bool = False  # each with a copy of Keras' weights


ONE = Way("one, eager", 1, compiled=False)
TWO = Way("two, eager", 2, compiled=False, batch_norm="local")
THREE, JOINED = Way("three", 3), Way("two, joined", 2, joined=True)
JOINED_IN_PARTS = JOINED._replace(name="two, joined, in parts", parts=3)
JOINED_UNKNOWN = Way("four, joined, unknown size", 4, known=False, joined=True)
UNKNOWN = Way("three, unknown size", 3, known=False)
TWO_EXAMPLES = Way("three, two examples, unknown size", 3, known=False, size=2)
EVEN, IN_PARTS = Way("two, even", 2, size=6), Way("two, in parts", 2, parts=3)
LOCAL = Way("three, local", 3, batch_norm="local")
BY_XLA = Way("two, by XLA", 2, batch_norm="local", by_xla=True)
JOINED_BY_XLA = BY_XLA._replace(name="two, joined, by XLA", joined=True)
EAGER_BY_XLA = BY_XLA._replace(name="two, eager, by XLA", compiled=False)
UNKNOWN_BY_XLA = UNKNOWN._replace(name="three, by XLA, unknown size", by_xla=True)
TWO_EXAMPLES_BY_XLA = TWO_EXAMPLES._replace(name="three, by XLA, two examples", by_xla=True)
GPU, GPUS = Way("one GPU", 1, on_gpus=True), Way("three GPUs", 3, on_gpus=True)
GPUS_JOINED = Way("three GPUs, joined", 3, joined=True, on_gpus=True)
GPUS_UNKNOWN = Way("three GPUs, unknown size", 3, known=False, on_gpus=True)
GPUS_EVEN = Way("three GPUs, even", 3, size=6, on_gpus=True)
GPUS_TWO_EXAMPLES = TWO_EXAMPLES._replace(name="three GPUs, two examples", on_gpus=True)
RARE = JOINED_BY_XLA, EAGER_BY_XLA, UNKNOWN_BY_XLA, TWO_EXAMPLES_BY_XLA, GPUS_EVEN, GPUS_UNKNOWN


def row(*ways, rare=(), tier="run"):
    """Add a case to the table, as a function returns it; of three towers in this tier.

    In a rare way other cases run the same code; `scripts/test --all` alone tries it.
    """

    def add(make):
        for way in (*ways, *rare):
            marks = [getattr(pytest.mark, tier if way is THREE else "run")]
            marks += [pytest.mark.extended] if way in (*RARE, *rare) else []
            ROWS.append(pytest.param(make, way, marks=marks, id=f"{make.__name__}-{way.name}"))
        return make

    return add


def cubes(predict):
    """Return losses of what a function predicts."""

    def losses(*batch):
        y = predict(*batch)
        return tf.reduce_sum(y**3, axis=list(range(1, y.shape.rank)))

    return losses


def of_model(model, x=X):
    """Return a case of a Keras model in training."""
    losses, x = cubes(functools.partial(model, training=True)), tf.convert_to_tensor(x)
    return Case(losses, model.trainable_variables, [x], model.non_trainable_variables)


def with_gradient(change):
    """Return a function that changes nothing but what goes back through it."""
    return tf.custom_gradient(lambda x: (tf.identity(x), change))


def entry(shape):
    return keras.Input(shape, dtype=keras.config.dtype_policy().variable_dtype)


def sequential(shape, *rest):
    return keras.Sequential([entry(shape), *rest])


# What is called.


@row(THREE, JOINED, IN_PARTS, UNKNOWN, tier="graph")
def variables_of_a_module_and_keywords():
    w, module = keras.Variable(X[:3], dtype="float64"), tf.Module()
    module.b = tf.Variable(0.5, dtype=tf.float64)
    linear = functools.partial(lambda x, *, scale: scale * tf.matmul(x, w) + module.b, scale=2.0)
    return Case(cubes(linear), [w, *module.trainable_variables])


def dense():
    return sequential((3,), layers.Dense(4, "tanh"), layers.Dense(2))


@row(THREE)
def a_shared_layer_and_two_outputs():
    x = entry((3,))
    shared = layers.Dense(3, activation="tanh")
    net = keras.Model(x, {"a": layers.Dense(1)(shared(shared(x))), "b": shared(x)})
    return Case(cubes(lambda x: net(x)["a"] * net(x)["b"]), net.trainable_variables)


@row(THREE, rare=[BY_XLA])
def a_recurrent_model():
    return of_model(sequential((3,), layers.Reshape((3, 1)), layers.SimpleRNN(2), layers.Dense(1)))


@row(TWO, THREE, rare=[BY_XLA], tier="graph")
def a_loss_that_is_traced():
    """For one tower and one step, it serves the others with the weights of the day."""
    case = of_model(dense())
    return case._replace(losses=tf.function(case.losses))


@row(THREE, rare=[TWO])
def functions_inside():
    w = tf.Variable(2.0, dtype=tf.float64)
    signed = tf.function(lambda a: a * tf.cast(a.shape.rank + 1, tf.float32), [tf.TensorSpec([])])
    number = tf.function(lambda: 3.0)
    rows = lambda x: tf.vectorized_map(lambda row: w * tf.reduce_sum(row), x)  # noqa: E731
    return Case(lambda x: rows(x) * tf.cast(signed(2.0) * number(), x.dtype), [w])


@row(THREE, rare=[BY_XLA])
def gradients_in_a_loss():
    net = dense()

    def losses(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = net(x)
        return tf.reduce_sum(tape.gradient(y, x) ** 2, axis=1)

    return Case(losses, net.trainable_variables[:3])  # no gradient reaches the last


@row(TWO, THREE, tier="graph")
def sparse_tensors():
    w = tf.Variable(X[:5, :1])
    x = tf.sparse.from_dense(np.random.default_rng(1).integers(0, 3, (7, 5)).astype("float64"))
    product = lambda x, y: tf.sparse.sparse_dense_matmul(x, w)[:, 0] * y  # noqa: E731
    return Case(product, [w], [x, tf.range(7.0, dtype=tf.float64)])


@row(TWO, THREE, BY_XLA, EAGER_BY_XLA, rare=[JOINED, GPUS], tier="graph")
def embeddings():
    """Sparse gradients: of Keras, of TensorFlow, used densely too, and not chosen by examples."""
    tokens = tf.constant([[0, 1], [1, 2], [8, 8], [3, 0], [1, 1], [5, 7], [8, 2]])
    chosen, fixed = layers.Embedding(9, 3), layers.Embedding(4, 2)
    chosen.build(), fixed.build()
    normal = np.random.default_rng(0).normal(size=(9, 3))
    table, tied = tf.Variable(normal), keras.Variable(normal, dtype="float64")
    scale, unused = tf.Variable(3.0, trainable=False, dtype=tf.float64), tf.Variable(1.0)

    def losses(tokens):
        logits = tf.matmul(tf.gather(tied, tokens[:, 0]), tied, transpose_b=True)
        rows = tf.reduce_sum(fixed(tf.range(2)[tf.newaxis]) ** 2, axis=[1, 2])
        return (
            tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 0], logits)
            + cubes(chosen)(tokens)
            + cubes(lambda tokens: tf.gather(table, tokens))(tokens)
            + rows * scale * tf.ones([tf.shape(tokens)[0]], tf.float64)
        )

    return Case(losses, [chosen.embeddings, table, tied, fixed.embeddings, unused], [tokens])


@row(THREE, JOINED, GPUS)
def a_complex_weight():
    weight = keras.Variable(np.array([1 + 2j, -1j, 0.5]), dtype="complex128")

    def losses(x):
        return tf.reduce_sum(tf.abs(tf.cast(x, tf.complex128) * weight + 1j) ** 2, axis=1)

    return Case(losses, [weight])


@row(ONE, THREE, JOINED, IN_PARTS, UNKNOWN, rare=[JOINED_IN_PARTS, JOINED_UNKNOWN])
def backward_passes_that_are_not_linear():
    """Clipping inside of a layer gives another gradient for a sum of losses than for their mean."""
    body = []
    for change in (
        lambda dy: tf.clip_by_value(dy, -0.02, 0.02),
        lambda dy: tf.clip_by_norm(dy, 0.03, axes=[1]),
        tf.sign,
    ):
        body += [layers.Dense(4, "tanh"), layers.Lambda(with_gradient(change))]
    return of_model(sequential((3,), *body))


# What is assigned.

ASSIGNMENTS = {
    "counter of calls": lambda v, x: v.assign_add(1),
    "counter of examples": lambda v, x: v.assign_add(tf.cast(tf.shape(x)[0], v.dtype)),
    "sum": lambda v, x: v.assign_add(tf.reduce_sum(x)),
    "largest": lambda v, x: v.assign(tf.maximum(v.value, tf.reduce_max(x))),
    "smallest": lambda v, x: v.assign(tf.minimum(v.value, tf.reduce_min(x))),
    "moving mean": lambda v, x: v.assign(0.9 * v.value + 0.1 * tf.reduce_mean(x)),
    "sum of means": lambda v, x: v.assign_add(tf.reduce_mean(x)),
    "sum by means": lambda v, x: v.assign_add(tf.reduce_mean(x) * tf.cast(tf.shape(x)[0], v.dtype)),
    "first": lambda v, x: v.assign(x[0, 0]),
    "in a function": lambda v, x: tf.function(lambda: v.assign_add(1.0))(),
    "in a loop": lambda v, x: tf.while_loop(
        lambda i, _: i < 1, lambda i, _: (i + 1, v.assign_add(1.0)), (0, v.value)
    ),
    "in a branch": lambda v, x: tf.cond(
        tf.shape(x)[0] < 99, lambda: v.assign_add(1.0), lambda: v.value
    ),
}


def kept(value, dtype, aggregation=None):
    return keras.Variable(value, dtype=dtype, trainable=False, aggregation=aggregation)


@row(THREE, GPUS, rare=[TWO_EXAMPLES])
def state():
    """Each is put together as the function shows; metrics and counters count from anywhere."""
    declared = {"first": "only_first_replica"}
    floats = {name: kept(0.5, "float64", declared.get(name)) for name in ASSIGNMENTS}
    counters, signs = [kept(n, "int64") for n in (0, 10**6, 10**8)], kept(np.zeros(3), "int64")
    accuracy = keras.metrics.BinaryAccuracy(dtype="float64")
    accuracy.update_state([1], [1])

    def losses(x):
        for name, assign in ASSIGNMENTS.items():
            assign(floats[name], x)
        for counter in counters:
            counter.assign_add(x.shape[0] or tf.cast(tf.shape(x)[0], tf.int64))
        positive = tf.cast(x[:, 0] > 0, tf.int32)
        signs.assign_add(tf.math.bincount(positive, minlength=3, dtype=tf.int64))
        accuracy.update_state(tf.ones_like(positive), positive)
        return x[:, 0]

    return Case(losses, [], state=[*floats.values(), *counters, signs, *accuracy.variables])


@row(TWO, THREE, JOINED, tier="graph")
def counters_that_are_read():
    """Every tower sees the master's, then its own."""
    integer, floating = kept(5, "int32"), kept(5.0, "float64")

    def losses(x):
        before = integer.value + 0, floating.value + 0
        integer.assign_add(1)
        floating.assign(floating + 1)
        after = integer.value + 0, floating.value + 0
        return x[:, 0] * tf.cast(before[0] + after[0], x.dtype) * (before[1] + after[1])

    return Case(losses, [], state=[integer, floating])


@row(ONE, TWO, THREE, JOINED, TWO_EXAMPLES, IN_PARTS, GPUS, tier="graph")
@row(BY_XLA, rare=[UNKNOWN_BY_XLA, TWO_EXAMPLES_BY_XLA, JOINED_IN_PARTS, JOINED_BY_XLA])
def draws():
    return of_model(sequential((3,), layers.Dense(9), layers.Dropout(0.5, seed=1)))


# What layers add to the loss, and leave in attributes: read in the towers, or after them.


class Adds(layers.Layer):
    """Adds what functions make of its inputs."""

    def __init__(self, *losses):
        super().__init__()
        self.of_inputs = losses

    def call(self, x):
        self.add_loss([loss(x) for loss in self.of_inputs])
        return x


class Cosine(keras.regularizers.Regularizer):  # those of Keras 3.12 are float32
    def __call__(self, x):
        return 0.1 * keras.ops.sum(keras.ops.cos(x))


def with_rest(call, rest, model):
    """Return a case whose `rest` is added to the loss in each tower, or after all of them."""
    of_each = lambda x: tf.reduce_mean(tf.sin(call(x)), axis=1)  # noqa: E731
    added = lambda x: of_each(x) + rest()  # noqa: E731
    return Case(added, model.trainable_variables, outside=(of_each, rest))


def of_added(*body):
    model = sequential((3,), layers.Dense(3), *body, layers.Dense(2, bias_regularizer=Cosine()))
    model.layers[0].trainable = False
    rest = lambda: sum(keras.ops.sum(loss) for loss in model.losses)  # noqa: E731
    return with_rest(functools.partial(model, training=True), rest, model)


@row(THREE, JOINED, JOINED_IN_PARTS, rare=[IN_PARTS, JOINED_UNKNOWN])
def losses_that_layers_add():
    """Means and sums, of all numbers, of columns and by example; of activities and weights."""
    kinds = (
        lambda x: 0.3 * keras.ops.mean(keras.ops.sin(x)), lambda x: 0.1 * keras.ops.sum(x**2),
        lambda x: keras.ops.mean(x**3, axis=0), lambda x: keras.ops.sum(x**2, axis=1),
        lambda x: keras.ops.max(x) * 0 + 0.5, tf.nn.l2_loss,
        lambda x: x[:, :1] ** 2 / keras.ops.cast(keras.ops.shape(x)[0], x.dtype),
        lambda x: tf.reduce_sum(tf.debugging.check_numerics(x**2, "not finite")),
    )  # fmt: skip
    active = layers.Dense(3, activity_regularizer=Cosine(), kernel_regularizer=Cosine())
    return of_added(Adds(*kinds), active)


# What is recomputed in the backward pass, as it ran in the forward one.


@row(GPUS_JOINED, rare=[THREE, JOINED_UNKNOWN])
def draws_and_moments_that_are_recomputed():
    rest = layers.BatchNormalization(), layers.Dropout(0.5, seed=1)
    net = sequential((3,), layers.Dense(5), *rest)
    plain = lambda x: tf.tanh(net(x, training=True))  # noqa: E731
    recomputed = cubes(tf.recompute_grad(plain))
    return of_model(net)._replace(losses=recomputed, plain=cubes(plain))


class Widths(layers.Layer):
    """Takes as many columns, and repeats them as often, as untrained weights say; counts calls."""

    def build(self, shape):
        given, constant = dict(shape=(), trainable=False), keras.initializers.Constant
        self.width = self.add_weight(initializer=constant(2), dtype="int64", **given)
        self.times = self.add_weight(initializer=constant(3), **given)

    def call(self, x):
        x = tf.tile(x[:, : self.width + 0], [1, tf.cast(self.times + 0, tf.int32)])
        self.times.assign_add(1.0)
        return tf.reduce_sum(x, axis=1, keepdims=True) * tf.cast(tf.shape(x)[1], x.dtype)


@row(GPUS_JOINED, rare=[THREE, GPUS_UNKNOWN])
def values_that_make_shapes():
    """A tower that fetches a value does not take the shape of what stands in for it meanwhile."""
    return of_model(sequential((3,), layers.Dense(4, "tanh"), Widths(), layers.Dense(2)))


# Moments over all towers.


def images(size=7):
    return tf.random.stateless_normal([size, 4, 4, 3], [0, 0], 5.0, 2.0, tf.float64)


@row(THREE, GPUS_JOINED, rare=[EVEN, TWO_EXAMPLES, JOINED])
def batch_norm():
    first = layers.BatchNormalization(momentum=0.5)
    second = layers.BatchNormalization(momentum=0.9, scale=False)
    body = first, layers.Conv2D(5, 3, activation="tanh"), second, layers.Flatten(), layers.Dense(4)
    return of_model(sequential((4, 4, 3), *body), images())


class Moments(layers.Layer):
    """Keeps the mean of what it has seen, and its largest value."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.most = self.add_weight(shape=(3,), initializer="zeros", trainable=False)

    def call(self, x):
        self.mean.assign(keras.ops.mean(x))
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(x, axis=0)))
        return x


class Measured(layers.Layer):
    """Updates metrics by the mean of a batch, and by each example."""

    def __init__(self):
        super().__init__()
        metric = keras.metrics
        self.mean, self.rows, self.largest = metric.Mean(), metric.Mean(), metric.Sum()
        self.share = metric.BinaryAccuracy()

    def call(self, x):
        self.mean.update_state(tf.reduce_mean(x))
        self.rows.update_state(x[:, 0])
        self.largest.update_state(tf.reduce_max(x))
        self.share.update_state(tf.cast(x > 0.1, x.dtype), tf.nn.sigmoid(x))
        return x


@row(THREE, rare=[TWO, GPUS, JOINED])
def metrics_that_a_layer_and_a_loss_function_update():
    measured, of_batches = Measured(), keras.metrics.Mean(dtype="float64")
    case = of_model(sequential((3,), layers.Dense(5, "tanh"), measured, layers.Dense(2)))

    def losses(x):
        of_batches.update_state(tf.reduce_mean(x))
        return case.losses(x)

    return case._replace(losses=losses, state=[*measured.metrics_variables, *of_batches.variables])


@row(GPUS, rare=[GPU, GPUS_UNKNOWN, GPUS_EVEN, GPUS_TWO_EXAMPLES])
def moments_of_several_layers():
    norm, dropout = layers.BatchNormalization(), layers.Dropout(0.3, seed=1)
    body = Moments(), layers.Dense(3, "tanh"), norm, dropout, layers.Dense(2)
    return of_model(sequential((3,), *body))


@row(THREE)
def batch_norm_of_another_axis_shared_and_read_again():
    """Of two calls, the second begins with what the first has assigned."""
    other = layers.BatchNormalization(axis=1, momentum=0.7)
    norm, once = (layers.BatchNormalization(momentum=0.7) for _ in range(2))
    x = entry((4, 4, 3))
    y = layers.Flatten()(other(keras.ops.tanh(other(x))))
    z = layers.Flatten()(once(once(norm(norm(x) ** 2 + x)), training=False))
    return of_model(keras.Model(x, layers.Dense(2)(y) + layers.Dense(2)(z)), images())


class Positions(layers.Layer):
    """Keeps the positions that are not masked."""

    supports_masking = True

    def call(self, x, mask=None):
        return tf.reshape(x * tf.cast(mask[..., tf.newaxis], x.dtype), [tf.shape(x)[0], 18])


@row(THREE, GPUS)
def batch_norm_of_masked_steps():
    """Sequences of other lengths: a step that is masked counts nowhere."""
    x = np.random.default_rng(0).normal(3, 2, (7, 6, 3))
    for i in range(7):
        x[i, i:] = 0
    norm = layers.BatchNormalization(momentum=0.5)
    return of_model(sequential((6, 3), layers.Masking(0.0), norm, Positions()), x)


@row(GPUS, UNKNOWN, rare=[JOINED_UNKNOWN, GPUS_UNKNOWN])
def fused_batch_norm():
    """In float32, of all ranks; a mean of 15 deviations must cost few digits."""
    keras.config.set_dtype_policy("float32")
    models = []
    for shape, use in ((3,), {}), ((5, 3), {"scale"}), ((4, 4, 3), {"center"}), ((2, 4, 4, 3), {}):
        norm = layers.BatchNormalization(momentum=0.5, **dict.fromkeys(use, False))
        models.append(sequential(shape, norm, layers.Flatten(), layers.Dense(2, "tanh")))
    batch = [
        tf.random.stateless_normal([7, *net.input_shape[1:]], [1, 2], 30.0, 2.0) for net in models
    ]
    cases = [of_model(net) for net in models]
    return Case(
        lambda *xs: tf.add_n([case.losses(x) for case, x in zip(cases, xs, strict=True)]),
        [v for case in cases for v in case.weights],
        batch,
        [v for case in cases for v in case.state],
    )


def case_of(make):
    """Return the case, with the same numbers whenever it is made."""
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    try:
        case = make()
    finally:
        keras.config.set_dtype_policy(before)
    assert case.weights or case.state
    return case


def contrast(losses):
    """Return a loss in which the examples of a batch see each other."""
    return tf.reduce_logsumexp(losses * losses[:, tf.newaxis])


def with_tape(loss_fn, weights, inputs_too=False):
    """Return a step that gives a loss, and its gradients by weights and perhaps by inputs."""
    sources = [v.value if isinstance(v, keras.Variable) else v for v in weights]

    def step(*batch):
        inputs = [x for x in batch if inputs_too and x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = loss_fn(*batch)
        return loss, tape.gradient(loss, [*sources, *inputs])

    return step


def copies(weights, num_towers):
    """Return weights of GPUs as `gradients` takes them, with a copy on each tower."""
    others = []
    for device in DEVICES[1:num_towers]:
        with tf.device(device):
            others.append([keras.Variable(tf.Variable(v.value), dtype=v.dtype) for v in weights])
    return [PerTower(own) for own in zip(weights, *others, strict=True)] if others else weights


def outcome(case, step, size=None):
    """Return {what: value} of two steps, with other weights in the second."""
    found = {}
    for i in (1, 2):
        loss, gradients = step(*(part[:size] if size else part for part in case.batch))
        found[f"loss {i}"] = loss
        for n, gradient in enumerate(gradients):
            first, *others = gradient if isinstance(gradient, list) else [gradient]
            leaves = (tf.nest.flatten(own, expand_composites=True) for own in (first, *others))
            assert all(all(map(np.array_equal, *pair)) for pair in itertools.pairwise(leaves))
            found[f"gradient {n} of step {i}"] = first
        found |= {f"state {n} after step {i}": v.numpy() for n, v in enumerate(case.state)}
        for weight in case.weights:
            for v in getattr(weight, "values", [weight]):
                v.assign(0.9 * v + 0.1)
    return found


@functools.cache
def of_one_device(make, size=None, joined=False):
    case = case_of(make)
    losses = case.plain or case.losses
    loss_fn = lambda *batch: tf.reduce_mean(losses(*batch))  # noqa: E731
    if joined:
        loss_fn = joined_loss(case, lambda fn, *batch: fn(*batch))
    return outcome(case, with_tape(loss_fn, case.weights, joined), size)


def joined_loss(case, call):
    """Return a loss of what `call` makes of a case's function, and of what is read after it."""
    joined, rest = case.outside or (case.plain or case.losses, lambda: 0.0)
    return lambda *batch: contrast(call(joined, *batch)) + rest()


def step_of(case, way, devices=DEVICES, gather_device="/cpu:0"):
    builder = TowerBuilder(
        devices[: way.num_towers], gather_device, accumulate_steps=way.parts,
        jit_compile=way.by_xla, batch_norm=way.batch_norm,
        check="once" if way is THREE else "off",  # which does not depend on the way
    )  # fmt: skip

    def step(*batch):
        loss, gradients = builder.gradients(case.losses, case.weights, *batch)
        return loss, [g.values if isinstance(g, PerTower) else g for g in gradients]

    if way.joined:
        step = with_tape(joined_loss(case._replace(plain=None), builder.concat), case.weights, True)
    specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in case.batch]
    if not way.compiled:
        return step
    return tf.function(step, None if way.known else specs, autograph=False)


def of_towers(make, way):
    if not way.on_gpus:
        case = case_of(make)
        return outcome(case, step_of(case, way), way.size)
    with cpus_for_gpus():
        with tf.device(DEVICES[0]):
            case = case_of(make)
        if all(isinstance(v, keras.Variable) for v in case.weights) and not way.joined:
            case = case._replace(weights=copies(case.weights, way.num_towers))
        return outcome(case, step_of(case, way, gather_device=DEVICES[0]), way.size)


def by_row(gradient):
    indices, values = np.asarray(gradient.indices), np.asarray(gradient.values)
    repeats = len(set(indices.tolist())) < len(indices)
    order = slice(None) if repeats else np.argsort(indices)
    return indices[order], values[order]


def assert_equal(found, expected):
    """Compare by the largest value; sparse gradients by row, repeated rows in order."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        own = found[name]
        if isinstance(value, tf.IndexedSlices):
            assert isinstance(own, tf.IndexedSlices), name
            (rows, own), (expected_rows, value) = by_row(own), by_row(value)
            np.testing.assert_array_equal(rows, expected_rows)
        assert (own is None) == (value is None), name
        if value is not None:
            error = np.max(np.abs(own - value), initial=0)
            tolerance = 1e-4 if value.dtype == "float32" else 1e-10
            size = max(np.max(np.abs(value), initial=0), 1e-3)
            assert error <= tolerance * size, f"{name} differs by {error / size:.1e}"


@pytest.mark.parametrize(("make", "way"), ROWS)
def test_towers_compute_what_one_device_computes(make, way):
    assert_equal(of_towers(make, way), of_one_device(make, way.size, way.joined))
