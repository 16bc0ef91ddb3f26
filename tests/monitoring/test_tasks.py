"""What TensorBoard and the terminal show of tasks of all kinds."""

import json
import re

import numpy as np
import pytest
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from tests import tiny
from towers import cli


def trained(folder, task, *flags):
    """Train one of tests.tasks on two towers; return the run's result."""
    argv = [f"--model=tests.tasks:{task}", f"--dataset=tests.tasks:{task}_data", *flags]
    argv += "--num_towers=2 --batch_size=8 --max_steps=6 --log_every_steps=2".split()
    argv += ["--histogram_every_epochs=1", f"--train_dir={folder}"]
    assert cli.main(["train", *argv]) == 0
    return json.loads((folder / "result.json").read_text())


def declared(folder):
    """Return the titles of charts with their tags, and the columns of metrics."""
    charts, columns = {}, []
    for _, value in tiny.records(folder):
        content = value.metadata.plugin_data.content
        if value.metadata.plugin_data.plugin_name == "custom_scalars":
            layout = layout_pb2.Layout.FromString(value.tensor.string_val[0])
            for category in layout.category:
                charts |= {chart.title: list(chart.multiline.tag) for chart in category.chart}
        if value.metadata.plugin_data.plugin_name == "hparams":
            found = plugin_data_pb2.HParamsPluginData.FromString(content)
            columns += [info.name.tag for info in found.experiment.metric_infos]
    return charts, columns


@pytest.mark.parametrize(
    "task, flags, metrics, pictures",
    [
        ("text", "--ema_decay=0.5 --validation_fraction=0.3", ["right", "auc"],
         ["confusion_matrix"]),
        ("masks", "", ["iou"], []),
        ("table", "", ["mae"], []),
        ("two", "", ["kind_accuracy", "value_mae"], []),
        ("images", "", ["accuracy"], ["confusion_matrix", "mistakes"]),
    ],
)  # fmt: skip
def test_metrics_are_shown_by_their_names(tmp_path, capfd, task, flags, metrics, pictures):
    result = trained(tmp_path / "run", task, *flags.split())
    out, err = capfd.readouterr()
    assert "nan" not in out.lower().replace("nanosecond", "") and "no pictures" not in out
    assert "no histograms" not in out and "no mistakes" not in out
    charts, columns = declared(tmp_path / "run")
    part = "validation" if "validation" in flags else "test"
    evaluated = {tag for _, tag, _ in tiny.events(tmp_path / "run" / "eval")}
    seen = tiny.events(tmp_path / "run" / "train")
    assert all(np.isfinite(value) for *_, value in seen)
    for metric in metrics:
        assert f"{part}/{metric}" in evaluated and f"batch/{metric}" in {tag for _, tag, _ in seen}
        assert re.match(charts[f"{part} {metric}"][0], f"{part}/{metric}")
        assert {f"result/test_{metric}", f"result/{part}_{metric}"} <= set(columns)
    assert columns[0] == f"result/{result['objective']}"
    written = {tag for _, tag, _ in tiny.events(tmp_path / "run")}
    assert {f"result/test_{metric}" for metric in metrics} <= written
    shown = {value.tag for _, value in tiny.records(tmp_path / "run" / "eval")} - evaluated
    assert sorted(shown) == pictures
    drawn = {value.tag.partition("/")[0] for _, value in tiny.records(tmp_path / "run" / "train")}
    assert {"weights", "gradients", "activations"} <= drawn
    assert ("images" in drawn) == (task in ("masks", "images"))
