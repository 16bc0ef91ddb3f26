"""What `towers doctor` looks at besides the GPUs: versions, environment, folders, data."""

import ast
import dataclasses
import importlib.metadata
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from towers import files
from towers.data import registry
from towers.errors import InputError

OK, PROBLEM, NOTE = "ok", "problem", "note"  # a note is something to know, nothing to mend
ROOT = Path(__file__).resolve().parents[3]
INSTALL = "type pip install 'tensorflow[and-cuda]>=2.21,<2.22'"
FREE_BYTES = 2**30  # for the checkpoints and events of a run
_PREFIXES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_")


@dataclasses.dataclass(frozen=True)
class Check:
    """What was looked at and found; each part is one line."""

    name: str
    status: str  # OK, PROBLEM or NOTE
    detail: str
    remedy: str = ""  # what to type or to do


def refused(name: str, error: InputError, remedy: str) -> Check:
    """Return a refusal as a problem; its remedy stands behind its last semicolon, or is given."""
    detail, semicolon, says = str(error).rpartition("; ")
    return Check(name, PROBLEM, detail, says) if semicolon else Check(name, PROBLEM, says, remedy)


def check_versions() -> Iterator[Check]:
    """Compare the Python and the packages that this process uses with what setup.py declares."""
    try:
        metadata = importlib.metadata.metadata("towers")
        yield Check("towers", OK, f"{metadata['Version']}, from {ROOT}")
        python, packages = metadata["Requires-Python"], metadata.get_all("Requires-Dist", [])
    except importlib.metadata.PackageNotFoundError:
        install = f"to install it, type python -m pip install -e {ROOT}"
        try:
            python, packages = declared(ROOT / "setup.py")
        except OSError:
            yield Check("towers", NOTE, f"{ROOT} does not say which versions it needs", install)
            return
        yield Check("towers", NOTE, f"runs from the checkout {ROOT}, not installed", install)
    yield check_version(f"Python{python}", platform.python_version(), "install a newer Python")
    for line in packages:
        if not (needed := Requirement(line)).marker:  # others are of an extra
            remedy = f"type python -m pip install '{line}'"
            yield check_version(line, installed(needed.name), remedy)


def declared(setup: Path) -> tuple[str, list[str]]:
    """Return `python_requires` and `install_requires` of a setup.py, without running it."""
    found = {"python_requires": "", "install_requires": []}
    for node in ast.walk(ast.parse(setup.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg in found:
            found[node.arg] = ast.literal_eval(node.value)
    return found["python_requires"], found["install_requires"]


def installed(package: str) -> str | None:
    """Return the version of a package of pip."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # tensorflow-cpu is a tensorflow, too
        others = importlib.metadata.packages_distributions().get(package)
        return importlib.metadata.version(others[0]) if others else None


def check_version(requirement: str, version: str | None, remedy: str) -> Check:
    """Compare a version, None if there is none, with a requirement: "keras>=3.15,<4"."""
    needed = Requirement(requirement)
    allowed = requirement.removeprefix(needed.name) or "any"
    try:
        fits = version and needed.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        fits = False
    if not fits:
        detail = f"{version or 'not installed'}, {allowed} is needed"
        return Check(needed.name, PROBLEM, detail, remedy)
    return Check(needed.name, OK, f"{version} ({allowed})")


def check_environment(environ: Mapping[str, str]) -> Check:
    """Look at the variables that change what CUDA and TensorFlow do."""
    # The command line may have set that of the C++ log by itself.
    names = sorted(n for n in environ if n.startswith(_PREFIXES) and n != "TF_CPP_MIN_LOG_LEVEL")
    if not names:
        return Check("environment", OK, "no TF_* or CUDA_* variable is set")
    values = ", ".join(f"{name}={environ[name]}" for name in names)
    return Check("environment", NOTE, " ".join(values.splitlines()))


def check_train_dir(train_dir: str) -> Check:
    """Look for permission and room to write a run."""
    folder, another = Path(train_dir), "name another --train_dir"
    try:
        files.check_train_dir(folder, overwrite=False)
        parent = next(p for p in [folder, *folder.absolute().parents] if p.exists())
        free = shutil.disk_usage(parent).free
    except InputError as error:
        return refused("train_dir", error, another)
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
        return refused("data", error, "name another --data_dir")
    if where is None:
        folder = data_dir or registry.cache_dir()
        return Check("data", NOTE, f"{dataset} is not below {folder}: the first run downloads it")
    return Check("data", OK, where)
