"""What a run leaves for TensorBoard, as a TensorBoard server shows it."""

import html
import json
import re
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorboard.compat.proto.graph_pb2 import GraphDef

from tests import tiny, trained_runs
from tests.tensorboard_server import Server, metrics
from towers import cli
from towers.errors import RunError
from towers.graphs.placement import read_placement
from towers.graphs.step_graph import step_graph
from towers.monitoring import dashboard
from towers.options.run import Options
from towers.training.run.setup import prepare

pytestmark = pytest.mark.graph

AT = [0, 4, 8, 12, 16, 17]  # updates before the steps that get a point
# What "classes" of `trained` shows: {run: {tag: updates at which its points stand}}.
SCALARS = {
    "train": {
        **dict.fromkeys(
            "loss/data loss/regularisation loss/total learning_rate gradient_norm "
            "progress/examples progress/epoch".split(),
            AT,
        ),
        **dict.fromkeys(  # between two points
            "speed/examples_per_second speed/seconds_per_step speed/input_wait_seconds "
            "speed/compute_seconds speed/gather_seconds speed/update_seconds".split(),
            AT[1:],
        ),
    },
    **dict.fromkeys(
        ["train/tower_0", "train/tower_1"],
        dict.fromkeys(
            "tower/loss tower/gradient_norm tower/memory_mib tower/peak_memory_mib".split(),
            AT,
        )
        | {"tower/step_seconds": AT[1:]},
    ),
    "eval": dict.fromkeys(
        "test/accuracy test/accuracy_ema test/loss test/loss_ema".split(), [5, 9, 13, 18]
    ),
    ".": dict.fromkeys(
        "result/test_accuracy result/test_accuracy_ema result/test_loss result/test_loss_ema "
        "result/train_loss result/examples_per_second result/steps result/examples".split(),
        [18],
    ),
}


@pytest.fixture(scope="module")
def server(trained):
    return Server(trained("classes"))


# A run.


@pytest.mark.run
def test_every_curve_has_all_its_points_and_none_is_missing_above(server):
    shown = {}
    for run, tag in server.tags("scalars"):
        shown.setdefault(run, {})[tag] = [step for step, _ in server.points(run, tag)]
    for run, tags in shown.items():
        some = {tag: tags[tag] for tag in tags if tag.startswith("result/")}
        assert tags == some | SCALARS[run]
    assert shown.keys() == SCALARS.keys()


@pytest.mark.run
def test_the_pictures_histograms_and_texts_are_there(server):
    for plugin, shown in {
        "images": [
            "train images/tower_0",
            "train images/tower_1",
        ],
        "histograms": ["train weights/"],
    }.items():
        for run, start in map(str.split, shown):
            tags = [tag for of, tag in server.tags(plugin) if of == run and tag.startswith(start)]
            assert tags
            assert server.get(f"plugin/{plugin}/{plugin}", run=run, tag=tags[0], sample="0")
    for tag, pattern in {
        "rules": "the same at any number of towers",
        "flags": "--weight_decay=0.01",
        "placement": r"each on its tower's device[^$]*op type +/cpu:0 +/cpu:1[^$]*\n +AddN +\d+",
        "environment": "/cpu:1",
        "model": "Conv2D",
    }.items():
        (text,) = server.text(tag)
        assert re.search(pattern, html.unescape(text))


@pytest.mark.run
def test_the_layout_has_three_categories_and_each_tag_one_chart(server):
    layout = server.get("plugin/custom_scalars/layout")["category"]
    assert [c["title"] for c in layout] == ["run", "towers", "speed"]
    charts = [chart for category in layout for chart in category["chart"]]
    exact = {series["value"] for c in charts for series in c.get("margin", {}).get("series", [])}
    assert exact == {"learning_rate", "progress/examples", "progress/epoch"}  # never smoothed
    patterns = [chart["multiline"]["tag"] for chart in charts if "multiline" in chart]
    shown = {tag for run, tags in SCALARS.items() if run != "." for tag in tags} - exact
    shown |= {"test/accuracy_ema", "loss"}
    for tag in (*shown, "loss/regularisation_2", "accuracy_of_tower_0"):
        matching = [c for c in patterns if any(re.match(t, tag) for t in c)]
        assert len(matching) == (tag in shown), tag


@pytest.mark.run
def test_the_graph_is_shown_with_towers_as_scopes_on_their_devices(server):
    assert server.get("plugin/graphs/info")["."]["run_graph"]
    graph = text_format.Parse(server.get("plugin/graphs/graph", run="."), GraphDef())
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    for tower in (0, 1):
        own = [n for n in graph.node if n.name.startswith(f"tower_{tower}/")]
        assert {"Conv2D", "MatMul", "Conv2DBackpropFilter"} <= {n.op for n in own}
        assert {n.device for n in own if n.op == "MatMul"} == {f"/device:CPU:{tower}"}


@pytest.mark.run
def test_a_run_is_one_row_with_its_flags_and_results(server, trained):
    (row,) = server.rows().values()
    options = Options(**trained_runs.flags("classes"), variables="cpu")
    expected = dashboard.hparams_of(options) | {"num_towers": 2}
    assert row["hparams"] == expected
    assert not {"train_dir", "overwrite", "json"} & set(expected)
    result = json.loads((trained("classes") / "result.json").read_text())
    shown = {name: result[name.removeprefix("result/")] for name in metrics(row)}
    assert metrics(row) == pytest.approx(shown) and set(SCALARS["."]) <= set(shown)
    assert [session["status"] for session in row["sessions"]] == ["STATUS_SUCCESS"]


@pytest.mark.run
def test_metrics_are_shown_by_their_names_with_those_of_a_part_that_is_held_out(tmp_path, capfd):
    """Of a model that its user compiled, with two outputs."""
    given = trained_runs.flags("two") | {"validation_fraction": 0.3, "max_steps": 4}
    given = [f"--{name}={value}" for name, value in (given | {"histogram_every_epochs": 1}).items()]
    assert cli.main(["train", f"--train_dir={tmp_path}/run", *given]) == 0
    out = capfd.readouterr().out
    assert not any(f"no {what}" in out for what in ("pictures", "histograms"))
    assert "nan" not in out.lower().replace("nanosecond", "")
    shown = Server(tmp_path / "run")
    kinds = {(run, tag.partition("/")[0]) for run, tag in shown.tags("histograms")}
    assert kinds == {("train", "weights")}
    layout = shown.get("plugin/custom_scalars/layout")["category"]
    charts = {chart["title"]: chart for category in layout for chart in category["chart"]}
    scalars = shown.tags("scalars")
    seen = [value for run, tag in scalars if run == "train" for _, value in shown.points(run, tag)]
    assert np.isfinite(seen).all()
    for name in "kind_accuracy", "value_mae":
        assert {("eval", f"validation/{name}"), ("train", f"batch/{name}")} <= scalars
        assert (".", f"result/test_{name}") in scalars
        tags = charts[f"validation {name}"]["multiline"]["tag"]
        assert re.match(tags[0], f"validation/{name}")


# The graph.


@pytest.mark.run
def test_towers_inside_a_loop_of_a_call_are_drawn_with_their_devices():
    given = dict(num_towers=2, devices="cpu", batch_size=8, accumulate_steps=2, jit_compile=True)
    run = prepare(tiny.options("unused", **given))
    loop = run.train_loop()
    arguments = iter(run.data.train.train_batches(8, seed=0)), tf.constant(0)
    placement = read_placement(loop, *arguments)
    nodes = step_graph(loop.get_concrete_function(*arguments).graph, placement).node
    names = {node.name for node in nodes}
    assert {name.partition(":")[0].lstrip("^") for n in nodes for name in n.input} <= names
    for tower in (0, 1):
        own = re.compile(rf"(^|/)tower_{tower}/")
        products = {n.device for n in nodes if n.op == "MatMul" and own.search(n.name)}
        assert products == {f"/device:CPU:{tower}"}


def placed(constant):
    """Return where the ops of x + constant ran, and its graph."""
    function = tf.function(lambda x: x + tf.constant(constant, tf.float32), autograph=False)
    argument = tf.zeros(np.shape(constant))
    return read_placement(function, argument), function.get_concrete_function(argument).graph


# The file of a run.

RESULT = {
    "steps": 12, "examples": 84, "test_accuracy": 0.5, "test_accuracy_ema": None,
    "test_loss": 1.25, "train_loss": 1.5, "examples_per_second": 300.0,
    "devices": ["/cpu:0", "/cpu:1"],
}  # fmt: skip


def open_root(folder, **changes):
    options = tiny.options("unused", num_towers=2, **changes)
    texts = {"rules": ["of this run"]}
    dashboard.open_root(folder, options, RESULT["devices"], texts, *placed(1.0))


def test_a_run_that_goes_on_is_one_row_with_one_value(tmp_path):
    other = tmp_path / "events.out.tfevents.1.somebody"  # stays
    other.write_bytes(b"")
    for accuracy in (0.5, 0.75):
        open_root(tmp_path)
        result = RESULT | {"test_accuracy": accuracy}
        dashboard.close_root(tmp_path, result, 12)
    assert len(list(tmp_path.iterdir())) == 2 and other.exists()
    server = Server(tmp_path)
    (row,) = server.rows().values()
    numbers = {name: value for name, value in result.items() if isinstance(value, int | float)}
    assert metrics(row) == {f"result/{name}": value for name, value in numbers.items()}
    assert server.points(".", "result/test_accuracy") == [(12, 0.75)]
    assert len(server.text("rules")) == 1


def test_a_folder_of_runs_shows_a_row_for_each(tmp_path):
    for seed in (1, 2):
        folder = tmp_path / f"seed={seed}"
        folder.mkdir()
        open_root(folder, seed=seed, momentum=0.5)
        dashboard.close_root(folder, RESULT | {"test_loss": float(seed)}, 12)
    server = Server(tmp_path)
    rows = server.rows()
    for seed in (1, 2):
        row = rows[f"seed={seed}"]
        assert metrics(row)["result/test_loss"] == row["hparams"]["seed"] == seed
    assert {"momentum", "seed"} <= {column["name"] for column in server.columns()["hparamInfos"]}


def test_a_run_whose_file_was_deleted_ends_well_and_a_full_disk_is_one_line(tmp_path, monkeypatch):
    dashboard.close_root(tmp_path, RESULT, 12)
    assert Server(tmp_path).points(".", "result/test_loss") == [(12, 1.25)]
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(dashboard, "append", full)
    with pytest.raises(RunError, match=f"^{tmp_path} cannot be written: No space left on device"):
        open_root(tmp_path)
