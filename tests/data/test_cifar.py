"""CIFAR-10 and CIFAR-100: found under a folder in any form, or downloaded, and read."""

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

from tests.data import cifar_files
from tests.data.cifar_files import CIFAR10, CIFAR100, NUM, pickled, write_binaries, write_pickles
from tests.data.splits import all_of, assert_same, refusal
from towers import data
from towers.data import cifar
from towers.errors import InputError

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("tiny")]

of_100 = functools.partial(write_binaries, names=CIFAR100)
pickles_of_100 = functools.partial(write_pickles, names=CIFAR100)
FORMS = [  # of data sets, with what writes them
    ("cifar10", write_binaries), ("cifar10", write_pickles),
    ("cifar100", of_100), ("cifar100_coarse", of_100),
    ("cifar100", pickles_of_100), ("cifar100_coarse", pickles_of_100),
]  # fmt: skip


def halves(name):
    """Return the training examples and the test examples of a data set, as they were written."""
    if name == "cifar10":
        return [cifar_files.half(names, "labels") for names in (CIFAR10[:5], CIFAR10[5:])]
    key = "coarse_labels" if "coarse" in name else "fine_labels"
    return [cifar_files.half([file], key) for file in CIFAR100]


def assert_is(folder, name):
    """Load a data set, and compare it with what was written."""
    loaded = data.load(name, str(folder))
    assert (loaded.name, loaded.image_shape) == (name, (32, 32, 3))
    assert loaded.class_names == cifar.SETS[name].class_names
    assert len(loaded.class_names) == loaded.num_classes
    for split, (images, labels) in zip((loaded.train, loaded.test), halves(name), strict=True):
        assert_same(all_of(split), (images, labels.astype(np.int32)))


def test_the_names_of_the_classes_which_what_stands_in_has_too(few_shapes, tmp_path):
    stand_ins = {name: data.stand_in(name) for name in dict(FORMS)}
    known = {name: found.class_names for name, found in stand_ins.items()}
    airplanes = "airplane automobile bird cat deer dog frog horse ship truck"
    assert known["cifar10"] == tuple(airplanes.split())
    fine, coarse = known["cifar100"], known["cifar100_coarse"]
    assert list(fine) == sorted(set(fine)) and len(fine) == 100
    assert [fine[i] for i in (0, 42, 99)] == ["apple", "leopard", "worm"]
    assert len(set(coarse)) == len(coarse) == 20
    names = ["aquatic_mammals", "large_carnivores", "vehicles_2"]
    assert [coarse[i] for i in (0, 8, 19)] == names
    for name, found in stand_ins.items():
        assert data.locate(name, str(tmp_path)) is None
        assert len(found.class_names) == found.num_classes
        assert found.image_shape == (32, 32, 3)


# Where it is found


@pytest.mark.parametrize(("name", "write"), FORMS)
def test_it_is_found_anywhere_and_files_that_are_not_the_published_ones_are_named_and_taken(
    tmp_path, capsys, publish, name, write
):
    folder = tmp_path / "some/where/below"
    write(folder)
    assert_is(tmp_path, name)
    differ = f"in {folder} differ from the published files of "
    line = capsys.readouterr().err
    if write is of_100:  # of these the sums are not known
        assert line == ""
    else:
        assert line.startswith("warning: ") and differ in line and line.count("\n") == 1
    sums = {path.name: md5(path) for path in folder.iterdir()}
    last = max(sums)
    publish(name, md5_of=sums)
    data.load(name, str(tmp_path))
    assert capsys.readouterr().err == ""
    publish(name, md5_of={**sums, last: "0" * 32})
    assert_is(tmp_path, name)
    assert capsys.readouterr().err.startswith(f"warning: {last} {differ}")


def test_the_nearest_folder_and_in_it_the_binary_form_is_taken(tmp_path):
    write_binaries(tmp_path / "a")
    write_pickles(tmp_path / "a")
    write_binaries(tmp_path / "b/deep")
    for path in (tmp_path / "a/test_batch", tmp_path / "b/deep/test_batch.bin"):
        path.write_bytes(b"never read")
    assert_is(tmp_path, "cifar10")


def test_links_are_followed_once_and_hidden_folders_are_not(tmp_path):
    write_binaries(tmp_path / "data/.towers-x1")
    for name in "abc":
        (tmp_path / "data" / name).symlink_to(tmp_path / "data")
    assert refusal("cifar10", str(tmp_path / "data")).startswith("cannot download ")
    write_binaries(tmp_path / "disk/cifar")
    (tmp_path / "data/linked").symlink_to(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert_is(tmp_path / "link", "cifar10")


def test_an_incomplete_set_is_named_and_not_downloaded(tmp_path):
    write_binaries(tmp_path / "a", CIFAR10[:1] + CIFAR10[2:5])
    message = refusal("cifar10", str(tmp_path))
    assert f"CIFAR-10 in {tmp_path}/a lacks data_batch_2.bin, test_batch.bin; add" in message
    write_pickles(tmp_path / "b")
    assert_is(tmp_path, "cifar10")
    write_binaries(tmp_path / "some/CIFAR-100", ["train"])
    message = f"CIFAR-100 in {tmp_path}/some/CIFAR-100 lacks test.bin; add what is missing"
    assert message in refusal("cifar100", str(tmp_path))


def test_folders_and_single_files_of_so_common_names_are_no_data_set(tmp_path):
    for half in CIFAR100:
        (tmp_path / "data" / half / "class").mkdir(parents=True)
    (tmp_path / "cifar/scripts").mkdir(parents=True)
    (tmp_path / "cifar/scripts/test").write_text("#!/bin/sh")
    assert data.locate("cifar100", str(tmp_path)) is None
    assert refusal("cifar100", str(tmp_path)).startswith("cannot download ")
    pickles_of_100(tmp_path / "data/train")
    assert_is(tmp_path, "cifar100")


# Damage


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
        + (b"\x89" + string(cifar_files.rows(images).tobytes()) + b"tb")
    )
    numbers = b"](" + b"".join(map(integer, labels.tolist())) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


def test_reads_the_official_pickles_of_python_2(tmp_path):
    for name in CIFAR10:
        images, labels = cifar_files.batch(name)
        (tmp_path / name).write_bytes(python2_pickle(images, labels["labels"]))
    assert_is(tmp_path, "cifar10")


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


def changed(content, place, value):
    """Return bytes of which one is another."""
    return content[:place] + bytes([value]) + content[place + 1 :]


BATCH, COUNTED, NO_PICKLE = "data_batch_4", "(counted from 0)", "is no pickle of CIFAR-10: "
BINARY, OF_100 = map(cifar_files.binary, ("data_batch_3", "train"))
IMAGES = cifar_files.batch(BATCH)[0]
BAD_PICKLES = {
    "empty": (b"", NO_PICKLE),
    "truncated": (pickled(BATCH)[:-100], NO_PICKLE),
    "runs a command": (pickle.dumps(Evil()), "posix.system is not allowed in it"),
    "runs a command within": (pickled(BATCH, extra=Evil()), "posix.system is not allowed in it"),
    "eval": (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval is not allowed in it"),
    "another of numpy's": (b"cnumpy\nfromfile\n(S'x'\ntR.", "numpy.fromfile is not allowed in it"),
    "persistent id": (b"Pevil\n.", NO_PICKLE),
    "object array": (pickled(BATCH, data=np.full((NUM, 3072), 3, object)), "O8"),
    "a list": (pickle.dumps([1]), NO_PICKLE),
    "no labels": (pickle.dumps({b"data": cifar_files.rows(IMAGES)}), NO_PICKLE),
    "data of another shape": (pickled(BATCH, data=IMAGES), "expected a dict with data, uint8 "),
    "data signed": (pickled(BATCH, data=IMAGES.view(np.int8)), "'i1' is not allowed"),
    "labels too few": (pickled(BATCH, labels=[1] * 19), "as many labels"),
    "labels float": (pickled(BATCH, labels=[1.0] * 20), "as many labels"),
    "label 10": (pickled(BATCH, labels=[0, 1, 10] + [0] * 17), f"record 2 {COUNTED} has label 10"),
    "label -1": (pickled(BATCH, labels=[-1] + [0] * 19), f"record 0 {COUNTED} has label -1"),
    # A memo of so many places, tuples in tuples, lists of lists that stand for 2**40 numbers.
    "gigabytes for its memo": (b"\x80\x02Nr\xff\xff\xff\x1f.", "536870911 places"),
    "gigabytes for its memo, as text": (b"Np536870911\n.", "536870911 places"),
    "more bytes than it has": (b"\x80\x04\x8e" + b"\xff" * 5 + bytes(3) + b".", NO_PICKLE),
    "deep": (b"\x80\x02)" + b"\x85" * 40_000 + b"0}.", "more than 1000 lists, tuples"),
    "many times the pictures": (b"N" * 300_000 + b".", "more than 245,760 bytes"),
    "labels that grow": (pickled(BATCH, labels=[doubled(40)] * NUM), "as many labels"),
}
BAD_PICKLES_OF_100 = {
    f"{key} {value}": (pickled("test", **{key: value}), "is no pickle of CIFAR-100: ")
    for key in ("coarse_labels", "fine_labels", "data")
    for value in ([1] * 9, None)
}
BAD_BINARIES = {
    "too few bytes": (BINARY[:-1000], "has 60,460 bytes; expected 20 records of 3073 bytes"),
    "label 10": (changed(BINARY, 6146, 10), f"record 2 {COUNTED} has label 10; allowed are 0..9"),
}
BAD_BINARIES_OF_100 = {
    "too few bytes": (OF_100[:-1000], "has 60,480 bytes; expected 20 records of 3074 bytes"),
    "coarse": (changed(OF_100, 6148, 20), f"record 2 {COUNTED} has coarse label 20; allowed"),
    "fine": (changed(OF_100, 6149, 100), f"record 2 {COUNTED} has fine label 100; allowed"),
}
DAMAGE = [
    pytest.param(name, write, file, *bad[kind], id=f"{file} {kind}")
    for name, write, file, bad in [
        ("cifar10", write_pickles, BATCH, BAD_PICKLES),
        ("cifar10", write_binaries, "data_batch_3.bin", BAD_BINARIES),
        ("cifar100", of_100, "train.bin", BAD_BINARIES_OF_100),
        ("cifar100_coarse", of_100, "train.bin", BAD_BINARIES_OF_100),
        ("cifar100", pickles_of_100, "test", BAD_PICKLES_OF_100),
    ]
    for kind in bad
]


@pytest.mark.parametrize(("name", "write", "file", "content", "expected"), DAMAGE)
def test_a_damaged_file_is_named_and_nothing_in_it_runs(
    tmp_path, monkeypatch, name, write, file, content, expected
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data")
    (tmp_path / "data" / file).write_bytes(content)
    message = refusal(name, str(tmp_path / "data"))
    assert message.startswith(str(tmp_path / "data" / file)) and expected in message
    assert message.endswith("; put an intact copy in its place")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.run
def test_a_pickle_with_any_byte_changed_is_an_error_or_a_valid_set(tmp_path, publish):
    publish("cifar10", num_records={"data_batch_1": 2})
    content = python2_pickle(np.zeros((2, 32, 32, 3), np.uint8), np.array([1, 2]))
    path = tmp_path / "data_batch_1"
    for index in [i for i, byte in enumerate(content) if byte]:  # all but the pixels
        for value in (0x2E, 0xFF):
            path.write_bytes(changed(content, index, value))
            try:
                images, labels, _ = cifar.SETS["cifar10"].read(str(path))
            except InputError as error:
                assert str(path) in str(error) and "\n" not in str(error)  # noqa: PT017
            else:
                assert images.shape == (2, 32, 32, 3) and images.dtype == np.uint8
                assert labels.shape == (2,) and 0 <= labels.min() <= labels.max() <= 9


@pytest.mark.run
def test_the_limits_of_a_pickle_leave_room_for_the_published_ones(tmp_path, publish):
    """50,000 labels, coarse and fine, and names."""
    publish("cifar100", num_records={"train": 50_000, "test": 10_000})
    numbers = [*range(20)] * 2500
    names = [b"some_%d.png" % number for number in range(50_000)]
    content = pickled(
        "train", data=np.zeros((50_000, 3072), np.uint8), filenames=names, coarse_labels=numbers,
        fine_labels=numbers,
    )  # fmt: skip
    (tmp_path / "train").write_bytes(content)
    _, labels, _ = cifar.SETS["cifar100"].read(str(tmp_path / "train"))
    assert labels.tolist() == numbers


# The download

FOLDER = cifar.SETS["cifar10"].folder


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def source(tmp_path, publish):
    """An archive of the binary set, which is where CIFAR-10 is downloaded from."""
    write_binaries(tmp_path / "server" / FOLDER)
    path = tmp_path / "server/cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "server" / FOLDER, FOLDER)
    publish("cifar10", url=path.as_uri(), md5=md5(path))
    return path


def test_downloads_what_is_nowhere(tmp_path, source, capsys):
    folder = tmp_path / "new/folder"
    assert_is(folder, "cifar10")
    assert os.listdir(folder) == [FOLDER]
    assert capsys.readouterr().out == ""  # where --json writes
    source.unlink()  # the second time needs no server
    assert_is(folder, "cifar10")


def assert_download_fails(folder, reason):
    message = refusal("cifar10", str(folder))
    url = cifar.SETS["cifar10"].url
    assert message.startswith(f"cannot download {url} to {folder}/{FOLDER}: ")
    assert reason in message and message.endswith("or use --dataset=shapes")
    assert os.listdir(folder) == []


class Failing(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if "closed" in self.path:
            self.connection.close()
        elif "short" in self.path:
            self.send_response(200)
            self.send_header("Content-Length", "5000")
            self.end_headers()
            self.wfile.write(bytes(1000))
        else:
            self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Keras' sockets
def test_a_failing_server(tmp_path, publish):
    answers = {"short": "1000 out of 5000 bytes", "closed": "closed connection without response"}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        for name, reason in (answers | {"none": "Not Found"}).items():
            publish("cifar10", url=f"http://127.0.0.1:{server.server_port}/{name}.tar.gz")
            assert_download_fails(tmp_path / "data", reason)
        server.shutdown()
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
    assert_is(tmp_path / "data", "cifar10")


def test_a_folder_with_other_things_is_not_replaced(tmp_path, source):
    (tmp_path / "here" / FOLDER).mkdir(parents=True)
    (tmp_path / "here" / FOLDER / "notes.txt").write_text("mine")
    message = refusal("cifar10", str(tmp_path / "here"))
    assert "not empty" in message and message.endswith("or use --dataset=shapes")
    assert (tmp_path / "here" / FOLDER / "notes.txt").read_text() == "mine"


# The real one

REAL = os.environ.get("TOWERS_CIFAR10_DIR", "")


@pytest.mark.run
@pytest.mark.skipif(not REAL, reason="TOWERS_CIFAR10_DIR does not name a folder with CIFAR-10")
def test_the_real_images(publish):
    publish("cifar10", num_records=dict.fromkeys(CIFAR10, 10_000))
    assert Path(REAL).is_dir()
    loaded = data.load("cifar10", REAL)
    assert (loaded.train.size, loaded.test.size) == (50_000, 10_000)
    for split in (loaded.train, loaded.test):
        images, labels = all_of(split)
        assert np.bincount(labels).tolist() == [split.size // 10] * 10
        # Published channel means, of the training images: 125.3, 123.0, 113.9.
        means = images.mean(axis=(0, 1, 2), dtype=np.float64)
        np.testing.assert_allclose(means, [125.3, 123.0, 113.9], atol=1.5)
