"""Towers on other machines: TensorFlow servers there, whose devices one program has for a time.

    cluster = connect(["host1:2222", "host2:2222"])     # or `of_run(options)`
    builder = towers.TowerBuilder(cluster.devices, gather_device=cluster.home)

What other rooms ask about devices there, they ask `towers.devices.remote`.
"""

from towers.options.lazy import lazily

_HOME = {
    "Recovery": "recovery",
    "WorkerCurves": "curves",
    "connect": "cluster",
    "find_workers": "addresses",
    "of_run": "cluster",
}
__all__ = sorted(_HOME)
__getattr__ = lazily(__name__, _HOME)
