"""`towers tensorboard`: it serves, in a process, until it is stopped."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.tensorboard_server import Server
from tests.worker_processes import ROOT
from towers.commands.tensorboard import command as tensorboard
from towers.commands.tensorboard.command import TensorboardOptions
from towers.errors import InputError
from towers.monitoring.event_writer import EventWriter

pytestmark = pytest.mark.unit


@pytest.fixture
def event_dir(tmp_path):
    """A folder in which TensorBoard finds something."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "events.out.tfevents.1.host").write_bytes(b"")
    return tmp_path


def started(folder, port):
    command = [sys.executable, "-m", "towers", "tensorboard"]
    command += [f"--train_dir={folder}", f"--port={port}"]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.process
def test_it_serves_until_ctrl_c(event_dir):
    with started(event_dir, 0) as server:
        try:
            address = re.search(r"http://localhost:(\d+)/", server.stdout.readline())
            for page, has in ("environment", str(event_dir)), ("plugins_listing", "scalars"):
                with urllib.request.urlopen(f"{address[0]}data/{page}", timeout=30) as answer:
                    assert has in answer.read().decode()
            server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=30)
        finally:
            server.kill()
    assert server.returncode == 0
    assert (out, err) == ("ended\n", "")  # not even TensorFlow, which TensorBoard loads


@pytest.mark.process
def test_a_port_that_is_taken_is_refused(event_dir):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started(event_dir, port) as server:
            _, err = server.communicate(timeout=60)
    assert server.returncode == 2
    assert re.fullmatch(rf"towers: --port={port}: .*in use.*\n", err)


def test_it_takes_no_gpu(event_dir, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    seen = {}
    monkeypatch.setattr(
        "tensorboard.program.TensorBoard.launch", lambda _: seen.update(os.environ) or "http://x:1/"
    )
    assert tensorboard.start(TensorboardOptions(train_dir=str(event_dir))) == "http://x:1/"
    assert seen["CUDA_VISIBLE_DEVICES"] == ""


def test_a_folder_with_nothing_to_show_is_refused(tmp_path, monkeypatch):
    for folder in f"{tmp_path}/absent", f"{tmp_path}/.":
        with pytest.raises(InputError, match=f"--train_dir={folder}: there are no event files"):
            TensorboardOptions(train_dir=folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no run in runs/train, .* no --train_dir is given"):
        TensorboardOptions()  # nobody has typed that folder


def test_all_points_of_a_long_curve_are_shown(tmp_path):
    writer = EventWriter(tmp_path, 200, pytest.fail)
    for step in range(1500):
        writer.write_scalars("train", step, {"long": step})
    assert [step for step, _ in Server(tmp_path).points("train", "long")] == list(range(1500))
