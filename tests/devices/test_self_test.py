"""The probe of the devices: what it finds, and what becomes of a process that fails."""

import itertools
import os
import sys

import numpy as np
import pytest
import tensorflow as tf

from towers.builder import collectives
from towers.devices import self_test

pytestmark = pytest.mark.unit

CPUS = ["/cpu:0", "/cpu:1"]


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Return `child(code)`, which lets the process run that code when it imports TensorFlow."""

    def fake(code):
        (tmp_path / "tensorflow.py").write_text("import os, sys, time\n" + code)

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return fake


@pytest.mark.process
def test_devices_of_this_machine(tmp_path, monkeypatch, capfd):
    """From another folder, which holds modules of the same names as those that are needed."""
    for name in ("towers.py", "numpy.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    if sys.version_info >= (3, 11):
        monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = self_test.run_probe([*CPUS, "/gpu:7"])
    assert list(found["devices"]) == [*CPUS, "/gpu:7"]
    for device in CPUS:
        result = found["devices"][device]
        assert result["errors"] == []
        assert result["gflops"].keys() == {"matmul", "convolution"}
        assert all(gflops > 0.1 for gflops in result["gflops"].values())
    assert found["build"] == dict(tf.sysconfig.get_build_info())
    assert capfd.readouterr() == ("", "")

    # What is wrong with one device hides nothing of the others.
    wrong = found["devices"]["/gpu:7"]
    assert [error.split(":")[0] for error in wrong["errors"]] == ["matmul", "convolution"]
    pairs = list(itertools.permutations([*CPUS, "/gpu:7"], 2))
    assert list(found["copies"]) == [f"{source} to {target}" for source, target in pairs]
    for pair, error in found["copies"].items():
        assert ("GPU:7" in error and "\n" not in error) if "gpu" in pair else error is None


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("print('CUDA is lost', file=sys.stderr, flush=True); os.abort()",
         "was ended by SIGABRT: CUDA is lost"),
        ("os.abort()", "was ended by SIGABRT: without a word"),
        ("os.write(2, b'worse\\nI0000 00:00 port.cc\\n\\n'); os._exit(3)",
         "ended with code 3: worse"),
        ("os.write(2, b'F0000 no memory\\n*** Check failure stack: ***\\n  @  0x7f main\\n')\n"
         "os.abort()", "was ended by SIGABRT: F0000 no memory"),
        ("raise ImportError('libcudart.so')", "ended with code 1: ImportError: libcudart.so"),
    ],
)  # fmt: skip
def test_a_process_that_fails_is_one_line(child, code, end):
    child(code)
    assert self_test.run_probe(["/gpu:0"]) == end


@pytest.mark.process
def test_a_process_that_hangs_is_ended(child, tmp_path):
    pid, words = tmp_path / "pid", "print('waiting for the GPU', file=sys.stderr, flush=True)"
    child(f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n{words}\ntime.sleep(600)")
    found = self_test.run_probe(["/gpu:0"], timeout_seconds=3)
    assert found == "gave no answer within 3 s: waiting for the GPU"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_wrong_result_is_told_and_does_not_hide_the_other(monkeypatch):
    monkeypatch.setattr(self_test, "TIMED_SECONDS", 1e-9)
    matmul, conv2d = tf.matmul, tf.nn.conv2d
    for factor, off in (1.02, "0.02"), (float("nan"), "nan"):
        monkeypatch.setattr(tf, "matmul", lambda a, b, factor=factor: matmul(a, b) * factor)
        result = self_test.probe_device("/cpu:0")
        assert result["errors"] == [f"matmul: the result is off by {off} of its largest value"]
        assert result["gflops"].keys() == {"convolution"}
    monkeypatch.setattr(tf.nn, "conv2d", lambda x, k, *rest: conv2d(x, k[:, ::-1], *rest))
    _, error = self_test.probe_device("/cpu:0")["errors"]
    assert error.startswith("convolution: the result is off")


def test_a_single_wrong_bit_of_a_copy(monkeypatch):
    right, number = tf.identity, []

    def identity(value):
        number.append(value)
        words = right(value).numpy()
        words.view(np.uint32)[17] ^= len(number) == 2
        return tf.constant(words)

    assert self_test.probe_copy("/cpu:0", "/cpu:1") is None
    monkeypatch.setattr(tf, "identity", identity)
    error = self_test.probe_copy("/cpu:0", "/cpu:1")
    assert error == f"1 of {self_test.COPY_BYTES // 4} words arrived wrong"


@pytest.mark.graph
def test_a_wrong_sum_names_the_device_and_a_failure_ends_the_sums(monkeypatch):
    right = collectives.all_sum

    def wrong(values, devices):
        first, (last,) = right(values, devices)
        if last.dtype == tf.float16:
            lines = "Graph execution error:", "no kernel of that type", "\t [[{{node sum}}]]"
            raise ValueError("\n".join(lines))
        return [first, [last + tf.cast(last.dtype == tf.float64, last.dtype)]]

    monkeypatch.setattr(collectives, "all_sum", wrong)
    assert self_test.all_sum(["/cpu:1", "/cpu:2"]) == {
        "float32": None, "float64": "a wrong sum on /cpu:2", "float16": "no kernel of that type"
    }  # fmt: skip


@pytest.mark.process
def test_an_all_sum_in_a_process_of_its_own():
    found = self_test.run_all_sum([*CPUS, "/cpu:2"])
    assert found == dict.fromkeys(self_test.SUM_TYPES)


def test_only_the_gpus_that_are_asked_for_are_seen(monkeypatch):
    """The others may be full: even to start on them may abort."""
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(4)]
    seen = {}
    monkeypatch.setattr(tf.config, "set_soft_device_placement", lambda on: seen.update(soft=on))
    monkeypatch.setattr(
        tf.config, "set_visible_devices", lambda found, kind: seen.update({kind: found})
    )
    monkeypatch.setattr(
        tf.config, "set_logical_device_configuration", lambda _, parts: seen.update(cpus=len(parts))
    )
    asked = ["/cpu:0", "/cpu:2", "/gpu:3", "/gpu:1", "/gpu:9"]
    names = self_test._make_visible(asked, gpus)
    assert seen == {"soft": False, "GPU": [gpus[1], gpus[3]], "cpus": 3}
    found = ["/cpu:0", "/cpu:2", "/gpu:1", "/gpu:0", "/gpu:9"]
    assert names == dict(zip(asked, found, strict=True))
