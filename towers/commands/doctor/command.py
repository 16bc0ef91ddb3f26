"""`towers doctor`: checks of the machine, each with what to type where something is wrong.

Nothing is created or downloaded. TensorFlow runs in processes of its own
(`towers.devices.self_test`), so that one which cannot be imported is a finding like others.
"""

import importlib.metadata
import itertools
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from towers import files
from towers.data import registry
from towers.devices import cuda_visible_devices, nvml, self_test
from towers.devices.checks import NOTE, OK, PROBLEM, Check, found
from towers.devices.nvml import MIB, DriverGpu
from towers.errors import InputError
from towers.formatting import count
from towers.options.run import Options

ROOT = Path(__file__).resolve().parents[3]
INSTALL = "type pip install 'tensorflow[and-cuda]>=2.21,<2.22'"
FREE_BYTES = 2**30  # for the checkpoints and events of a run
SHARED_MEMORY = "/dev/shm"
SHARED_BYTES = 2**30  # what NVIDIA's containers advise
# The oldest driver for each major version of CUDA, which also runs later minor versions:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
LEAST_DRIVER = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}


def run(options: Options, say: Callable[[str], None]) -> list[Check]:
    """Check versions, folder, data, GPUs and their results.

    Args:
        options: `train_dir`, `dataset`, `data_dir` and the GPU options are used.
        say: called with each finding as soon as it is known, then with a summary.

    Returns:
        The findings, at least one.
    """
    findings = []
    for check in _checks(options, dict(os.environ)):
        findings.append(check)
        say(f"{check.status:8} {check.name:22} {check.detail}")
        if check.remedy:
            say(f"{'':8} {'':22} -> {check.remedy}")
    problems = sum(check.status == PROBLEM for check in findings)
    outcome = f"{count(problems, 'problem')} of {len(findings)} checks"
    say(outcome if problems else f"{len(findings)} checks: all ok")
    return findings


def _checks(options: Options, environ: dict[str, str]) -> Iterator[Check]:
    yield from check_versions()
    yield check_train_dir(options.train_dir)
    yield check_data(options.dataset, options.data_dir)
    driver = nvml.gpus()
    try:
        cuda_visible_devices.set_visible(options.gpu_options(), driver, environ)
    except InputError as error:
        yield _refused("visible_gpus", error, "leave out --visible_gpus")
    yield from _check_devices(driver, environ)


def _refused(name: str, error: InputError, remedy: str) -> Check:
    """Return an error as a problem; its remedy is what follows its last semicolon, or `remedy`."""
    detail, semicolon, says = str(error).rpartition("; ")
    return Check(name, PROBLEM, detail, says) if semicolon else Check(name, PROBLEM, says, remedy)


def check_versions() -> Iterator[Check]:
    """Compare Python and the installed packages with the requirements in setup.py."""
    try:
        metadata = importlib.metadata.metadata("towers")
    except importlib.metadata.PackageNotFoundError:
        install = f"to install it and what it needs, type python -m pip install -e {ROOT}"
        yield Check("towers", NOTE, f"runs from the checkout {ROOT}, not installed", install)
        return
    yield Check("towers", OK, f"{metadata['Version']}, from {ROOT}")
    python = f"Python{metadata['Requires-Python']}"
    yield check_version(python, platform.python_version(), "install a newer Python")
    for line in metadata.get_all("Requires-Dist", []):
        if (needed := Requirement(line)).marker:  # an extra
            continue
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:  # tensorflow-cpu provides tensorflow, too
            others = importlib.metadata.packages_distributions().get(needed.name)
            version = importlib.metadata.version(others[0]) if others else None
        yield check_version(line, version, f"type python -m pip install '{line}'")


def check_version(requirement: str, version: str | None, remedy: str) -> Check:
    """Check a package's version.

    Args:
        requirement: as in setup.py, "keras>=3.15,<3.16".
        version: the installed version, None if there is none.
        remedy: what to do if it does not fit.
    """
    needed = Requirement(requirement)
    allowed = requirement.removeprefix(needed.name) or "any"
    try:
        fits = version and needed.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        fits = False
    needs = f"{version or 'not installed'}, {allowed} is needed"
    return found(needed.name, fits, f"{version} ({allowed})" if fits else needs, remedy)


def check_train_dir(train_dir: str) -> Check:
    """Check permissions and free space for a run."""
    folder, another = Path(train_dir), "name another --train_dir"
    try:
        files.check_train_dir(folder, overwrite=False)
    except InputError as error:
        return _refused("train_dir", error, another)
    parent = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    free = shutil.disk_usage(parent).free
    detail, remedy = f"{folder}: {free / 2**30:.1f} GiB free", f"free {FREE_BYTES / 2**30:g} GiB"
    return found("train_dir", free >= FREE_BYTES, detail, f"{remedy}, or {another}")


def check_data(dataset: str, data_dir: str) -> Check:
    """Check that the data set's files exist, without loading or downloading.

    Args:
        dataset: its name, as --dataset has it.
        data_dir: its folder, or "".
    """
    try:
        return Check("data", OK, registry.locate(dataset, data_dir))
    except InputError as error:
        return _refused("data", error, "name another --data_dir")


def _check_devices(driver: Sequence[DriverGpu], environ: Mapping[str, str]) -> Iterator[Check]:
    """Compare the driver's GPUs with TensorFlow's, then test those that a run would use."""
    visible = cuda_visible_devices.visible_in(environ, driver)
    start = self_test.run_probe([], environ=environ)
    if isinstance(start, str):
        yield Check("TensorFlow starts", PROBLEM, f"its process {start}", INSTALL)
        yield from _check_memory(driver, visible)
        return
    gpus = [(name, capability and tuple(capability)) for name, capability in start["gpus"]]
    yield _check_gpus(driver, gpus, start["build"], environ)
    yield from _check_memory(driver, visible)
    if driver:
        yield from check_driver(nvml.driver_version(), start["build"].get("cuda_version"))
    numbered = list(enumerate(cuda_visible_devices.match(gpus, visible)))
    usable = [f"/gpu:{number}" for number, gpu in numbered if not (gpu and gpu.full)]
    devices = ["/cpu:0", *(usable if gpus else ["/cpu:1"])]
    yield from _check_probe(self_test.run_probe(devices, environ=environ), devices)
    if len(usable) > 1:
        access = nvml.peer_access(visible)
        yield check_peer_access(access)
        try:
            free = shutil.disk_usage(SHARED_MEMORY).free
        except OSError:
            free = None
        yield check_shared_memory(free, "" in access.values())
        yield _check_all_sum(self_test.run_all_sum(usable, environ=environ), usable)


def _check_gpus(
    driver: Sequence[DriverGpu],
    gpus: Sequence[cuda_visible_devices.Seen],
    build: Mapping[str, object],
    environ: Mapping[str, str],
) -> Check:
    """Compare the driver's GPUs with those that TensorFlow lists."""
    version = nvml.driver_version()
    if not driver and gpus:
        return Check("GPUs", NOTE, f"TensorFlow lists {len(gpus)}, the driver (NVML) none")
    if not driver:
        none = "no GPU here, only its driver" if version else "no GPU and no NVIDIA driver here"
        return Check("GPUs", OK, f"{none}: towers run on the CPU")
    says = f"the driver ({version}) has {', '.join(map(str, driver))}; TensorFlow"
    visible = cuda_visible_devices.visible_in(environ, driver)
    if missing := cuda_visible_devices.skipped(gpus, visible):
        cause, remedy = cuda_visible_devices.why_skipped(missing, len(gpus), build)
        names = ", ".join(map(str, missing))
        return Check("GPUs", PROBLEM, f"{says} leaves out {names}: {cause}", remedy)
    says += f" lists {len(gpus)}"
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return Check("GPUs", OK, says)
    entries = map(str.strip, value.split(","))
    meant = list(itertools.takewhile(lambda entry: entry not in ("", "-1"), entries))
    says += f"; CUDA_VISIBLE_DEVICES={value}"
    if len(gpus) < len(meant):
        shown = ",".join(gpu.key for gpu in driver)
        remedy = f"unset CUDA_VISIBLE_DEVICES, or export CUDA_VISIBLE_DEVICES={shown} or fewer"
        return Check("GPUs", PROBLEM, f"{says} names others, which hides all from there on", remedy)
    return Check("GPUs", OK, says)


def _check_memory(driver: Sequence[DriverGpu], visible: Sequence[DriverGpu]) -> Iterator[Check]:
    """Report free memory and other processes of each GPU that a run would use."""
    for gpu in visible:
        name = f"memory of GPU {gpu.key}"
        if None in (gpu.free_bytes, gpu.total_bytes):
            yield Check(name, NOTE, "the driver does not tell")
            continue
        detail = f"{gpu.free_bytes // MIB} of {gpu.total_bytes // MIB} MiB free"
        if gpu.processes:
            detail += f"; held by {', '.join(map(str, gpu.processes))}"
        others = ",".join(other.key for other in driver if not other.full)
        instead = f"--visible_gpus={others}" if others else "--devices=cpu"
        detail = f"full: {detail}" if gpu.full else detail
        yield found(name, not gpu.full, detail, f"type {instead}, or end what holds it")


def check_driver(version: str | None, cuda: str | None) -> Iterator[Check]:
    """Check that the driver is new enough for TensorFlow's CUDA, if both are known.

    Args:
        version: the driver's version, as "550.54.14".
        cuda: TensorFlow's CUDA, as "12.5.1".
    """
    least = LEAST_DRIVER.get((cuda or "").partition(".")[0])
    if not (version and least):
        return
    update = "update the NVIDIA driver (nvidia-smi shows it; in a container it is the host's)"
    detail = f"{version}; CUDA {cuda} needs {least} or newer"
    try:
        yield found("driver", Version(version) >= Version(least), detail, update)
    except InvalidVersion:
        yield Check("driver", NOTE, detail, update)


def check_peer_access(access: Mapping[tuple[str, str], str | None]) -> Check:
    """Report which pairs of GPUs have peer access, as `nvml.peer_access` returns it."""
    pairs_by_reason: dict[str, list[str]] = {}
    for pair, reason in access.items():
        reason = "the driver does not tell" if reason is None else reason or "P2P"
        pairs_by_reason.setdefault(reason, []).append("-".join(pair))
    detail = "; ".join(f"{why}: {' '.join(pairs)}" for why, pairs in pairs_by_reason.items())
    slower = (
        "these pairs exchange through host memory, which is slower; P2P needs NVLink, or one PCIe "
        "root with IOMMU and ACS off"
    )
    return found("P2P", set(access.values()) <= {""}, detail, slower, NOTE)


def check_shared_memory(free_bytes: int | None, some_peer_access: bool) -> Check:
    """Check the free space in /dev/shm, which NCCL needs between GPUs without P2P.

    Args:
        free_bytes: free space, None if it cannot be read.
        some_peer_access: whether some GPUs have P2P; too little space is then only a note.
    """
    remedy = (
        f"start the container with --shm-size={SHARED_BYTES // 2**30}g (Docker gives 64 MiB), "
        "or with --ipc=host"
    )
    if free_bytes is None:
        return Check(SHARED_MEMORY, PROBLEM, "cannot be read; NCCL needs it", remedy)
    detail, enough = f"{free_bytes // MIB} MiB free", free_bytes >= SHARED_BYTES
    detail += "" if enough else f"; NCCL may need {SHARED_BYTES // MIB}"
    return found(SHARED_MEMORY, enough, detail, remedy, NOTE if some_peer_access else PROBLEM)


def _check_all_sum(result: dict[str, str | None] | str, devices: Sequence[str]) -> Check:
    remedy = (
        f"type NCCL_DEBUG=INFO python -m towers.devices.self_test --all_sum {' '.join(devices)}, "
        "which says why; try NCCL_P2P_DISABLE=1; --variables=cpu needs no all-sum"
    )
    if isinstance(result, str):
        return Check("all-sum", PROBLEM, f"its process {result}", remedy)
    wrong = "; ".join(f"{name}: {error}" for name, error in result.items() if error)
    exact = f"exact over {count(len(devices), 'GPU')}: {', '.join(result)}"
    return found("all-sum", not wrong, wrong or exact, remedy)


def _check_probe(probe: dict[str, Any] | str, devices: Sequence[str]) -> Iterator[Check]:
    if isinstance(probe, str):
        command = (
            f"type python -m towers.devices.self_test {' '.join(devices)}, which shows all of it"
        )
        yield Check("computing", PROBLEM, f"the probe {probe}", command)
        return
    for device, result in probe["devices"].items():
        speeds = [f"{name} {gflops:.0f} GFLOP/s" for name, gflops in result["gflops"].items()]
        detail, leave_out = "; ".join(result["errors"] + speeds), "leave it out with --visible_gpus"
        remedy = f"{leave_out}, or type --devices=cpu" if "gpu" in device else INSTALL
        yield found(f"computing on {device}", not result["errors"], detail, remedy)
    if copies := probe["copies"]:
        broken = "; ".join(f"{pair}: {error}" for pair, error in copies.items() if error)
        remedy = "leave one out with --visible_gpus; in the BIOS, turn off IOMMU and PCIe ACS"
        exact = f"{len(copies)} pairs of devices, bit for bit"
        yield found("copies", not broken, broken or exact, remedy)
