"""Which devices hold the towers, which memory they have, and what the driver says.

The public functions are loaded when they are first used: some modules of this room need no
TensorFlow, and those who import them do not wait for it.
"""

import importlib

_HOME = {
    "Device": "selection",
    "config_proto": "sessions",
    "configure": "gpus",
    "cuda_environ": "gpus",
    "describe": "selection",
    "driver_gpus": "gpus",
    "missing_gpus": "gpus",
    "read_back": "gpus",
    "report": "selection",
    "tower_devices": "selection",
    "try_out": "gpus",
    "visible_gpus": "gpus",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Load a public function on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'towers.devices' has no attribute {name!r}")
    return getattr(importlib.import_module(f"towers.devices.{_HOME[name]}"), name)
