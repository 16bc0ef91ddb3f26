"""`model.fit` over towers: `towers.parallelize`."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers import devices as tower_devices
from towers.builder.device_names import are_remote, is_device
from towers.builder.tower import TowerBuilder
from towers.errors import InputError, kind_of
from towers.training.step import train_state
from towers.training.step.on_towers import put_on


def parallelize(
    model: keras.Model,
    num_towers: int = 0,
    devices: str | Sequence[str] = "",
    *,
    num_gpus: int = 0,
    gather_device: str = "",
    variables: str = "default",
    batch_norm: str = "sync",
    accumulate_steps: int = 1,
    jit_compile: bool = False,
    check: str = "once",
    on_inexact: str = "warn",
) -> keras.Model:
    """Run `fit`, `evaluate` and `predict` of a model on towers; return the model.

        model = towers.parallelize(model, num_towers=4)
        model.compile(optimizer="adam", loss="mse")
        model.fit(x, y, batch_size=256)

    The model, built or not, compiled or not, is changed in place. Losses, metrics and weights are
    those of one device without XLA, up to rounding, if layers compute each example from itself
    (BatchNorm is synchronized); otherwise a warning names the layer. Layers that cannot be called
    with a part of the batch run on one device, with a warning. So do a step that fails on towers
    and a model that runs eagerly. Direct calls, saved files, copies and pickles are those of the
    plain model.

    Args:
        model: any Keras model, also with its own `train_step` or `compute_loss`.
        num_towers: 0 for one tower on each visible GPU, or one on the CPU without GPUs.
        devices: devices of the towers, "/gpu:0,/gpu:2" or a list, perhaps of other machines (see
            `towers.devices.connect`); "cpu" for logical CPU devices although there are GPUs; "" for
            the first ones. GPUs that it leaves out are hidden if TensorFlow has not started.
        num_gpus: exactly so many GPUs, in place of `num_towers`; an error if there are fewer.
        gather_device: where batches are split, outputs joined, and loss and update computed; "" for
            the first tower's GPU if weights are on GPUs, otherwise "/cpu:0".
        variables: where weights are. "replicated": on each tower's GPU; "cpu": on the gather
            device; "default": "replicated" on GPUs of this machine, otherwise "cpu".
        batch_norm: batch statistics of all towers ("sync") or of each tower ("local").
        accumulate_steps: number of microbatches, computed one after the other to save memory. The
            forward pass runs twice, and BatchNorm uses the statistics of each microbatch.
        jit_compile: whether XLA compiles each tower.
        check: when towers are compared with one device, on rows of the batch: "once", "always" or
            "off".
        on_inexact: what to do if they differ: "warn", "stop", or train on "one_device".

    Raises:
        InputError: an argument is out of range, or there is no such device.
    """
    if not isinstance(model, keras.Model):
        raise InputError(f"parallelize takes a keras.Model, not {kind_of(model)}")
    if tf.distribute.has_strategy() or model.distribute_strategy != tf.distribute.get_strategy():
        raise InputError(
            "parallelize replaces tf.distribute: build the model outside of a strategy's scope, "
            "and call parallelize there"
        )
    if variables not in ("default", *train_state.VARIABLES):
        raise InputError(f"variables={variables!r} must be 'default', 'cpu' or 'replicated'")
    if num_gpus:
        if num_towers or devices:
            raise InputError("num_gpus excludes num_towers and devices: leave out num_gpus")
        num_towers, devices = num_gpus, "gpu"
    tower_devices.hide_others(devices)
    device_names = tower_devices.tower_devices(num_towers, devices)
    if jit_compile:
        tower_devices.try_xla(device_names)
    if variables == "default":
        at_host = bool(gather_device) and not is_device(device_names[0], gather_device)
        variables = "cpu" if at_host or are_remote(device_names) else variables
    variables, home = train_state.placement(variables, device_names)
    builder = TowerBuilder(
        device_names,
        gather_device or home,
        batch_norm=batch_norm,
        accumulate_steps=accumulate_steps,
        jit_compile=jit_compile,
        check=check,
        on_inexact=on_inexact,
    )
    return put_on(model, builder, variables == "replicated")
