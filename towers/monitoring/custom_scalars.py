"""The table of charts of the custom-scalars dashboard.

To add a curve, add its tag to `CHARTS` and its value to the scalars of the monitor. A curve of each
tower is tower/NAME of the runs train/tower_0, train/tower_1 ..., each with its own color.
"""

import re
from collections.abc import Sequence
from typing import Any

from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as layout_summary

_EVALUATED = "(test|validation)/"  # before a metric's name

# {category: {chart: patterns of tags}}
CHARTS = {
    "run": {
        "loss": f"loss/data loss/total loss {_EVALUATED}loss(_ema)?",
        "METRICS": "",  # a chart for each
        "learning rate": "learning_rate",
        "gradient norm": "gradient_norm",
        "regularization": "loss/regularization",
        "epoch": "progress/epoch",
        "examples": "progress/examples",
    },
    "towers": {
        "loss of each tower": "tower/loss",
        "gradient norm of each tower": "tower/gradient_norm",
        "seconds of each tower's step": "tower/step_seconds",
        "memory of each tower, MiB": "tower/memory_mib",
        "peak memory of each tower, MiB": "tower/peak_memory_mib",
    },
    "speed": {
        "examples/s": "speed/examples_per_second",
        "seconds of a step": "speed/seconds_per_step",
        "seconds of a step by phase": (
            "speed/input_wait_seconds speed/compute_seconds speed/gather_seconds "
            "speed/update_seconds"
        ),
    },
}


def layout(metrics: Sequence[str]) -> Any:
    """Return the Summary of the custom-scalars dashboard, the same at any number of towers.

    TensorBoard matches the patterns at the start of every run's tags.

    Args:
        metrics: names of charts: "validation auc" shows validation/auc, validation/auc_ema and the
            training curves auc or batch/auc.
    """
    dashboard = layout_pb2.Layout()
    for title, charts in CHARTS.items():
        category = dashboard.category.add(title=title)
        for name, tags in charts.items():
            shown = {name: tags.split()}
            if name == "METRICS":
                names = {metric: re.escape(metric.partition(" ")[2]) for metric in metrics}
                shown = {
                    metric: [f"({_EVALUATED})?{n}", f"{_EVALUATED}{n}_ema", f"batch/{n}"]
                    for metric, n in names.items()
                }
            for chart, patterns in shown.items():
                category.chart.add(title=chart).multiline.tag.extend(f"{p}$" for p in patterns)
    return layout_summary.pb(dashboard)
