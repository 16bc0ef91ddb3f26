"""Pictures of a run: the images that towers see, first filters, and an evaluation's mistakes.

`evaluation_images`, `tower_images` and `filter_images` return lists of Summary protos of bounded
size.
"""

import dataclasses
import io
from collections.abc import Iterable, Sequence

import keras
import numpy as np
from PIL import Image, ImageDraw, ImageOps
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.image import metadata
from tensorboard.util import tensor_util

from towers.formatting import cut
from towers.tf_internals import layers_of

NUM_IMAGES = 8  # of each tower
_MAX_FILTERS, _MAX_CLASSES = 256, 1000
_SIDE, _MAX_SIDE = 128, 256  # pixels: smaller images are enlarged, larger ones shrunk
_GAP, _LINE = 6, 14  # pixels between images, and height of a line of text
_MATRIX, _CELL, _MARGIN = 900, 48, 140  # pixels: of the matrix, the largest cell, the names
_RIGHT, _WRONG = (8, 81, 156), (165, 15, 21)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """An example that the model puts into the wrong class."""

    image: np.ndarray  # as stored, `[H, W, C]`
    label: int  # the true class
    predicted: int  # the model's class
    confidence: float  # the model's probability of that class


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The true and predicted classes of the examples of a data set."""

    labels: np.ndarray  # true classes, int32 `[N]`, in the order of the data set
    predicted: np.ndarray  # predicted classes, int32 `[N]`
    mistakes: list[Mistake]  # the most confident ones, in decreasing order
    averaged: bool  # whether the weights' moving average made them


def evaluation_images(predictions: Predictions, names: Sequence[str]) -> list[Summary]:
    """Return `confusion_matrix`, for up to 1000 classes, and `mistakes` if there are any.

    Args:
        predictions: the true and predicted classes.
        names: names of the classes.
    """
    weights = "the moving average of the weights" if predictions.averaged else "the weights"
    pictures = []
    if len(predictions.labels) and len(names) <= _MAX_CLASSES:
        counts = np.zeros((len(names), len(names)), np.int64)
        np.add.at(counts, (predictions.labels, predictions.predicted), 1)
        about = (
            f"Rows are true classes, columns what the model says, with {weights}. The deeper a "
            "colour, the greater the share of its row."
        )
        pictures.append(_summary("confusion_matrix", draw_matrix(counts, names), about))
    if mistakes := predictions.mistakes:
        captions = [
            [f"true {names[m.label]},", f"said {names[m.predicted]} {m.confidence:.2f}"]
            for m in mistakes
        ]
        about = f"The most confident mistakes, with {weights}."
        picture = draw_grid([to_bytes(m.image) for m in mistakes], captions)
        pictures.append(_summary("mistakes", picture, about))
    return pictures


def tower_images(
    seen: Iterable[tuple[np.ndarray, np.ndarray]], names: Sequence[str], stretch: bool = True
) -> list[Summary]:
    """Return `images/tower_I` for each tower with examples: its images, with their classes.

    Args:
        seen: (images, labels) of each tower, see `image_summaries.seen_by_towers`.
        names: names of the classes.
        stretch: see `to_bytes`.
    """
    summaries = []
    for i, (images, labels) in enumerate(seen):
        if len(images):
            classes = [names[label] for label in labels]
            shown = [to_bytes(image, stretch) for image in images]
            about = f"Training images as tower {i} sees them: {', '.join(classes)}."
            picture = draw_grid(shown, [[name] for name in classes])
            summaries.append(_summary(f"images/tower_{i}", picture, about))
    return summaries


def filter_images(model: keras.Model) -> list[Summary]:
    """Return `filters/LAYER` of the model's first Conv2D layer, or [] if it has none.

    Input channels are shown as `to_bytes` shows those of an image; each filter is scaled from its
    smallest to its largest weight.
    """
    kind = keras.layers.Conv2D
    layer = next((x for x in layers_of(model) if isinstance(x, kind) and x.weights), None)
    if layer is None:
        return []
    kernel = np.asarray(keras.ops.convert_to_numpy(layer.kernel), np.float32)  # [h, w, in, out]
    shown = [to_bytes(each, stretch=True) for each in np.moveaxis(kernel, -1, 0)[:_MAX_FILTERS]]
    height, width, _, num = kernel.shape
    about = f"{len(shown)} of the {num} {height}x{width} filters of the first convolution."
    picture = draw_grid(shown, columns=max(4, round(len(shown) ** 0.5)))
    return [_summary(f"filters/{layer.path or layer.name}", picture, about)]


def to_bytes(image: np.ndarray, stretch: bool = False) -> np.ndarray:
    """Convert an image to uint8 `[h, w, 3]` for display.

    The first three of 3 or 4 channels are red, green and blue; otherwise the first channel is shown
    in gray. Infinities and NaN count as 0.

    Args:
        image: `[h, w, C]`; uint8 is unchanged, values from 0 to 1 are scaled to 0..255, others from
            their minimum to their maximum.
        stretch: whether values from 0 to 1 are scaled as others are.
    """
    image = np.asarray(image)
    image = image[..., :3] if image.shape[-1] in (3, 4) else image[..., :1]
    if image.dtype != np.uint8:
        image = np.where(np.isfinite(image), image, 0.0)
        low, high = float(image.min()), float(image.max())
        if not stretch and low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        image = np.round(255 * (image - low) / max(high - low, 1e-9)).astype(np.uint8)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def draw_grid(
    images: Sequence[np.ndarray], captions: Sequence[Sequence[str]] = (), columns: int = 4
) -> Image.Image:
    """Draw images in rows, each above its lines of text.

    Args:
        images: uint8 `[h, w, 3]` each, one or more.
        captions: lines of text of each image; without any, images are small.
        columns: most images of a row.
    """
    side = max(_SIDE, min(_MAX_SIDE, max(images[0].shape[:2]))) if captions else _SIDE // 4
    columns, num_rows = min(columns, len(images)), -(-len(images) // columns)
    width = side + _GAP
    height = width + _LINE * max(map(len, captions), default=0)
    picture = Image.new("RGB", (_GAP + columns * width, _GAP + num_rows * height), "white")
    draw = ImageDraw.Draw(picture)
    for i, image in enumerate(images):
        left, top = _GAP + i % columns * width, _GAP + i // columns * height
        small = max(image.shape[:2]) <= side
        how = Image.Resampling.NEAREST if small else Image.Resampling.BICUBIC
        picture.paste(ImageOps.contain(Image.fromarray(image), (side, side), how), (left, top))
        for number, line in enumerate(captions[i] if captions else ()):
            draw.text((left, top + side + number * _LINE), _legible(line), "black")
    return picture


def draw_matrix(counts: np.ndarray, names: Sequence[str]) -> Image.Image:
    """Draw a confusion matrix, with as many names and numbers as fit.

    A cell's colour, blue on the diagonal and red elsewhere, deepens with the square root of its
    share of the row, so that rare mistakes are visible.

    Args:
        counts: number of examples, integers `[n, n]`; rows are true classes.
        names: names of the n classes.
    """
    num = len(counts)
    cell = max(1, min(_CELL, _MATRIX // num))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    colours = np.where(np.eye(num, dtype=bool)[..., None], _RIGHT, _WRONG)
    pixels = np.round(255 - np.sqrt(shares)[..., None] * (255 - colours)).astype(np.uint8)
    cells = Image.fromarray(pixels).resize((num * cell, num * cell), Image.Resampling.NEAREST)
    side = _MARGIN + num * cell + _GAP
    picture = Image.new("RGB", (side, side), "white")
    picture.paste(cells, (_MARGIN, _MARGIN))
    draw = ImageDraw.Draw(picture)
    draw.text((_GAP, _MARGIN - _LINE), "true \\ said", "gray")
    for i in range(0, num, -(-_LINE // cell)):
        place = _MARGIN + i * cell + (cell - _LINE) // 2
        draw.text((_GAP, place), _legible(names[i]), "black")
        upright = Image.new("RGB", (_MARGIN - _GAP, _LINE), "white")
        ImageDraw.Draw(upright).text((0, 0), _legible(names[i]), "black")
        picture.paste(upright.rotate(90, expand=True), (place, 0))
    if cell == _CELL:
        for row, column in np.argwhere(counts):
            place = _MARGIN + column * cell + _GAP, _MARGIN + row * cell + (cell - _LINE) // 2
            colour = "white" if shares[row, column] > 0.3 else "black"
            draw.text(place, str(counts[row, column]), colour)
    return picture


def _summary(tag: str, picture: Image.Image, description: str) -> Summary:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    width, height = (str(size).encode() for size in picture.size)
    tensor = tensor_util.make_tensor_proto([width, height, buffer.getvalue()])
    about = metadata.create_summary_metadata(None, description, converted_to_tensor=True)
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=tensor)])


def _legible(line: str) -> str:
    # Fit the width of an image, in letters of Pillow's built-in font.
    return cut(" ".join(line.split()), 21).encode("latin-1", "replace").decode("latin-1")
