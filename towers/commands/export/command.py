"""`towers export`: writes a run's model to a file, and checks it by loading it again."""

import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from towers import tf_internals
from towers.commands.export.options import ExportOptions
from towers.data import augment
from towers.errors import InputError, RunError, first_line
from towers.options.functions import SHIPPED
from towers.training.load import TrainedModel, load_run
from towers.training.step.step import floatx_of

_NUM_COMPARED = 4  # examples
# Allowed difference, relative to the largest output. ResNet-20 had 9e-16 and 3e-7 by rounding;
# deeper models, and half precision, have more.
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
_TOLERANCE_OF_HALF = 0.1

Inputs = Any  # a structure of tensors


def run(options: ExportOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Write a run's model to a file, load it, and compare the outputs of both; see `flags.Verb`.

    Returns:
        {"passed", "output", "step", "averages", "max_relative_difference"}.
    """
    output = _output(options)
    trained = load_run(options.run, averages=options.averages)
    examples = _random_examples(trained.spec()[0])
    expected = _arrays(trained.model(trained.inputs(examples), training=False))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=output.parent) as folder:
            path = Path(folder, "model.keras")
            outputs = _saved_and_loaded(trained, path, examples)
            difference = max(
                float(np.max(np.abs(a - b), initial=0) / max(np.max(np.abs(a), initial=0), 1e-30))
                for a, b in zip(expected, outputs, strict=True)
            )
            passed = difference <= _TOLERANCE.get(options.run.dtype, _TOLERANCE_OF_HALF)
            if passed:
                os.replace(path, output)
    except OSError as error:
        raise RunError(f"--output={output} cannot be written: {error.strerror or error}") from None
    compared = f"{_NUM_COMPARED} random examples: largest relative difference {difference:.1e}"
    if passed:
        kind = "averages" if trained.averaged else "weights"
        say(f"exported    {output}: the {kind} of {options.run.train_dir} at step {trained.step}")
        for line in _to_import(options.run.train_dir, trained.model):
            say(line)
        say(f"compared    loaded again, {compared}")
    else:
        say(
            "failed      no file was written: the saved model, loaded again, differs from the run; "
            f"{compared}"
        )
    return {
        "passed": passed,
        "output": str(output),
        "step": trained.step,
        "averages": trained.averaged,
        "max_relative_difference": difference,
    }


def _raw_model(trained: TrainedModel) -> keras.Model:
    """Return a model that takes batches of examples as the data set stores them."""
    spec, task, model = trained.spec()[0], trained.task, trained.model
    # Drop optimizer and loss, which Keras may not find where the file is loaded.
    model.compiled, model.optimizer = False, None
    if not task["image_shape"]:
        if isinstance(model, keras.Sequential) or getattr(model, "inputs", None):
            return model
        inputs = tf.nest.map_structure(lambda s: keras.Input(s.shape, dtype=s.dtype.name), spec)
        return keras.Model(inputs, model(inputs, training=False))
    with floatx_of(trained.options.dtype):
        images = keras.Input(spec.shape, dtype=spec.dtype.name, name="images")
        inputs = _eval_images(images, task["augment"], trained.options.input_dtype)
        return keras.Model(images, model(inputs))


def _eval_images(images: keras.KerasTensor, kind: str, dtype: str) -> keras.KerasTensor:
    """Return `augment.eval_images` with Keras ops only, which a Keras file can hold."""

    def standardize(images: keras.KerasTensor) -> keras.KerasTensor:
        centered = images - ops.mean(images, [1, 2, 3], keepdims=True)
        deviation = ops.sqrt(ops.sum(ops.square(centered), [1, 2, 3], keepdims=True))
        return centered * (math.prod(images.shape[1:]) ** 0.5 / ops.maximum(deviation, 1.0))

    return augment.eval_images(images, kind, dtype, ops.cast, standardize)


def _random_examples(spec: Any) -> Inputs:
    """Return a batch of random examples; integers other than uint8 are 0 or 1."""
    random = np.random.default_rng(0)

    def batch(spec: tf.TensorSpec) -> tf.Tensor:
        shape = [_NUM_COMPARED, *(size or 8 for size in spec.shape)]
        if spec.dtype == tf.string:
            return tf.fill(shape, "a")
        if spec.dtype.is_floating:
            return tf.constant(random.normal(size=shape), spec.dtype)
        high = 256 if spec.dtype == tf.uint8 else 2
        return tf.constant(random.integers(0, high, shape), spec.dtype)

    with tf.device("/cpu:0"):
        return tf.nest.map_structure(batch, spec)


def _arrays(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(output, np.float64) for output in tf.nest.flatten(outputs)]


def _saved_and_loaded(trained: TrainedModel, path: Path, examples: Inputs) -> list[np.ndarray]:
    """Write the file, load it again, and return its outputs."""
    model = _raw_model(trained)
    try:
        model.save(path)
        loaded = keras.models.load_model(path, compile=False)
    except OSError:
        raise
    except Exception as error:  # of many kinds; the outer ones are a page long
        while error.__context__:
            error = error.__context__
        raise InputError(
            f"Keras cannot load the file again: {first_line(error, 200)}; give your own layers "
            "get_config and @keras.saving.register_keras_serializable(), or write a SavedModel: "
            f"towers.load({trained.options.train_dir!r}).export(FOLDER)"
        ) from None
    return _arrays(loaded(examples, training=False))


def _to_import(train_dir: str, model: keras.Model) -> list[str]:
    """Return a line on the imports that loading the file needs, if there are any."""
    modules = {type(layer).__module__ for layer in tf_internals.layers_of(model)}
    imports = sorted(name for name in modules if name.split(".")[0] != "keras")
    if not imports:
        return []
    if any(name.startswith(f"{SHIPPED}.") for name in imports):  # models of towers' own
        return [f"call        towers.load({train_dir!r}) first, which defines its layers"]
    return [f"import      {', '.join(imports)} before loading it, which defines its layers"]


def _output(options: ExportOptions) -> Path:
    """Return the path to write; raise InputError if a file there must be kept."""
    path = Path(options.output or Path(options.run.train_dir, "model.keras")).expanduser()
    if path.is_dir() or (path.exists() and not options.overwrite):
        raise InputError(
            f"--output={path} already exists; type --overwrite to replace a file, or name another "
            "with --output"
        )
    return path
