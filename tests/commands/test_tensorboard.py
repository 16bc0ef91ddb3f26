"""`towers tensorboard`, and every tag of a real run through its HTTP interface."""

import html
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests import tiny
from tests.tensorboard_server import Server, metrics
from towers.commands.tensorboard import command as tensorboard
from towers.commands.tensorboard.command import TensorboardOptions
from towers.errors import InputError
from towers.training.train import train

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "towers", "tensorboard"]
STEPS = dict(
    max_steps=12, log_every_steps=5, checkpoint_every_steps=4, histogram_every_epochs=1,
    ema_decay=0.9,
)  # fmt: skip
AT = [0, 5, 10, 11]  # updates before the steps that get a point
# What a run on two towers shows: {run: {tag: updates at which its points stand}}.
SCALARS = {
    "train": {
        **dict.fromkeys(
            "loss/data loss/regularisation loss/total learning_rate gradient_norm "
            "progress/examples progress/epoch noise_scale/trace noise_scale/squared_norm".split(),
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
            "tower/loss tower/gradient_norm tower/cosine_to_mean tower/memory_mib "
            "tower/peak_memory_mib".split(),
            AT,
        )
        | {"tower/step_seconds": AT[1:]},
    ),
    "eval": dict.fromkeys("test/accuracy test/accuracy_ema test/loss test/loss_ema".split(), [12]),
    ".": dict.fromkeys(
        "result/test_accuracy result/test_accuracy_ema result/test_loss result/test_loss_ema "
        "result/train_loss result/examples_per_second result/steps result/examples".split(),
        [12],
    ),
}
PICTURES = ["train images/tower_0", "train images/tower_1", "train filters/", "eval confusion"]
HISTOGRAMS = ["train weights/", "train gradients/", "train activations/"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(tiny.options(folder, model="tests.tiny:cnn", num_towers=2, devices="cpu", **STEPS))
    return Server(folder)


# ------------------------------------------------------------------------ What a run shows


def test_every_curve_has_all_its_points_and_none_is_missing_above(server):
    shown = {}
    for run, tag in server.tags("scalars"):
        shown.setdefault(run, {})[tag] = [step for step, _ in server.points(run, tag)]
    # what is seen of it depends on how noisy the gradients are: at some steps it has no value
    shown["train"].pop("noise_scale/examples", None)
    for run, tags in shown.items():
        some = {tag: tags[tag] for tag in tags if tag.startswith(("gpu_", "result/"))}
        assert tags == some | SCALARS[run]
    assert shown.keys() == SCALARS.keys()


@pytest.mark.parametrize(
    ("plugin", "shown"),
    [*(("images", name) for name in PICTURES), *(("histograms", name) for name in HISTOGRAMS)],
)
def test_the_pictures_and_histograms_are_there(server, plugin, shown):
    run, name = shown.split()
    tags = [tag for of, tag in server.tags(plugin) if of == run and tag.startswith(name)]
    assert tags
    assert server.get(f"plugin/{plugin}/{plugin}", run=run, tag=tags[0], sample="0")


@pytest.mark.parametrize(
    ("tag", "pattern"),
    [
        ("rules", "the same at any number of towers"),
        ("flags", "--ema_decay"),
        ("placement", r"each on its tower's device[^$]*op type +/cpu:0 +/cpu:1[^$]*\n +AddN +\d+"),
        ("environment", "/cpu:1"),
        ("model", "Conv2D"),
    ],
)
def test_the_texts_are_there(server, tag, pattern):
    (text,) = server.text(tag)
    assert re.search(pattern, html.unescape(text))


def test_every_curve_of_training_is_in_the_layout(server):
    layout = server.get("plugin/custom_scalars/layout")
    charts = [chart for category in layout["category"] for chart in category["chart"]]
    patterns = [tag for chart in charts for tag in chart.get("multiline", {}).get("tag", [])]
    exact = {series["value"] for c in charts for series in c.get("margin", {}).get("series", [])}
    assert exact == {"learning_rate", "progress/examples", "progress/epoch"}  # never smoothed
    for run in SCALARS.keys() - {"."}:
        for tag in SCALARS[run].keys() - exact:
            assert any(re.match(pattern, tag) for pattern in patterns), tag


def test_the_graph_and_the_table_are_there(server):
    assert 'name: "tower_1/' in server.get("plugin/graphs/graph", run=".")
    (row,) = server.rows().values()
    assert row["hparams"]["num_towers"] == 2
    assert set(SCALARS["."]) <= set(metrics(row))
    assert row["sessions"][0]["status"] == "STATUS_SUCCESS"


# --------------------------------------------------------------------------------- The verb


@pytest.fixture
def event_dir(tmp_path):
    """A folder in which TensorBoard finds something."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "events.out.tfevents.1.host").write_bytes(b"")
    return tmp_path


def test_it_serves_until_ctrl_c(event_dir):
    command = [*COMMAND, f"--train_dir={event_dir}", "--port=0"]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        try:
            address = re.search(r"http://localhost:(\d+)/", server.stdout.readline())
            with urllib.request.urlopen(f"{address[0]}data/environment", timeout=30) as answer:
                assert str(event_dir) in answer.read().decode()
            server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=30)
        finally:
            server.kill()
    assert server.returncode == 0
    assert "Traceback" not in out + err


def test_it_takes_no_gpu(event_dir, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    seen = {}
    monkeypatch.setattr(
        "tensorboard.program.TensorBoard.launch", lambda _: seen.update(os.environ) or "http://x:1/"
    )
    assert tensorboard.start(TensorboardOptions(train_dir=str(event_dir))) == "http://x:1/"
    assert seen["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("folder", ["absent", "."])
def test_a_folder_with_nothing_to_show_is_refused(tmp_path, folder):
    folder = f"{tmp_path}/{folder}"
    with pytest.raises(InputError, match=f"--train_dir={folder}: there are no event files"):
        tensorboard.start(TensorboardOptions(train_dir=folder))


def test_a_port_that_is_taken_is_refused(event_dir):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [*COMMAND, f"--train_dir={event_dir}", f"--port={port}"]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert re.fullmatch(rf"towers: --port={port}: .*in use.*\n", done.stderr)


def test_all_points_of_a_long_curve_are_shown(tmp_path):
    import tensorflow as tf

    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        for step in range(3000):
            tf.summary.scalar("long", step, step=step)
    writer.close()
    assert [step for step, _ in Server(tmp_path).points(".", "long")] == list(range(3000))
