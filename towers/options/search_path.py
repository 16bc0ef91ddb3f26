"""Takes the current folder off Python's search path, except for modules that the user names.

It imports only what Python itself has imported already: the command runs it first.
"""

import os
import sys

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def leave_out_current_folder() -> None:
    """Remove the current folder from the search path, or move it last if it is the checkout.

    `python -m towers` and an empty part of PYTHONPATH put it first, and a numpy.py in it would run.
    """
    others = _without_current_folder(sys.path)
    if len(others) < len(sys.path) and _is_here(CHECKOUT):
        others.append(CHECKOUT)
    sys.path[:] = others


def child_environment(environ: dict[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which `python -m towers...` finds the same modules."""
    inherited = _without_current_folder(environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = os.pathsep.join(dict.fromkeys([CHECKOUT, *inherited]))
    return dict(environ) | {"PYTHONPATH": folders, "PYTHONSAFEPATH": "1"}


def _without_current_folder(folders: list[str]) -> list[str]:
    return [folder for folder in folders if not _is_here(folder)]


def _is_here(folder: str) -> bool:
    try:
        return os.path.samefile(folder or ".", ".")
    except OSError:  # either is gone
        return not folder
