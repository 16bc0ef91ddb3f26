"""Names of devices: as TensorFlow numbers them now, and as they are shown.

TensorFlow numbers visible GPUs from 0. Messages and files keep the names that GPUs had before
others were hidden.
"""

import re
from collections.abc import Iterable

from towers.builder.device_names import machine_of

_shown: dict[str, str] = {}  # {TensorFlow's name of a GPU: its name before others were hidden}
in_use = False  # whether `tower_devices` has returned a GPU, whose name must not change


class NewName(str):
    """TensorFlow's name of a GPU, where `renumber` has changed names."""


def renumber(names: Iterable[str]) -> None:
    """Note that TensorFlow numbers the GPUs of these names from 0, since others are hidden."""
    _shown.clear()
    _shown.update({f"/gpu:{i}": name for i, name in enumerate(names)})


def renumbered() -> bool:
    """Return whether GPUs were hidden, so that TensorFlow may number the others differently."""
    return bool(_shown)


def shown_name(device: str) -> str:
    """Return a device's name in messages and files: that of before other GPUs were hidden."""
    return _shown.get(device, device)


def new_name(device: str) -> str:
    """Return TensorFlow's name of a device, from the name that is shown."""
    names = {shown: NewName(name) for name, shown in _shown.items()}
    return names.get(device, device)


def short_device_name(device: str) -> str:
    """Return "/gpu:0" for "/job:localhost/replica:0/task:0/device:GPU:0"; "" for "".

    It is the name that is shown. That of another machine is kept: "/job:JOB/task:1/gpu:0".
    """
    match = re.search(r"/(?:device:)?([A-Za-z_]+):(\d+)$", device)
    if not match or match[1] in ("job", "replica", "task"):
        return device
    name = f"/{match[1].lower()}:{match[2]}"
    return machine + name if (machine := machine_of(device)) else shown_name(name)


def parse_device(text: str) -> str:
    """Return "/gpu:0" for any spelling, such as "GPU:0" or "/device:gpu:00"; "" for other text."""
    match = re.fullmatch(r"/?(?:device:)?(gpu|cpu):(\d{1,3})", text.strip().lower())
    return f"/{match[1]}:{int(match[2])}" if match else ""
