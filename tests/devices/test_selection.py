"""Which devices towers get. The process has four CPU devices; GPUs are made up."""

import functools
import os
import sys

import pytest
import tensorflow as tf

from tests import runs
from tests.fake_gpus import A100, LOST, SMALL, Card
from tests.programs import ROOT, python
from towers.builder import device_names
from towers.devices import selection
from towers.devices.gpus import read_back
from towers.devices.selection import Device, describe, report, tower_devices

pytestmark = pytest.mark.unit

CPUS = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
CPU = f"CPU, {os.cpu_count()} cores shared by all its devices"
CORES = len(os.sched_getaffinity(0))


refusal = functools.partial(runs.refusal, tower_devices)


def test_without_gpus():
    assert tower_devices() == ["/cpu:0"]
    for number in (1, 2, 3, 4):
        assert tower_devices(number) == tower_devices(number, "cpu") == CPUS[:number]
    assert tower_devices(devices="cpu") == ["/cpu:0"]
    assert tower_devices(devices="/cpu:2,/cpu:0") == ["/cpu:2", "/cpu:0"]
    assert describe() == [Device(0, "/cpu:0", CPU)]
    with device_names.cpus_for_gpus():  # which are others than the host
        assert tower_devices() == ["/cpu:1"]
        assert tower_devices(3) == tower_devices(3, "cpu") == CPUS[1:]


CASES = [(1, "", 0), (2, "", -(-CORES // 2)), (CORES + 1, "", 1)]
CASES += [(CORES + 1, "env", 0), (2, "5", 5)]
THREADS = f"""
import multiprocessing, os
import tensorflow as tf
from towers.options.run import Options
from towers.training.run.setup import tower_devices

def threads(num_towers, said, _):
    if said == "env":
        os.environ["TF_NUM_INTRAOP_THREADS"] = "7"
    elif said:
        tf.config.threading.set_intra_op_parallelism_threads(int(said))
    tower_devices(Options(num_towers=num_towers, devices="cpu"))
    tf.constant(0)
    return tf.config.threading.get_intra_op_parallelism_threads()

with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # a process each
    print(pool.starmap(threads, {CASES}, chunksize=1))
"""


@pytest.mark.process
def test_towers_on_cpus_have_their_share_of_the_cores_unless_threads_are_said():
    ran = python("-c", THREADS)
    assert ran.stdout.splitlines()[-1:] == [str([found for *_, found in CASES])], ran.stderr


@pytest.mark.parametrize("args", [(5,), (6, "cpu"), (9, ["CPU"])])
def test_too_late_for_more_cpus_towers_share_those_there_are(args, capsys):
    tf.constant(0)
    selection._print_once.cache_clear()
    assert tower_devices(*args) == (CPUS * 3)[: args[0]] == tower_devices(*args)
    (line,) = capsys.readouterr().err.splitlines()
    assert not line.startswith("towers: ")  # as errors do
    assert f"{args[0]} towers share /cpu:0, /cpu:1, /cpu:2, /cpu:3, because" in line
    assert f"call towers.devices.tower_devices({args[0]}) before the first model" in line


@pytest.mark.parametrize("number", [4, 1, 0])
def test_gpus_alone_are_asked_for_where_there_is_none(install, number):
    message = refusal(number, "gpu")
    assert message.startswith(f"--num_gpus={number}, but" if number else "TensorFlow sees 0 GPUs")
    assert f"type --devices=cpu --num_towers={number or 1}" in message
    install(A100, A100)
    assert tower_devices(min(number, 2), "gpu") == ["/gpu:0", "/gpu:1"][: number or 2]


@pytest.mark.parametrize(
    "args, devices",
    [
        ((), [0, 1, 2]), ((1,), [0]), ((0, "/GPU:0,/device:GPU:2"), [0, 2]),
        ((2, "device:gpu:00, Gpu:2 "), [0, 2]), ((0, ("GPU:0", "/device:GPU:2")), [0, 2]),
        ((0, "/gpu:1,/gpu:0"), [1, 0]), ((0, "/gpu:0,/cpu:1"), [0, "/cpu:1"]),
        ((0, "CPU"), CPUS[:1]), ((3, " cpu "), CPUS[:3]), ((0, ["cpu"]), CPUS[:1]),
    ],
)  # fmt: skip
def test_all_gpus_or_the_first_or_those_named_in_any_spelling(install, args, devices):
    install(A100, A100, A100)
    names = [f"/gpu:{device}" if isinstance(device, int) else device for device in devices]
    assert tower_devices(*args) == names


@pytest.mark.parametrize("number", [0, 4])
@pytest.mark.parametrize(
    "cards, value, sees, says, remedy",
    [
        ([A100, A100], None, "2 GPUs (/gpu:0, /gpu:1)", "1 (NVIDIA A100)", "at most 2"),
        ([A100, SMALL], None, "1 GPU (/gpu:0)", "1 (NVIDIA T400)", "and-cuda"),
        ([A100, A100], "1", "1 GPU (/gpu:0)", "CUDA_VISIBLE_DEVICES=1", "at most 1"),
        ([LOST], None, "0 GPUs", "0 (unreadable)", "and-cuda"),
        ([A100], "7", "0 GPUs", "CUDA_VISIBLE_DEVICES=7", ""),
    ],
)
def test_more_towers_than_gpus_are_refused_never_reduced(
    install, monkeypatch, number, cards, value, sees, says, remedy
):
    """Nor does a run that sees none of the driver's GPUs go to the CPU in silence."""
    install(*cards)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    if number or sees == "0 GPUs":
        message = refusal(number)
        assert message.startswith(f"--num_towers={number}, but " if number else "TensorFlow sees")
        assert f"TensorFlow sees {sees}, the driver has 0" in message and says in message
        assert remedy in message and f"--devices=cpu --num_towers={number or 1}" in message
    else:
        assert len(tower_devices(number)) == int(sees[0])
    assert tower_devices(number, "cpu") == CPUS[: number or 1]


@pytest.mark.parametrize(
    "cards, value, devices, says",
    [
        ([], None, CPUS[:2], ""),
        ([A100], None, ["/gpu:0"], ""),
        ([Card(listed=False)], None, CPUS[:2], "and-cuda"),
        ([A100], "7", CPUS[:2], "CUDA_VISIBLE_DEVICES=7"),
    ],
)
def test_any_takes_all_gpus_or_two_cpus_with_a_line_if_there_is_a_driver(
    install, monkeypatch, capsys, cards, value, devices, says
):
    install(*cards, driver=bool(cards))
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert tower_devices(devices="any") == devices
    assert selection.most_towers("any") == (len(cards) if "gpu" in devices[0] else None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(says) and all(says in line and "2 CPU" in line for line in lines)
    if "gpu" in devices[0]:
        assert "ask for at most" in refusal(len(cards) + 1, "any")
    else:
        assert tower_devices(3, "any") == CPUS[:3]


def test_what_installs_cuda_is_this_environments_own_command_with_the_constraints(install):
    install(Card(listed=False))
    pip = f"{sys.executable} -m pip install -c {ROOT}/scripts/cuda-constraints.txt"
    assert refusal().endswith(f"{pip} 'tensorflow[and-cuda]>=2.18'")


@pytest.mark.parametrize("value", ["", "NoDevFiles", '"-1"'])
def test_gpus_that_are_hidden_on_purpose_are_not_missed(install, monkeypatch, value):
    install(Card(listed=False), Card(listed=False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert tower_devices() == ["/cpu:0"]
    assert tower_devices(2) == ["/cpu:0", "/cpu:1"]


def test_the_logical_parts_of_a_gpu_count_each(install):
    install(A100, A100).split(0, 1024, 1024, 1024)
    assert tower_devices() == ["/gpu:0", "/gpu:1", "/gpu:2", "/gpu:3"]
    assert tower_devices(devices="/gpu:3") == ["/gpu:3"]
    assert "TensorFlow sees 4 GPUs" in refusal(5)


@pytest.mark.parametrize(
    "number, devices, flag, remedy",
    [
        *((0, names, f"--devices={names}", "type names such as /gpu:0")
          for names in ("/gpu:0,,/gpu:1", "/tpu:0", "0,1", "cpu,/gpu:0", "/cpu:1000000")),
        (0, "/gpu:0,/gpu:3", "--devices=/gpu:0,/gpu:3: no /gpu:3", "--devices=/gpu:0"),
        (0, "/gpu:0,/device:GPU:0", "--devices=/gpu:0,/device:GPU:0", "each GPU takes one tower"),
        (1, "/gpu:0,/gpu:2", "--num_towers=1 and --devices=/gpu:0,/gpu:2", "leave out --num_t"),
        *((n, "", f"--num_towers={n!r}", "from 0 to 1000 is needed") for n in (-1, 1001, "2")),
        *((0, names, f"devices={names}", "one device for each tower") for names in ([], [0, 1])),
    ],
)  # fmt: skip
def test_names_are_of_devices_and_agree_with_the_number(install, number, devices, flag, remedy):
    install(A100, A100, A100)
    message = refusal(number, devices)
    assert message.startswith(flag) and remedy in message


def test_the_table(install):
    machine = install(SMALL, A100, Card(silent=frozenset(["nvmlDeviceGetMemoryInfo"])))
    machine.split(0, 1000, 2000)
    lines = report(["/cpu:0", *tower_devices()])
    assert lines[0] == "devices" and [line.split() for line in lines[2:6]] == [
        ["0", "/cpu:0", "-", "-", "-", "-", *CPU.split()],
        ["1", "/gpu:0", "00000000:25:00.0", "1", "40960", "40536", "NVIDIA", "A100"],
        ["2", "/gpu:1", "00000000:25:00.0", "1", "40960", "40536", "NVIDIA", "A100"],
        ["3", "/gpu:2", "00000000:35:00.0", "2", "-", "-", "NVIDIA", "A100"],
    ]
    assert lines[6] == "memory      /gpu:0 1000 MiB, growth off" and lines[6:] == read_back()
