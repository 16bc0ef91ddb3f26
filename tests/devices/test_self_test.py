"""The probe of the devices: what it finds, and what becomes of a process that fails."""

import os

import numpy as np
import pytest
import tensorflow as tf

from towers.devices import self_test

pytestmark = pytest.mark.unit


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Return `child(code)`, which lets the process run that code when it imports TensorFlow."""

    def fake(code):
        (tmp_path / "tensorflow.py").write_text("import os, sys, time\n" + code)

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return fake


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("print('CUDA is lost', file=sys.stderr, flush=True); os.abort()",
         "was ended by SIGABRT: CUDA is lost"),
        ("os.write(2, b'F0000 no memory\\n*** Check failure stack: ***\\n  @  0x7f main\\n')\n"
         "os.abort()", "was ended by SIGABRT: F0000 no memory"),
        ("raise ImportError('libcudart.so')", "ended with code 1: ImportError: libcudart.so"),
    ],
)  # fmt: skip
def test_a_process_that_fails_is_one_line(child, code, end):
    child(code)
    assert self_test.run_probe(["/gpu:0"]) == end


@pytest.mark.process
def test_a_process_that_hangs_is_ended(child, tmp_path, monkeypatch):
    monkeypatch.setattr(self_test, "TIMEOUT_SECONDS", 3)
    pid, words = tmp_path / "pid", "print('waiting for the GPU', file=sys.stderr, flush=True)"
    child(f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n{words}\ntime.sleep(600)")
    found = self_test.run_probe(["/gpu:0"])
    assert found == "did not answer within 3 s: waiting for the GPU"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_wrong_product_and_a_wrong_bit_are_told_and_hide_no_other_device(monkeypatch):
    names = {f"/gpu:{i}": f"/cpu:{i}" for i in range(3)}
    assert self_test.find_errors(names) == dict.fromkeys(names)
    right, identity, calls = tf.matmul, tf.identity, []

    def matmul(a, b):
        calls.append(a)
        return right(a, b) * (float("nan") if len(calls) == 1 else 1.0)

    def copied(value):
        words = identity(value).numpy()
        words.view(np.uint32).flat[17] ^= len(calls) == 1
        return tf.constant(words)

    monkeypatch.setattr(tf, "matmul", matmul)
    monkeypatch.setattr(tf, "identity", copied)
    first, second, third = self_test.find_errors(names).values()
    assert "off by nan" in first and "1 of 1048576 copied numbers" in second and third is None


@pytest.mark.parametrize(
    "owner, name, kernel",
    [
        (tf, "multiply", "a multiplication"), (tf, "cast", "a cast"),
        (tf, "reduce_sum", "a reduction"),
        (tf.random, "stateless_uniform", "generation of random numbers"),
    ],
)  # fmt: skip
def test_each_kind_of_kernel_is_tried_and_named(monkeypatch, owner, name, kernel):
    """A driver that is too old runs cuBLAS and refuses TensorFlow's own kernels."""
    right, faults = getattr(owner, name), ("fails: CUDA_ERROR_UNSUPPORTED_PTX", "is off by")
    names = {f"/gpu:{i}": f"/cpu:{i}" for i in range(1, 4)}
    for fault in faults:

        def faulty(*args, fault=fault, **kwargs):
            result = right(*args, **kwargs)
            if "CPU:2" in result.device and "fails" in fault:
                raise tf.errors.InternalError(None, None, fault.removeprefix("fails: "))
            return result * 0 + 1 if "CPU:2" in result.device else result

        monkeypatch.setattr(owner, name, faulty)
        first, second, third = self_test.find_errors(names).values()
        assert first is third is None and f"{kernel} {fault}" in second
