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
    return _line(folder, "rev-parse", "--show-toplevel")


def state(folder: Path, without: Path) -> dict[str, Any] | None:
    """Return the state of the repository that a folder lies in; nothing is changed.

    Args:
        folder: anywhere in it.
        without: a folder in which nothing is looked at, that of the run.

    Returns:
        "root"; "commit", None before the first; "branch", None if detached; "dirty"; "changed", the
        tracked files that differ from the commit, and "untracked", at most 100 of each; "diff", the
        sha256 of how they differ, "clean" if none does, None if git does not say. None in place of
        all this where there is no git, no repository, or no answer in time.
    """
    if (top := root(folder)) is None:
        return None
    paths, without = [":/"], without.resolve()
    if without.is_relative_to(top):
        paths.append(f":(exclude,literal){without}")
    kinds = ("--porcelain", "-z", "--no-renames", "--untracked-files=normal")
    found = _git(folder, "status", *kinds, "--", *paths)
    if found is None:
        return None
    entries = os.fsdecode(found).split("\0")[:-1]  # such as " M towers/cli.py"
    untracked = [entry[3:] for entry in entries if entry.startswith("??")]
    changed = [entry[3:] for entry in entries if not entry.startswith("??")]
    diff: str | None = "clean"
    if changed:
        text = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--full-index", "HEAD")
        diff = None if text is None else hashlib.sha256(text).hexdigest()
    return {
        "root": top,
        "commit": _line(folder, "rev-parse", "--verify", "HEAD"),
        "branch": _line(folder, "symbolic-ref", "--short", "HEAD"),
        "dirty": bool(entries),
        "changed": _first(changed),
        "untracked": _first(untracked),
        "diff": diff,
    }


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return what git prints, None if there is none, it fails, or does not answer in time."""
    environ = {name: value for name, value in os.environ.items() if name not in _LEAD_ELSEWHERE}
    try:
        return subprocess.run(
            ["git", "-c", "core.fsmonitor=false", *arguments],
            cwd=folder,
            env=environ | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=True,
        ).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _line(folder: Path, *arguments: str) -> str | None:
    found = _git(folder, *arguments)
    return os.fsdecode(found.removesuffix(b"\n")) if found else None


def _first(names: list[str]) -> list[str]:
    left = len(names) - _MAX_NAMES
    return names[:_MAX_NAMES] + ([f"and {left} more"] if left > 0 else [])
