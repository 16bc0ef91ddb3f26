"""The download of CIFAR-10: whole or not at all, and what is said when it fails."""

import errno
import functools
import gc
import hashlib
import http.server
import os
import tarfile
import threading

import pytest

from tests.data.tiny_cifar10 import NAMES, assert_is_cifar10, fails, write_binaries
from towers import data
from towers.data import cifar10, download

pytestmark = pytest.mark.usefixtures("tiny")

FOLDER = "cifar-10-batches-bin"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """An archive of the binary set, which is where CIFAR-10 is downloaded from."""
    write_binaries(tmp_path / "server" / FOLDER)
    path = tmp_path / "server/cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "server" / FOLDER, FOLDER)
    monkeypatch.setattr(cifar10, "URL", path.as_uri())
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(path.read_bytes()).hexdigest())
    return path


@pytest.fixture
def server(monkeypatch):
    """Serve on 127.0.0.1 what the test puts into `answer`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.answer(self)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.url = f"http://127.0.0.1:{server.server_port}/cifar-10-binary.tar.gz"
        yield server
        server.shutdown()


def send(handler, content=b"", length=None):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


def test_downloads_what_is_nowhere(tmp_path, monkeypatch, server, source, capsys):
    server.answer = functools.partial(send, content=source.read_bytes())
    monkeypatch.setattr(cifar10, "URL", server.url)
    folder = tmp_path / "new/folder"
    assert_is_cifar10(data.load("cifar10", str(folder)))
    assert os.listdir(folder) == [FOLDER]
    assert sorted(os.listdir(folder / FOLDER)) == sorted(f"{name}.bin" for name in NAMES)
    assert capsys.readouterr().out == ""  # where --json writes

    server.answer = None  # the second time needs no server
    assert_is_cifar10(data.load("cifar10", str(folder)))


def assert_fails(folder, reason):
    message = fails(folder)
    assert message.startswith(f"cannot download {cifar10.URL} to {folder}/{FOLDER}: ")
    assert reason in message
    assert message.endswith(
        f"; put {FOLDER} (data_batch_1.bin ... test_batch.bin) under {folder}, "
        "or use --dataset=shapes"
    )
    assert os.listdir(folder) == []


def test_no_network(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr(cifar10, "URL", "http://data.example/cifar-10-binary.tar.gz")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert_fails(tmp_path / "new", "Network is unreachable")


def stall(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "5000")
    handler.end_headers()
    handler.server.released.wait(5)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda handler: send(handler, bytes(1000), length=5000), "1000 out of 5000 bytes"),
        (lambda handler: handler.connection.close(), "closed connection without response"),
        (lambda handler: handler.send_error(404), "Not Found"),
        (stall, "timed out"),
    ],
    ids=["hangs up", "hangs up at once", "not found", "stalls"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Keras' sockets
def test_a_failing_server(tmp_path, monkeypatch, server, answer, reason):
    monkeypatch.setattr(download, "_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(cifar10, "URL", server.url)
    server.answer, server.released = answer, threading.Event()
    assert_fails(tmp_path / "data", reason)
    server.released.set()
    gc.collect()


def test_an_archive_that_is_not_the_one(tmp_path, source):
    source.write_bytes(source.read_bytes()[:-100])
    assert_fails(tmp_path / "data", "hash does not match")


@pytest.mark.parametrize("interrupted", ["tarfile.TarFile.extractall", "os.replace"])
@pytest.mark.parametrize(
    "interruption", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_an_interrupted_download_leaves_nothing(
    tmp_path, monkeypatch, source, interrupted, interruption
):
    def fail(*_, **__):
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(interrupted, fail)
        if isinstance(interruption, OSError):
            assert_fails(tmp_path / "data", "No space left on device")
        else:
            with pytest.raises(KeyboardInterrupt):
                data.load("cifar10", str(tmp_path / "data"))
    assert os.listdir(tmp_path / "data") == []
    assert_is_cifar10(data.load("cifar10", str(tmp_path / "data")))


def test_two_processes_may_download_at_the_same_time(tmp_path, monkeypatch, source):
    import keras

    get_file = keras.utils.get_file

    def slower_than_another(*args, **given):
        write_binaries(tmp_path / "data" / FOLDER)
        return get_file(*args, **given)

    monkeypatch.setattr(keras.utils, "get_file", slower_than_another)
    assert_is_cifar10(data.load("cifar10", str(tmp_path / "data")))
    assert os.listdir(tmp_path / "data") == [FOLDER]
