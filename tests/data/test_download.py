"""The download of CIFAR-10: whole or not at all, and what is said when it fails."""

import errno
import functools
import hashlib
import http.server
import io
import os
import tarfile
import threading

import numpy as np
import pytest

from tests.data.tiny_cifar10 import NAMES, assert_is_cifar10, batch, fails, rows, write_binaries
from towers import data
from towers.data import cifar10, download

pytestmark = pytest.mark.usefixtures("tiny")

HINT = (
    "; put cifar-10-batches-bin (data_batch_1.bin ... test_batch.bin) under {}, "
    "or use --dataset=shapes"
)


def archive(path, members=None):
    """Write a tar.gz of the binary set; `members` changes what it holds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for index, name in enumerate(NAMES):
            images, labels = batch(index)
            content = np.concatenate([labels.astype(np.uint8)[:, None], rows(images)], 1).tobytes()
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = len(content)
            if members:
                info, content = members(info, content)
            tar.addfile(info, None if content is None else io.BytesIO(content))
        readme = tarfile.TarInfo("cifar-10-batches-bin/readme.html")
        tar.addfile(readme, io.BytesIO())
    return path


def serve(monkeypatch, path):
    monkeypatch.setattr(cifar10, "URL", path.as_uri())
    monkeypatch.setattr(cifar10, "MD5", hashlib.md5(path.read_bytes()).hexdigest())


@pytest.fixture
def server():
    """Serve on 127.0.0.1 what the test puts into `answer`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.answer(self)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def send(handler, content=b"", length=None):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


def test_downloads_what_is_nowhere(tmp_path, monkeypatch, server, capsys):
    source = archive(tmp_path / "server/cifar-10-binary.tar.gz")
    serve(monkeypatch, source)
    server.answer = functools.partial(send, content=source.read_bytes())
    url = f"http://127.0.0.1:{server.server_port}/cifar-10-binary.tar.gz"
    monkeypatch.setattr(cifar10, "URL", url)
    folder = tmp_path / "new/folder"
    assert_is_cifar10(data.load("cifar10", str(folder)))
    assert os.listdir(folder) == ["cifar-10-batches-bin"]
    binaries = sorted(f"{name}.bin" for name in NAMES)
    assert sorted(os.listdir(folder / "cifar-10-batches-bin")) == binaries
    assert capsys.readouterr() == ("", "")  # no progress bar in a log file

    server.answer = None  # the second time needs no server
    assert_is_cifar10(data.load("cifar10", str(folder)))


def test_no_network(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr(cifar10, "URL", "http://data.example/cifar-10-binary.tar.gz")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "new"
    assert fails(folder) == (
        "cannot download http://data.example/cifar-10-binary.tar.gz: [Errno 101] Network is "
        f"unreachable{HINT.format(folder)}"
    )
    assert not folder.exists()


def hang_up(handler):
    send(handler, bytes(1000), length=5000)


def hang_up_at_once(handler):
    handler.connection.close()


def not_found(handler):
    handler.send_error(404)


def stall(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "5000")
    handler.end_headers()
    handler.server.released.wait(5)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (hang_up, "the connection ended after 1,000 of 5,000 bytes"),
        (hang_up_at_once, "Remote end closed connection without response"),
        (not_found, "Not Found"),
        (stall, "timed out"),
    ],
)
def test_a_failing_server(tmp_path, monkeypatch, server, answer, reason):
    monkeypatch.setattr(download, "_TIMEOUT_SECONDS", 0.5)
    server.answer, server.released = answer, threading.Event()
    url = f"http://127.0.0.1:{server.server_port}/a.tar.gz"
    monkeypatch.setattr(cifar10, "URL", url)
    message = fails(tmp_path)
    server.released.set()
    assert message == f"cannot download {url}: {reason}{HINT.format(tmp_path)}"
    assert os.listdir(tmp_path) == []


def test_a_wrong_md5(tmp_path, monkeypatch):
    source = archive(tmp_path / "server/a.tar.gz")
    serve(monkeypatch, source)
    md5 = cifar10.MD5
    monkeypatch.setattr(cifar10, "MD5", "0" * 32)
    folder = tmp_path / "data"
    assert fails(folder) == (
        f"{source.as_uri()} has md5 {md5}; expected {'0' * 32}; nothing of it was kept"
        f"{HINT.format(folder)}"
    )
    assert os.listdir(folder) == []


def as_link(info, content):
    if "test" in info.name:
        info.type, info.linkname, content = tarfile.SYMTYPE, "data_batch_1.bin", None
    return info, content


def as_device(info, content):
    if "test" in info.name:
        info.type, content = tarfile.CHRTYPE, None
    return info, content


def shorter(info, content):
    info.size -= "test" in info.name
    return info, content


@pytest.mark.parametrize("members", [as_link, as_device, shorter])
def test_an_archive_with_something_else_in_place_of_a_file(tmp_path, monkeypatch, members):
    source = archive(tmp_path / "server/a.tar.gz", members)
    serve(monkeypatch, source)
    folder = tmp_path / "data"
    assert fails(folder) == (
        f"{source.as_uri()} lacks test_batch.bin as a plain file of 61,460 bytes"
        f"{HINT.format(folder)}"
    )
    assert os.listdir(folder) == []


@pytest.mark.parametrize("prefix", ["../../", "{}/elsewhere/"])
def test_an_archive_cannot_write_elsewhere(tmp_path, monkeypatch, prefix):
    def elsewhere(info, content):
        info.name = prefix.format(tmp_path) + os.path.basename(info.name)
        return info, content

    serve(monkeypatch, archive(tmp_path / "server/a.tar.gz", elsewhere))
    folder = tmp_path / "deep/data"
    assert_is_cifar10(data.load("cifar10", str(folder)))
    assert os.listdir(folder) == ["cifar-10-batches-bin"]
    assert sorted(os.listdir(tmp_path)) == ["deep", "server"]
    assert os.listdir(tmp_path / "deep") == ["data"]


@pytest.mark.parametrize("content", [b"not an archive", "cut"])
def test_what_is_no_archive(tmp_path, monkeypatch, content):
    source = archive(tmp_path / "server/a.tar.gz")
    source.write_bytes(source.read_bytes()[:50_000] if content == "cut" else content)
    serve(monkeypatch, source)
    assert f"{source.as_uri()} is not a whole tar archive: " in fails(tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []


@pytest.mark.parametrize("interrupted", ["tarfile.open", "os.replace", "shutil.copyfileobj"])
@pytest.mark.parametrize(
    "interruption", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_an_interrupted_download_leaves_nothing(tmp_path, monkeypatch, interrupted, interruption):
    serve(monkeypatch, archive(tmp_path / "server/a.tar.gz"))
    folder = tmp_path / "data"

    def fail(*_, **__):
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(interrupted, fail)
        if isinstance(interruption, OSError):
            assert fails(folder) == (
                f"cannot write {folder}/cifar-10-batches-bin: No space left on device"
                f"{HINT.format(folder)}"
            )
        else:
            with pytest.raises(KeyboardInterrupt):
                data.load("cifar10", str(folder))
    assert os.listdir(folder) == []
    assert_is_cifar10(data.load("cifar10", str(folder)))


def test_two_processes_may_download_at_the_same_time(tmp_path, monkeypatch):
    serve(monkeypatch, archive(tmp_path / "server/a.tar.gz"))
    unpack = download._unpack

    def slower_than_another(*args):
        unpack(*args)
        write_binaries(tmp_path / "data/cifar-10-batches-bin")

    monkeypatch.setattr(download, "_unpack", slower_than_another)
    assert_is_cifar10(data.load("cifar10", str(tmp_path / "data")))
    assert os.listdir(tmp_path / "data") == ["cifar-10-batches-bin"]
