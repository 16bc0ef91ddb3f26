"""`towers doctor`: checks this machine as a run does before its first step.

Nothing is created or downloaded. TensorFlow runs in a process of its own, since a broken driver may
end it.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from towers.devices import nvml, self_test
from towers.devices.cuda_visible_devices import FORCED_GROWTH, INSTALL
from towers.devices.nvml import MIB
from towers.errors import InputError, RunError
from towers.formatting import count
from towers.options import environment
from towers.options.run import Options

ROOT = Path(__file__).resolve().parents[3]
OK, PROBLEM = "ok", "problem"


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check; each part is one line."""

    name: str
    status: str  # OK or PROBLEM
    detail: str
    remedy: str = ""  # what to type or to do


def run(options: Options, say: Callable[[str], None]) -> list[Check]:
    """Check versions, GPUs, and a computation on each device; see `flags.Verb`.

    Each finding is said as soon as it is known, then a summary.
    """
    findings = []
    for check in _checks(options):
        findings.append(check)
        say(f"{check.status:8} {check.name:22} {check.detail}")
        if check.remedy:
            say(f"{'':8} {'':22} -> {check.remedy}")
    problems = sum(check.status == PROBLEM for check in findings)
    outcome = f"{count(problems, 'problem')} of {len(findings)} checks"
    say(outcome if problems else f"{len(findings)} checks: all ok")
    return findings


def _checks(options: Options) -> Iterator[Check]:
    yield from check_versions()
    try:
        environment.check()
    except InputError as error:
        yield Check("environment", PROBLEM, str(error))
        return
    if newer := self_test.compiling(nvml.gpus()):
        yield Check("kernels", OK, self_test.compiling_note(newer))
    given = dataclasses.asdict(options.gpu_options()) | {"forced": os.environ.get(FORCED_GROWTH)}
    found = self_test.run_module(__name__, json.dumps(given))
    if isinstance(found, str):
        yield Check("TensorFlow", PROBLEM, f"its process {found}", INSTALL)
        return
    for check in found:
        yield Check(**check)


def check_devices(options: Mapping[str, Any]) -> Iterator[Check]:
    """Check the devices that a run would use, in the process of the check.

    Args:
        options: of the GPUs, see `towers.devices.configure`, and perhaps "forced", the value of
            TF_FORCE_GPU_ALLOW_GROWTH in a run, which this process has changed.
    """
    import tensorflow as tf

    from towers import devices
    from towers.devices import gpus

    options = dict(options)
    forced = options.pop("forced", None)
    try:
        devices.configure(**options)
        names = devices.tower_devices()
    except InputError as error:
        detail, _, remedy = str(error).rpartition("; ")
        yield Check("GPUs", PROBLEM, detail or remedy, remedy if detail else "")
        return
    driver = nvml.gpus()
    missing = ", ".join(map(str, gpus.missing_gpus(gpus.visible_gpus(driver))))
    says = f"driver {nvml.driver_version()} has {_listed(driver)}" if driver else "no NVIDIA driver"
    if missing:
        yield Check("GPUs", PROBLEM, f"{says}; TensorFlow does not list GPU {missing}", INSTALL)
    else:
        yield Check("GPUs", OK, says)
    for device in devices.describe(names):
        yield Check("device", OK, str(device))
    tf.config.list_logical_devices()  # starts TensorFlow
    if FORCED_GROWTH in os.environ:
        os.environ[FORCED_GROWTH] = forced or ""
    try:
        for line in devices.read_back():
            name, _, detail = line.partition(" ")
            yield Check(name, OK, detail.strip())
    except RunError as error:
        detail, _, remedy = str(error).rpartition(": ")
        yield Check("memory", PROBLEM, detail, remedy)
    for name, error in self_test.find_errors(dict(zip(names, names, strict=True))).items():
        if error:
            yield Check(f"computing on {name}", PROBLEM, error, "type --visible_gpus without it")
        else:
            yield Check(f"computing on {name}", OK, "copy, kernels and random numbers are correct")


def _listed(driver: Sequence[nvml.DriverGpu]) -> str:
    texts = []
    for gpu in driver:
        free = f", {gpu.free_bytes // MIB} MiB free" if gpu.free_bytes is not None else ""
        held = f", used by {', '.join(gpu.processes)}" if gpu.processes else ""
        texts.append(f"{gpu}{free}{held}")
    return "; ".join(texts)


def check_versions() -> Iterator[Check]:
    """Compare Python and the installed packages with the requirements in setup.py."""
    try:
        metadata = importlib.metadata.metadata("towers")
    except importlib.metadata.PackageNotFoundError:
        install = f"to install it with its requirements, type python -m pip install -e {ROOT}"
        yield Check("towers", OK, f"runs from the checkout {ROOT}, not installed", install)
        return
    yield Check("towers", OK, f"{metadata['Version']}, from {ROOT}")
    for line in [f"Python{metadata['Requires-Python']}", *metadata.get_all("Requires-Dist", [])]:
        needed = Requirement(line)
        if needed.marker:  # an extra
            continue
        version, remedy = _installed(needed.name), f"type python -m pip install '{line}'"
        if version and needed.specifier.contains(version, prereleases=True):
            yield Check(needed.name, OK, version)
        else:
            detail = f"{version or 'not installed'}, {needed.specifier or 'any'} is needed"
            yield Check(needed.name, PROBLEM, detail, remedy)


def _installed(name: str) -> str | None:
    """Return the version of Python or of a package, None if it is not installed."""
    if name == "Python":
        return platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # tensorflow-cpu provides tensorflow, too
        others = importlib.metadata.packages_distributions().get(name)
        return importlib.metadata.version(others[0]) if others else None


if __name__ == "__main__":
    print(json.dumps([*map(dataclasses.asdict, check_devices(json.loads(sys.argv[1])))]))
