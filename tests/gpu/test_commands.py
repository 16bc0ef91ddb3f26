"""Commands in processes of their own: what they set before TensorFlow starts, and the driver."""

import json
import re
import sys

import pytest

from tests import programs

pytestmark = pytest.mark.process
DENSE = "--model=tests.tiny:dense --dataset=tests.tiny:images --augment=standardize --max_steps=2"
DRIVERS = {name: f"{sys.prefix}/lib/{name}" for name in ("driver", "old_driver", "none")}


def towers(*argv, driver="driver", **variables):
    """Return the exit code, standard output and standard error of a command."""
    variables |= {"LD_LIBRARY_PATH": DRIVERS[driver], "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = programs.python("-m", "towers", *map(str, argv), variables=variables)
    noise = "WARNING: All log messages", "I0000"  # of TensorFlow's CPU build
    err = [line for line in done.stderr.splitlines() if not line.startswith(noise)]
    return done.returncode, done.stdout, "\n".join(err)


def train(tmp_path, *flags, **variables):
    """Return what a run prints, which is to succeed, and the devices of its towers."""
    folder = f"--train_dir={tmp_path}/run"
    code, out, err = towers("train", folder, *DENSE.split(), *flags, **variables)
    assert code == 0, err
    return out, json.loads((tmp_path / "run/result.json").read_text())["devices"]


@pytest.mark.parametrize(
    "flags, variables, devices, row",
    [
        ("--visible_gpus=1", {}, ["/gpu:0"], "0  /gpu:0  00000000:02:00.0       1  "),
        ("--visible_gpus=none", {}, ["/cpu:0"], "0  /cpu:0  "),
        ("", {"CUDA_VISIBLE_DEVICES": "1"}, ["/gpu:0"], "0  /gpu:0  00000000:02:00.0       1  "),
        ("", {"CUDA_VISIBLE_DEVICES": ""}, ["/cpu:0"], "0  /cpu:0  "),
        ("--devices=cpu --num_towers=2", {}, ["/cpu:0", "/cpu:1"], "1  /cpu:1  "),
    ],
)
def test_a_run_sees_the_gpus_that_it_is_told(flags, variables, devices, row, tmp_path):
    out, found = train(tmp_path, "--variables=cpu", *flags.split(), **variables)
    assert found == devices and f" {row}" in out


@pytest.mark.parametrize("names", [["/gpu:1"], ["/gpu:0", "/gpu:2"]])
def test_gpus_that_no_tower_stands_on_are_left_alone(names, tmp_path):
    flags = f"--devices={','.join(names)}", "--per_process_gpu_memory_fraction=0.4"
    out, found = train(tmp_path, *flags, "--log_device_placement", TOWERS_TEST_GPUS="3")
    header, *rows = (tmp_path / "run/placement.tsv").read_text().splitlines()
    assert found == names and header.endswith("\tdevice")
    assert {row.split("\t")[-1] for row in rows} - {"-"} == {"/cpu:0", *names}
    assert {*re.findall(r"/gpu:\d", out)} == {*names}
    for name in names:
        assert f"memory      {name} 409 MiB, growth off\n" in out
        assert f"{name} -> GPU of host memory, GPU {name[5:]} of the driver" in out
    code, out, err = towers("evaluate", f"--train_dir={tmp_path}/run", TOWERS_TEST_GPUS="3")
    assert code == 0 and {*re.findall(r"/gpu:\d", out)} == {*names}, err


def test_too_little_memory_is_one_line(tmp_path):
    flags = "--model_args=width=20000", "--gpu_memory_limit_mib=50", "--variables=replicated"
    code, _, err = towers("train", f"--train_dir={tmp_path}/run", *DENSE.split(), *flags)
    assert code == 1 and len(err.splitlines()) == 1
    assert err.startswith("towers: out of memory: ") and "its limit is 50 MiB" in err


@pytest.mark.parametrize(
    "driver, says",
    [
        ("driver", "driver 555.42.02 has 0 (GPU of host memory)"),
        ("old_driver", "driver 555.42.02 has 0 (GPU of host memory)"),
        ("none", "no NVIDIA driver"),
    ],
)
def test_doctor_finds_the_gpus(driver, says):
    code, out, err = towers("doctor", driver=driver)
    assert code == 0, out + err
    assert says in out
    assert "computing on /gpu:0" in out and "computing on /gpu:1" in out
    assert "Traceback" not in err and "FAIL" not in out


@pytest.mark.parametrize("number", [1, 2])
def test_the_first_command_takes_all_gpus(number, tmp_path):
    flags = "--flagfile=configs/quickstart.cfg", "--dataset=tests.tiny:images"
    flags = *flags, "--augment=standardize", "--max_steps=1", f"--train_dir={tmp_path}/run"
    code, _, err = towers("train", *flags, TOWERS_TEST_GPUS=str(number))
    assert code == 0, err
    found = json.loads((tmp_path / "run/result.json").read_text())["devices"]
    assert found == ["/gpu:0", "/gpu:1"][:number]


def test_memory_options_of_a_run_are_read_back(tmp_path):
    out, _ = train(tmp_path, "--per_process_gpu_memory_fraction=0.25", "--variables=cpu")
    assert "/gpu:0 256 MiB, growth off" in out and "/gpu:1 256 MiB, growth off" in out


def test_more_memory_than_there_is_is_refused(tmp_path):
    flags = *DENSE.split(), "--gpu_memory_limit_mib=2000"
    code, _, err = towers("train", f"--train_dir={tmp_path}/run", *flags)
    assert code == 2 and len(err.splitlines()) == 1
    assert "has 1024 of 1024 MiB free, 2000 are needed" in err
