"""Trains what `towers train` would, under plain `keras.Model.fit` on one device.

    python scripts/fit_recipe.py --flagfile=configs/quickstart.cfg --train_dir=runs/fit --seed=1

Network and initial weights, images with their order and augmentation, loss, regularisation,
clipping and the learning rate of each step are those of the flags; the step, the loop, the metrics
and the moving average (use_ema, of weights alone) are Keras' own. Draws of layers, as of Dropout,
are Keras', too. Writes flags.cfg and, at its end, result.json; it does not go on in the middle.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import keras
    import tensorflow as tf

from towers import files  # noqa: E402
from towers.errors import InputError, RunError  # noqa: E402
from towers.options import code_trust, flags  # noqa: E402
from towers.options.run import Options  # noqa: E402
from towers.training.run.model import compile_from_flags  # noqa: E402
from towers.training.run.setup import RunContext, prepare  # noqa: E402
from towers.training.step.keras_model import floatx_of  # noqa: E402
from towers.training.step.optimizer_step import EMA_EXAMPLES  # noqa: E402
from towers.training.step.optimizers import is_own  # noqa: E402


def main(argv: Sequence[str]) -> int:
    """Train; return 0, or 2 where the flags are wrong."""
    if "--help" in argv:
        print(__doc__)
        return 0
    try:
        options = dataclasses.replace(flags.parse(argv), num_towers=1, variables="cpu")
        with floatx_of(options.dtype):
            train(options)
    except (InputError, RunError) as error:
        print(f"fit_recipe: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def train(options: Options) -> None:
    """Train and write what it ended with.

    Raises:
        InputError: the flags ask for what is not here.
    """
    run, folder = prepare(options), Path(options.train_dir)
    task, last = run.task, run.timetable().last_step
    model = compiled(run)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(folder / "flags.cfg", code_trust.signed(options.to_flagfile()))
    batches = run.data.train.train_batches(options.batch_size, seed=options.seed)
    batches = batches.map(
        lambda example, draws: (task.inputs(example[0], draws), example[1]),
        num_parallel_calls=tf.data.AUTOTUNE,
    ).prefetch(2)
    of_test = run.data.test.eval_batches(options.batch_size).map(
        lambda example, counted: tuple(
            tf.boolean_mask(part, counted > 0)
            for part in (task.inputs(example[0], None), example[1])
        )
    )
    print(f"fit         {folder}, {last} steps", flush=True)
    clock = Clock()
    # What comes after an epoch, and is written in its history, is before the averages are put in.
    history = model.fit(
        batches, steps_per_epoch=last, shuffle=False, validation_data=of_test, callbacks=[clock],
        verbose=0,
    ).history  # fmt: skip
    result = {
        "steps": last,
        "examples": last * options.batch_size,
        "training_seconds": clock.seconds(last),
        "test_accuracy": history["val_accuracy"][-1],
        "seed": options.seed,
    }
    if options.ema_decay:
        metrics = model.evaluate(of_test, verbose=0, return_dict=True)
        result["test_accuracy_ema"] = metrics["accuracy"]
    files.write_json(folder / "result.json", result)


def compiled(run: RunContext) -> keras.Model:
    """Return the run's model, compiled as its flags say."""
    options, model = run.options, run.task.model
    if model.compiled or is_own(options) or options.accumulate_steps > 1:
        raise InputError("fit trains a classifier with an optimizer of the flags, a step a batch")
    if options.dtype == "mixed_float16":
        raise InputError("--dtype=mixed_float16 is not compared with fit: type mixed_bfloat16")
    if options.test_time_flip:
        raise InputError("fit sees no mirror images: leave out --test_time_flip")
    plain = dataclasses.replace(options, label_smoothing=0.0, metrics="accuracy")
    compile_from_flags(model, plain)
    optimizer, num_classes = model.optimizer, run.data.num_classes
    optimizer.learning_rate = Schedule(run)
    if options.ema_decay:
        optimizer.use_ema = True
        optimizer.ema_momentum = options.ema_decay ** (options.batch_size / EMA_EXAMPLES)

    def loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return keras.losses.categorical_crossentropy(
            tf.one_hot(tf.cast(tf.reshape(labels, [-1]), tf.int32), num_classes),
            tf.cast(logits, tf.float32) if logits.dtype.size < 4 else logits,
            from_logits=True,
            label_smoothing=options.label_smoothing,
        )

    on_gpu = tf.config.list_logical_devices("GPU")
    model.compile(
        optimizer, loss, metrics=["accuracy"], steps_per_execution=options.steps_per_loop,
        jit_compile="auto" if on_gpu else False,  # XLA's convolutions take 2.5 times as long
    )  # fmt: skip
    return model


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """The run's learning rate of each step."""

    def __init__(self, run: RunContext):
        """Take it from a run."""
        self._run = run

    def __call__(self, step: Any) -> tf.Tensor:
        """Return the rate after `step` updates."""
        examples = tf.cast(step, tf.int64) * self._run.options.batch_size
        return tf.cast(self._run.learning_rate(examples), tf.float32)


class Clock(keras.callbacks.Callback):
    """Takes the time from the second call to the end of the last step."""

    def __init__(self) -> None:
        """Begin when training does."""
        super().__init__()
        self._start: tuple[float, int] | None = None
        self._end = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin at the second call: the first one traces."""
        if batch and self._start is None:
            self._start = time.perf_counter(), int(self.model.optimizer.iterations)

    def on_test_begin(self, logs: Any = None) -> None:
        """End: an evaluation follows."""
        int(self.model.optimizer.iterations)  # waits for the steps
        self._end = self._end or time.perf_counter()

    def seconds(self, num_steps: int) -> float | None:
        """Return the seconds of so many steps; None where there was but one call."""
        if self._start is None:
            return None
        start, steps_then = self._start
        return (self._end - start) * num_steps / (num_steps - steps_then)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
