"""`towers doctor`: what it says of this machine, and of machines that are made up."""

import ast
import dataclasses
import email.message
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from towers.commands.doctor import gpus as doctor_gpus
from towers.commands.doctor import versions as doctor_versions
from towers.commands.doctor.command import (
    Check,
    check_data,
    check_environment,
    check_train_dir,
    doctor,
)
from towers.commands.doctor.versions import check_version, check_versions, declared, is_allowed
from towers.devices import nvml, probe
from towers.devices.nvml import MIB, DriverGpu, Process
from towers.options.run import Options

ROOT = Path(__file__).resolve().parents[2]
A100, K80 = ("NVIDIA A100", (8, 0)), ("Tesla K80", (3, 7))
BUILD = {
    "is_cuda_build": True,
    "cuda_version": "12.5.1",
    "cudnn_version": "9",
    "cuda_compute_capabilities": ["sm_60", "compute_90"],
}


def gpu(index, kind=A100, free=39_000, processes=()):
    """Return one GPU of 40,000 MiB, of which `free` are free."""
    return DriverGpu(
        index, f"GPU-{index}{index}", None, *kind, 40_000 * MIB, free * MIB, tuple(processes)
    )


def device(errors=(), matmul=100.0):
    return {"errors": list(errors), "gflops": {"matmul": matmul} if matmul else {}}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No variable of this machine counts."""
    for name in list(os.environ):
        if name.startswith(("TF_CONFIG", "TF_MIN", "CUDA_")):
            monkeypatch.delenv(name)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return `make(driver, gpus)`, which examines such a machine: {name of a check: check}."""

    def make(driver, gpus, results=None, copies=None, build=BUILD, start=None, **options):
        """`gpus`: TensorFlow's; `results`: {device: what its probe gives}; `start`: a failure."""
        calls = []

        def run_probe(devices, environ):
            calls.append((devices, environ))
            if start and not devices:
                return start
            if isinstance(results, str) and devices:
                return results
            return {
                "gpus": [[name, list(capability)] for name, capability in gpus],
                "build": build,
                "devices": {d: (results or {}).get(d, device()) for d in devices},
                "copies": copies or {},
            }

        monkeypatch.setattr(nvml, "gpus", lambda: driver)
        monkeypatch.setattr(nvml, "driver_version", lambda: driver and "550.54" or None)
        monkeypatch.setattr(probe, "run_probe", run_probe)
        lines = []
        checks = doctor(Options(train_dir=str(tmp_path / "run"), **options), lines.append)
        make.lines, make.probed, make.environ = lines, calls[-1][0], calls[-1][1]
        return {check.name: check for check in checks}

    return make


def problems(checks):
    return [name for name, check in checks.items() if check.status == "problem"]


# ---------------------------------------------------------------------------- This machine


def test_this_machine_has_no_problem(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    lines = []
    checks = doctor(Options(train_dir="runs/new"), lines.append)
    assert [check for check in checks if check.status == "problem"] == []
    assert lines[-1].startswith(f"{len(checks)} checks: all ok")
    assert {"Python", "tensorflow", "keras", "train_dir", "GPUs", "computing on /cpu:0"} <= {
        check.name for check in checks
    }
    assert json.loads(json.dumps([dataclasses.asdict(check) for check in checks]))[0].keys() == {
        "name",
        "status",
        "detail",
        "remedy",
    }
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


def test_no_tensorflow_is_needed_to_examine_it():
    heavy = "{'tensorflow', 'numpy'} & set(sys.modules)"
    code = f"import sys, towers.commands.doctor.command; sys.exit({heavy} != set())"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_without_a_gpu_two_logical_cpus_are_probed(machine):
    checks = machine([], [])
    assert checks["GPUs"] == Check(
        "GPUs", "ok", "no GPU and no NVIDIA driver here: towers run on the CPU"
    )
    assert machine.probed == ["/cpu:0", "/cpu:1"]
    assert not problems(checks) and "CUDA" not in checks


def test_each_check_is_said_as_soon_as_it_is_known(monkeypatch):
    lines = []
    monkeypatch.setattr(nvml, "gpus", lambda: [])

    def run_probe(devices, environ):
        assert any("train_dir" in line for line in lines)
        return "was ended by SIGABRT: lost"

    monkeypatch.setattr(probe, "run_probe", run_probe)
    checks = doctor(Options(), lines.append)
    assert any("was ended by SIGABRT: lost" in line for line in lines)
    assert lines[-1] == f"1 problem of {len(checks)} checks"
    remedies = [line.split("-> ")[1] for line in lines if "-> " in line]
    assert remedies == [check.remedy for check in checks if check.remedy]


# ---------------------------------------------------------------------------- GPUs


def test_several_gpus(machine):
    checks = machine(
        [gpu(0), gpu(1)],
        [A100, A100],
        {"/gpu:0": device(matmul=9000.0)},
        {"/gpu:0 to /gpu:1": None, "/gpu:1 to /gpu:0": None},
    )
    assert machine.probed == ["/cpu:0", "/gpu:0", "/gpu:1"]
    assert machine.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not {"GPUs", "memory of GPU 0", "computing on /gpu:0", "copies"} & {*problems(checks)}
    assert checks["GPUs"].detail == (
        "the driver (550.54) has 0 (NVIDIA A100), 1 (NVIDIA A100); TensorFlow lists 2"
    )
    assert checks["computing on /gpu:0"].detail == "matmul 9000 GFLOP/s (90.0 x CPU)"
    assert checks["computing on /cpu:0"].detail == "matmul 100 GFLOP/s"
    assert checks["copies"].detail == "2 pairs of devices, bit for bit"
    assert checks["memory of GPU 1"].detail == "39000 of 40000 MiB free"


def test_a_full_gpu_names_who_holds_it_and_is_not_probed(machine):
    holder = Process(17, "python", 39_500 * MIB)
    driver = [gpu(0), gpu(1, free=500, processes=[holder]), gpu(2)]
    checks = machine(driver, [A100] * 3)
    full = checks["memory of GPU 1"]
    assert full.status == "problem"
    assert full.detail == ("full: 500 of 40000 MiB free; held by python (pid 17, 39500 MiB)")
    assert full.remedy == "type --visible_gpus=0,2, or end what holds it"
    assert checks["memory of GPU 0"].status == "ok"
    assert machine.probed == ["/cpu:0", "/gpu:0", "/gpu:2"]

    checks = machine(driver, [A100] * 2, visible_gpus="0,2")  # what it said to type
    assert "memory of GPU 1" not in checks
    assert machine.environ["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert checks["GPUs"].status == "ok"


def test_where_all_gpus_are_full(machine):
    checks = machine([gpu(0, free=0)], [A100])
    assert checks["memory of GPU 0"].remedy == "type --devices=cpu, or end what holds it"
    assert machine.probed == ["/cpu:0"]


def test_memory_that_the_driver_does_not_tell(machine):
    assert machine([DriverGpu(0)], [A100])["memory of GPU 0"].status == "note"


def test_a_gpu_that_tensorflow_skips(machine):
    checks = machine([gpu(0), gpu(1, K80)], [A100])
    assert checks["GPUs"].status == "problem"
    assert "leaves out 1 (Tesla K80): GPU 1 (Tesla K80) has compute capability 3.7" in (
        checks["GPUs"].detail
    )
    assert "--visible_gpus" in checks["GPUs"].remedy
    assert machine.probed == ["/cpu:0", "/gpu:0"]


def test_a_driver_without_gpus_in_tensorflow(machine):
    checks = machine([gpu(0)], [])
    assert {"GPUs", "CUDA", "cuDNN"} <= {*problems(checks)}
    assert "CUDA 12.5.1 or cuDNN 9 is not found" in checks["GPUs"].detail
    assert checks["GPUs"].remedy == doctor_versions.INSTALL
    assert machine.probed == ["/cpu:0", "/cpu:1"]

    checks = machine([gpu(0)], [], build={"is_cuda_build": False})
    assert problems(checks) == ["GPUs", "CUDA"]
    assert checks["CUDA"].detail == "this TensorFlow was built without CUDA"


@pytest.mark.parametrize("value", ["", "-1", " -1,0", "'-1'"])
def test_gpus_that_are_hidden_on_purpose(machine, monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    checks = machine([gpu(0)], [])
    assert checks["GPUs"].status == "ok" and "CUDA_VISIBLE_DEVICES=" in checks["GPUs"].detail
    assert not {"CUDA", "memory of GPU 0"} & {*checks}


def test_some_hidden_gpus(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    checks = machine([gpu(0, free=0), gpu(1)], [A100])
    assert checks["GPUs"].status == "ok"
    assert checks["GPUs"].detail.endswith("CUDA_VISIBLE_DEVICES=1 hides the rest")
    assert "memory of GPU 0" not in checks and machine.probed == ["/cpu:0", "/gpu:0"]


@pytest.mark.parametrize(("value", "seen"), [("7", 0), ("0,7", 1), ("cuda:0", 0), ("0,0", 1)])
def test_gpus_that_are_hidden_by_a_mistake(machine, monkeypatch, value, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    check = machine([gpu(0), gpu(1)], [A100] * seen)["GPUs"]
    assert check.status == "problem"
    assert f"CUDA_VISIBLE_DEVICES={value}" in check.detail
    assert "export CUDA_VISIBLE_DEVICES=0,1" in check.remedy


def test_gpus_without_nvml(machine):
    checks = machine([], [A100], build={"is_rocm_build": True})
    check = checks["GPUs"]
    assert not problems(checks)
    assert (check.status, check.detail) == (
        "note",
        "TensorFlow lists 1, the driver (NVML) none",
    )


def test_a_gpu_that_is_asked_for_and_not_there(machine):
    checks = machine([gpu(0)], [A100], visible_gpus="3")
    assert checks["visible_gpus"].status == "problem"
    assert "there is no GPU 3" in checks["visible_gpus"].detail
    assert checks["computing on /gpu:0"].status == "ok"


def test_the_environment_of_this_process_is_left_alone(machine):
    before = dict(os.environ)
    machine([gpu(0), gpu(1)], [A100], visible_gpus="1")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("pip", "system", "listed", "status", "found"),
    [
        ("12.5.82", "", False, "ok", "12.5.82"),
        ("13.0.1", "", False, "problem", "13.0.1"),
        (None, "libcudart.so.12", False, "ok", "12"),
        (None, "libcudart.so.11.0", False, "problem", "11.0"),
        (None, "", False, "problem", "none by pip or ldconfig"),
        (None, "", True, "note", "none by pip or ldconfig"),
    ],
)
def test_cuda_libraries(monkeypatch, pip, system, listed, status, found):
    def version(package):
        if pip is None:
            raise importlib.metadata.PackageNotFoundError
        return pip

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: system)
    check = next(doctor_gpus.check_libraries(BUILD, listed))
    assert (check.name, check.status) == ("CUDA", status)
    assert check.detail == f"built for 12.5.1, found {found}"
    assert bool(check.remedy) == (status == "problem")


# ---------------------------------------------------------------------------- Computing


def test_a_wrong_result_on_one_device(machine):
    wrong = device(["matmul: the result is off by 0.5 of its largest value"], matmul=None)
    checks = machine([gpu(0), gpu(1)], [A100] * 2, {"/gpu:1": wrong})
    assert checks["computing on /gpu:0"].status == "ok"
    assert checks["computing on /gpu:1"].status == "problem"
    assert checks["computing on /gpu:1"].detail.startswith("matmul: the result is off by 0.5")
    assert "--visible_gpus" in checks["computing on /gpu:1"].remedy


def test_a_cpu_without_a_result_is_compared_with_nothing(machine):
    failed = device(["the probe was ended by SIGILL: without a word"], matmul=None)
    checks = machine([gpu(0)], [A100], {"/cpu:0": failed})
    assert checks["computing on /gpu:0"].detail == "matmul 100 GFLOP/s"


def test_a_wrong_copy(machine):
    copies = {"/gpu:0 to /gpu:1": "3 of 9 words arrived wrong", "/gpu:1 to /gpu:0": None}
    check = machine([gpu(0), gpu(1)], [A100] * 2, copies=copies)["copies"]
    assert (check.status, check.detail) == (
        "problem",
        "/gpu:0 to /gpu:1: 3 of 9 words arrived wrong",
    )
    assert check.remedy


def test_a_probe_that_fails_is_one_problem(machine):
    checks = machine([gpu(0)], [A100], "gave no answer within 180 s: without a word")
    assert checks["computing"].status == "problem"
    assert checks["computing"].remedy.startswith(
        "type python -m towers.devices.probe /cpu:0 /gpu:0"
    )
    assert [name for name in checks if "computing" in name or name == "copies"] == ["computing"]


def test_tensorflow_that_does_not_start(machine):
    checks = machine([gpu(0, free=0)], [], start="was ended by SIGILL: without a word")
    assert checks["TensorFlow starts"].status == "problem"
    assert checks["memory of GPU 0"].status == "problem"


# ---------------------------------------------------------------------------- Versions


@pytest.mark.parametrize(
    ("version", "allowed", "right"),
    [
        ("2.21.0", ">=2.21,<2.22", True),
        ("2.21", "<2.22,>=2.21.0", True),
        ("2.21.3", ">=2.21,<2.22", True),
        ("2.22.0rc1", ">=2.21,<2.22", False),
        ("2.9.1", ">=2.21,<2.22", False),
        ("4.0.0", ">=3.15,<4", False),
        ("1.0", "", True),
        ("1.5.0", "!=1.5", False),
        ("", ">=1", False),
    ],
)
def test_ranges(version, allowed, right):
    assert is_allowed(version, allowed) == right


def test_a_wrong_and_a_missing_version():
    wrong = check_version("keras", "2.9", ">=3.15,<4", "type pip")
    assert wrong == Check("keras", "problem", "2.9, >=3.15,<4 is needed", "type pip")
    missing = check_version("keras", None, ">=3.15,<4", "type pip")
    assert missing == Check("keras", "problem", "not installed, >=3.15,<4 is needed", "type pip")
    assert check_version("tqdm", None, "", "type pip").detail == "not installed, any is needed"
    assert check_version("keras", "", ">=3.15,<4", "").detail == "unreadable, >=3.15,<4 is needed"


@pytest.fixture
def packages(monkeypatch):
    """Return {package: version}, which may be changed; towers is not installed."""
    versions = {"tensorflow": "2.21.0", "keras": "3.15.1", "tensorboard": "2.21.0"}
    versions |= {"numpy": "2.4.6", "absl-py": "2", "nvidia-ml-py": "13", "tqdm": "4"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "metadata", version)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
    return versions


def test_a_checkout_reads_its_setup(packages):
    checks = {check.name: check for check in check_versions()}
    assert list(checks) == ["towers", "Python", *packages]
    assert checks["towers"].status == "note" and "not installed" in checks["towers"].detail
    assert not problems(checks)
    assert checks["tensorflow"].detail == "2.21.0 (>=2.21,<2.22)"


def test_packages_that_do_not_fit(packages):
    packages |= {"tensorflow": "2.16.1", "keras": None}  # pip gives None where metadata is lost
    del packages["tqdm"]
    checks = {check.name: check for check in check_versions()}
    assert problems(checks) == ["tensorflow", "keras", "tqdm"]
    assert checks["keras"].detail == "unreadable, >=3.15,<4 is needed"
    assert checks["tensorflow"].remedy == "type python -m pip install 'tensorflow>=2.21,<2.22'"


def test_tensorflow_under_another_name(packages, monkeypatch):
    packages["tensorflow-cpu"] = packages.pop("tensorflow")
    others = {"tensorflow": ["tensorflow-cpu"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: others)
    checks = {check.name: check for check in check_versions()}
    assert checks["tensorflow"].status == "ok"


def test_an_installation_tells_itself_what_it_needs(packages, monkeypatch):
    message = email.message.Message()
    message["Version"], message["Requires-Python"] = "9.9", ">=99"
    message["Requires-Dist"] = "keras<4,>=3.15"
    message["Requires-Dist"] = 'pytest; extra == "test"'
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: message)
    checks = {check.name: check for check in check_versions()}
    assert list(checks) == ["towers", "Python", "keras"]
    assert checks["towers"].status == "ok" and problems(checks) == ["Python"]


@pytest.mark.parametrize(
    "text", [None, "is not Python", "install_requires = [", "f(python_requires=x)"]
)
def test_a_checkout_without_a_readable_setup(packages, monkeypatch, tmp_path, text):
    if text is not None:
        (tmp_path / "setup.py").write_text(text)
    monkeypatch.setattr(doctor_versions, "ROOT", tmp_path)
    assert [check.status for check in check_versions()] == ["note"]


def test_what_setup_declares():
    python, packages = declared(ROOT / "setup.py")
    assert python == ">=3.10"
    for line in [f"python{python}", *packages]:
        name, allowed = doctor_versions.split(line)
        assert not is_allowed("0", allowed) or not allowed
    extras = next(
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text()))
        if isinstance(node, ast.keyword) and node.arg == "extras_require"
    )
    assert doctor_versions.INSTALL == f"type pip install '{extras['gpu'][0]}'"


# ---------------------------------------------------------------------------- The rest


def test_a_new_and_an_old_train_dir(tmp_path):
    for folder in (tmp_path, tmp_path / "a" / "b"):
        assert check_train_dir(str(folder)).status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_train_dir_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    check = check_train_dir(str(tmp_path / "file" / "run"))
    assert check.status == "problem" and "is a file" in check.detail
    assert check.remedy == "name a folder"


def test_a_train_dir_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    check = check_train_dir(str(tmp_path))
    assert check.status == "problem" and "no permission to write" in check.detail
    assert check.remedy == "name another --train_dir"


def test_a_full_disk(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**29))
    check = check_train_dir(str(tmp_path / "run"))
    assert check.status == "problem" and check.detail.endswith("0.5 GiB free")

    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    assert check_train_dir(str(tmp_path / "run")).detail.endswith("Input/output error")


def test_data_that_needs_no_files():
    assert check_data("shapes", "").status == "ok"
    own = check_data("no_such_module:load", "")
    assert own.status == "ok" and "your own" in own.detail
    unknown = check_data("cifar100", "")
    assert unknown.status == "problem" and "shapes, cifar10, folder" in unknown.remedy


def test_data_of_your_own_files(tmp_path):
    assert check_data("folder", str(tmp_path)).status == "ok"
    for folder in ("", str(tmp_path / "nowhere")):
        missing = check_data("tfrecord", folder)
        assert missing.status == "problem" and "DIR/train*.tfrecord*" in missing.remedy


def test_cifar10(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    absent = check_data("cifar10", "")
    assert absent.status == "note" and f"{tmp_path}/towers" in absent.detail
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "test_batch").touch()
    part = check_data("cifar10", str(tmp_path))
    assert part.status == "problem" and "data_batch_3" in part.detail
    assert part.remedy.startswith("add what is missing")
    for number in range(1, 6):
        (folder / f"data_batch_{number}").touch()
    assert check_data("cifar10", str(tmp_path)) == Check("data", "ok", f"cifar10 is in {folder}")
    assert check_data("cifar10", str(folder / "test_batch")).status == "problem"


def test_variables_in_force():
    assert [check.status for check in check_environment({"PATH": "x"})] == ["ok"]
    environ = {"TF_NUM_X": "1\n2", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    (check,) = check_environment(environ)
    assert (check.status, check.detail) == ("note", "CUDA_VISIBLE_DEVICES=, TF_NUM_X=1 2")


def config(cluster, task):
    return json.dumps({"cluster": cluster, "task": task})


WORKERS = {"worker": ["a:1", "b:1"], "chief": ["c:1"]}


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"type": "worker", "index": 1}, "worker 2 of 2, at b:1"),
        ({"type": "worker", "index": "0"}, "worker 1 of 2, at a:1"),
        ({"type": "chief", "index": 0}, "chief 1 of 1, at c:1"),
    ],
)
def test_a_good_tf_config(task, says):
    environment, check = check_environment({"TF_CONFIG": config(WORKERS, task)})
    assert environment.status == "ok"
    assert check == Check("TF_CONFIG", "ok", says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{worker", "is not JSON"),
        ("", "is not JSON"),
        ("{}", "has no 'task'"),
        ("[]", "cannot be understood"),
        ("null", "cannot be understood"),
        (json.dumps({"cluster": WORKERS}), "has no 'task'"),
        (json.dumps({"task": {"type": "worker", "index": 0}}), "has no 'cluster'"),
        (config(WORKERS, {"type": "worker"}), "has no 'index'"),
        (config(WORKERS, {"type": "ps", "index": 0}), "has no 'ps'"),
        (config(WORKERS, {"type": "worker", "index": 2}), "cluster has no worker 2"),
        (config(WORKERS, {"type": "worker", "index": -1}), "cluster has no worker -1"),
        (config(WORKERS, {"type": "worker", "index": "x"}), "cannot be understood"),
        (config(WORKERS, {"type": [], "index": 0}), "cannot be understood"),
        (config({"worker": "a:1"}, {"type": "worker", "index": 0}), "cluster has no worker 0"),
        (config([], {"type": "worker", "index": 0}), "cannot be understood"),
    ],
)
def test_a_bad_tf_config(text, says):
    check = list(check_environment({"TF_CONFIG": text}))[1]
    assert check.status == "problem" and says in check.detail
    assert check.remedy.startswith("unset TF_CONFIG")
