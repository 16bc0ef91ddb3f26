"""What a run leaves for TensorBoard, as a TensorBoard server shows it."""

import html
import json
import re

import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorboard.compat.proto.graph_pb2 import GraphDef

from tests import tiny, trained_runs
from tests.tensorboard_server import Server
from towers.graphs.placement import read_placement
from towers.graphs.step_graph import step_graph
from towers.training.run.setup import prepare

pytestmark = pytest.mark.graph

AT = [0, 4, 8, 12, 16, 17]  # updates before the steps that get a point
# What "classes" of `trained` shows: {run: {tag: updates at which its points stand}}.
SCALARS = {
    "train": {
        **dict.fromkeys(
            "loss/data loss/regularization loss/total learning_rate gradient_norm "
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
    results = shown.pop(".")
    assert {"result/test_accuracy", "result/train_loss", "result/steps"} < results.keys()
    assert shown == SCALARS


@pytest.mark.run
def test_the_histograms_and_texts_are_there(server):
    tags = [
        tag for run, tag in server.tags("histograms") if (run, tag[:8]) == ("train", "weights/")
    ]
    assert server.get("plugin/histograms/histograms", run="train", tag=tags[0], sample="0")
    for tag, pattern in {
        "summary": "the same on any number of towers",
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
    patterns = [chart["multiline"]["tag"] for chart in charts]
    shown = {tag for tags in SCALARS.values() for tag in tags}
    shown |= {"test/accuracy_ema", "loss"}
    for tag in (*shown, "loss/regularization_2", "accuracy_of_tower_0"):
        matching = [c for c in patterns if any(re.match(t, tag) for t in c)]
        assert len(matching) == (tag in shown), tag


@pytest.mark.run
def test_a_run_is_one_row_with_its_flags_and_results(trained):
    """Of the folder that holds it."""
    (row,) = Server(trained("classes").parent).rows().values()
    flags = trained_runs.flags("classes")
    assert flags.items() <= row["hparams"].items() and row["hparams"]["num_towers"] == 2
    assert not {"train_dir", "overwrite", "json"} & row["hparams"].keys()
    result = json.loads((trained("classes") / "result.json").read_text())
    shown = {each["name"]["tag"]: each.get("value", 0.0) for each in row["metricValues"]}
    for name in "test_accuracy", "test_loss", "train_loss", "steps":
        assert shown[f"result/{name}"] == pytest.approx(result[name])
    assert [session["status"] for session in row["sessions"]] == ["STATUS_SUCCESS"]


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
