"""Where Python looks for modules: in the current folder only for what the user has named.

It imports what Python itself has by then: the first thing that the command does is to come here.
"""

import os
import sys

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def leave_out_current_folder() -> None:
    """Let modules of the current folder not be found; those of a checkout last of all.

    `python -m towers` begins with it, and so does an empty part of PYTHONPATH: a numpy.py that lies
    there, whoever has written it, would run.
    """
    before = list(sys.path)
    sys.path[:] = _without_current_folder(before)
    if len(sys.path) < len(before) and _is_here(CHECKOUT):
        sys.path.append(CHECKOUT)


def environment_of_own_programs(environ: dict[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a `python -m towers...`: it finds what this process does."""
    given = _without_current_folder(environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = os.pathsep.join(dict.fromkeys([CHECKOUT, *given]))
    return dict(environ) | {"PYTHONPATH": folders, "PYTHONSAFEPATH": "1"}


def _without_current_folder(folders: list[str]) -> list[str]:
    return [folder for folder in folders if not _is_here(folder)]


def _is_here(folder: str) -> bool:
    try:
        return os.path.samefile(folder or ".", ".")
    except OSError:  # either is gone
        return not folder
