"""The classes that a trained model's output stands for."""

from typing import NamedTuple

import numpy as np

from towers.training.load import TrainedModel


class Classes(NamedTuple):
    """The classes of a model, and whether its outputs are logits or probabilities."""

    names: list[str]
    logits: bool

    @classmethod
    def of(cls, trained: TrainedModel) -> "Classes | None":
        """Return the classes of a model, or None if it is not a classifier."""
        model, names = trained.model, trained.task["class_names"]
        loss = model.loss if model.compiled else trained.options.loss or None
        name = str(getattr(loss, "name", getattr(loss, "__name__", loss)))
        widths = {len(names), 1} if len(names) == 2 else {len(names)}
        shape = getattr(model, "output_shape", (None, len(names)))
        is_classifier = names and (loss is None or "crossentropy" in name)
        if not is_classifier or shape not in [(None, width) for width in widths]:
            return None
        return cls(names, loss is None or getattr(loss, "from_logits", False))

    def top_2(self, output: np.ndarray) -> list[tuple[str, float]]:
        """Return the two most probable classes of an output, with their probabilities."""
        output = output.astype(np.float64)
        if len(output) == 1 and len(self.names) == 2:  # of the second class
            output = np.append(0, output) if self.logits else np.append(1 - output, output)
        if self.logits:
            exponentials = np.exp(output - np.max(output))
            output = exponentials / np.sum(exponentials)
        order = np.argsort(-output, kind="stable")[:2]
        return [(self.names[i], round(float(output[i]), 6)) for i in order]
