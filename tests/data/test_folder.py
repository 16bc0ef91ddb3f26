"""Folders of images: what is found, decoded, kept, and refused in one line."""

import os
import shutil
import struct

import numpy as np
import pytest
import tensorflow as tf

from tests.data.image_files import CLASSES, SHAPE, image, numbers_of, png, write_folder
from tests.data.splits import all_of, flat, refusal, take
from towers import data
from towers.data.folder import read_image

pytestmark = pytest.mark.graph

TRAIN, TEST = 14, range(500, 510)


def write(top, num_train=TRAIN, test=TEST, **how):
    """Write training images 0, 1, ... and test images."""
    write_folder(top, range(num_train), **how)
    write_folder(top, test, split="test", **how)


@pytest.fixture(scope="module")
def top_folder(tmp_path_factory):
    """14 training and 10 test images."""
    top = tmp_path_factory.mktemp("folder")
    write(top)
    return top


@pytest.fixture(scope="module")
def loaded(top_folder):
    return data.load("folder", str(top_folder))


def images_of(split):
    """Return the numbers of the images in a split, in its order."""
    return numbers_of(all_of(split)[0]).tolist()


# Whole files


def test_images_come_in_order_as_they_were_written_with_their_labels(loaded):
    assert (loaded.name, loaded.train.size, loaded.test.size) == ("folder", TRAIN, len(TEST))
    assert loaded.image_shape == SHAPE and loaded.num_classes == 3
    assert loaded.class_names == CLASSES
    batches = flat(loaded.test.eval_batches(4))
    images, labels, weights = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    in_order = sorted(TEST, key=lambda n: n % 3)
    assert numbers_of(images)[: len(TEST)].tolist() == in_order and len(batches) == 3
    np.testing.assert_array_equal(weights, np.arange(12) < len(TEST))
    assert not images[len(TEST) :].any() and not labels[len(TEST) :].any()
    shown = take(loaded.train, 7, 1, seed=1) + [(images[:10], labels[:10], None)]
    for images, labels, _ in shown:
        for pixels, label, number in zip(images, labels, numbers_of(images), strict=True):
            np.testing.assert_array_equal(pixels, image(number))
            assert label == number % 3


def test_a_third_split_is_for_validation(tmp_path):
    for number, split in enumerate(("train", "val")):
        write_folder(tmp_path, range(6 * number, 6 * number + 6), split=split)
    loaded = data.load("folder", str(tmp_path))
    assert (sorted(images_of(loaded.test)), loaded.validation) == ([*range(6, 12)], None)
    write_folder(tmp_path, range(12, 15), split="test")
    (tmp_path / "val").rename(tmp_path / "validation")
    loaded = data.load("folder", str(tmp_path))
    assert sorted(images_of(loaded.validation)) == [*range(6, 12)]
    assert sorted(images_of(loaded.test)) == [*range(12, 15)]


# Sizes


def sized(size):
    return lambda pixels: tf.io.encode_png(tf.image.resize(pixels, size, "nearest")).numpy()


def test_images_of_different_sizes_need_one(tmp_path):
    write_folder(tmp_path, range(3), encode=sized((8, 4)))
    write_folder(tmp_path, range(3, 6), split="test", encode=sized((9, 9)))
    line = refusal("folder", str(tmp_path))
    assert "is 9x9 " in line and " but another is 8x4; " in line
    assert line.endswith(" --image_size=8x4")
    loaded = data.load("folder", str(tmp_path), (4, 2))
    assert loaded.image_shape == (4, 2, 3)
    images, _ = all_of(loaded.test)
    assert images.shape == (3, 4, 2, 3) and images.dtype == np.uint8


# Damage


def damaged(content):
    return content[:40] + bytes(40) + content[80:]


def damage(top, number, content=None):
    """Damage an image that has been written. Return its path."""
    (path,) = top.rglob(f"{number:05d}.png")
    path.write_bytes(content or damaged(png(image(number))))
    return str(path)


def assert_fails(batches, *says):
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        list(batches)
    assert all(part in str(error.value) for part in says)


def test_images_that_are_damaged_change_their_size_or_go_away_are_named(tmp_path):
    """As on a disk that is gone: no endless search for one that can be read."""
    write(tmp_path)
    loaded = data.load("folder", str(tmp_path))
    for number, batches in (
        (3, loaded.train.train_batches(5, seed=1).take(TRAIN)),
        (509, loaded.test.eval_batches(5)),
        (500, loaded.test.eval_batches(1)),
    ):
        name = damage(tmp_path, number)
        assert_fails(batches, f"{name} cannot be read: ", "repair, convert or remove it")
    evaluated = loaded.test.eval_batches(5)
    name = damage(tmp_path, 507, png(image(507, (4, 4, 3))))  # of the first batch
    size = " is 4x4 (height x width), but another is 6x5"
    assert_fails(evaluated, f"{name}{size}", "--image_size=6x5")
    tmp_path.rename(tmp_path.with_suffix(".gone"))
    assert_fails(evaluated, "test/bird/00501.png", "cannot be read: No such file or directory")
    assert_fails(loaded.train.train_batches(5, seed=1), "cannot be read: No such file")


# Folders


@pytest.fixture
def top(tmp_path):
    """A folder with six training and three test images."""
    write(tmp_path, 6, range(6, 9))
    return tmp_path


def test_every_kind_of_image_becomes_three_channels_and_other_files_are_passed_over(top):
    gray, alpha = np.full((*SHAPE[:2], 1), 77, np.uint8), np.full((*SHAPE[:2], 4), 88, np.uint8)
    (top / "train/ant/below").mkdir(parents=True)
    (top / "train/ant/a.PNG").write_bytes(png(gray))
    (top / "train/ant/b.png").write_bytes(png(alpha))
    (top / "train/ant/c.jpg").write_bytes(tf.io.encode_jpeg(gray, quality=100).numpy())
    (top / "train/ant/d.jpeg").write_bytes(tf.io.encode_jpeg(alpha[..., :3], quality=100).numpy())
    (top / "train/ant/below/e.png").write_bytes(png(gray))
    for name in "train/cat/notes.txt", "train/cat/._00001.png", "train/README", "train/.png":
        (top / name).write_text("no image")
    for name in ".cache/cat", "cat/.ipynb_checkpoints/deep", "cat/__MACOSX":
        (top / "train" / name).mkdir(parents=True)
        (top / "train" / name / "a.png").write_bytes(png(image(0)))
    os.mkfifo(top / "train/cat/pipe.png")
    (top / "train/cat/empty.png").mkdir()
    loaded = data.load("folder", str(top))
    _, note = loaded.notes  # the first: test has no images of ant
    assert "skipped 2 files" in note and note.endswith(
        "cat/notes.txt, " + f"{top}/train/cat/pipe.png"
    )
    images, labels = all_of(loaded.train)
    assert labels.tolist() == [0] * 5 + [1, 1, 2, 2, 3, 3]
    for pixels, value in zip(images[:5], [77, 88, 77, 77, 88], strict=True):
        assert np.abs(pixels.astype(int) - value).max() <= 1
    assert numbers_of(images[5:]).tolist() == [0, 3, 1, 4, 2, 5]


def bitmap(bits, rows, colors=b"", compression=0):
    """Return a BMP of 4x2 pixels."""
    about = struct.pack("<IiiHHIIiiII", 40, 4, 2, 1, bits, compression, len(rows), 0, 0, 0, 0)
    return b"BM" + struct.pack("<III", 0, 0, 54 + len(colors)) + about + colors + rows


RED, BLUE = [255, 0, 0], [0, 0, 255]
PICTURE = [[BLUE] * 4, [RED, BLUE, BLUE, BLUE]]
COLORS = bytes([0, 0, 255, 0, 255, 0, 0, 0])  # of a palette: red, then blue
BITMAPS = {  # below on the left a red pixel, all others are blue
    1: (b"\x70\0\0\0\xf0\0\0\0", COLORS),
    4: (b"\x01\x11\0\0\x11\x11\0\0", COLORS + bytes(56)),
    8: (b"\0\1\1\1\1\1\1\1", COLORS + bytes(1016)),
    16: (struct.pack("<8H", 0x7C00, *[0x1F] * 7), b""),
    32: (bytes([0, 0, 255, 0, *[255, 0, 0, 0] * 7]), b""),
}


@pytest.mark.unit
def test_bitmaps_have_the_colors_of_their_palette(tmp_path):
    path = tmp_path / "a.bmp"
    for bits, (rows, colors) in BITMAPS.items():
        path.write_bytes(bitmap(bits, rows, colors))
        assert read_image(path).tolist() == PICTURE, bits
    path.write_bytes(bitmap(8, b"\1\0\3\1\0\0\4\1\0\1", COLORS + bytes(1016), compression=1))
    assert read_image(path).tolist() == PICTURE
    path.write_bytes(bitmap(2, bytes(8), COLORS + bytes(8)))  # whole, but Pillow does not know it
    assert "cannot be read: Unsupported BMP" in refusal(path, call=read_image)


@pytest.mark.parametrize("below", ["", "train"])
def test_without_images_for_testing_a_tenth_is_held_out(top, below):
    shutil.rmtree(top / "test")
    expected = all_of(data.load("folder", str(top)).train)
    if not below:
        (top / "train").rename(top / "moved")
        top = top / "moved"
    loaded = data.load("folder", str(top))
    assert loaded.class_names == ("bird", "cat", "dog") and loaded.test.size == 1
    assert "1 of 6 examples, held out at random" in loaded.notes[0]
    found = sorted(images_of(loaded.train) + images_of(loaded.test))
    assert found == list(range(6))
    np.testing.assert_array_equal(all_of(loaded.train)[0], expected[0])


def said_of(top):
    return refusal("folder", str(top)).replace(f"{top}", "TOP")


@pytest.mark.unit
def test_missing_folders_and_classes_and_what_is_no_image(top):
    path = top / "train/cat/00001.png"
    for content, says in {
        b"": "cannot be read: cannot identify image file",
        png(np.zeros([4, 4, 1], np.uint16)): "has more than 8 bits per channel; convert it to 8",
    }.items():
        path.write_bytes(content)
        assert said_of(top).startswith(f"TOP/train/cat/00001.png {says}")
    path.unlink()
    path.symlink_to("nowhere")
    assert "00001.png cannot be read: No such file or directory; repair" in said_of(top)
    for path in (top / "train/cat").iterdir():
        path.unlink()
    assert said_of(top).startswith("TOP/train/cat has no images (.png, .jpg, ")
    write(top, 6, range(6, 9))
    (top / "test/cat").rename(top / "test/Cat")
    line = "TOP/test/Cat is a class that TOP/train lacks; it has bird, cat, dog"
    assert said_of(top) == line
    os.rename(top / "train", top / "elsewhere")
    assert said_of(top).startswith("TOP/train: No such file or directory; expected DIR/train")
    os.rename(top / "test", top / "testing")
    assert "has no folder train, and its folder elsewhere has folders of images" in said_of(top)
    (top / "train").mkdir()
    (top / "train/a.png").write_bytes(png(image(0)))
    assert said_of(top).startswith("TOP/train has no folders of classes; expected DIR/train")
