"""The curves of a run in one table: where each value comes from, and in which chart it is shown.

Who adds a curve adds a row to `CHARTS`, and the value to what the train loop returns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as layout_summary

# {category: {chart: {tag: name of the value of a step}}}; None is written by its tag, and not by
# `scalars`. A tag with {} is of each tower, or GPU; towers/..._spread is the greatest value of a
# tower minus the least.
CHARTS = {
    "run": {
        "loss": {"loss/data": "loss", "loss/total": "total_loss", "loss": None, "loss_ema": None},
        "test accuracy": {"accuracy": None, "accuracy_ema": None},
        "learning rate": {"learning_rate": "learning_rate"},
        "gradient norm": {"gradient_norm": "gradient_norm"},
        "update to weight ratio": {"update_to_weight_ratio": "update_to_weight_ratio"},
        "regularisation": {"loss/regularisation": "penalty"},
        "noise scale, in examples": {"noise_scale/examples": None},
        "noise scale: trace of the covariance, squared norm of the gradient": {
            "noise_scale/trace": None,
            "noise_scale/squared_norm": None,
        },
        "epoch": {"progress/epoch": "epoch"},
        "examples": {"progress/examples": "examples"},
    },
    "towers": {
        "loss of each tower": {"tower_{}/loss": "tower_loss"},
        "gradient norm of each tower": {"tower_{}/gradient_norm": "tower_gradient_norm"},
        "cosine between a tower's gradient and the mean": {
            "tower_{}/cosine_to_mean": "tower_cosine"
        },
        "seconds of each tower's step": {"tower_{}/step_seconds": "tower_step_seconds"},
        "memory of each tower, MiB": {"tower_{}/memory_mib": "tower_memory_mib"},
        "peak memory of each tower, MiB": {"tower_{}/peak_memory_mib": "tower_peak_memory_mib"},
        "spread of losses": {"towers/loss_spread": "tower_loss"},
        "spread of gradient norms": {"towers/gradient_norm_spread": "tower_gradient_norm"},
        "spread of step seconds": {"towers/step_seconds_spread": "tower_step_seconds"},
    },
    "GPUs": {
        "utilisation, %": {"gpu_{}/utilisation_percent": None},
        "memory utilisation, %": {"gpu_{}/memory_utilisation_percent": None},
        "memory used, MiB": {"gpu_{}/memory_used_mib": None},
        "power, W": {"gpu_{}/power_watts": None},
        "temperature, °C": {"gpu_{}/temperature_celsius": None},
        "clocks, MHz": {"gpu_{}/sm_clock_mhz": None, "gpu_{}/memory_clock_mhz": None},
    },
    "speed": {
        "examples/s": {"speed/examples_per_second": None},
        "seconds of a step": {"speed/seconds_per_step": None},
        "where a step's seconds go": {
            "speed/input_wait_seconds": None,
            "speed/compute_seconds": None,
            "speed/gather_seconds": None,
            "speed/update_seconds": None,
        },
        "seconds of a checkpoint": {"checkpoint_seconds": None},
    },
}


def scalars(values: Mapping[str, Any], towers: Sequence[int]) -> dict[str, float]:
    """Return {tag: value} of a point, as far as its values are known.

    Values of towers are lists over all of them; only those of `towers`, which had examples, are
    shown.
    """
    curves = [row for charts in CHARTS.values() for tags in charts.values() for row in tags.items()]
    found = {}
    for tag, name in curves:
        if name in values and tag.startswith("tower"):
            own = {i: values[name][i] for i in towers if values[name][i] is not None}
            if tag.startswith("tower_{}"):
                found |= {tag.format(i): value for i, value in own.items()}
            else:
                found[tag] = max(own.values()) - min(own.values())
        elif name in values:
            found[tag] = values[name]
    return found


def layout(gpus: bool) -> Any:
    """Return the Summary of the custom-scalars dashboard, the same at any number of towers.

    TensorBoard tries the patterns on the tags of every run, from the tag's first letter on. Without
    GPUs their empty charts are folded up.
    """
    found = layout_pb2.Layout()
    for title, charts in CHARTS.items():
        category = found.category.add(title=title, closed=title == "GPUs" and not gpus)
        for name, tags in charts.items():
            patterns = [tag.replace("{}", r"\d+") + "$" for tag in tags]
            category.chart.add(title=name).multiline.tag.extend(patterns)
    return layout_summary.pb(found)
