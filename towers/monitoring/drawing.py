"""Pictures for TensorBoard, drawn with Pillow: captioned grids of images, and matrices of counts.

    picture = drawing.grid([image, ...], [["cat"], ...])
    summary = drawing.summary("images/tower_0", picture, "what tower 0 sees")

Nothing here knows of towers. Every picture is bounded, whatever it is made of.
"""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.image import metadata
from tensorboard.util import tensor_util

_SIDE, _MAX_SIDE = 128, 256  # pixels: small images are enlarged to the one, large ones shrunk
_GAP, _LINE = 6, 14  # pixels between images, and of a line of text
_MATRIX = 900  # pixels of a matrix's side
_RIGHT, _WRONG = (8, 81, 156), (165, 15, 21)
_MAX_NAME = 130  # pixels


def to_bytes(image: np.ndarray, stretch: bool = False) -> np.ndarray:
    """Return an image `[h, w, C]` as uint8 `[h, w, 3]` for a person to recognise.

    Of 3 or 4 channels the first three are red, green and blue; of any other number the first is
    shown, in gray. uint8 is shown as it is, and so are floats from 0 to 1, unless `stretch`; other
    floats are stretched from their least to their greatest. What is not finite is shown as the
    least.
    """
    image = np.asarray(image)
    image = image[..., :3] if image.shape[-1] in (3, 4) else image[..., :1]
    if image.dtype != np.uint8:
        image = np.where(np.isfinite(image), image, np.nan).astype(np.float64)
        known = image[np.isfinite(image)] if np.isfinite(image).any() else np.array([0.0, 1.0])
        low, high = known.min(), known.max()
        if not stretch and low >= 0 and high <= 1:
            low, high = 0.0, 1.0
        share = (image - low) / (high - low) if high > low else 0.5 + 0 * image
        image = np.round(255 * np.nan_to_num(share)).astype(np.uint8)
    return np.broadcast_to(image, (*image.shape[:2], 3))


def grid(
    images: Sequence[np.ndarray], captions: Sequence[Sequence[str]] = (), columns: int = 4
) -> Image.Image:
    """Draw images, as `to_bytes` takes them, in rows, each with its lines of text under it.

    Without any captions, images stand close together.
    """
    side = _SIDE if captions else _SIDE // 4
    tiles = [_tile(to_bytes(image), side) for image in images]
    num_lines = max((len(lines) for lines in captions), default=0)
    width = max(*(tile.width for tile in tiles), _SIDE if captions else 0, 0) + _GAP
    height = max(tile.height for tile in tiles) + _LINE * num_lines + _GAP
    columns = min(columns, len(tiles))
    num_rows = -(-len(tiles) // columns)
    picture = Image.new("RGB", (_GAP + columns * width, _GAP + num_rows * height), "white")
    draw = ImageDraw.Draw(picture)
    for i, tile in enumerate(tiles):
        left, top = _GAP + i % columns * width, _GAP + i // columns * height
        picture.paste(tile, (left, top))
        for number, line in enumerate(captions[i] if captions else ()):
            place = left, top + tile.height + number * _LINE
            draw.text(place, _fitting(draw, line, width - _GAP), "black")
    return picture


def matrix(counts: np.ndarray, names: Sequence[str]) -> Image.Image:
    """Draw a square matrix: rows and columns named, as far as names and numbers fit.

    A cell's colour is the deeper, the greater its share of its row: blue on the diagonal, red
    elsewhere. It goes by the root of the share, so that rare mistakes are seen. Counts are integers
    `[n, n]`, n at most 900.
    """
    num = len(counts)
    cell = max(1, min(48, _MATRIX // num))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    colours = np.where(np.eye(num, dtype=bool)[..., None], _RIGHT, _WRONG)
    pixels = 255 - np.sqrt(shares)[..., None] * (255 - colours)
    pixels = np.round(pixels).astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)

    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    names = [_fitting(draw, name, _MAX_NAME) for name in names]
    margin = int(max(draw.textlength(name) for name in [*names, "true \\ said"])) + 2 * _GAP
    side = margin + num * cell + _GAP
    picture = Image.new("RGB", (side, side), "white")
    picture.paste(Image.fromarray(pixels), (margin, margin))
    draw = ImageDraw.Draw(picture)
    draw.text((_GAP, margin - _LINE), "true \\ said", "gray")
    for i in range(0, num, -(-_LINE // cell)):
        place = margin + i * cell + (cell - _LINE) // 2
        draw.text((_GAP, place), names[i], "black")
        upright = Image.new("RGB", (margin - _GAP, _LINE), "white")
        ImageDraw.Draw(upright).text((0, 0), names[i], "black")
        picture.paste(upright.rotate(90, expand=True), (place, 0))
    if max(draw.textlength(str(count)) for count in np.unique(counts)) <= cell - 2:
        for row, column in np.argwhere(counts):
            text = str(counts[row, column])
            x = margin + column * cell + (cell - draw.textlength(text)) / 2
            colour = "white" if shares[row, column] > 0.3 else "black"
            draw.text((x, margin + row * cell + (cell - _LINE) // 2), text, colour)
    return picture


def summary(tag: str, picture: Image.Image, description: str) -> Summary:
    """Return a picture as TensorBoard's image plugin takes it; the description is Markdown."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    width, height = (str(size).encode() for size in picture.size)
    tensor = tensor_util.make_tensor_proto([width, height, buffer.getvalue()])
    about = metadata.create_summary_metadata(None, description, converted_to_tensor=True)
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=tensor)])


def _tile(image: np.ndarray, side: int) -> Image.Image:
    """Enlarge a small image by a whole number, so that its pixels are sharp; shrink a large one."""
    scale = max(1, side // max(image.shape[:2]))
    tile = Image.fromarray(image.repeat(scale, axis=0).repeat(scale, axis=1))
    tile.thumbnail((_MAX_SIDE, _MAX_SIDE))
    return tile


def _fitting(draw: ImageDraw.ImageDraw, text: str, width: float) -> str:
    """Return a text in Latin letters, which are all that Pillow's own font has, cut to a width."""
    text = " ".join(text.split()).encode("latin-1", "replace").decode("latin-1")
    if draw.textlength(text) <= width:
        return text
    while text and draw.textlength(text + "..") > width:
        text = text[:-1]
    return text + ".."
