"""A CIFAR-100 of 20 training and 10 test pictures."""

import pickle

import numpy as np

from tests.data.tiny_cifar10 import rows

NUM = {"train": 20, "test": 10}


def batch(half):
    """Return images, coarse labels 0..19 and fine labels 0..99."""
    rng = np.random.default_rng(NUM[half])
    images = rng.integers(0, 256, (NUM[half], 32, 32, 3), np.uint8)
    fine = (99 - 7 * np.arange(NUM[half])) % 100
    return images, (fine % 20).astype(np.int32), fine.astype(np.int32)


def write_binaries(folder, halves=tuple(NUM)):
    folder.mkdir(parents=True, exist_ok=True)
    for half in halves:
        images, *labels = batch(half)
        records = np.concatenate([np.stack(labels, 1).astype(np.uint8), rows(images)], axis=1)
        (folder / f"{half}.bin").write_bytes(records.tobytes())


def write_pickles(folder, halves=tuple(NUM)):
    folder.mkdir(parents=True, exist_ok=True)
    for half in halves:
        images, coarse, fine = batch(half)
        content = {
            b"filenames": [b"some_%d.png" % number for number in fine],
            b"batch_label": b"batch 1 of 1",
            b"fine_labels": fine.tolist(),
            b"coarse_labels": coarse.tolist(),
            b"data": np.ascontiguousarray(rows(images)),
        }
        (folder / half).write_bytes(pickle.dumps(content, 4))
