"""TensorFlow's private runtime: who started it, and the memory that its devices really have.

Nothing public tells either. The tests fail loudly if a release of TensorFlow changes it.
"""

import os
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context

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
        self._watch("listed", "_initialize_physical_devices", self._has_listed)
        self._watch("started", "ensure_initialized", self._has_started)

    def listed_by(self) -> str | None:
        """Return what listed the devices, None if nothing has."""
        return self._line("listed") if self._has_listed() else None

    def started_by(self) -> str | None:
        """Return what started TensorFlow, None if nothing has."""
        return self._line("started") if self._has_started() else None

    def environ(self) -> Mapping[str, str]:
        """Return the environment in which CUDA lists GPUs: now, or when it did; it does so once."""
        return self._environ if self._has_listed() else os.environ

    def _line(self, event: str) -> str:
        return self._lines.get(event, "a line that ran before towers.devices was imported")

    @staticmethod
    def _has_listed() -> bool:
        return context.context()._physical_devices is not None

    @staticmethod
    def _has_started() -> bool:
        return context.context()._initialized

    def _watch(self, event: str, method: str, happened: Callable[[], bool]) -> None:
        """Wrap a method of TensorFlow's context until it has done its work once."""
        if happened():
            return
        cls = type(context.context())
        original = getattr(cls, method)

        def wrapper(*args, **kwargs):
            if not happened():
                self._lines.setdefault(event, _user_line())
                if not self._has_listed():
                    self._environ = dict(os.environ)
            result = original(*args, **kwargs)
            if happened() and getattr(cls, method) is wrapper:
                setattr(cls, method, original)  # eager ops call it each time
            return result

        setattr(cls, method, wrapper)


def device_memory_bytes() -> dict[str, int]:
    """Return {"/gpu:0": bytes that TensorFlow may take}; it must have started."""
    devices = pywrap_tfe.TFE_ContextListDevices(context.context()._handle)
    try:
        result = {}
        for i in range(pywrap_tf_session.TF_DeviceListCount(devices)):
            name = pywrap_tf_session.TF_DeviceListName(devices, i)
            kind, _, number = name.rpartition("device:")[2].partition(":")
            memory = pywrap_tf_session.TF_DeviceListMemoryBytes(devices, i)
            result[f"/{kind.lower()}:{number}"] = memory
        return result
    finally:
        pywrap_tf_session.TF_DeleteDeviceList(devices)


def _user_line() -> str:
    """Return the innermost line of the stack that is neither ours nor of an installed package."""
    for frame in reversed(traceback.extract_stack()):
        file = frame.filename
        if not file.startswith(_FOLDERS) and not any(part in file for part in _PARTS):
            return f"{file}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
    return "an installed package"
