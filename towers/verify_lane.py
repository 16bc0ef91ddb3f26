"""One of the runs that `towers verify` compares: the same steps, on its own towers."""

import random
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers import data
from towers.options import Options
from towers.run import Run, assemble, one_line_errors


class Lane:
    """One of the runs that are compared: its towers, its model, and where it is."""

    def __init__(
        self,
        options: Options,
        names: Sequence[str],
        dataset: data.Data,
        scaled: bool,
        python_seed: int | None = None,
    ):
        """Build the run.

        Args:
            options: of the run.
            names: one device for each tower.
            dataset: its data.
            scaled: whether there is a loss scale.
            python_seed: of Python's and NumPy's generators while the step is built.
        """
        self.run: Run = assemble(options, names, dataset, loss_scaling=scaled)
        self.num_towers = len(names)
        self.precision = "float64" if options.dtype == "float64" else "float32"  # of the weights
        train_step = self.run.train_step()
        batches = dataset.train.train_batches(options.batch_size, seed=options.seed)
        if python_seed is not None:
            random.seed(python_seed)
            np.random.seed(python_seed)
        compiled = tf.function(train_step, autograph=False)
        self.step = compiled.get_concrete_function(*batches.element_spec)

    def variables(self) -> dict[str, np.ndarray]:
        """Return the master variables by name, those of the weights first."""
        return {name: v.numpy() for name, v in self.run.masters.variables().items()}

    def weight_names(self) -> set[str]:
        """Return the names of the trainable weights among the master variables."""
        weights = {id(weight.value) for weight in self.run.masters.model.trainable_variables}
        return {name for name, v in self.run.masters.variables().items() if id(v) in weights}

    def take(self, values: dict[str, np.ndarray]) -> None:
        """Set the master variables."""
        for name, variable in self.run.masters.variables().items():
            variable.assign(values[name])
        self.run.masters.spread()

    def make_step(self, batch: Sequence[tf.Tensor]) -> dict[str, np.ndarray]:
        """Make a step; return the loss, the gathered gradients, then the master variables."""
        with one_line_errors(self.run.options):
            metrics, gradients = self.step(*batch)
        found = {"loss": metrics["loss"].numpy()}
        for variable, gradient in zip(
            self.run.masters.model.trainable_variables, gradients, strict=True
        ):
            if gradient is not None:
                found[f"gradient/{variable.path}"] = tf.convert_to_tensor(gradient).numpy()
        return found | self.variables()
