"""Evaluation: output towers over the whole test set, every example counted once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from towers import devices
from towers.data import Data
from towers.errors import InputError
from towers.monitoring.pictures import Mistake, Predictions
from towers.options.run import Options
from towers.training import checkpoint
from towers.training.run import Run, one_line_errors, prepare
from towers.training.step import make_eval_step

NUM_MISTAKES = 16


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Figures over a whole test set; those of the moving average are None where there is none.

    Attributes:
        accuracy: correct / examples, with the weights as they are.
        loss: mean cross entropy in nats.
        class_accuracy: {class name: accuracy}, None for a class without examples.
        accuracy_ema: as `accuracy`, with the moving average of the weights.
        loss_ema: as `loss`.
        class_accuracy_ema: as `class_accuracy`.
        examples: how many were counted.
        predictions: of each example; no figure, and no part of what `figures` returns.
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
        fields = [field.name for field in dataclasses.fields(self) if field.name != "predictions"]
        return {name: getattr(self, name) for name in fields}


def make_evaluator(run: Run) -> Callable[..., Evaluation | None]:
    """Return `evaluator(stop)`, which evaluates the master variables as they are at the call.

    `stop` is a function that is asked before each batch; when it says True, the evaluator returns
    None. The compiled step is made once and kept.
    """
    eval_step = make_eval_step(run.builder, run.masters, run.options)
    batches = run.data.test.eval_batches(run.options.batch_size)

    def evaluator(stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        totals: dict[str, Any] = {}
        found = _Found()
        for batch in batches:
            if stop():
                return None
            values = eval_step(*batch)
            found.add(*batch, values.pop("predicted"), values.pop("confidence"))
            _accumulate(totals, values)
        return _summarise(totals, found.predictions(averaged="ema" in totals), run.data)

    return evaluator


def evaluate(options: Options, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Evaluate the newest checkpoint of `options.train_dir`.

    Returns:
        The figures of an `Evaluation`, the checkpoint's "step", and "num_towers".

    Raises:
        InputError: there is no checkpoint, or it is of another model.
        RunError: the test set cannot be read.
    """
    folder = Path(options.train_dir)
    if not checkpoint.find(folder / "checkpoints"):
        raise InputError(
            f"--train_dir={options.train_dir}: there is no checkpoint in {folder / 'checkpoints'}; "
            "train first, or name the folder of a run"
        )
    run = prepare(dataclasses.replace(options, variables="cpu"))  # they are only read
    variables = run.masters.variables().items()
    step = checkpoint.Checkpoints(
        folder / "checkpoints",
        {name: v for name, v in variables if name.startswith(("model/", "average/"))},
        {name: getattr(options, name) for name in ("model", "model_args", "augment")},
        exact=False,  # the optimizer and the loss scale matter no more
    ).restore(say)
    with one_line_errors(options):
        result = make_evaluator(run)()
    for line in devices.report(run.builder.devices):
        say(line)
    say(f"step {step}, {result.examples} test examples, {len(run.builder.devices)} towers")
    for line in table(result):
        say(line)
    return result.figures() | {"step": step, "num_towers": len(run.builder.devices)}


def table(result: Evaluation) -> list[str]:
    """Return `result` as the lines of a table for a person."""
    ema = result.class_accuracy_ema
    lines = [f"{'':12}{'weights':>10}" + (f"{'EMA':>10}" if ema else "")]

    def row(name: str, value: float | None, averaged: float | None) -> str:
        cells = [value] + ([averaged] if ema else [])
        return f"{name:12}" + "".join(f"{'-' if c is None else f'{c:.4f}':>10}" for c in cells)

    lines.append(row("accuracy", result.accuracy, result.accuracy_ema))
    lines.append(row("loss", result.loss, result.loss_ema))
    for name, value in result.class_accuracy.items():
        lines.append(row(f"  {name}", value, ema[name] if ema else None))
    return lines


def _accumulate(totals: dict[str, Any], sums: dict[str, Any]) -> None:
    """Add one batch's sums, in numpy's float64 and int64."""
    for key, value in sums.items():
        if isinstance(value, dict):
            _accumulate(totals.setdefault(key, {}), value)
        else:
            totals[key] = totals.get(key, 0) + value.numpy()


def _summarise(totals: dict[str, Any], predictions: Predictions, data: Data) -> Evaluation:
    """Divide the sums over the test set."""
    examples: np.ndarray = totals["examples"]
    count = int(examples.sum())

    def figures(name: str) -> tuple[Any, Any, Any]:
        if name not in totals:
            return None, None, None
        correct = totals[name]["correct"]
        of_class = {
            class_name: float(right / total) if total else None
            for class_name, right, total in zip(data.class_names, correct, examples, strict=True)
        }
        return float(correct.sum() / count), float(totals[name]["loss"] / count), of_class

    return Evaluation(*figures("raw"), *figures("ema"), count, predictions)


class _Found:
    """Collects the predictions of one evaluation, and the images of few."""

    def __init__(self) -> None:
        self._labels: list[np.ndarray] = []
        self._predicted: list[np.ndarray] = []
        self._mistakes: list[Mistake] = []

    def add(
        self,
        images: tf.Tensor,
        labels: tf.Tensor,
        weights: tf.Tensor,
        predicted: tf.Tensor,
        confidence: tf.Tensor,
    ) -> None:
        """Add a batch; only images that are among the worst so far are looked at."""
        counted = weights.numpy() > 0
        labels, predicted, confidence = labels.numpy(), predicted.numpy(), confidence.numpy()
        self._labels.append(labels[counted])
        self._predicted.append(predicted[counted])
        full = len(self._mistakes) == NUM_MISTAKES
        least = self._mistakes[-1].confidence if full else -1.0
        # NaN is above no number: what a broken model says is no confident mistake
        rows = np.flatnonzero(counted & (labels != predicted) & (confidence > least))
        if not rows.size:
            return
        rows = rows[np.argsort(-confidence[rows], kind="stable")[:NUM_MISTAKES]]
        with tf.device("/cpu:0"):  # where the batch is
            pictures = tf.gather(images, rows).numpy()
        found = zip(pictures, labels[rows], predicted[rows], confidence[rows], strict=True)
        self._mistakes += [Mistake(p, int(a), int(b), float(c)) for p, a, b, c in found]
        self._mistakes.sort(key=lambda mistake: -mistake.confidence)
        del self._mistakes[NUM_MISTAKES:]

    def predictions(self, averaged: bool) -> Predictions:
        """Return what was found."""
        labels, predicted = np.concatenate(self._labels), np.concatenate(self._predicted)
        return Predictions(labels, predicted, self._mistakes, averaged)
