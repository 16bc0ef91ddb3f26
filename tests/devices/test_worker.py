"""`towers worker` as a process, asked as programs ask it: by TensorFlow's own file operations."""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tensorflow as tf

from tests.workers import ROOT, Worker, environment, started
from towers.devices import board, worker
from towers.devices.board import Claim, Lease, Offer
from towers.errors import InputError, RunError
from towers.options.gpu import GpuOptions

PATIENCE_SECONDS = 20.0
END_SECONDS = 2.0


@pytest.fixture(scope="module")
def lent():
    """A worker for all tests that leave it as it was."""
    with started(1) as (found,):
        yield found


@contextlib.contextmanager
def on(address):
    """Let a session run what the block makes on a worker."""
    with tf.Graph().as_default(), tf.device("/job:worker/task:0/cpu:0"):
        session = tf.compat.v1.Session(f"grpc://{address}")
        with session.as_default():
            yield session
        with contextlib.suppress(tf.errors.OpError):  # who released it may find it gone
            session.close()


def read(address, file, kind):
    with on(address) as session:
        return board.from_text(kind, session.run(tf.io.read_file(file)))


def write(address, claim):
    with on(address) as session:
        session.run(tf.io.write_file(board.claim_file(claim.id), board.to_text(claim)))


def wait_for(question, seconds=PATIENCE_SECONDS):
    """Wait until a question has a true answer, and return that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := question():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"{seconds} s are over")


def lease(address):
    return read(address, board.LEASE, Lease).id


def listens(host, port):
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), timeout=0.5).close()
        return True
    return False


def test_it_says_what_it_has(lent):
    offer = read(lent.address, board.OFFER, Offer)
    assert offer.address == lent.address and offer.tensorflow == tf.__version__
    assert offer.kind == "cpu" and [device.name for device in offer.devices] == ["/cpu:0"]
    assert offer.num_cpu_devices >= 16 and offer.pid == lent.process.pid
    assert offer.folder == str(ROOT)
    with on(lent.address) as session, tf.device(f"/cpu:{offer.num_cpu_devices - 1}"):
        assert session.run(tf.add(1, 2)) == 3
    text = "\n".join(lent.lines)
    assert lent.address in text and tf.__version__ in text and "close it to all but" in text
    assert lent.errors() == ""


def test_a_program_has_it_alone_and_then_all_is_free_again(lent):
    first, second = Claim("z", "node1", 11, "anna"), Claim("a", "node2", 12, "bert")
    write(lent.address, first)
    assert "anna's program on node1 (pid 11)" in lent.read_until("taken")
    write(lent.address, second)
    time.sleep(0.3)
    assert lease(lent.address) == "z"
    write(lent.address, Claim("z", released=True))
    lent.read_until("over")
    start = time.monotonic()
    lent.read_until("free")
    assert time.monotonic() - start < PATIENCE_SECONDS
    assert lease(lent.address) == ""
    with on(lent.address) as session, pytest.raises(tf.errors.NotFoundError):
        session.run(tf.io.read_file(board.claim_file("a")))


def test_a_program_that_is_silent_loses_it_and_one_that_speaks_does_not(lent):
    claim = Claim("c", "node1", 1, "anna", timeout_seconds=1.0)
    start = time.monotonic()
    while time.monotonic() - start < 2.5:
        write(lent.address, claim)
        time.sleep(0.2)
    assert lease(lent.address) == "c"
    lent.read_until("taken")
    assert "no word" in lent.read_until("over")
    lent.read_until("free")
    assert lease(lent.address) == ""


def test_a_program_that_cannot_speak_but_whose_server_answers_keeps_it_for_a_while(tmp_path):
    now, claim = 0.0, Claim("mine", timeout_seconds=10.0)
    claims = worker.Claims(tmp_path, clock=lambda: now)
    with started(1) as (server,):  # which answers in the place of the program's
        claim = dataclasses.replace(claim, address=server.address)
        (tmp_path / board.claim_file("mine")).write_text(board.to_text(claim))
        for seconds in (0.0, 9.0, 11.0, 190.0):
            now = seconds
            assert claims.look() == "" and claims.lease.id == "mine"
        server.signal_all(signal.SIGSTOP)
        assert "no word" in claims.look()
        server.signal_all(signal.SIGCONT)
        wait_for(lambda: claims.look() == "")
        now = 201.0
        assert "no word" in claims.look()
    now = 11.0
    assert "no word" in claims.look()


PROGRAM_WITH_THE_LOCK = """
import ctypes, sys, time
import tensorflow as tf
from towers.devices import cluster
found = cluster.connect([sys.argv[1]], timeout_seconds=2.0)
with tf.device(found.devices[0]):
    there = tf.Variable(7.0)
ctypes.PyDLL(None).sleep(7)  # no other thread of Python runs meanwhile
for _ in range(5):
    assert there.numpy() == 7.0 and not found.lost() and not found.workers[0].lost_because
    time.sleep(0.5)
found.close()
print("it is still there")
"""


def test_a_program_that_holds_pythons_lock_for_long_keeps_it(lent):
    command = [sys.executable, "-c", PROGRAM_WITH_THE_LOCK, lent.address]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert "it is still there" in done.stdout, done.stderr
    assert "released" in lent.read_until("over")
    lent.read_until("free")


def test_a_server_that_dies_is_replaced(lent):
    children = Path(f"/proc/{lent.process.pid}/task/{lent.process.pid}/children")
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    assert "SIGKILL" in lent.read_until("over")
    lent.read_until("free")
    assert lease(lent.address) == ""


def test_a_program_may_do_what_it_likes_with_the_board(lent):
    write(lent.address, Claim("b", "node1", 1, "anna"))
    lent.read_until("taken")
    (folder,) = Path(tempfile.gettempdir()).glob("towers-worker-*/claim.b")
    shutil.rmtree(folder.parent)
    assert "cannot be used any more" in lent.read_until("over")
    lent.read_until("free")
    assert lease(lent.address) == ""


def test_it_is_reached_at_its_address_alone(lent):
    port = lent.address.rpartition(":")[2]
    assert (
        listens("127.0.0.1", port) and not listens("127.0.0.2", port) and not listens("::1", port)
    )


BUSY = """
import sys, tensorflow as tf
tf.compat.v1.disable_eager_execution()
with tf.device("/job:worker/task:0/cpu:0"):
    loop = tf.while_loop(lambda i: i < 10**12, lambda i: i + 1, [tf.constant(0, tf.int64)])
print("busy", flush=True)
tf.compat.v1.Session("grpc://" + sys.argv[1]).run(loop)
"""


@pytest.mark.parametrize("number, code", [("TERM", 0), ("INT", 0), ("HUP", 0), ("KILL", -9)])
def test_a_signal_ends_it_at_once_though_a_program_uses_it(number, code):
    number = signal.Signals[f"SIG{number}"]
    with started(1) as (found,):
        host, _, port = found.address.partition(":")
        program = [sys.executable, "-c", BUSY, found.address]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as user:
            try:
                user.stdout.readline()
                time.sleep(0.5)
                start = time.monotonic()
                found.process.send_signal(number)
                assert found.process.wait(PATIENCE_SECONDS) == code
                wait_for(lambda: not listens(host, port), END_SECONDS)
                assert time.monotonic() - start < END_SECONDS
            finally:
                user.kill()
        if code == 0:
            assert found.errors() == f"towers: ended by {number.name}\n"


def test_what_a_killed_worker_left_is_cleared_up_and_not_what_another_uses(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with worker._folder() as used:
        left = tmp_path / "towers-worker-left"
        left.mkdir()
        for path in (used, left):
            os.utime(path, (0, 0))
        with worker._folder() as own:
            assert sorted(tmp_path.iterdir()) == sorted([used, own])
    assert list(tmp_path.iterdir()) == []


def test_every_address_is_served_if_that_is_asked_for():
    other = Worker("--any_address", address="0.0.0.0:0")
    try:
        port = other.ready().address.rpartition(":")[2]
        assert listens("127.0.0.1", port) and listens("127.0.0.2", port)
        assert any("every address" in line for line in other.lines)
    finally:
        other.close()


@pytest.mark.parametrize(
    "host, port, why",
    [
        ("0.0.0.0", 0, "every address of this machine"),
        ("::", 0, "every address of this machine"),
        ("192.0.2.1", 0, "no address of this machine"),
        ("nobody.invalid", 2222, "no machine is known by the name"),
    ],
)
def test_an_address_that_cannot_be_had_is_one_line(host, port, why):
    with pytest.raises(InputError, match=why) as error:
        worker.serve(host, port, GpuOptions())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("holder", ["127.0.0.1", "127.0.0.2", "::"])
def test_a_port_that_is_taken_is_one_line(holder):
    family = socket.AF_INET6 if ":" in holder else socket.AF_INET
    with socket.create_server((holder, 0), family=family, dualstack_ipv6=holder == "::") as taken:
        with pytest.raises(InputError, match="the port is taken"):
            worker.serve("127.0.0.1", taken.getsockname()[1], GpuOptions())


@pytest.mark.parametrize(("port", "attempts"), [(0, 3), (23456, 1)])
def test_a_port_that_was_free_and_is_taken_is_not_the_only_one(monkeypatch, port, attempts):
    tried = []

    def server(folder, address, *_):
        tried.append(address)
        raise RunError("the server does not start")

    monkeypatch.setattr(worker, "_server", server)
    with pytest.raises(RunError, match="does not start"):
        worker.serve("127.0.0.1", port, GpuOptions())
    assert len(set(tried)) == len(tried) == attempts


def test_faults_of_the_command_line_are_one_line_and_exit_code_2():
    def errors(*flags):
        done = subprocess.run(
            [sys.executable, "-m", "towers", "worker", *flags],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        return done.stderr

    assert "needs --address=HOST:PORT" in errors()
    assert "HOST:PORT is needed" in errors("--address=a:b:c")
    assert "takes no --batch_size" in errors("--address=127.0.0.1", "--batch_size=3")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "taken" in errors(f"--address=127.0.0.1:{taken.getsockname()[1]}")
    assert "there is no GPU 0" in errors("--address=127.0.0.1:0", "--visible_gpus=0")
