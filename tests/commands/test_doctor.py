"""`towers doctor`: what it says of this machine, and of machines that are made up."""

import email.message
import importlib.metadata
import os
import shutil

import pytest

from towers.commands.doctor import command as doctor
from towers.commands.doctor.command import INSTALL, Check
from towers.devices import nvml, self_test
from towers.devices.nvml import MIB, DriverGpu
from towers.options.run import Options

pytestmark = pytest.mark.unit

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

    def make(
        driver, gpus, results=None, copies=None, build=BUILD, start=None, sums=None, **options
    ):
        """`gpus`: TensorFlow's; `results`: {device: what its probe gives}; `start`: a failure."""
        calls, lines, make.summed = [], [], []

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

        def run_all_sum(devices, environ):
            make.summed = devices
            return sums or {"float32": None, "int64": None}

        monkeypatch.setattr(nvml, "driver_version", lambda: driver and "550.54" or None)
        monkeypatch.setattr(self_test, "run_probe", run_probe)
        monkeypatch.setattr(self_test, "run_all_sum", run_all_sum)
        checks = doctor.run(Options(train_dir=str(tmp_path / "run"), **options), lines.append)
        make.lines, make.probed, make.environ = lines, calls[-1][0], calls[-1][1]
        return {check.name: check for check in checks}

    return make


def problems(checks):
    return [name for name, check in checks.items() if check.status == "problem"]


@pytest.mark.process
def test_this_machine_has_no_problem(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    lines = []
    checks = doctor.run(Options(train_dir="runs/new"), lines.append)
    assert [check for check in checks if check.status == "problem"] == []
    assert lines[-1].startswith(f"{len(checks)} checks: all ok")
    names = {check.name for check in checks}
    assert names >= {"Python", "tensorflow", "keras", "train_dir", "GPUs", "computing on /cpu:0"}
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


def test_a_machine_without_gpus_and_one_with_several(machine):
    checks = machine([], [])
    none = "no GPU and no NVIDIA driver here: towers run on the CPU"
    assert checks["GPUs"] == Check("GPUs", "ok", none) and not problems(checks)
    assert machine.probed == ["/cpu:0", "/cpu:1"]  # logical ones
    assert not {"driver", "P2P", "/dev/shm", "all-sum"} & set(checks)

    copies = {"/gpu:0 to /gpu:1": None, "/gpu:1 to /gpu:0": None}
    checks = machine([gpu(0), gpu(1)], [A100] * 2, {"/gpu:0": device(matmul=9000.0)}, copies)
    assert machine.probed == ["/cpu:0", "/gpu:0", "/gpu:1"]
    assert machine.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not problems(checks)
    for name, detail in {
        "GPUs": "the driver (550.54) has 0 (NVIDIA A100), 1 (NVIDIA A100); TensorFlow lists 2",
        "computing on /gpu:0": "matmul 9000 GFLOP/s",
        "computing on /cpu:0": "matmul 100 GFLOP/s",
        "copies": "2 pairs of devices, bit for bit",
        "memory of GPU 1": "39000 of 40000 MiB free",
        "driver": "550.54; CUDA 12.5.1 needs 525.60.13 or newer",
        "P2P": "the driver does not tell: 0-1",
        "all-sum": "exact over 2 GPUs: float32, int64",
    }.items():
        assert checks[name].detail == detail
    assert machine.summed == ["/gpu:0", "/gpu:1"] and "/dev/shm" in checks


def test_a_full_gpu_names_who_holds_it_and_is_not_probed(machine):
    holder = "python (pid 17, 39500 MiB)"
    driver = [gpu(0), gpu(1, free=500, processes=[holder]), gpu(2)]
    checks = machine(driver, [A100] * 3)
    assert checks["memory of GPU 1"] == Check(
        "memory of GPU 1", "problem",
        "full: 500 of 40000 MiB free; held by python (pid 17, 39500 MiB)",
        "type --visible_gpus=0,2, or end what holds it",
    )  # fmt: skip
    assert checks["memory of GPU 0"].status == "ok"
    assert machine.probed == ["/cpu:0", "/gpu:0", "/gpu:2"]
    assert machine.summed == ["/gpu:0", "/gpu:2"]

    checks = machine(driver, [A100] * 2, visible_gpus="0,2")  # what it said to type
    assert "memory of GPU 1" not in checks
    assert machine.environ["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert checks["GPUs"].status == "ok"


LEFT_OUT = {
    "an old one": ([gpu(0), gpu(1, K80)], [A100], BUILD, "capability 3.7", "--visible_gpus"),
    "no CUDA": ([gpu(0)], [], BUILD, "CUDA 12.5.1 or cuDNN 9 is not", INSTALL),
    "a CPU build": ([gpu(0)], [], {"is_cuda_build": False}, "built without CUDA", INSTALL),
}


@pytest.mark.parametrize("driver, listed, build, detail, remedy", LEFT_OUT.values(), ids=LEFT_OUT)
def test_gpus_that_tensorflow_leaves_out(machine, driver, listed, build, detail, remedy):
    checks = machine(driver, listed, build=build)
    assert problems(checks) == ["GPUs"]
    assert detail in checks["GPUs"].detail and remedy in checks["GPUs"].remedy
    assert machine.probed == ["/cpu:0", "/gpu:0" if listed else "/cpu:1"]


@pytest.mark.parametrize(
    ("value", "seen", "status"),
    [
        *(("", 0, "ok"), ("'-1'", 0, "ok"), ("1", 1, "ok"), ("7", 0, "problem")),
        ("0,7", 1, "problem"),
    ],
)
def test_gpus_that_are_hidden_on_purpose_or_by_a_mistake(machine, monkeypatch, value, seen, status):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    checks = machine([gpu(0, free=0), gpu(1)], [A100] * seen)
    assert checks["GPUs"].status == status
    assert "CUDA_VISIBLE_DEVICES=" in checks["GPUs"].detail
    assert ("export CUDA_VISIBLE_DEVICES=0,1" in checks["GPUs"].remedy) == (status == "problem")
    if status == "ok":
        assert "memory of GPU 0" not in checks
        assert machine.probed == ["/cpu:0", "/gpu:0" if seen else "/cpu:1"]


def test_a_gpu_that_is_asked_for_and_not_there(machine):
    before = dict(os.environ)
    checks = machine([gpu(0)], [A100], visible_gpus="3")
    assert checks["visible_gpus"].status == "problem"
    assert "there is no GPU 3" in checks["visible_gpus"].detail
    assert checks["computing on /gpu:0"].status == "ok"
    assert dict(os.environ) == before


def test_a_wrong_result_and_a_wrong_copy(machine):
    wrong = device(["matmul: the result is off by 0.5 of its largest value"], matmul=None)
    copies = {"/gpu:0 to /gpu:1": "3 of 9 words arrived wrong", "/gpu:1 to /gpu:0": None}
    checks = machine([gpu(0), gpu(1)], [A100] * 2, {"/gpu:1": wrong}, copies)
    assert problems(checks) == ["computing on /gpu:1", "copies"]
    assert checks["computing on /gpu:1"].detail.startswith("matmul: the result is off by 0.5")
    assert "--visible_gpus" in checks["computing on /gpu:1"].remedy
    assert checks["copies"].detail == "/gpu:0 to /gpu:1: 3 of 9 words arrived wrong"
    assert checks["copies"].remedy


def test_a_probe_that_fails_is_one_problem(machine):
    checks = machine([gpu(0)], [A100], "gave no answer within 180 s: without a word")
    assert problems(checks) == ["computing"]
    command = "type python -m towers.devices.self_test /cpu:0 /gpu:0"
    assert checks["computing"].remedy.startswith(command)
    checks = machine([gpu(0, free=0)], [], start="was ended by SIGILL: without a word")
    assert problems(checks) == ["TensorFlow starts", "memory of GPU 0"]


def driver(*given):
    return list(doctor.check_driver(*given))


def version(needed, there):
    return [doctor.check_version(needed, there, "type pip")]


def shared_memory(free_mib, p2p):
    return [doctor.check_shared_memory(free_mib and free_mib * MIB, p2p)]


def peers(*reasons):
    pairs = ("0", "1"), ("0", "2"), ("1", "2")
    return [doctor.check_peer_access(dict(zip(pairs, reasons, strict=True)))]


KERAS, CHIPSET = "keras>=3.15,<3.16", "the chipset does not support it"


@pytest.mark.parametrize(
    ("checks", "status", "detail", "remedy"),
    [
        (driver("525.60.13", "12.5.1"), "ok", "525.60.13; CUDA 12.5.1 needs 525.60.13", ""),
        (driver("525.60.11", "12.5.1"), "problem", "needs 525.60.13", "the NVIDIA driver"),
        (driver("470.256.02", "12.5"), "problem", "needs 525.60.13", "update the NVIDIA"),
        (driver("555.42.02", "12.5.1"), "ok", "555.42.02", ""),
        (driver("580.65.06", "12.5.1"), "ok", "580.65.06", ""),
        (driver("570.10", "13.0.1"), "problem", "needs 580.65.06", "the NVIDIA driver"),
        (driver("new", "12.5.1"), "note", "new; CUDA 12.5.1 needs", "the NVIDIA driver"),
        *((driver("550.54", unknown), *[None] * 3) for unknown in (None, "", "?", "99.1")),
        (driver(None, "12.5.1"), *[None] * 3),
        (peers("", "", ""), "ok", "P2P: 0-1 0-2 1-2", ""),
        (peers("", CHIPSET, None), "note",
         f"P2P: 0-1; {CHIPSET}: 0-2; the driver does not tell: 1-2", "IOMMU"),
        (shared_memory(64, False), "problem", "64 MiB free; NCCL may need 1024", "--shm-size=1g"),
        (shared_memory(64, True), "note", "64 MiB free; NCCL may need 1024", "--shm-size=1g"),
        (shared_memory(1024, False), "ok", "1024 MiB free", ""),
        (shared_memory(None, True), "problem", "cannot be read", "--shm-size=1g"),
        (version(KERAS, "3.15.1"), "ok", "3.15.1 (>=3.15,<3.16)", ""),
        (version(KERAS, "3.9"), "problem", "3.9, >=3.15,<3.16 is needed", "type pip"),
        (version(KERAS, "4.0rc1"), "problem", "4.0rc1, >=3.15,<3.16 is needed", "type pip"),
        (version(KERAS, None), "problem", "not installed, >=3.15,<3.16 is needed", "type pip"),
        (version(KERAS, "?"), "problem", "?, >=3.15,<3.16 is needed", "type pip"),
        (version("keras", "1"), "ok", "1 (any)", ""),
    ],
)  # fmt: skip
def test_what_one_check_finds(checks, status, detail, remedy):
    """Of drivers, P2P, room for NCCL, versions; None: it finds nothing."""
    assert [check.status for check in checks] == [status] * (status is not None)
    for check in checks:
        assert detail in check.detail and remedy in check.remedy
        assert bool(check.remedy) == (status != "ok")


def test_an_all_sum_that_is_wrong_or_hangs(machine):
    for sums, says in (
        ({"float32": None, "int32": "a wrong sum on /gpu:1"}, "int32: a wrong sum on /gpu:1"),
        ("gave no answer within 120 s: float16: an all-sum", "its process gave no answer within"),
    ):
        checks = machine([gpu(0), gpu(1)], [A100] * 2, sums=sums)
        assert problems(checks) == ["all-sum"]
        assert checks["all-sum"].detail.startswith(says)
        command = "NCCL_DEBUG=INFO python -m towers.devices.self_test --all_sum /gpu:0 /gpu:1"
        assert command in checks["all-sum"].remedy and "--variables=cpu" in checks["all-sum"].remedy


def test_an_installation_tells_itself_what_it_needs(monkeypatch):
    message = email.message.Message()
    message["Version"], message["Requires-Python"] = "9.9", ">=99"
    for line in ["keras<3,>=2", "no-such-package", "PIL>1", 'pytest>=99; extra == "test"']:
        message["Requires-Dist"] = line
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: message)
    checks = {check.name: check for check in doctor.check_versions()}
    assert list(checks) == ["towers", "Python", "keras", "no-such-package", "PIL"]
    assert problems(checks) == ["Python", "keras", "no-such-package"]  # pillow has a PIL
    assert checks["keras"].remedy == "type python -m pip install 'keras<3,>=2'"

    def metadata(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "metadata", metadata)
    (check,) = doctor.check_versions()  # of a checkout that is not installed
    assert check.status == "note" and "pip install -e" in check.remedy


def test_a_train_dir(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "a" / "b"):
        assert doctor.check_train_dir(str(folder)).status == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    below_a_file = doctor.check_train_dir(str(tmp_path / "file" / "run"))
    assert below_a_file.status == "problem" and "is a file" in below_a_file.detail
    assert below_a_file.remedy == "name a folder"
    usage = shutil.disk_usage(tmp_path)._replace(free=2**29)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    full = doctor.check_train_dir(str(tmp_path / "run"))
    assert full.status == "problem" and full.detail.endswith("0.5 GiB free")


def test_data_that_is_not_downloaded(tmp_path):
    assert doctor.check_data("shapes", "").status == "ok"
    own = doctor.check_data("no_such_module:load", "")
    assert own.status == "ok" and "your own" in own.detail
    assert doctor.check_data("folder", str(tmp_path)).status == "ok"
    for name, folder in [("imagenet", ""), ("folder", ""), ("folder", f"{tmp_path}/nowhere")]:
        wrong = doctor.check_data(name, folder)
        assert wrong.status == "problem" and wrong.remedy
