"""Which line of a program started TensorFlow."""

import os
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path

from towers import tf_private

# Lines of these are not the user's own.
_PARTS = ("site-packages", "dist-packages", "<frozen")
_FOLDERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], sysconfig.get_path("stdlib"))
)


class StartRecorder:
    """Remembers which line of a program listed the devices first and which started TensorFlow.

    What has started cannot be configured any more; a late call can then name the line to move.
    """

    def __init__(self) -> None:
        """Watch the two events, if they have not happened yet."""
        self._lines: dict[str, str] = {}
        self._environ = dict(os.environ)
        tf_private.watch_start(lambda: self._note("listed"), lambda: self._note("started"))

    def listed_by(self) -> str | None:
        """Return what listed the devices, None if nothing has."""
        return self._line("listed") if tf_private.has_listed_devices() else None

    def started_by(self) -> str | None:
        """Return what started TensorFlow, None if nothing has."""
        return self._line("started") if tf_private.has_started() else None

    def environ(self) -> Mapping[str, str]:
        """Return the environment in which CUDA lists GPUs: now, or when it did; it does so once."""
        return self._environ if tf_private.has_listed_devices() else os.environ

    def _line(self, event: str) -> str:
        return self._lines.get(event, "a line that ran before towers.devices was imported")

    def _note(self, event: str) -> None:
        """Note who lets an event happen."""
        self._lines.setdefault(event, _user_line())
        if not tf_private.has_listed_devices():
            self._environ = dict(os.environ)


def _user_line() -> str:
    """Return the innermost line of the stack that is neither ours nor of an installed package."""
    for frame in reversed(traceback.extract_stack()):
        file = frame.filename
        if not file.startswith(_FOLDERS) and not any(part in file for part in _PARTS):
            return f"{file}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
    return "an installed package"
