"""Versions of Python and the packages against what setup.py declares."""

import ast
import importlib.metadata
import operator
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from towers.commands.doctor.check import NOTE, OK, PROBLEM, Check

ROOT = Path(__file__).resolve().parents[3]
INSTALL = "type pip install 'tensorflow[and-cuda]>=2.21,<2.22'"
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def check_versions() -> Iterator[Check]:
    """Look at the Python and the packages that this process uses."""
    try:
        metadata = importlib.metadata.metadata("towers")
        yield Check("towers", OK, f"{metadata.get('Version')}, from {ROOT}")
        python = metadata.get("Requires-Python", "")
        packages = metadata.get_all("Requires-Dist", [])
    except importlib.metadata.PackageNotFoundError:
        install = f"to install it, type python -m pip install -e {ROOT}"
        try:
            python, packages = declared(ROOT / "setup.py")
        except (OSError, SyntaxError, ValueError):
            yield Check("towers", NOTE, f"{ROOT} does not say which versions it needs", install)
            return
        yield Check("towers", NOTE, f"runs from the checkout {ROOT}, not installed", install)
    yield check_version("Python", platform.python_version(), python, "install a newer Python")
    for line in packages:
        if ";" in line:  # of an extra
            continue
        name, allowed = split(line)
        yield check_version(name, _installed(name), allowed, f"type python -m pip install '{line}'")


def declared(setup: Path) -> tuple[str, list[str]]:
    """Return `python_requires` and `install_requires` of a setup.py, without running it."""
    found = {"python_requires": "", "install_requires": []}
    for node in ast.walk(ast.parse(setup.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg in found:
            found[node.arg] = ast.literal_eval(node.value)
    return found["python_requires"], found["install_requires"]


def split(requirement: str) -> tuple[str, str]:
    """Return ("keras", ">=3.15,<4") for "keras>=3.15,<4"."""
    name = re.match(r"[\w.-]*", requirement)[0]
    return name, requirement[len(name) :].strip()


def check_version(name: str, version: str | None, allowed: str, remedy: str) -> Check:
    """Compare a version with a range.

    Args:
        name: of what has it.
        version: None if it is not installed.
        allowed: ">=2.21,<2.22"; "" allows any.
        remedy: what to type.
    """
    if version is None:
        return Check(name, PROBLEM, f"not installed, {allowed or 'any'} is needed", remedy)
    if not is_allowed(version, allowed):
        return Check(name, PROBLEM, f"{version or 'unreadable'}, {allowed} is needed", remedy)
    return Check(name, OK, f"{version} ({allowed or 'any'})")


def is_allowed(version: str, allowed: str) -> bool:
    """Tell whether a version's numbers are in a range; "2.21.0rc1" counts as 2.21."""
    bounds = re.findall(r"([<>=!]+)\s*([\d.]+)", allowed)
    return all(_COMPARE[sign](_numbers(version), _numbers(bound)) for sign, bound in bounds)


def _numbers(version: str) -> list[int]:
    """Return [2, 21] for "2.21.0"."""
    numbers = [int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part]
    while numbers and not numbers[-1]:
        del numbers[-1]
    return numbers


def _installed(name: str) -> str | None:
    """Return the version of a package, "" if it does not tell, None if there is none."""
    try:
        return importlib.metadata.version(name) or ""
    except importlib.metadata.PackageNotFoundError:  # tensorflow-cpu is a tensorflow, too
        others = importlib.metadata.packages_distributions().get(name)
        return importlib.metadata.version(others[0]) if others else None
    except KeyError:  # metadata without a version
        return ""
