"""Gives peers the data of a run: the shape of its images, and its training set in a file.

    python scripts/peers/images.py '{"options": {"dataset": "shapes", ...}, "path": "train.npz"}'

Prints {"image_shape", "num_classes", "augment", "data"} as the lane protocol does, or "skipped".
"""

import json
import sys

import lane
import numpy as np
import tensorflow as tf

from towers import devices
from towers.commands.benchmark import own_run
from towers.data import Split, augment
from towers.options.parts import parse_augment
from towers.options.run import Options
from towers.training.run.setup import assemble


def export(train: Split, path: str) -> None:
    """Write "images" `[N, H, W, C]` in uint8 and "labels" `[N]` to an .npz file.

    Raises:
        Skipped: examples are something else.
    """
    batches = train.eval_batches(1000)
    specs = batches.element_spec[0]
    one_each = all(isinstance(spec, tf.TensorSpec) for spec in specs) and len(specs) == 2
    if not (one_each and specs[0].dtype == tf.uint8 and specs[1].shape.rank == 1):
        raise lane.Skipped("the data set holds no images as bytes, with one class each")
    parts = [(x[counted > 0], y[counted > 0]) for (x, y, *_), counted in batches]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    np.savez(path, images=images, labels=labels)


def main(options: Options, path: str) -> None:
    """Print what a run on these options gives to its peers; `path` is that of the file."""
    devices.configure(visible_gpus="none")
    dataset, options = own_run.load(options)
    kind = assemble(options, devices.tower_devices(1, "cpu"), dataset).options.augment
    if parse_augment(kind).cutout or parse_augment(kind).base == "shift":
        raise lane.Skipped(f"other programs do not know --augment={kind}")
    if dataset.name == "synthetic":
        path = ""
    else:
        export(dataset.train, path)
    shape = augment.output_shape(dataset.image_shape, kind)
    lane.emit(image_shape=shape, num_classes=dataset.num_classes, augment=kind, data=path)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    try:
        main(Options(**given["options"]), given["path"])
    except lane.Skipped as why:
        lane.emit(skipped=str(why))
