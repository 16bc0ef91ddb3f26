"""Evaluation: output towers over the whole test set, every example counted once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from towers import devices
from towers.errors import InputError
from towers.monitoring.pictures import Mistake, Predictions
from towers.options.run import Options
from towers.training import checkpoint
from towers.training.run import Run, prepare
from towers.training.step import make_eval_step
from towers.training.tensorflow_errors import one_line_errors

NUM_MISTAKES = 16


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Figures over a whole test set; those of the moving average are None where there is none.

    `accuracy` is correct / examples, `loss` the mean cross entropy in nats, and `class_accuracy`
    {class name: accuracy}, None for a class without examples. `predictions` are no figure.
    """

    accuracy: float
    loss: float
    class_accuracy: dict[str, float | None]
    accuracy_ema: float | None
    loss_ema: float | None
    class_accuracy_ema: dict[str, float | None] | None
    examples: int
    predictions: Predictions | None = dataclasses.field(default=None, compare=False, repr=False)

    def figures(self) -> dict[str, Any]:
        """Return what `towers evaluate --json` prints of it."""
        return {name: value for name, value in vars(self).items() if name != "predictions"}


def make_evaluator(run: Run) -> Callable[..., Evaluation | None]:
    """Return `evaluator(stop)`, which evaluates the master variables as they are at the call.

    `stop` is a function that is asked before each batch; when it says True, the evaluator returns
    None. The compiled step is made once and kept.
    """
    eval_step = make_eval_step(run.builder, run.masters, run.options)
    batches = run.data.test.eval_batches(run.options.batch_size)

    def evaluator(stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        sums, labels, predicted, mistakes = None, [], [], []
        for images, true, weights in batches:
            if stop():
                return None
            found = tf.nest.map_structure(lambda t: t.numpy(), eval_step(images, true, weights))
            said, confidence = found.pop("predicted"), found.pop("confidence")
            sums = tf.nest.map_structure(np.add, sums, found) if sums else found
            counted, true = weights.numpy() > 0, true.numpy()
            labels.append(true[counted])
            predicted.append(said[counted])
            # Images are copied only of those that are among the worst so far. NaN is above no
            # number: what a broken model says is no confident mistake.
            least = mistakes[-1].confidence if len(mistakes) == NUM_MISTAKES else -1.0
            rows = np.flatnonzero(counted & (true != said) & (confidence > least))
            for i in rows[np.argsort(-confidence[rows], kind="stable")[:NUM_MISTAKES]]:
                with tf.device("/cpu:0"):  # where the batch is
                    image = images[i].numpy()
                mistakes.append(Mistake(image, int(true[i]), int(said[i]), float(confidence[i])))
            mistakes.sort(key=lambda mistake: -mistake.confidence)
            del mistakes[NUM_MISTAKES:]
        predictions = np.concatenate(labels), np.concatenate(predicted), mistakes, "ema" in sums
        figures = [figure for name in ("raw", "ema") for figure in _figures(run, sums, name)]
        return Evaluation(*figures, int(sums["examples"].sum()), Predictions(*predictions))

    return evaluator


def _figures(run: Run, sums: dict[str, Any], name: str) -> tuple:
    """Return accuracy, loss and accuracy of each class; None for averages that are not there."""
    if name not in sums:
        return None, None, None
    examples, correct = sums["examples"], sums[name]["correct"]
    parts = zip(run.data.class_names, correct, examples, strict=True)
    of_class = {c: float(right / of) if of else None for c, right, of in parts}
    count = int(examples.sum())
    return float(correct.sum() / count), float(sums[name]["loss"] / count), of_class


def evaluate(options: Options, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Evaluate the newest checkpoint of `options.train_dir`.

    Returns:
        The figures of an `Evaluation`, the checkpoint's "step", and "num_towers".

    Raises:
        InputError: there is no checkpoint, or it is of another model.
        RunError: the test set cannot be read.
    """
    folder = Path(options.train_dir, "checkpoints")
    if not checkpoint.find(folder):
        raise InputError(
            f"--train_dir={options.train_dir}: there is no checkpoint in {folder}; train first, or "
            "name the folder of a run"
        )
    run = prepare(dataclasses.replace(options, variables="cpu"))  # they are only read
    variables = run.masters.variables().items()
    step = checkpoint.Checkpoints(
        folder,
        {name: v for name, v in variables if name.startswith(("model/", "average/"))},
        {name: getattr(options, name) for name in ("model", "model_args", "augment")},
        exact=False,  # the optimizer and the loss scale matter no more
    ).restore(say)
    with one_line_errors(options):
        result = make_evaluator(run)()
    num_towers = len(run.builder.devices)
    heading = f"step {step}, {result.examples} test examples, {num_towers} towers"
    for line in [*devices.report(run.builder.devices), heading, *table(result)]:
        say(line)
    return result.figures() | {"step": step, "num_towers": num_towers}


def table(result: Evaluation) -> list[str]:
    """Return `result` as the lines of a table for a person."""
    ema = result.class_accuracy_ema
    rows = [
        ("", "weights", "EMA"),
        ("accuracy", result.accuracy, result.accuracy_ema),
        ("loss", result.loss, result.loss_ema),
        *((f"  {name}", v, ema and ema[name]) for name, v in result.class_accuracy.items()),
    ]
    lines = []
    for name, *cells in rows:
        shown = [f"{c:.4f}" if isinstance(c, float) else c or "-" for c in cells[: 2 if ema else 1]]
        lines.append(f"{name:12}" + "".join(f"{text:>10}" for text in shown))
    return lines
