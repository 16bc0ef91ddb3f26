"""The towers' devices: choice, memory options, and the driver's view; names load at first use."""

from towers.options.lazy import lazily

_HOME = {
    "Device": "selection",
    "config_proto": "gpus",
    "configure": "gpus",
    "connect": "remote",
    "describe": "selection",
    "hide_gpus": "gpus",
    "most_towers": "selection",
    "read_back": "gpus",
    "report": "selection",
    "tower_devices": "selection",
    "try_out": "gpus",
}
__all__ = sorted(_HOME)
__getattr__ = lazily(__name__, _HOME)
