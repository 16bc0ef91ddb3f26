"""Street View House Numbers, the cropped digits: `svhn`, and `svhn_extra` with more for training.

Images: 73,257 for training and 26,032 for testing, uint8 `[32, 32, 3]`, ten classes; 300 MB. The
531,131 easier ones of `extra_32x32.mat` are for training in `svhn_extra` (1.9 GB, and 6 GB while
they are read, in 40 s), and left alone in `svhn`.
Source: Netzer et al., Reading Digits in Natural Images with Unsupervised Feature Learning, 2011.

A file is one of MATLAB's: X, uint8 `[32, 32, 3, N]`, and y `[N, 1]`, where 10 is the digit 0.
"""

import zlib

import numpy as np

from towers.data import matlab
from towers.data.published import Published
from towers.errors import InputError

MAX_IMAGES = 531_131  # of a file

_PICTURE_BYTES = 32 * 32 * 3
_URL = "http://ufldl.stanford.edu/housenumbers/"  # it answers by http alone; the sums are compared
_MD5_OF = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "extra_32x32.mat": "a93ce644f1a588dc4d68dda5feec44a7",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}


def _read(path: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        arrays = matlab.loads(content, ("X", "y"), MAX_IMAGES * _PICTURE_BYTES)
        shapes = [arrays[name].shape if name in arrays else () for name in ("X", "y")]
        num = shapes[0][-1] if shapes[0] else 0
        expected = [(32, 32, 3, num), (num, 1)]
        if num == 0 or shapes != expected or arrays["X"].dtype != np.uint8:
            raise ValueError("expected X, uint8 [32, 32, 3, N], and y [N, 1]")
    except (ValueError, zlib.error) as error:
        raise InputError(f"{path} is no MATLAB file of SVHN: {error}") from None
    labels = arrays["y"][:, 0]
    wrong = np.flatnonzero(~np.isin(labels, range(1, 11)))
    if wrong.size:
        raise InputError(
            f"{path}: y {wrong[0]} (counted from 0) is {labels[wrong[0]]}; allowed are 1..10, 10 "
            "being the digit 0"
        )
    images = np.ascontiguousarray(arrays["X"].transpose(3, 0, 1, 2))
    return images, labels.astype(np.int32) % 10


def _set(name: str, *files: str) -> Published:
    return Published(
        name=name,
        title="SVHN",
        class_names=tuple("0123456789"),
        forms=(files,),
        md5_of=_MD5_OF,
        max_bytes=2 * MAX_IMAGES * _PICTURE_BYTES,
        folder="svhn",
        sources={_URL + file: _MD5_OF[file] for file in files},
        read=_read,
    )


SETS = {
    "svhn": _set("svhn", "train_32x32.mat", "test_32x32.mat"),
    "svhn_extra": _set("svhn_extra", *_MD5_OF),
}
