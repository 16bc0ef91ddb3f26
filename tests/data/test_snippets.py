"""The data functions that the page of towers/data shows: each runs as it is written there."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.data.splits import all_of
from tests.programs import ROOT

pytestmark = pytest.mark.unit


def snippet(name):
    """Return the code block of the page that begins with the name of a file."""
    page = (ROOT / "towers/data/README.md").read_text(encoding="utf-8")
    return re.search(rf"```python\n(# {name}\n.*?)```", page, re.DOTALL)[1]


def load_of(name, changes=()):
    """Return the function of a snippet, in which some numbers are others."""
    text = snippet(name)
    for old, new in dict(changes).items():
        assert old in text
        text = text.replace(old, new)
    exec(text, names := {})
    return names["load"]


def test_a_table_with_a_column_of_texts(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{i},{['Oslo', 'Rome'][i % 2]},{i}.5" for i in range(20)]
    (tmp_path / "prices.csv").write_text("\n".join(["area,city,price", *rows]))
    found = load(load_of("my_prices.py"))
    assert (found.train.size, found.test.size, found.num_classes) == (18, 2, 0)
    x, y = map(np.concatenate, zip(all_of(found.train), all_of(found.test), strict=True))
    order, area = np.argsort(y), np.arange(20)
    assert x[order].tolist() == np.stack([area, area % 2 == 0, area % 2], 1).tolist()
    assert y[order].tolist() == (area + 0.5).tolist()


def test_tfrecord_files_with_a_parse_function(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, [64, 64, 3], np.uint8)
    for name, labels in ("train", [3, 1, 2]), ("test", [9, 0]):
        with tf.io.TFRecordWriter(f"{name}.tfrecord") as file:
            for label in labels:
                file.write(record_of(tf.io.encode_png(pixels).numpy(), label))
    found = load(load_of("my_records.py", {"50_000": "3", "10_000": "2"}))
    assert found.num_classes == 10 and found.image_shape == (64, 64, 3)
    images, labels = all_of(found.train)
    assert labels.tolist() == [3, 1, 2] and all_of(found.test)[1].tolist() == [9, 0]
    np.testing.assert_array_equal(images, np.stack([pixels] * 3).astype(np.float32))


def record_of(image, label):
    """Return a serialized tf.train.Example."""
    feature = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
