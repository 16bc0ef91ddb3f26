"""`towers worker` as a process, asked as programs ask it: by TensorFlow's own file operations."""

import contextlib
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

from tests.programs import ROOT, python
from tests.runs import command, refusal
from tests.worker_processes import Worker, started
from towers.errors import RunError
from towers.options.gpu import GpuOptions
from towers.workers import rendezvous, server
from towers.workers.rendezvous import Reservation, WorkerInfo

pytestmark = pytest.mark.process

PATIENCE_SECONDS = 20.0
END_SECONDS = 10.0  # it takes one; a server that waited for its program would never end


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
        return rendezvous.from_text(kind, session.run(tf.io.read_file(file)))


def write(address, claim):
    with on(address) as session:
        file = rendezvous.reservation_file(claim.id)
        session.run(tf.io.write_file(file, rendezvous.to_text(claim)))


def wait_for(question, seconds=PATIENCE_SECONDS):
    """Wait until a question has a true answer, and return that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := question():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"{seconds} s are over")


def lease(address):
    return read(address, rendezvous.OWNER_FILE, Reservation).id


def over(worker):
    """Return why a lease is over, when the worker is free again."""
    why = worker.read_until("over")
    worker.read_until("free")
    assert lease(worker.address) == ""
    return why


def listens(host, port):
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), timeout=0.5).close()
        return True
    return False


def test_it_says_what_it_has(lent):
    offer = read(lent.address, rendezvous.INFO_FILE, WorkerInfo)
    assert offer.address == lent.address and offer.tensorflow == tf.__version__
    assert offer.kind == "cpu" and [device.name for device in offer.devices] == ["/cpu:0"]
    assert offer.num_cpu_devices >= 16 and offer.pid == lent.process.pid
    assert offer.folder == str(ROOT)
    with on(lent.address) as session, tf.device(f"/cpu:{offer.num_cpu_devices - 1}"):
        assert session.run(tf.add(1, 2)) == 3
    text = "\n".join(lent.lines)
    assert lent.address in text and tf.__version__ in text and "close it to all but" in text
    assert lent.errors() == ""
    port = lent.address.rpartition(":")[2]  # it is reached at its address alone
    assert [listens(host, port) for host in ("127.0.0.1", "127.0.0.2", "::1")] == [1, 0, 0]


def test_a_program_has_it_alone_and_then_all_is_free_again(lent):
    first, second = Reservation("z", "node1", 11, "anna"), Reservation("a", "node2", 12, "bert")
    write(lent.address, first)
    assert "anna's program on node1 (pid 11)" in lent.read_until("taken")
    write(lent.address, second)
    assert {lease(lent.address) for _ in range(9)} == {"z"}
    write(lent.address, Reservation("z", released=True))
    assert "released" in over(lent)
    with on(lent.address) as session, pytest.raises(tf.errors.NotFoundError):
        session.run(tf.io.read_file(rendezvous.reservation_file("a")))


def test_a_program_that_cannot_speak_but_whose_server_answers_keeps_it_for_a_while(lent, tmp_path):
    now = 0.0
    reservations = server.Reservations(tmp_path, clock=lambda: now)

    def speak(address):
        claim = Reservation("mine", timeout_seconds=10.0, address=address)
        (tmp_path / rendezvous.reservation_file("mine")).write_text(rendezvous.to_text(claim))

    speak(lent.address)  # which answers in the place of the program's server
    for seconds in (0.0, 9.0, 11.0, 190.0):
        now = seconds
        assert reservations.look() == "" and reservations.owner.id == "mine"
    lent.signal_all(signal.SIGSTOP)  # a thread of it may run for a moment more
    try:
        wait_for(lambda: "no word" in reservations.look())
    finally:
        lent.signal_all(signal.SIGCONT)
    wait_for(lambda: reservations.look() == "")
    now = 201.0
    assert "no word" in reservations.look()
    with socket.create_server(("127.0.0.1", 0)) as ended:
        speak(f"127.0.0.1:{ended.getsockname()[1]}")
    assert reservations.look() == ""
    now = 212.0
    assert "no word" in reservations.look()


PROGRAM_WITH_THE_LOCK = """
import ctypes, sys, time
import tensorflow as tf
from towers.workers import cluster
found = cluster.connect([sys.argv[1]], timeout_seconds=2.0)
with tf.device(found.devices[0]):
    there = tf.Variable(7.0)
ctypes.PyDLL(None).sleep(5)  # no other thread of Python runs meanwhile
for _ in range(4):
    assert there.numpy() == 7.0 and not found.find_lost() and not found.workers[0].problem
    time.sleep(0.5)
found.close()
print("it is still there")
"""


@pytest.mark.extended
def test_a_program_that_holds_pythons_lock_for_long_keeps_it(lent):
    none = {"CUDA_VISIBLE_DEVICES": ""}
    done = python("-c", PROGRAM_WITH_THE_LOCK, lent.address, variables=none)
    assert "it is still there" in done.stdout, done.stderr
    assert "released" in over(lent)


def test_a_server_that_dies_is_replaced_and_so_is_one_without_its_board(lent):
    children = Path(f"/proc/{lent.process.pid}/task/{lent.process.pid}/children")
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    assert "SIGKILL" in over(lent)
    name = f"b{os.getpid()}"
    write(lent.address, Reservation(name, "node1", 1, "anna"))
    lent.read_until("taken")
    (folder,) = Path(tempfile.gettempdir()).glob(f"towers-worker-*/claim.{name}")
    shutil.rmtree(folder.parent)  # a program may do there what it likes
    assert "cannot be used any more" in over(lent)


@pytest.mark.unit
def test_what_a_killed_worker_left_is_cleared_up_and_not_what_another_uses(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with server._folder() as used:
        left = tmp_path / "towers-worker-left"
        left.mkdir()
        for path in (used, left):
            os.utime(path, (0, 0))
        with server._folder() as own:
            assert sorted(tmp_path.iterdir()) == sorted([used, own])
    assert list(tmp_path.iterdir()) == []


def test_every_address_is_served_if_that_is_asked_for():
    with contextlib.closing(Worker("--any_address", address="0.0.0.0:0")) as other:
        port = other.ready().address.rpartition(":")[2]
        assert listens("127.0.0.1", port) and listens("127.0.0.2", port)
        assert any("every address" in line for line in other.lines)


@pytest.mark.unit
def test_an_address_that_cannot_be_had_is_one_line():
    for host, why in {
        "0.0.0.0": "every address of this machine",
        "::": "every address of this machine",
        "192.0.2.1": "no address of this machine",
    }.items():
        assert why in refusal(server.serve, host, 0, GpuOptions())
    for holder in "127.0.0.2", "::":
        family, both = socket.AF_INET6 if ":" in holder else socket.AF_INET, holder == "::"
        with socket.create_server((holder, 0), family=family, dualstack_ipv6=both) as taken:
            given = "127.0.0.1", taken.getsockname()[1], GpuOptions()
            assert "the port is taken" in refusal(server.serve, *given)


@pytest.mark.unit
@pytest.mark.parametrize(("port", "attempts"), [(0, 3), (23456, 1)])
def test_a_port_that_was_free_and_is_taken_is_not_the_only_one(monkeypatch, port, attempts):
    tried = []

    def fails(folder, address, *_):
        tried.append(address)
        raise RunError("the server does not start")

    monkeypatch.setattr(server, "_server", fails)
    with pytest.raises(RunError, match="does not start"):
        server.serve("127.0.0.1", port, GpuOptions())
    assert len(set(tried)) == len(tried) == attempts


def test_faults_of_the_command_line_are_one_line_and_exit_code_2(capsys):
    for flags, says in {
        "": "needs --address=HOST:PORT",
        "--address=a:b:c": "HOST:PORT is needed",
        "--address=127.0.0.1 --batch_size=3": "takes no --batch_size",
        "--address=nobody.invalid:2222": "no machine is known",
    }.items():
        code, out, err = command(capsys, "worker", *flags.split())
        assert (code, out, err.count("\n")) == (2, "", 1) and says in err


def test_a_fault_that_the_server_finds_is_one_line_and_exit_code_2():
    flags = "worker", "--address=127.0.0.1:0", "--visible_gpus=0"
    done = python("-m", "towers", *flags, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "there is no GPU 0" in done.stderr


BUSY = """
import sys, tensorflow as tf
tf.compat.v1.disable_eager_execution()
with tf.device("/job:worker/task:0/cpu:0"):
    loop = tf.while_loop(lambda i: i < 10**12, lambda i: i + 1, [tf.constant(0, tf.int64)])
print("busy", flush=True)
tf.compat.v1.Session("grpc://" + sys.argv[1]).run(loop)
"""


@pytest.mark.parametrize(
    "number, code",
    [
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.extended),
        *(pytest.param(n, 0, marks=pytest.mark.extended) for n in (signal.SIGINT, signal.SIGHUP)),
        (signal.SIGTERM, 0),
    ],
)
def test_a_signal_ends_it_at_once_though_a_program_uses_it(lent, number, code):
    """The last signal ends the one that all other tests have used."""
    last = number == signal.SIGTERM
    with contextlib.nullcontext([lent]) if last else started(1) as (found,):
        host, _, port = found.address.partition(":")
        program = [sys.executable, "-c", BUSY, found.address]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as user:
            try:
                user.stdout.readline()
                time.sleep(0.5)  # so that it computes
                found.process.send_signal(number)
                assert found.process.wait(END_SECONDS) == code
                wait_for(lambda: not listens(host, port), END_SECONDS)
            finally:
                user.kill()
        if code == 0:
            assert found.errors().endswith(f"towers: ended by {number.name}\n")
