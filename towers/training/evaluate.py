"""Evaluation: output towers over the whole test set, every example counted once."""

import dataclasses
from collections.abc import Callable, Sequence
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
        found = _Found()
        for batch in batches:
            if stop():
                return None
            found.add(*batch, eval_step(*batch))
        return found.evaluation(run.data.class_names)

    return evaluator


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
        ("accuracy", result.accuracy, result.accuracy_ema),
        ("loss", result.loss, result.loss_ema),
        *((f"  {name}", v, ema and ema[name]) for name, v in result.class_accuracy.items()),
    ]
    lines = [f"{'':12}{'weights':>10}" + (f"{'EMA':>10}" if ema else "")]
    for name, *cells in rows:
        shown = ["-" if cell is None else f"{cell:.4f}" for cell in cells[: 2 if ema else 1]]
        lines.append(f"{name:12}" + "".join(f"{text:>10}" for text in shown))
    return lines


class _Found:
    """Adds up what the batches of one evaluation give, in numpy's float64 and int64."""

    def __init__(self) -> None:
        self._labels: list[np.ndarray] = []
        self._predicted: list[np.ndarray] = []
        self._mistakes: list[Mistake] = []
        self._examples: Any = 0
        self._sums: dict[str, dict[str, Any]] = {}

    def add(
        self, images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, values: dict[str, Any]
    ) -> None:
        """Add a batch, and what the step says of it."""
        self._examples = self._examples + values["examples"].numpy()
        for name in {"raw", "ema"} & values.keys():
            sums = self._sums.setdefault(name, {"loss": 0, "correct": 0})
            for key in sums:
                sums[key] = sums[key] + values[name][key].numpy()
        counted, labels = weights.numpy() > 0, labels.numpy()
        predicted, confidence = values["predicted"].numpy(), values["confidence"].numpy()
        self._labels.append(labels[counted])
        self._predicted.append(predicted[counted])
        # Images are copied only of those that are among the worst so far. NaN is above no number:
        # what a broken model says is no confident mistake.
        full = len(self._mistakes) == NUM_MISTAKES
        least = self._mistakes[-1].confidence if full else -1.0
        rows = np.flatnonzero(counted & (labels != predicted) & (confidence > least))
        rows = rows[np.argsort(-confidence[rows], kind="stable")[:NUM_MISTAKES]]
        if rows.size:
            with tf.device("/cpu:0"):  # where the batch is
                pictures = tf.gather(images, rows).numpy()
            found = zip(pictures, labels[rows], predicted[rows], confidence[rows], strict=True)
            self._mistakes += [Mistake(p, int(a), int(b), float(c)) for p, a, b, c in found]
            self._mistakes.sort(key=lambda mistake: -mistake.confidence)
            del self._mistakes[NUM_MISTAKES:]

    def evaluation(self, class_names: Sequence[str]) -> Evaluation:
        """Divide the sums over the test set."""
        count, figures = int(self._examples.sum()), []
        for name in ("raw", "ema"):
            if name not in self._sums:
                figures += [None, None, None]
                continue
            correct, loss = self._sums[name]["correct"], self._sums[name]["loss"]
            pairs = zip(class_names, correct, self._examples, strict=True)
            of_class = {c: float(right / of) if of else None for c, right, of in pairs}
            figures += [float(correct.sum() / count), float(loss / count), of_class]
        labels, predicted = np.concatenate(self._labels), np.concatenate(self._predicted)
        predictions = Predictions(labels, predicted, self._mistakes, "ema" in self._sums)
        return Evaluation(*figures, count, predictions)
