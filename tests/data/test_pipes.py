"""Pipes and devices in the place of users' files: refused before they are opened."""

import os
import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.data.image_files import write_folder
from towers import cli, data, files
from towers.commands.predict import inputs
from towers.errors import InputError
from towers.monitoring import events
from towers.training.run import checkpoint

pytestmark = pytest.mark.run


@pytest.fixture(autouse=True)
def in_time(tmp_path, monkeypatch):
    """Stand in an empty folder; whoever waits for a pipe is ended."""

    def end(*_):
        raise TimeoutError("it waits for a pipe")

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path):
    if os.path.lexists(path):
        os.remove(path)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    os.mkfifo(path)
    return path


def images(kind, write):
    """Return a reader of a data set in this folder, one of whose files is a pipe."""

    def read(name):
        write(Path(), range(3), split="train")
        write(Path(), range(3, 6), split="test")
        pipe(name)
        data.load(kind, ".")

    return read


def nested_flags(name):
    Path("a.cfg").write_text(f"--flagfile={pipe(name)}\n")
    cli.parse("train", ["--flagfile=a.cfg"])


def run(name):
    cli.parse("evaluate", [f"--train_dir={os.path.dirname(pipe(name))}"])


@pytest.mark.parametrize(
    ("name", "read"),
    [
        *(
            (f"mine.{ending}", lambda name: inputs._part(pipe(name), None))
            for ending in ("npy", "npz", "png")
        ),
        *((n, images("folder", write_folder)) for n in ("train/cat/x.png", "test/dog/x/y.jpg")),
        ("a.cfg", lambda name: cli.parse("train", [f"--flagfile={pipe(name)}"])),
        ("b.cfg", nested_flags), ("run/flags.cfg", run),
    ],
)  # fmt: skip
def test_of_users(name, read):
    with pytest.raises(InputError, match="pipe or a device, and a file is needed"):
        read(name)


def test_of_runs(capsys):
    assert files.read_json(Path(pipe("manifest.json"))) == {}
    assert "manifest.json is damaged" in capsys.readouterr().err
    pipe("train/events.out.tfevents.1")
    assert events.read(Path("train")) == {}
    pipe("checkpoints/ckpt-1.index")
    with pytest.raises(OSError, match="pipe or a device"):
        checkpoint.read("checkpoints/ckpt-1", "")
    pipe("checkpoints/checkpoint")
    assert checkpoint.without_index(Path("checkpoints")) == {}


@pytest.mark.parametrize(
    "header",
    [
        b"(" * 5000 + b")" * 5000, b"{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -4)}",
        b"{'descr': '" + b"[" * 3000, b"{'descr': 'nope', 'fortran_order': 0, 'shape': (1,)}",
        b"'''", b"\xff\xfe\x00", b"-" * 5000, b"{{}}",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (2**9999,)}",
    ],
    ids=range(9),
)  # fmt: skip
@pytest.mark.parametrize("version", [1, 2, 3, 9])
def test_odd_headers(header, version):
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    content = b"\x93NUMPY" + bytes([version, 0]) + length + header + np.zeros(8).tobytes()
    with zipfile.ZipFile("mine.npz", "w") as archive:
        for key in "x", "y":
            archive.writestr(f"{key}.npy", content)
    with pytest.raises(InputError, match=r"mine.npz is damaged, or no .npz file"):
        data.load("mine.npz")
