"""One of the runs that `towers verify` compares: the same steps, on its own towers."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import data
from towers.options.run import Options
from towers.training.parallel import unparallelize
from towers.training.run import assemble
from towers.training.tensorflow_errors import one_line_errors


class Lane:
    """One of the runs that are compared: its towers, its model, and where it is."""

    def __init__(
        self,
        options: Options,
        names: Sequence[str],
        dataset: data.Data,
        scaled: bool,
        python_seed: int | None = None,
        plain: bool = False,
    ):
        """Build the run, with a loss scale if it is `scaled`, on one device for each tower.

        `python_seed` is that of Python's and NumPy's generators while the step is built. With
        `plain` a compiled model makes its steps as Keras does, without any tower.
        """
        self.run = run = assemble(options, names, dataset, loss_scaling=scaled, exact=True)
        self.num_towers = len(names)
        self.precision = options.input_dtype  # of the weights
        if plain:
            unparallelize(run.masters.model)
        if python_seed is not None:
            random.seed(python_seed)
            np.random.seed(python_seed)
        batches = dataset.train.train_batches(options.batch_size, seed=options.seed)
        run.rehearse(next(iter(batches)))
        train_step = run.train_step()
        compiled = tf.function(lambda example, draws: train_step(example, draws), autograph=False)
        with one_line_errors(options):
            self.step = compiled.get_concrete_function(*batches.element_spec)

    def variables(self) -> dict[str, np.ndarray]:
        """Return the master variables by name, those of the weights first."""
        return {name: v.numpy() for name, v in self.run.masters.variables().items()}

    def weight_names(self) -> list[str]:
        """Return the names of the trainable weights among the master variables."""
        weights = {id(weight.value) for weight in self.run.masters.model.trainable_variables}
        return [name for name, v in self.run.masters.variables().items() if id(v) in weights]

    def take(self, values: dict[str, np.ndarray]) -> None:
        """Set the master variables."""
        for name, variable in self.run.masters.variables().items():
            variable.assign(values[name])
        self.run.masters.set_copies()

    def make_step(self, batch: Any) -> dict[str, np.ndarray]:
        """Make a step; return loss and metrics, the gathered gradients, then the variables."""
        with one_line_errors(self.run.options):
            metrics, gradients = self.step(*batch)
        found = {"loss": metrics["loss"].numpy()}
        for name, value in metrics.items():
            if name.startswith("batch/"):
                found[name.replace("batch", "metric", 1)] = value.numpy()
        weights = self.run.masters.model.trainable_variables
        for variable, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                found[f"gradient/{variable.path}"] = tf.convert_to_tensor(gradient).numpy()
        return found | self.variables()

    def evaluate(self, batch: Any) -> dict[str, np.ndarray]:
        """Evaluate a batch of the test set; return what it adds up."""
        with one_line_errors(self.run.options):
            found = self.run.task.eval_arrays(*batch)
        floats = {n for n, value in found.items() if value.dtype.kind == "f"}  # not the sum's own
        return {
            f"evaluation/{name}": value.astype(self.precision if name in floats else value.dtype)
            for name, value in found.items()
        }
