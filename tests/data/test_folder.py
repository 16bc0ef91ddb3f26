"""Image folders: what is taken for an image, and what is refused in one line."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tests.data.image_files import CLASSES, SHAPE, image, numbers_of, png, write_folder
from towers import data
from towers.errors import InputError


@pytest.fixture
def top(tmp_path):
    """Six training and three test images."""
    write_folder(tmp_path, range(6))
    write_folder(tmp_path, range(6, 9), split="test")
    return tmp_path


def refusal(top, **given):
    """Return the message with which a folder is refused."""
    with pytest.raises(InputError) as error:
        data.load("folder", str(top), **given)
    assert "\n" not in str(error.value)
    return str(error.value)


def images_of(split):
    return next(split.eval_batches(split.size).as_numpy_iterator())[0]


def test_every_kind_of_image_becomes_three_channels(top):
    grey, alpha = np.full((*SHAPE[:2], 1), 77, np.uint8), np.full((*SHAPE[:2], 4), 88, np.uint8)
    (top / "train/ant").mkdir()
    (top / "train/ant/a.PNG").write_bytes(png(grey))
    (top / "train/ant/b.png").write_bytes(png(alpha))
    (top / "train/ant/c.jpg").write_bytes(tf.io.encode_jpeg(grey, quality=100).numpy())
    (top / "train/ant/d.jpeg").write_bytes(tf.io.encode_jpeg(alpha[..., :3], quality=100).numpy())
    (top / "train/ant/below").mkdir()
    (top / "train/ant/below/e.png").write_bytes(png(grey))
    images, labels = images_of(data.load("folder", str(top)).train)
    assert labels[:6].tolist() == [0, 0, 0, 0, 0, 1]
    for pixels, value in zip(images[:5], [77, 88, 77, 77, 88], strict=True):
        assert np.abs(pixels.astype(int) - value).max() <= 1


def test_other_files_are_passed_over(top):
    before = images_of(data.load("folder", str(top)).train)
    for name in "train/cat/notes.txt", "train/cat/._00001.png", "train/README", "train/.png":
        (top / name).write_text("no image")
    (top / "train/.cache").mkdir()
    (top / "train/cat/empty.png").mkdir()
    for part, same in zip(images_of(data.load("folder", str(top)).train), before, strict=True):
        np.testing.assert_array_equal(part, same)


@pytest.mark.parametrize("name", ["val", "validation"])
def test_the_test_images_may_be_called_otherwise(top, name):
    (top / "test").rename(top / name)
    images, _ = images_of(data.load("folder", str(top)).test)
    assert numbers_of(images).tolist() == [6, 7, 8]


def test_a_class_may_be_missing_from_the_test_images(top):
    for path in (top / "test/bird").iterdir():
        path.unlink()
    (top / "test/bird").rmdir()
    loaded = data.load("folder", str(top))
    assert loaded.class_names == CLASSES and images_of(loaded.test)[1].tolist() == [1, 2]


def test_names_need_not_be_ascii(top):
    (top / "train/cat").rename(top / "train/Kätzchen 猫")
    (top / "test/cat").rename(top / "test/Kätzchen 猫")
    (top / "train/Kätzchen 猫/00001.png").rename(top / "train/Kätzchen 猫/ä ö.png")
    loaded = data.load("folder", str(top))
    assert loaded.class_names == ("Kätzchen 猫", "bird", "dog")
    assert sorted(numbers_of(images_of(loaded.train)[0])) == list(range(6))


def test_a_file_that_goes_away_is_named(top):
    loaded = data.load("folder", str(top))
    (top / "test/cat/00007.png").unlink()
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        list(loaded.test.eval_batches(2))
    assert "test/cat/00007.png cannot be read: No such file or directory" in str(error.value)


def test_an_image_that_changes_its_size_is_named(top):
    loaded = data.load("folder", str(top))
    (top / "test/cat/00007.png").write_bytes(png(image(7, (4, 4, 3))))
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        list(loaded.test.eval_batches(2))
    assert "test/cat/00007.png is 4x4 (height x width), but others are 6x5" in str(error.value)
    assert "--image_size=6x5" in str(error.value)


# Errors


def test_missing_folders(top):
    os.rename(top / "test", top / "elsewhere")
    assert refusal(top).startswith(f"--data_dir={top} has no folder test, validation or val; ")
    os.rename(top / "elsewhere", top / "test")
    os.rename(top / "train", top / "elsewhere")
    assert refusal(top).startswith(f"{top}/train: No such file or directory; expected DIR/train")
    (top / "train").mkdir()
    (top / "train/a.png").write_bytes(png(image(0)))
    assert refusal(top).startswith(f"{top}/train has no folders of classes; expected DIR/train")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_class_without_images(top, split):
    (top / split / "cat/notes.txt").write_text("no image")
    for path in (top / split / "cat").glob("*.png"):
        path.unlink()
    assert refusal(top) == (
        f"{top}/{split}/cat has no images (.png, .jpg, .jpeg, .bmp, .gif); put some there, or "
        "remove it"
    )


def test_a_test_class_that_train_has_not(top):
    (top / "test/cat").rename(top / "test/Cat")
    assert refusal(top) == (
        f"{top}/test/Cat is a class that {top}/train has not; it has bird, cat, dog"
    )


def test_what_is_no_image(top):
    path = top / "train/cat/00001.png"
    for content in b"no image", b"":
        path.write_bytes(content)
        assert refusal(top).startswith(f"{path} is damaged, or no PNG, JPEG, BMP or GIF; mend or")
    path.unlink()
    path.symlink_to("nowhere")
    assert refusal(top) == f"{path} cannot be read: No such file or directory; mend or remove it"
