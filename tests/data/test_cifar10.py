"""CIFAR-10: found under a folder, wherever it lies and in either form, or downloaded."""

import functools
import gc
import hashlib
import http.server
import os
import pickle
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.data.tiny_cifar10 import (
    NAMES,
    NUM,
    assert_is_cifar10,
    batch,
    everything,
    fails,
    rows,
    write_binaries,
    write_pickles,
)
from towers import data
from towers.data import cifar10
from towers.errors import InputError

pytestmark = pytest.mark.usefixtures("tiny")


def test_describes_itself(tmp_path):
    write_binaries(tmp_path)
    loaded = data.load("cifar10", str(tmp_path))
    assert (loaded.name, loaded.num_classes, loaded.image_shape) == ("cifar10", 10, (32, 32, 3))
    assert (loaded.train.size, loaded.test.size) == (5 * NUM, NUM)
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    assert loaded.class_names == tuple(names.split())


@pytest.mark.parametrize("write", [write_binaries, write_pickles])
@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin", "some/where/below"])
def test_is_found_anywhere(tmp_path, write, folder):
    write(tmp_path / folder)
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))


@pytest.mark.parametrize("write", [write_binaries, write_pickles])
def test_files_that_are_not_the_published_ones_are_named_and_taken(
    tmp_path, capsys, publish, write
):
    write(tmp_path)
    sums = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    publish(cifar10, md5_of=sums)
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))
    assert capsys.readouterr().err == ""
    first, *_, last = sorted(tmp_path.iterdir())
    content = bytearray(last.read_bytes())
    content[1000] ^= 64  # a pixel
    last.write_bytes(content)
    loaded = data.load("cifar10", str(tmp_path))
    assert loaded.train.size == 5 * NUM
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {last.name} in {tmp_path} differ")
    assert first.name not in line


def test_the_nearest_folder_and_in_it_the_binary_form_is_taken(tmp_path):
    write_binaries(tmp_path / "a")
    write_pickles(tmp_path / "a")
    write_binaries(tmp_path / "b/deep")
    for path in (tmp_path / "a/test_batch", tmp_path / "b/deep/test_batch.bin"):
        path.write_bytes(b"never read")
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))


def test_links_are_followed_once_and_hidden_folders_are_not(tmp_path):
    write_binaries(tmp_path / "data/.towers-x1")
    for name in "abc":
        (tmp_path / "data" / name).symlink_to(tmp_path / "data")
    assert fails(tmp_path / "data").startswith("cannot download ")
    write_binaries(tmp_path / "disk/cifar")
    (tmp_path / "data/linked").symlink_to(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert_is_cifar10(data.load("cifar10", str(tmp_path / "link")))


def test_an_incomplete_set_is_named_and_not_downloaded(tmp_path):
    write_binaries(tmp_path / "a", NAMES[:1] + NAMES[2:5])
    message = fails(tmp_path)
    assert f"CIFAR-10 in {tmp_path}/a lacks data_batch_2.bin, test_batch.bin; add" in message
    write_pickles(tmp_path / "b")
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))


# Damage


def test_a_damaged_binary_is_named(tmp_path):
    write_binaries(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    message = fails(tmp_path)
    assert message.startswith(f"{path} has 60,460 bytes; expected 20 records of 3073 bytes")
    path.write_bytes(content[:6146] + b"\x0a" + content[6147:])
    assert f"{path}: record 2 (counted from 0) has label 10; allowed are 0..9" in fails(tmp_path)


def python2_pickle(images, labels):
    """Write protocol 2 as Python 2 did: all strings, the array's bytes too, are byte strings."""

    def string(value):
        return b"T" + len(value).to_bytes(4, "little") + value

    def integer(value):
        return b"J" + value.to_bytes(4, "little", signed=True)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        + (integer(0) + b"\x85" + string(b"b") + b"\x87R")
        + (b"(" + integer(1) + integer(len(labels)) + integer(3072) + b"\x86")
        + (b"cnumpy\ndtype\n" + string(b"u1") + integer(0) + integer(1) + b"\x87R")
        + (b"(" + integer(3) + string(b"|") + b"NNN" + integer(-1) * 2 + integer(0) + b"tb")
        + (b"\x89" + string(rows(images).tobytes()) + b"tb")
    )
    numbers = b"](" + b"".join(map(integer, labels.tolist())) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


def test_reads_the_official_pickles_of_python_2(tmp_path):
    for index, name in enumerate(NAMES):
        (tmp_path / name).write_bytes(python2_pickle(*batch(index)))
    assert_is_cifar10(data.load("cifar10", str(tmp_path)))


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def doubled(times):
    """Return a list in a list, twice in each: little to write, too much to go through."""
    inner = [1]
    for _ in range(times):
        inner = [inner, inner]
    return inner


IMAGES, LABELS = batch(5)
GOOD = {b"data": rows(IMAGES), b"labels": LABELS.tolist()}
WRONG = "is no pickle of CIFAR-10: "

BAD_PICKLES = {
    "empty": (b"", "Ran out of input"),
    "truncated": (pickle.dumps(GOOD, 4)[:-100], WRONG),
    "runs a command": (Evil(), "posix.system is not allowed in it"),
    "runs a command within": ({**GOOD, b"extra": Evil()}, "posix.system is not allowed in it"),
    "eval": (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval is not allowed in it"),
    "another of numpy's": (b"cnumpy\nfromfile\n(S'x'\ntR.", "numpy.fromfile is not allowed in it"),
    "persistent id": (b"Pevil\n.", WRONG),
    "object array": ({**GOOD, b"data": np.full((NUM, 3072), 3, object)}, "O8"),
    "a list": ([GOOD], WRONG),
    "no labels": ({b"data": rows(IMAGES)}, WRONG),
    "data of another shape": ({**GOOD, b"data": IMAGES}, "expected a dict with data, uint8 [20, "),
    "data signed": ({**GOOD, b"data": rows(IMAGES).view(np.int8)}, "'i1' is not allowed"),
    "labels too few": ({**GOOD, b"labels": [1] * 19}, "as many labels"),
    "labels float": ({**GOOD, b"labels": [1.0] * 20}, "as many labels"),
    "label 10": ({**GOOD, b"labels": [0, 1, 10] + [0] * 17}, "record 2 (counted from 0) has label"),
    # A memo of so many places, tuples in tuples, lists of lists that stand for 2**40 numbers.
    "gigabytes for its memo": (b"\x80\x02Nr\xff\xff\xff\x1f.", "536870911 places"),
    "gigabytes for its memo, as text": (b"Np536870911\n.", "536870911 places"),
    "more bytes than it has": (b"\x80\x04\x8e" + b"\xff" * 5 + bytes(3) + b".", "ends too early"),
    "deep": (b"\x80\x02)" + b"\x85" * 40_000 + b"0}.", "more than 1000 lists, tuples"),
    "many times the pictures": (b"N" * 300_000 + b".", "more than 245,760 bytes"),
    "labels that grow": ({**GOOD, b"labels": [doubled(40)] * NUM}, "as many labels"),
    "label -1": ({**GOOD, b"labels": [-1] + [0] * 19}, "record 0 (counted from 0) has label -1"),
}


@pytest.mark.parametrize("damage", BAD_PICKLES)
def test_a_bad_pickle_is_named_and_nothing_in_it_runs(tmp_path, monkeypatch, damage):
    content, expected = BAD_PICKLES[damage]
    monkeypatch.chdir(tmp_path)
    write_pickles(tmp_path / "data")
    path = tmp_path / "data/data_batch_4"
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, 4))
    message = fails(tmp_path)
    assert message.startswith(str(path)) and expected in message
    assert message.endswith("; put an intact copy in its place")
    assert not (tmp_path / "pwned").exists()


def test_a_pickle_with_any_byte_changed_is_an_error_or_a_valid_set(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", 2)
    images, labels = np.zeros((2, 32, 32, 3), np.uint8), np.array([1, 2])
    content = bytearray(python2_pickle(images, labels))
    path = tmp_path / "data_batch_1"
    for index in [i for i, byte in enumerate(content) if byte]:  # all but the pixels
        for value in (0, 0x2E, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[index] = value
            path.write_bytes(damaged)
            try:
                images, labels, _ = cifar10.SETS["cifar10"]._read(str(path))
            except InputError as error:
                assert str(path) in str(error) and "\n" not in str(error)  # noqa: PT017
            else:
                assert images.shape == (2, 32, 32, 3) and images.dtype == np.uint8
                assert labels.shape == (2,) and 0 <= labels.min() <= labels.max() <= 9


# The download

FOLDER = cifar10.SETS["cifar10"].folder


@pytest.fixture
def source(tmp_path, publish):
    """An archive of the binary set, which is where CIFAR-10 is downloaded from."""
    write_binaries(tmp_path / "server" / FOLDER)
    path = tmp_path / "server/cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "server" / FOLDER, FOLDER)
    publish(cifar10, sources={path.as_uri(): hashlib.md5(path.read_bytes()).hexdigest()})
    return path


@pytest.fixture
def server(publish):
    """Serve on 127.0.0.1 what the test puts into `answer`."""
    (md5,) = cifar10.SETS["cifar10"].sources.values()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.answer(self)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        publish(cifar10, sources={f"http://127.0.0.1:{server.server_port}/cifar.tar.gz": md5})
        yield server
        server.shutdown()


def send(handler, content=b"", length=None):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


def test_downloads_what_is_nowhere(tmp_path, source, server, capsys):
    server.answer = functools.partial(send, content=source.read_bytes())
    folder = tmp_path / "new/folder"
    assert_is_cifar10(data.load("cifar10", str(folder)))
    assert os.listdir(folder) == [FOLDER]
    assert capsys.readouterr().out == ""  # where --json writes
    server.answer = None  # the second time needs no server
    assert_is_cifar10(data.load("cifar10", str(folder)))


def assert_download_fails(folder, reason):
    message = fails(folder)
    (url,) = cifar10.SETS["cifar10"].sources
    assert message.startswith(f"cannot download {url} to {folder}/{FOLDER}: ")
    assert reason in message and message.endswith("or use --dataset=shapes")
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda handler: send(handler, bytes(1000), length=5000), "1000 out of 5000 bytes"),
        (lambda handler: handler.connection.close(), "closed connection without response"),
        (lambda handler: handler.send_error(404), "Not Found"),
    ],
    ids=["hangs up", "hangs up at once", "not found"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Keras' sockets
def test_a_failing_server(tmp_path, server, answer, reason):
    server.answer = answer
    assert_download_fails(tmp_path / "data", reason)
    gc.collect()


def test_an_archive_that_is_not_the_one(tmp_path, source):
    source.write_bytes(source.read_bytes()[:-100])
    assert_download_fails(tmp_path / "data", "hash does not match")


@pytest.mark.parametrize("interrupted", ["tarfile.TarFile.extractall", "os.replace"])
def test_an_interrupted_download_leaves_nothing(tmp_path, monkeypatch, source, interrupted):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(interrupted, interrupt)
        with pytest.raises(KeyboardInterrupt):
            data.load("cifar10", str(tmp_path / "data"))
    assert os.listdir(tmp_path / "data") == []
    assert_is_cifar10(data.load("cifar10", str(tmp_path / "data")))


# The real one

REAL = os.environ.get("TOWERS_CIFAR10_DIR", "")


@pytest.mark.skipif(not REAL, reason="TOWERS_CIFAR10_DIR does not name a folder with CIFAR-10")
def test_the_real_images(monkeypatch, publish):
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", 10_000)
    publish(cifar10, max_bytes=4 * 10_000 * 3072)
    assert Path(REAL).is_dir()
    loaded = data.load("cifar10", REAL)
    assert (loaded.train.size, loaded.test.size) == (50_000, 10_000)
    for split in (loaded.train, loaded.test):
        images, labels = everything(split)
        assert np.bincount(labels).tolist() == [split.size // 10] * 10
        # Published channel means, of the training images: 125.3, 123.0, 113.9.
        means = images.mean(axis=(0, 1, 2), dtype=np.float64)
        np.testing.assert_allclose(means, [125.3, 123.0, 113.9], atol=1.5)
