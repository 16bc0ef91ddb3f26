"""What a run looks like: the images that towers see, first filters, and what evaluation gets wrong.

Each function returns a list of Summary protos. Nothing is written here, and nothing that a run
computes with is changed.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import keras
import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary

from towers.monitoring import drawing
from towers.tf_private import layers_of

NUM_IMAGES = 8  # of each tower
_MAX_FILTERS = 256
_MAX_CLASSES = 500  # rows of a confusion matrix


@dataclasses.dataclass(frozen=True)
class Mistake:
    """An example that was taken for another class."""

    image: np.ndarray  # as it is stored, `[H, W, C]`
    label: int  # the true class
    predicted: int  # the class that the model said
    confidence: float  # the probability that it gave that class


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What the model said of each example of the test set."""

    labels: np.ndarray  # the true classes, int32 `[N]`, in the order of the test set
    predicted: np.ndarray  # the classes that the model said, int32 `[N]`
    mistakes: list[Mistake]  # the most confident ones, the most confident first
    averaged: bool  # whether this is of the moving average of the weights


def of_evaluation(predictions: Predictions, names: Sequence[str]) -> list[Summary]:
    """Return the pictures of an evaluation: `confusion_matrix`, and `mistakes` if there are any."""
    if not predictions.labels.size:
        return []
    averaged = predictions.averaged
    weights = "the moving average of the weights" if averaged else "the weights as they are"
    # Where classes are very many, each row and column is of several that follow each other.
    of_each = -(-len(names) // _MAX_CLASSES)
    num = -(-len(names) // of_each)
    places = predictions.labels // of_each * np.int64(num) + predictions.predicted // of_each
    counts = np.bincount(places, minlength=num * num).reshape(num, num)
    about = (
        f"Rows are true classes, columns what the model says, with {weights}. The deeper a colour, "
        "the greater the share of its row."
    )
    if of_each > 1:
        about += f" Each row and column is of {of_each} classes, named after the first."
    matrix = drawing.matrix(counts, names[::of_each])
    pictures = [drawing.summary("confusion_matrix", matrix, about)]
    if found := predictions.mistakes:
        captions = [
            [f"true {names[m.label]},", f"said {names[m.predicted]} {m.confidence:.2f}"]
            for m in found
        ]
        lines = [f"{i}. {' '.join(caption)}" for i, caption in enumerate(captions, 1)]
        about = f"The most confident mistakes, with {weights}:\n\n" + "\n".join(lines)
        grid = drawing.grid([m.image for m in found], captions)
        pictures.append(drawing.summary("mistakes", grid, about))
    return pictures


def of_towers(
    seen: Iterable[tuple[np.ndarray, np.ndarray]],
    class_names: Sequence[str],
    step: int | None,
    stretch: bool = True,
) -> list[Summary]:
    """Return `images/tower_I` of each tower with examples: its images, with their classes.

    `seen` is what `samples.seen_by_towers` returns, `step` that which trains on them, None if they
    stand for those of another step; `stretch` is as in `drawing.to_bytes`.
    """
    of_step = "(some, not of this step)" if step is None else f"in step {step}"
    found = []
    for i, (images, labels) in enumerate(seen):
        if not len(images):
            continue
        names = [class_names[label] for label in labels]
        about = f"Training images as tower {i} sees them {of_step}: {', '.join(names)}."
        shown = [drawing.to_bytes(image, stretch=stretch) for image in images]
        picture = drawing.grid(shown, [[name] for name in names])
        found.append(drawing.summary(f"images/tower_{i}", picture, about))
    return found


def filters(model: keras.Model) -> list[Summary]:
    """Return `filters/LAYER` of the model's first Conv2D layer, or nothing if it has none.

    With 3 input channels they are shown in colour, else in gray, as their mean over the channels;
    each is stretched from its least weight to its greatest.
    """
    kind = keras.layers.Conv2D
    layer = next((x for x in layers_of(model) if isinstance(x, kind) and x.weights), None)
    if layer is None:
        return []
    kernel = np.array(keras.ops.convert_to_numpy(layer.kernel), np.float64)  # [h, w, in, out]
    if kernel.shape[2] != 3:
        with np.errstate(invalid="ignore"):  # infinities
            kernel = kernel.mean(axis=2, keepdims=True)
    shown = [drawing.to_bytes(each, stretch=True) for each in np.moveaxis(kernel, -1, 0)]
    num, shown = len(shown), shown[:_MAX_FILTERS]
    height, width = kernel.shape[:2]
    about = f"{len(shown)} of the {num} {height}x{width} filters of the first convolution."
    picture = drawing.grid(shown, columns=max(4, round(len(shown) ** 0.5)))
    return [drawing.summary(f"filters/{layer.path or layer.name}", picture, about)]
