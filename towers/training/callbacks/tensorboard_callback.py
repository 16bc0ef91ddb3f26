"""TensorBoard for `fit` over towers, with the curves and dashboards of `towers train`.

    model.fit(x, y, epochs=10, callbacks=[towers.callbacks.TowerBoard("runs/fit")])

To view it, also while the model trains:

    tensorboard --logdir=runs/fit
"""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import files
from towers.errors import InputError
from towers.graphs.placement import Placement
from towers.graphs.step_graph import step_graph
from towers.monitoring import dashboard, tower_metrics
from towers.monitoring.event_writer import EventWriter
from towers.monitoring.speed import Speed, by_tower
from towers.training.step.on_towers import builder_of, passes_of
from towers.training.step.train_state import dynamic_scale

_OF_TOWERS = ("tower_examples", "tower_gradient_norm", "tower_seconds")


class TowerBoard(keras.callbacks.Callback):
    """Writes TensorBoard event files of `fit` over towers.

    For each tower: gradient norm, seconds of its step (not with `accumulate_steps`) and
    memory. For all: Keras' logs of training and validation, learning rate,
    epoch, examples per second, and the graph of a step. Towers have no loss of their own: it is
    computed once, from all outputs.

    The x of a point is the number of updates before it. Gradient norms are computed only for
    points, and do not change the training. A fit that resumes at an earlier step replaces the
    points from there on. If a step calls several layers, such as two encoders, the towers' values
    are those of the last one with gradients.
    """

    def __init__(self, log_dir: str | Path, every_steps: int = 100):
        """Set where and how often to write.

        Args:
            log_dir: the folder for `tensorboard --logdir`.
            every_steps: steps between two points, at least 1.
        """
        super().__init__()
        self.folder, self.every_steps = Path(log_dir), every_steps

    def on_train_begin(self, logs: Any = None) -> None:
        """Replace the model's train step by one that also measures its towers."""
        self._builder = builder_of(self.model)
        if self._builder is None:
            raise InputError("TowerBoard needs a model on towers: call towers.parallelize(model)")
        files.check_train_dir(self.folder, overwrite=False, flag="log_dir")
        num_towers = len(self._builder.devices)
        with tf.device("/cpu:0"):  # the host sets and reads them
            self._measured = tf.Variable(False, trainable=False)
            self._seen = tf.Variable(tf.zeros([len(_OF_TOWERS), num_towers]), trainable=False)
            self._examples = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._writer, self._graph = None, None
        self._num_steps, self._due, self._speed = 0, None, Speed()
        self._train_step = self.model.train_step
        vars(self.model)["train_step"] = self._measured_train_step
        self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restart the measurement of speed, see `keras.callbacks.Callback`."""
        self._epoch, self._epoch_begins = epoch, True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Write the point of the previous call; measure the next call if a point is due.

        For the arguments see `keras.callbacks.Callback`, whose `on_train_batch_end` would do, too,
        but makes Keras wait for each step.
        """
        self._write_point()
        if self._epoch_begins and self._writer:
            self._speed.at(self._num_steps, int(self._examples))
        self._epoch_begins = False
        if self._num_steps % self.every_steps < self.model.steps_per_execution:
            self._due = batch
            self._measured.assign(True)
        self._num_steps += self.model.steps_per_execution

    def on_test_begin(self, logs: Any = None) -> None:
        """Write the last point of an epoch while the metrics are those of training."""
        self._write_point()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the evaluation in the logs, see `keras.callbacks.Callback`."""
        self._write_point()
        scalars = _numbers({k: v for k, v in (logs or {}).items() if k.startswith("val_")})
        if self._writer and scalars:
            scalars = {f"validation/{name[4:]}": value for name, value in scalars.items()}
            self._writer.write_scalars("eval", int(self.model.optimizer.iterations), scalars)

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the model's train step."""
        vars(self.model)["train_step"] = self._train_step
        self.model.train_function = None

    def _measured_train_step(self, data: Any) -> Any:
        scale = dynamic_scale(self.model)
        logs, gradients = self._train_step(data), passes_of(self.model).gradients
        if gradients is None:  # it was traced on one device, and will be traced again
            return logs
        self._graph = tf.compat.v1.get_default_graph()
        with tf.name_scope("telemetry"):
            measured = self._measured.read_value()
            values = tower_metrics.measure(gradients, self._builder, measured, scale)
            with tf.device("/cpu:0"):
                self._seen.assign(tf.stack([values[name] for name in _OF_TOWERS]))
                num_examples = tf.reduce_sum(values["tower_examples"])
                self._examples.assign_add(tf.cast(num_examples, tf.int64))
        return logs

    def _write_point(self) -> None:
        if self._due is None:
            return
        batch, self._due = self._due, None
        x = int(self.model.optimizer.iterations) - self.model.steps_per_execution
        values = dict(zip(_OF_TOWERS, self._seen.numpy().tolist(), strict=True))
        self._measured.assign(False)
        of_towers = {"gradient_norm": values["tower_gradient_norm"]}
        if any(values["tower_seconds"]):
            of_towers["step_seconds"] = values["tower_seconds"]
        num_batches = self.params.get("steps")
        scalars = _numbers(self.model.get_metrics_result()) | {
            **by_tower(self._builder.devices, of_towers, values["tower_examples"]),
            **self._speed.at(self._num_steps, int(self._examples)),
            "learning_rate": float(self.model.optimizer.learning_rate),
            "progress/epoch": self._epoch + (batch / num_batches if num_batches else 0),
        }
        self._open(x)
        self._writer.write_scalars("train", x, scalars)

    def _open(self, x: int) -> None:
        """Create the files with the first point; older points at `x` or later are replaced."""
        if self._writer is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventWriter(self.folder, x)
        devices = self._builder.devices
        metrics = [f"validation {name}" for name in self.model.get_metrics_result()]
        if self._graph is not None:
            metrics = [m for m in metrics if m != "validation loss"]  # which has a chart
            texts = {"environment": dashboard.environment(devices)}
            step = step_graph(self._graph, Placement((), (), ()))
            dashboard.write_root(self.folder, metrics, texts, step)


def _numbers(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
