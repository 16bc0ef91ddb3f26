"""Which devices hold the towers, which memory they have, and what the driver says.

The public functions are loaded when they are first used: some modules of this room need no
TensorFlow, and those who import them do not wait for it.
"""

from towers.options.lazy import lazily

_HOME = {
    "Device": "selection",
    "config_proto": "gpus",
    "configure": "gpus",
    "connect": "remote",
    "describe": "selection",
    "hide_gpus": "gpus",
    "precision_advice": "gpus",
    "read_back": "gpus",
    "report": "selection",
    "tower_devices": "selection",
    "try_out": "gpus",
}
__all__ = sorted(_HOME)
__getattr__ = lazily(__name__, _HOME)
