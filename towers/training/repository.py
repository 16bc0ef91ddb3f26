"""Which state of which git repository a program was started from."""

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

_SECONDS = 2.0  # for each call of git: a slow disk is no reason to keep a run waiting
_MAX_NAMES = 100
# Set inside git's hooks: with them it looks at one repository wherever it is called.
_LEAD_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")


def root(folder: Path) -> str | None:
    """Return the root of the repository that a folder lies in, None if git knows of none."""
    found = _git(folder, "rev-parse", "--show-toplevel")
    return os.fsdecode(found.removesuffix(b"\n")) if found else None


def state(folder: Path, without: Path | None = None) -> dict[str, Any] | None:
    """Return the state of the repository that a folder lies in; nothing is changed.

    Args:
        folder: anywhere in it.
        without: a folder that is not counted among the untracked files, that of the run.

    Returns:
        "root"; "commit", None before the first; "branch", None if detached; "dirty"; "changed", the
        tracked files that differ from the commit, and "untracked", at most 100 of each; "diff", the
        sha256 of how they differ, "clean" if none does, None if git does not say. None in place of
        all this where there is no git, no repository, or no answer in time.
    """
    top = root(folder)
    found = top and _git(
        folder, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=normal"
    )
    if not found:
        return None
    headers, changed, untracked = _parse(found)
    commit, branch = headers.get("branch.oid"), headers.get("branch.head")
    if without is not None:
        without = without.resolve()
        untracked = [name for name in untracked if not _overlap(Path(top, name), without)]
    diff = "clean"
    if changed:
        text = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--full-index", "HEAD")
        diff = None if text is None else hashlib.sha256(text).hexdigest()
    return {
        "root": top,
        "commit": None if commit == "(initial)" else commit,
        "branch": None if branch == "(detached)" else branch,
        "dirty": bool(changed or untracked),
        "changed": _first(changed),
        "untracked": _first(untracked),
        "diff": diff,
    }


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return what git prints, None if there is none, it fails, or does not answer in time."""
    environ = {name: value for name, value in os.environ.items() if name not in _LEAD_ELSEWHERE}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            cwd=folder,
            env=environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout


def _parse(status: bytes) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the headers, the changed and the untracked files of `git status --porcelain=v2 -z`."""
    headers: dict[str, str] = {}
    changed: list[str] = []
    untracked: list[str] = []
    entries = iter(os.fsdecode(status).split("\0"))
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if kind == "#":
            name, _, value = rest.partition(" ")
            headers[name] = value
        elif kind == "?":
            untracked.append(rest)
        elif kind in ("1", "2", "u"):  # fields before the name: 7, of renames 8, of conflicts 9
            changed.append(rest.split(" ", {"1": 7, "2": 8, "u": 9}[kind])[-1])
            if kind == "2":
                next(entries, None)  # the old name
    return headers, changed, untracked


def _overlap(path: Path, folder: Path) -> bool:
    """Tell whether one lies in the other; git names a folder that is untracked as a whole."""
    path = path.resolve()
    return path == folder or path in folder.parents or folder in path.parents


def _first(names: list[str]) -> list[str]:
    left = len(names) - _MAX_NAMES
    return names[:_MAX_NAMES] + ([f"and {left} more"] if left > 0 else [])
