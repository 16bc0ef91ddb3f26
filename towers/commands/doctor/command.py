"""`towers doctor`: small checks of the machine, each with what to type where something is wrong.

    checks = doctor.doctor(Options(train_dir="runs/mine"), say=print)

Nothing is created, downloaded or left behind. TensorFlow runs in processes of its own
(`towers.devices.probe`), so that even one that cannot be imported is only one of the findings.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from towers import files
from towers.commands.doctor import gpus as doctor_gpus
from towers.commands.doctor import versions as doctor_versions
from towers.commands.doctor.check import NOTE, OK, PROBLEM, Check
from towers.data import registry
from towers.devices import nvml, visibility
from towers.errors import InputError
from towers.options.run import Options

FREE_BYTES = 2**30  # for the checkpoints and events of a run
_PREFIXES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_")
_OWN = ("TF_CPP_MIN_LOG_LEVEL", "TF_CONFIG")  # the command line may set one; one has its own check


def doctor(options: Options, say: Callable[[str], None]) -> list[Check]:
    """Look at versions, GPUs, data, disk and environment.

    Args:
        options: `train_dir`, `dataset`, `data_dir` and those of the GPUs count.
        say: is given each finding as soon as it is known, then a line that sums up.

    Returns:
        The findings, at least one.
    """
    checks = []
    for check in _checks(options, dict(os.environ)):
        checks.append(check)
        say(f"{check.status:8} {check.name:22} {check.detail}")
        if check.remedy:
            say(f"{'':8} {'':22} -> {check.remedy}")
    problems, notes = ([c.status for c in checks].count(status) for status in (PROBLEM, NOTE))
    if problems:
        say(f"{problems} problem{'s' * (problems > 1)} of {len(checks)} checks")
    else:
        to_know = f", {notes} note{'s' * (notes > 1)}" if notes else ""
        say(f"{len(checks)} checks: all ok{to_know}")
    return checks


def _checks(options: Options, environ: dict[str, str]) -> Iterator[Check]:
    yield from doctor_versions.check_versions()
    yield from check_environment(environ)
    yield check_train_dir(options.train_dir)
    yield check_data(options.dataset, options.data_dir)
    driver = nvml.gpus()
    try:
        visibility.set_visible(options.gpu_options(), driver, environ)
    except InputError as error:
        yield _refused("visible_gpus", error, "leave out --visible_gpus")
    yield from doctor_gpus.check_devices(driver, environ)


def check_environment(environ: Mapping[str, str]) -> Iterator[Check]:
    """Look at the variables that change what CUDA and TensorFlow do."""
    names = [name for name in sorted(environ) if name.startswith(_PREFIXES) and name not in _OWN]
    values = ", ".join(f"{name}={environ[name]}" for name in names)
    detail = " ".join(values.splitlines()) or "no TF_* or CUDA_* variable is set"
    yield Check("environment", NOTE if names else OK, detail)
    if "TF_CONFIG" in environ:
        yield check_tf_config(environ["TF_CONFIG"])


def check_tf_config(text: str) -> Check:
    """Look whether TF_CONFIG names this process's place among the workers."""
    try:
        config = json.loads(text)
        kind, index = config["task"]["type"], int(config["task"]["index"])
        addresses = config["cluster"][kind]
        if not isinstance(addresses, list) or not 0 <= index < len(addresses):
            raise LookupError(f"cluster has no {kind} {index}")
    except json.JSONDecodeError as error:
        wrong = f"is not JSON: {error}"
    except KeyError as error:
        wrong = f"has no {error}"
    except (LookupError, TypeError, ValueError) as error:
        wrong = f"cannot be understood: {error}"
    else:
        address = addresses[index]
        return Check("TF_CONFIG", OK, f"{kind} {index + 1} of {len(addresses)}, at {address}")
    example = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    return Check("TF_CONFIG", PROBLEM, wrong, f"unset TF_CONFIG, or export TF_CONFIG='{example}'")


def check_train_dir(train_dir: str) -> Check:
    """Look for permission and room to write a run."""
    folder = Path(train_dir)
    another = "name another --train_dir"
    try:
        files.check_train_dir(folder, overwrite=False)
        parent = next(p for p in [folder, *folder.absolute().parents] if p.exists())
        free = shutil.disk_usage(parent).free
    except InputError as error:
        return _refused("train_dir", error, another)
    except OSError as error:
        return Check("train_dir", PROBLEM, f"{folder}: {error.strerror}", another)
    detail = f"{folder}: {free / 2**30:.1f} GiB free"
    if free < FREE_BYTES:
        return Check("train_dir", PROBLEM, detail, f"free {FREE_BYTES / 2**30:g} GiB, or {another}")
    return Check("train_dir", OK, detail)


def check_data(dataset: str, data_dir: str) -> Check:
    """Look for the files of the data set; nothing is loaded or downloaded."""
    try:
        where = registry.locate(dataset, data_dir)
    except InputError as error:
        return _refused("data", error, "name another --data_dir")
    if where is None:
        folder = data_dir or registry.cache_dir()
        return Check("data", NOTE, f"{dataset} is not below {folder}: the first run downloads it")
    return Check("data", OK, where)


def _refused(name: str, error: InputError, remedy: str) -> Check:
    """Return a refusal as a problem; what to type stands behind its last semicolon, if it has one.

    Args:
        name: of the check.
        error: the refusal.
        remedy: for a refusal that says none.
    """
    detail, semicolon, says = str(error).rpartition("; ")
    return Check(name, PROBLEM, detail, says) if semicolon else Check(name, PROBLEM, says, remedy)
