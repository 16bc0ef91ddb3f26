"""The results of an evaluation."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import keras
import tensorflow as tf

from towers.formatting import figure
from towers.training.step.train_state import copy_beside

AVERAGED = "_ema"  # ends the names of metrics of the averages


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of evaluating a split."""

    # "accuracy" and "loss" (mean cross entropy in nats) of a classifier, the metrics of a compiled
    # model; those of the moving averages end in "_ema".
    metrics: Mapping[str, float | None]
    examples: int  # their number

    def table(self) -> list[str]:
        """Return the metrics as the lines of a table."""
        names = [name for name in self.metrics if not name.endswith("_ema")]
        rows = [(name, self.metrics[name], self.metrics.get(f"{name}_ema")) for name in names]
        averaged = any(average is not None for *_, average in rows)
        lines, width = [], max(12, *(len(name) for name, *_ in rows))
        for name, *cells in [("", "weights", "EMA"), *rows]:
            shown = [figure(c) if isinstance(c, float) else c or "-" for c in cells[: 1 + averaged]]
            lines.append(f"{name:{width}}" + "".join(f" {text:>9}" for text in shown))
        return lines


class MetricState:
    """A second state of the metrics, for evaluating the averages of the weights."""

    def __init__(self, variables: Iterable[keras.Variable]):
        """Create a second variable for each variable of the metrics."""
        self._twins = [(v, copy_beside(v.value)) for v in variables]

    def reset(self) -> None:
        """Copy the initial state from the metrics, which have been reset."""
        for variable, twin in self._twins:
            twin.assign(variable.value)

    @contextlib.contextmanager
    def used(self, averages: Iterable[tuple[keras.Variable, tf.Variable]]) -> Iterator[None]:
        """Read averages in place of variables in the block, and update this state."""
        pairs = [*averages, *self._twins]
        with keras.StatelessScope([(v, tf.convert_to_tensor(new)) for v, new in pairs]) as scope:
            yield
        for variable, twin in self._twins:
            twin.assign(scope.get_current_value(variable))
