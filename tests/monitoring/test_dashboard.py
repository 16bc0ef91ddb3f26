"""The event file of the run itself, as a TensorBoard server shows it."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from tensorboard.compat.proto.graph_pb2 import GraphDef

from tests import tiny
from tests.tensorboard_server import Server, metrics
from towers import files
from towers.errors import RunError
from towers.graphs.placement import read_placement
from towers.graphs.step_graph import step_graph
from towers.monitoring import dashboard
from towers.monitoring.hparams import hparams_of
from towers.options.run import Options
from towers.training.run import prepare

RESULT = {
    "steps": 12,
    "examples": 84,
    "test_accuracy": 0.5,
    "test_accuracy_ema": None,
    "test_loss": 1.25,
    "train_loss": 1.5,
    "examples_per_second": 300.0,
    "devices": ["/cpu:0", "/cpu:1"],
}


def traced(**changes):
    """Return a run, where its ops ran, and its graph."""
    run = prepare(tiny.options("unused", **({"num_towers": 2, "devices": "cpu"} | changes)))
    loop, size, seed = run.train_loop(), run.options.batch_size, run.options.seed
    arguments = iter(run.data.train.train_batches(size, seed=seed)), tf.constant(0)
    placement = read_placement(loop, *arguments)
    return run, placement, loop.get_concrete_function(*arguments).graph


@pytest.fixture(scope="module")
def parts():
    return traced(model="tests.tiny:cnn", learning_rate=0.25, clip_norm=2.0)


def open_root(parts, folder):
    run, placement, graph = parts
    texts = {"rules": ["of this run"], "model": ["<Conv2D>"]}
    dashboard.open_root(folder, run.options, run.builder.devices, texts, placement, graph)


@pytest.fixture(scope="module")
def server(parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    open_root(parts, folder)
    dashboard.close_root(folder, RESULT, 12)
    return Server(folder)


# -------------------------------------------------------------------------- What is in the file


def test_the_layout_has_five_categories_and_each_tag_one_chart(server):
    found = server.get("plugin/custom_scalars/layout")["category"]
    assert [c["title"] for c in found] == ["run", "towers", "workers", "GPUs", "speed"]
    charts = [chart for category in found for chart in category["chart"]]
    charts = [chart["multiline"]["tag"] for chart in charts if "multiline" in chart]
    shown = {"tower/loss", "gpu/power_watts", "loss/data", "test/loss", "test/accuracy_ema"}
    shown |= {"tower_0/loss", "tower_11/loss", "gpu_3/power_watts", "loss"}  # of older runs
    for tag in (*shown, "loss/regularisation_2", "accuracy_of_tower_0"):
        matching = [c for c in charts if any(re.match(t, tag) for t in c)]
        assert len(matching) == (tag in shown)


def test_the_flags_start_with_those_that_are_no_defaults(server):
    lines = [line for line in server.text("flags")[0].splitlines() if "--" in line]
    assert len(lines) == len(Options.__dataclass_fields__)
    changed = ["--clip_norm=2.0", "--learning_rate=0.25"]
    assert all(any(flag in line for line in lines[:20]) for flag in changed)
    assert any("--momentum=" in line for line in lines[20:])


def test_the_graph_is_shown_with_towers_as_scopes_on_their_devices(server):
    assert server.get("plugin/graphs/info")["."]["run_graph"]
    graph = text_format.Parse(server.get("plugin/graphs/graph", run="."), GraphDef())
    names = [node.name for node in graph.node]
    assert len(set(names)) == len(names)
    for tower in (0, 1):
        own = [n for n in graph.node if n.name.startswith(f"tower_{tower}/")]
        assert {"Conv2D", "MatMul", "Conv2DBackpropFilter"} <= {n.op for n in own}
        assert {n.device for n in own if n.op == "MatMul"} == {f"/device:CPU:{tower}"}


@pytest.mark.parametrize("changes", [{"accumulate_steps": 2}, {"jit_compile": True}])
def test_towers_inside_a_loop_or_a_call_are_drawn_with_their_devices(changes):
    _, placement, graph = traced(batch_size=8, **changes)
    nodes = step_graph(graph, placement).node
    names = {node.name for node in nodes}
    assert {name.partition(":")[0].lstrip("^") for n in nodes for name in n.input} <= names
    for tower in (0, 1):
        products = [
            n for n in nodes if n.op == "MatMul" and re.search(rf"(^|/)tower_{tower}/", n.name)
        ]
        assert {n.device for n in products} == {f"/device:CPU:{tower}"}


def test_a_large_constant_is_left_out_of_the_graph():
    @tf.function(autograph=False)
    def function(x):
        return x + tf.constant(np.arange(10000.0), tf.float32)

    argument = tf.zeros([10000])
    placement = read_placement(function, argument)
    found = step_graph(function.get_concrete_function(argument).graph, placement)
    assert "AddV2" in {node.op for node in found.node}
    assert found.ByteSize() < 10000


# ------------------------------------------------------------------------------------ HParams


def test_a_run_is_one_row_with_its_flags_and_results(server, parts):
    rows = server.rows()
    assert len(rows) == 1
    (row,) = rows.values()
    expected = hparams_of(parts[0].options, 2)
    assert row["hparams"] == expected
    assert not {"train_dir", "overwrite", "json"} & set(expected)
    assert metrics(row) == {
        f"result/{name}": value for name, value in RESULT.items() if isinstance(value, int | float)
    }
    assert [session["status"] for session in row["sessions"]] == ["STATUS_SUCCESS"]


def test_a_run_that_goes_on_is_one_row_with_one_value(parts, tmp_path):
    other = tmp_path / "events.out.tfevents.1.somebody"  # stays
    other.write_bytes(b"")
    for accuracy in (0.5, 0.75):
        open_root(parts, tmp_path)
        dashboard.close_root(tmp_path, RESULT | {"test_accuracy": accuracy}, 12)
    assert len(list(tmp_path.iterdir())) == 2 and other.exists()
    server = Server(tmp_path)
    (row,) = server.rows().values()
    assert metrics(row)["result/test_accuracy"] == 0.75
    assert server.points(".", "result/test_accuracy") == [(12, 0.75)]
    assert len(server.text("rules")) == 1


def test_a_sweep_shows_a_row_for_each_run_and_what_is_varied_first(parts, tmp_path):
    noted = {"name": "seed=1", "status": "finished", "flags": {"momentum": 0.5, "seed": 1}}
    files.write_json(tmp_path / "sweep.json", {"runs": [noted]})
    for seed in (1, 2):
        run, *rest = parts
        folder = tmp_path / f"seed={seed}"
        folder.mkdir()
        changed = dataclasses.replace(run.options, seed=seed, momentum=0.5)
        open_root((dataclasses.replace(run, options=changed), *rest), folder)
        dashboard.close_root(folder, RESULT | {"test_loss": float(seed)}, 12)
    server = Server(tmp_path)
    rows = server.rows()
    for row in (rows["seed=1"], rows["seed=2"]):
        assert metrics(row)["result/test_loss"] == row["hparams"]["seed"]
    assert [rows[f"seed={seed}"]["hparams"]["seed"] for seed in (1, 2)] == [1, 2]
    shown = [column["name"] for column in server.columns()["hparamInfos"][:5]]  # at first
    assert {"momentum", "seed"} < set(shown)
    alone = Server(tmp_path / "seed=1").columns()["hparamInfos"]
    assert [h["name"] for h in alone if h.get("differs")] == shown


# ------------------------------------------------------------------------------------ The file


def test_a_full_disk_is_one_line(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(dashboard, "_new_path", lambda folder: Path("/dev/full"))
    with pytest.raises(RunError, match=f"^{tmp_path} cannot be written: .*No space left on device"):
        open_root(parts, tmp_path)


def test_a_run_whose_file_was_deleted_ends_well(tmp_path):
    dashboard.close_root(tmp_path, RESULT, 12)
    assert Server(tmp_path).points(".", "result/test_loss") == [(12, 1.25)]
