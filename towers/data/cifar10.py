"""CIFAR-10.

Images: 50,000 for training and 10,000 for testing, uint8 `[32, 32, 3]`, ten classes; 180 MB.
Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
"""

import numpy as np

from towers.data import cifar
from towers.data.published import Published

CLASS_NAMES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
RECORDS_PER_FILE = 10_000

_PICKLES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_MD5_OF = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def _read(path: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    images, labels = cifar.read(
        path, content, "CIFAR-10", RECORDS_PER_FILE, {"labels": len(CLASS_NAMES)}
    )
    return images, labels[:, 0]


SETS = {
    "cifar10": Published(
        name="cifar10",
        title="CIFAR-10",
        class_names=CLASS_NAMES,
        forms=(tuple(f"{name}.bin" for name in _PICKLES), _PICKLES),
        md5_of=_MD5_OF,
        max_bytes=cifar.MAX_PICKLE * RECORDS_PER_FILE * cifar.PICTURE_BYTES,
        folder="cifar-10-batches-bin",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        read=_read,
    )
}
