"""The towers' devices: choice, memory options, and the driver's view; names load at first use."""

from towers.options.lazy import lazily

_HOME = {
    "Device": "selection",
    "config_proto": "gpus",
    "configure": "gpus",
    "configure_run": "gpus",
    "connect": "remote",
    "describe": "selection",
    "hide_gpus": "gpus",
    "hide_others": "gpus",
    "loose_ops_on": "selection",
    "most_towers": "selection",
    "read_back": "gpus",
    "report": "selection",
    "tower_devices": "selection",
    "try_out": "gpus",
    "try_xla": "xla_trial",
}
__all__ = sorted(_HOME)
__getattr__ = lazily(__name__, _HOME)
