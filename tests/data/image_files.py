"""Small data sets of image files and of TFRecord files, each image known by its pixels."""

import numpy as np
import tensorflow as tf

SHAPE = (6, 5, 3)
CLASSES = ("bird", "cat", "dog")


def image(number, shape=SHAPE):
    """Return an image whose first pixel says its number, 0..65,535, and whose others differ."""
    pixels = np.random.default_rng(number).integers(0, 256, shape).astype(np.uint8)
    pixels[0, 0, :2] = divmod(number, 256)
    return pixels


def numbers_of(images):
    """Return the numbers of the images of a batch."""
    return images[:, 0, 0, 0].astype(int) * 256 + images[:, 0, 0, 1]


def png(pixels):
    return tf.io.encode_png(pixels).numpy()


def write_folder(top, numbers, *, split="train", encode=png, ending="png"):
    """Write images as files; number n is of class n % 3. Return the numbers in the files' order."""
    for number in numbers:
        folder = top / split / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:05d}.{ending}").write_bytes(encode(image(number)))
    return sorted(numbers, key=lambda number: (number % 3, number))


def example(content, label, image_key="image/encoded", label_key="image/class/label"):
    """Return a serialised tf.train.Example."""
    features = {
        image_key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[content])),
        label_key: tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        "image/height": tf.train.Feature(int64_list=tf.train.Int64List(value=[SHAPE[0]])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_records(path, records, compression=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)


def write_tfrecord(top, numbers, *, split="train", num_files=3, encode=png, **keys):
    """Write images as TFRecord files. Return the numbers in the records' order."""
    parts = np.array_split(np.array(numbers), num_files)
    for index, part in enumerate(parts):
        path = top / f"{split}-{index:05d}-of-{num_files:05d}.tfrecord"
        write_records(path, [example(encode(image(n)), n % 3, **keys) for n in part.tolist()])
    return list(numbers)


WRITE = {"folder": write_folder, "tfrecord": write_tfrecord}
