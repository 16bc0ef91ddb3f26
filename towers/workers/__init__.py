"""Towers on other machines; other rooms use it through `towers.devices.remote`."""
