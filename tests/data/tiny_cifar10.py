"""A CIFAR-10 of 20 pictures a file, for the tests that find, read and download it."""

import pickle

import numpy as np
import pytest

from towers import data
from towers.errors import InputError

NUM = 20  # records in each file; the real ones have 10,000
NAMES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def batch(index):
    rng = np.random.default_rng(index)
    images = rng.integers(0, 256, (NUM, 32, 32, 3), np.uint8)
    return images, rng.permutation(NUM).astype(np.int32) % 10


def rows(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), 3072)


def write_binaries(folder, names=NAMES):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        images, labels = batch(NAMES.index(name))
        records = np.concatenate([labels[:, None].astype(np.uint8), rows(images)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_pickles(folder, names=NAMES, protocol=4):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        images, labels = batch(NAMES.index(name))
        content = {b"data": np.ascontiguousarray(rows(images)), b"labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol))


def everything(split):
    (images, labels), counted = next(iter(split.eval_batches(split.size)))
    assert counted.numpy().all()
    return images.numpy(), labels.numpy()


def assert_is_cifar10(loaded):
    parts = [batch(i) for i in range(6)]
    images, labels = everything(loaded.train)
    np.testing.assert_array_equal(images, np.concatenate([part[0] for part in parts[:5]]))
    np.testing.assert_array_equal(labels, np.concatenate([part[1] for part in parts[:5]]))
    images, labels = everything(loaded.test)
    np.testing.assert_array_equal(images, parts[5][0])
    np.testing.assert_array_equal(labels, parts[5][1])


def fails(folder):
    with pytest.raises(InputError) as error:
        data.load("cifar10", str(folder))
    message = str(error.value)
    assert "\n" not in message
    return message
