"""One of the runs that `towers verify` compares: the same steps, on its own towers."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import data
from towers.options.run import Options
from towers.training.run import assemble
from towers.training.step import make_eval_step
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
    ):
        """Build the run, with a loss scale if it is `scaled`, on one device for each tower.

        `python_seed` is that of Python's and NumPy's generators while the step is built.
        """
        self.run = run = assemble(options, names, dataset, loss_scaling=scaled, exact=True)
        self.num_towers = len(names)
        self.precision = options.input_dtype  # of the weights
        self.eval_step = make_eval_step(run.builder, run.masters, options)  # traced when called
        if python_seed is not None:
            random.seed(python_seed)
            np.random.seed(python_seed)
        batches = dataset.train.train_batches(options.batch_size, seed=options.seed)
        run.rehearse(next(iter(batches)))
        compiled = tf.function(run.train_step(), autograph=False)
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

    def make_step(self, batch: Sequence[tf.Tensor]) -> dict[str, np.ndarray]:
        """Make a step; return the loss, the gathered gradients, then the master variables."""
        with one_line_errors(self.run.options):
            metrics, gradients = self.step(*batch)
        found = {"loss": metrics["loss"].numpy()}
        weights = self.run.masters.model.trainable_variables
        for variable, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                found[f"gradient/{variable.path}"] = tf.convert_to_tensor(gradient).numpy()
        return found | self.variables()

    def evaluate(self, batch: Sequence[tf.Tensor]) -> dict[str, np.ndarray]:
        """Evaluate a batch of the test set; return sums, with the moving averages' ones."""
        with one_line_errors(self.run.options):
            sums: dict[str, Any] = self.eval_step(*batch)
        found = {"evaluation/examples": sums["examples"].numpy()}
        for weights, ending in {"raw": "", "ema": "_ema"}.items():
            for name, value in sums.get(weights, {}).items():
                kept = self.precision if name == "loss" else value.dtype.name  # not the sum's own
                found[f"evaluation/{name}{ending}"] = value.numpy().astype(kept)
        return found
