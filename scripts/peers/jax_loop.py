"""Peer: JAX, one compiled step over a mesh of devices.

    python scripts/peers/jax_loop.py CONFIG_JSON        the lane protocol, see lane.py

Follows JAX's guides "Distributed data parallelism" and "shard_map": weights replicated, the batch
in slices along the mesh's only axis, gradients averaged by `lax.pmean`, buffers donated; models
in plain jax.numpy and jax.lax, the update written out. Images of a file lie on the devices and are
augmented a batch at a time inside the step. The reported loss leaves out the penalty, whose
gradient is added to the data's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import lane

with lane.package("jax"):
    import jax
    import jax.numpy as jnp
    import jax_models
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "devices"
PADDING = 4  # pixels on each side, "resnet"


def make_loop(config: lane.Config) -> Callable[[], jax.Array]:
    """Return a function that makes `steps_per_loop` steps and returns the last loss."""
    model = jax_models.make_model(config)
    mesh = Mesh(jax.devices()[: config.num_devices], (AXIS,))
    everywhere, sliced = PartitionSpec(), PartitionSpec(AXIS)
    of_batch = (everywhere, everywhere, sliced) if config.data else (sliced, sliced)
    step = jax.shard_map(
        functools.partial(train_step, config, model),
        mesh=mesh,
        in_specs=(everywhere, of_batch),
        out_specs=(everywhere, everywhere),
        check_vma=False,  # the gradients are averaged by hand, once
    )
    step = jax.jit(step, donate_argnums=0)
    state = jax.device_put(make_state(config, model), NamedSharding(mesh, everywhere))
    batches = make_batches(config, [NamedSharding(mesh, spec) for spec in of_batch])

    def loop() -> jax.Array:
        nonlocal state
        # Python's loop, not lax.scan's: inside a loop of XLA's, convolutions on a CPU use one
        # thread and take more than ten times as long.
        for _ in range(config.steps_per_loop):
            state, loss = step(state, next(batches))
        return loss

    return loop


def make_batches(config: lane.Config, shardings: list[NamedSharding]) -> Iterator[tuple]:
    """Yield the synthetic batch, or all images, all labels and which of them are the batch."""
    if not config.data:
        batch = tuple(map(jax.device_put, lane.synthetic_batch(config), shardings))
        while True:
            yield batch
    *of_file, of_chosen = shardings
    images, labels = map(jax.device_put, lane.stored_images(config), of_file)
    generator, size = np.random.default_rng(config.seed), config.batch_size
    while True:
        shuffled = generator.permutation(len(labels)).astype(np.int32)
        for start in range(0, len(labels) - size + 1, size):
            yield images, labels, jax.device_put(shuffled[start : start + size], of_chosen)


def make_state(config: lane.Config, model: jax_models.Model) -> dict[str, Any]:
    """Return weights, statistics, the optimizer's slots, the average and the step's number."""
    weights, statistics = model.init(jax.random.key(config.seed))
    slots = {"sgd": 0, "adamw": 2}.get(config.optimizer, 1)
    return {
        "weights": weights,
        "statistics": statistics,
        "slots": [jax.tree.map(jnp.zeros_like, weights) for _ in range(slots)],
        "average": jax.tree.map(jnp.copy, weights) if config.ema_decay else {},
        "step": jnp.zeros([], jnp.int32),
    }


def train_step(
    config: lane.Config, model: jax_models.Model, state: dict[str, Any], batch: tuple
) -> tuple[dict[str, Any], jax.Array]:
    """Make one step on this device's slice; returns the new state and the mean loss."""
    images, labels = chosen_images(config, state["step"], *batch) if config.data else batch
    dtype = jnp.bfloat16 if config.dtype == "mixed_bfloat16" else jnp.float32

    def loss_fn(weights: dict) -> tuple[jax.Array, dict]:
        logits, statistics = model.apply(weights, state["statistics"], images, True, dtype)
        losses = jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(len(labels)), labels]
        return losses.mean(), statistics

    values, gradients = jax.value_and_grad(loss_fn, has_aux=True)(state["weights"])
    (loss, statistics), gradients = lax.pmean((values, gradients), AXIS)
    weights, slots = update(config, model.decays, state, gradients)
    average = state["average"]
    if config.ema_decay:
        decay = config.ema_decay
        average = jax.tree.map(lambda a, w: decay * a + (1.0 - decay) * w, average, weights)
    new = {"weights": weights, "statistics": statistics, "slots": slots, "average": average}
    return new | {"step": state["step"] + 1}, loss


def update(
    config: lane.Config, decays: dict[str, float], state: dict[str, Any], gradients: dict
) -> tuple[dict, list[dict]]:
    """Return the new weights and slots."""
    weights, rate, count = state["weights"], config.learning_rate, state["step"] + 1
    adamw = config.optimizer == "adamw"

    def regularised(name: str) -> jax.Array:
        everywhere = 0.0 if adamw or weights[name].ndim < 2 else config.weight_decay
        decay = decays.get(name, 0.0) + everywhere
        return gradients[name] + decay * weights[name] if decay else gradients[name]

    def of_adamw(w: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        m, v = m / (1.0 - 0.9**count), v / (1.0 - 0.999**count)
        decay = config.weight_decay if w.ndim > 1 else 0.0
        return w - rate * (m / (jnp.sqrt(v) + 1e-7) + decay * w)

    gradients = {name: regularised(name) for name in weights}
    if adamw:
        first, second = state["slots"]
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
        return jax.tree.map(of_adamw, weights, gradients, first, second), [first, second]
    slots = state["slots"]
    if slots:
        slots = [jax.tree.map(lambda m, g: config.momentum * m + g, slots[0], gradients)]
        if config.optimizer == "nesterov":
            gradients = jax.tree.map(lambda m, g: config.momentum * m + g, slots[0], gradients)
        else:
            gradients = slots[0]
    return jax.tree.map(lambda w, g: w - rate * g, weights, gradients), slots


def chosen_images(
    config: lane.Config, step: jax.Array, images: jax.Array, labels: jax.Array, chosen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return this device's slice of a step's batch, augmented: `[b, h, w, C]`, `[b]`."""
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    key = jax.random.fold_in(key, lax.axis_index(AXIS))
    return augmented(images[chosen], key, config.augment), labels[chosen]


def augmented(batch: jax.Array, key: jax.Array, kind: str) -> jax.Array:
    """Augment images, uint8 `[b, H, W, C]`.

    The tutorial's brightness adds a number to all of an image, which standardising takes away
    again: it is left out.
    """
    b, height, width, _ = batch.shape
    keys = jax.random.split(key, 4)
    if kind in ("tutorial", "resnet"):
        if kind == "tutorial":
            new_height, new_width = max(1, height * 3 // 4), max(1, width * 3 // 4)
        else:
            batch = jnp.pad(batch, [(0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)])
            new_height, new_width = height, width
        top = jax.random.randint(keys[0], [b, 1], 0, batch.shape[1] - new_height + 1)
        left = jax.random.randint(keys[1], [b, 1], 0, batch.shape[2] - new_width + 1)
        across = jnp.arange(new_width)
        columns = left + jnp.where(
            jax.random.bernoulli(keys[2], shape=[b, 1]), new_width - 1 - across, across
        )
        lines = top + jnp.arange(new_height)
        pixel = jnp.arange(b)[:, None, None]
        batch = batch[pixel, lines[:, :, None], columns[:, None, :]]
    x = batch.astype(jnp.float32)
    if kind == "tutorial":
        contrast = jax.random.uniform(keys[3], [b, 1, 1, 1], minval=0.2, maxval=1.8)
        mean = x.mean((1, 2), keepdims=True)
        x = (x - mean) * contrast + mean
    if kind != "off":
        deviation = x.std((1, 2, 3), keepdims=True)
        x = (x - x.mean((1, 2, 3), keepdims=True)) / jnp.maximum(deviation, x[0].size ** -0.5)
    return x


def configure_devices(config: lane.Config) -> None:
    """Ask for the devices before JAX starts.

    Raises:
        Skipped: there are not so many GPUs.
    """
    if not config.gpus:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.num_devices)
    elif jax.default_backend() != "gpu" or jax.device_count() < config.num_devices:
        raise lane.Skipped(
            f"num_devices={config.num_devices} with gpus, and JAX sees {jax.devices()}"
        )


def program(config: lane.Config) -> None:
    """Train as the lane protocol asks."""
    config.require(dtype=("float32", "mixed_bfloat16"))
    config.slice_size()
    configure_devices(config)
    loop = make_loop(config)
    with lane.Lane(config, {"jax": jax.__version__}) as turns:
        loss = None
        while turns.more(loss):
            loss = loop()


if __name__ == "__main__":
    lane.run(program)
