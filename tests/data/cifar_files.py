"""CIFARs of 20 pictures a file, for the tests that find, read and download them."""

import pickle

import numpy as np

NUM, NUM_OF_100 = 20, {"train": 20, "test": 10}  # records in each file; the real ones have 10,000
CIFAR10 = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
CIFAR100 = tuple(NUM_OF_100)


def records(known):
    """Return how many records each file of a set has here."""
    return {name: NUM_OF_100.get(name, NUM) for name in known.num_records}


def batch(name):
    """Return the images of a file, and its labels by their keys in a pickle."""
    num, rng = NUM_OF_100.get(name, NUM), np.random.default_rng([*name.encode()])
    images = rng.integers(0, 256, (num, 32, 32, 3), np.uint8)
    if name in CIFAR10:
        return images, {"labels": rng.permutation(num).astype(np.int32) % 10}
    fine = (99 - 7 * np.arange(num, dtype=np.int32)) % 100
    return images, {"coarse_labels": fine % 20, "fine_labels": fine}


def half(names, key):
    """Return the images of some files, and their labels of a key."""
    batches = [batch(name) for name in names]
    return (
        np.concatenate([images for images, _ in batches]),
        np.concatenate([labels[key] for _, labels in batches]),
    )


def rows(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), 3072)


def binary(name):
    images, labels = batch(name)
    records = [np.stack([*labels.values()], 1).astype(np.uint8), rows(images)]
    return np.concatenate(records, axis=1).tobytes()


def pickled(name, **changes):
    """Return a pickle, in which some values are others."""
    images, labels = batch(name)
    content = {
        "filenames": [b"some_%d.png" % number for number in range(len(images))],
        "batch_label": b"batch 1 of 1",
        "data": np.ascontiguousarray(rows(images)),
        **{key: column.tolist() for key, column in labels.items()},
        **changes,
    }
    return pickle.dumps({key.encode(): value for key, value in content.items()}, 4)


def write_binaries(folder, names=CIFAR10):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.bin").write_bytes(binary(name))


def write_pickles(folder, names=CIFAR10):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(pickled(name))
