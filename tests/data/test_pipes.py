"""Pipes and devices in the place of users' files: refused before they are opened."""

import os
import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.data.cifar_files import CIFAR10, write_binaries
from tests.data.image_files import write_folder, write_tfrecord
from towers import cli, data, files
from towers.commands.predict import inputs
from towers.errors import InputError
from towers.monitoring import events
from towers.training import checkpoint

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


def of_file(name):
    data.load(pipe(name))


def of_device(name):
    os.symlink("/dev/zero", name)
    data.load(name)


def of_folder(name):
    write_folder(Path(), range(3), split="train")
    write_folder(Path(), range(3, 6), split="test")
    pipe(name)
    data.load("folder", ".")


def of_tfrecord(name):
    write_tfrecord(Path(), range(3), split="train")
    write_tfrecord(Path(), range(3, 6), split="test")
    pipe(name)
    data.load("tfrecord", ".")


def of_cifar(name):
    write_binaries(Path(), CIFAR10)
    data.load("cifar10", os.path.dirname(pipe(name)) or ".")


def of_flags(name):
    cli.parse("train", [f"--flagfile={pipe(name)}"])


def nested(name):
    pipe(name)
    with open("a.cfg", "w") as file:
        file.write(f"--flagfile={name}\n")
    cli.parse("train", ["--flagfile=a.cfg"])


def of_run(name):
    pipe(name)
    cli.parse("evaluate", ["--train_dir=run"])


def predicted(name):
    inputs._part(pipe(name), None)


PREDICTED = "csv", "npy", "npz", "png"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("mine.csv", of_file), ("mine.npz", of_file), ("linked.csv", of_device),
        ("train/cat/x.png", of_folder), ("test/dog/deep/x.jpg", of_folder),
        ("train-0.tfrecord", of_tfrecord), ("test-0.tfrecord", of_tfrecord),
        ("data_batch_1.bin", of_cifar), ("a.cfg", of_flags), ("b.cfg", nested),
        ("run/flags.cfg", of_run), *(((f"mine.{kind}", predicted)) for kind in PREDICTED),
    ],
    ids=lambda given: getattr(given, "__name__", given),
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


def test_wide_tables(tmp_path):
    """Of 100,000 columns: what compares each with each takes minutes."""
    names = [f"column_{number}" for number in range(100_000)]
    rows = [",".join(["1"] * len(names))] * 10
    (tmp_path / "wide.csv").write_text("\n".join([",".join(names), *rows]))
    assert data.load("wide.csv").train.spec[0].shape == (99_999,)


@pytest.mark.parametrize(
    "header",
    [
        b"(" * 5000 + b")" * 5000, b"{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -4)}",
        b"{'descr': '" + b"[" * 3000, b"{'descr': 'nope', 'fortran_order': 0, 'shape': (1,)}",
        b"'''", b"\xff\xfe\x00", b"{'descr': '<f8', 'fortran_order': False, 'shape': (2**9999,)}",
    ],
    ids=range(7),
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
