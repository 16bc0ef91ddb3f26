"""Comparisons: what is read of runs, the tables, the picture."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from tests import tiny
from towers import cli
from towers.commands.compare import plot as compare_plot
from towers.commands.compare.command import compare
from towers.monitoring.curves import read_curves, training_seconds
from towers.options.run import Options
from towers.text import cut, table


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Stand in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_events(folder, points, began=1000, wall_time=0.0):
    """Write an event file of [(x, {tag: value})]; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{began}.host.1.v2"
    with open(path, "wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString())
        for x, values in points:
            event = Event(wall_time=wall_time + x, step=x)
            for tag, value in values.items():
                event.summary.value.extend(scalar_pb(tag, value).value)
            writer.write(event.SerializeToString())
    return path


def train_points(steps, rate=100.0, batch=10, by_examples=False, first=True):
    """Return the points after these numbers of steps; without `first` the first has a speed too."""
    points = []
    for number, step in enumerate(steps):
        values = {
            "loss/data": 10.0 / step,
            "progress/examples": step * batch,
            "progress/epoch": step * batch / 1000,
        }
        if number or not first:
            values["speed/examples_per_second"] = rate
        points.append(((step - 1) * batch if by_examples else step - 1, values))
    return points


def make_run(name, accuracies, result=None, rate=100.0, by_examples=False, **changes):
    """Make the folder of a run of 10 examples a step, evaluated after each 100 steps."""
    run = Path(name)
    run.mkdir(parents=True)
    x_of = {True: 10, False: 1}[by_examples]
    options = Options(
        train_dir=name,
        batch_size=10,
        tensorboard_x="examples" if by_examples else "step",
        **changes,
    )
    (run / "flags.cfg").write_text(options.to_flagfile())
    points = train_points([1, *range(50, 100 * len(accuracies) + 1, 50)], rate, 10, by_examples)
    write_events(run / "train", points)
    write_events(
        run / "eval",
        [((i + 1) * 100 * x_of, {"accuracy": value}) for i, value in enumerate(accuracies)],
    )
    if result is not None:
        (run / "result.json").write_text(json.dumps(result))
    return run


def compare_lines(*argv):
    lines = []
    result = compare(cli.parse("compare", list(argv)), lines.append)
    return result, lines


def cells(lines, title):
    """Return the rows of the table under the line that starts so."""
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return [line.split() for line in lines[start + 1 : end]]


RESULT = {
    "steps": 300, "examples": 3000, "test_accuracy": 0.9, "test_accuracy_ema": None,
    "test_loss": 0.25, "train_loss": 0.125, "examples_per_second": 99.5,
}  # fmt: skip


# ---------------------------------------------------------------------------- Tables


def test_flags_results_and_times():
    make_run("runs/a", [0.5, 0.7, 0.9], RESULT, learning_rate=0.1)
    make_run("runs/b", [0.6, 0.8], rate=50.0, learning_rate=0.2, optimizer="adamw")
    result, lines = compare_lines("runs/a", "runs/b", "--plot=none")
    assert cells(lines, "flags that differ") == [
        ["run", "optimizer", "learning_rate"],
        ["a", "momentum", "0.1"],
        ["b", "adamw", "0.2"],
    ]
    assert cells(lines, "results") == [
        "run status accuracy test_loss train_loss examples/s examples epochs seconds".split(),
        "a finished 0.9000 0.2500 0.1250 99.5 3000 3.00 30.00".split(),
        "b unfinished 0.8000 - 0.0500 50.0 2000 2.00 40.00".split(),
    ]
    assert cells(lines, "to a test accuracy of 0.8000")[:3] == [
        "run seconds steps examples epochs".split(),
        "a 30.00 300 3000 3.00".split(),
        "b 40.00 200 2000 2.00".split(),
    ]
    assert "not finished: as far as it is: b" in lines
    assert result["differing_flags"] == ["optimizer", "learning_rate"]
    assert result["runs"][1]["to_accuracy"]["seconds"] == pytest.approx(40)
    assert result["plot"] is None and not Path("runs/compare.png").exists()


def test_an_accuracy_may_never_be_reached_and_is_reached_when_it_is_equal():
    make_run("a", [0.5, 0.9])  # event files hold it in 32 bits, where it is less than 0.9
    make_run("b", [0.5, 0.6])
    _, lines = compare_lines("a", "b", "--accuracy=0.9", "--plot=none")
    assert cells(lines, "to a test accuracy of 0.9000")[1:3] == [
        "a 20.00 200 2000 2.00".split(),
        "b - - - -".split(),
    ]
    assert cells(lines, "no flag differs") == []


def test_the_moving_average_counts_where_there_is_one():
    run = make_run("a", [0.5])
    write_events(run / "eval", [(100, {"accuracy": 0.5, "accuracy_ema": 0.75})])
    make_run("b", [0.5])
    result, _ = compare_lines("a", "b", "--plot=none")
    assert [run["metrics"]["accuracy"] for run in result["runs"]] == [0.75, 0.5]


def test_runs_over_examples_and_over_steps_are_the_same():
    make_run("a", [0.5, 0.7])
    make_run("b", [0.5, 0.7], by_examples=True)
    result, _ = compare_lines("a", "b", "--accuracy=0.6", "--plot=none")
    left, right = (run["to_accuracy"] for run in result["runs"])
    assert left == pytest.approx(right)
    assert (left["steps"], left["examples"]) == (200, 2000)


def test_the_result_of_a_run_that_went_on_is_an_old_one():
    make_run("a", [0.5, 0.6, 0.7], RESULT | {"examples": 2000})
    make_run("b", [0.5, 0.6, 0.7], RESULT)
    result, _ = compare_lines("a", "b", "--plot=none")
    assert [run["status"] for run in result["runs"]] == ["unfinished", "finished"]
    assert [run["metrics"]["accuracy"] for run in result["runs"]] == pytest.approx([0.7, 0.9])


def test_empty_and_failed_runs_are_named():
    make_run("S/a", [0.5])
    (Path("S/b") / "checkpoints").mkdir(parents=True)
    (Path("S/nothing")).mkdir()
    noted = {"runs": [{"name": "c", "status": "failed", "error": "exit code 2: no"}]}
    Path("S/sweep.json").write_text(json.dumps(noted))
    result, lines = compare_lines("S", "--plot=none")
    assert [run["status"] for run in result["runs"]] == ["unfinished", "empty"]
    assert "no curves: b" in lines and "failed: c: exit code 2: no" in lines
    assert cells(lines, "results")[2] == ["b", "empty", *"-------"]


def test_runs_without_any_evaluation():
    for name in ("a", "b"):
        write_events(make_run(name, []) / "train", train_points([1, 50]))
    result, lines = compare_lines("a", "b", "--plot=none")
    assert "no run was evaluated yet" in lines
    assert (result["accuracy"], result["runs"][0]["to_accuracy"]) == (None, None)
    assert result["runs"][0]["metrics"]["seconds"] == pytest.approx(5)


def test_a_folder_of_runs_stands_for_all_of_them_once_and_in_order():
    for number in (10, 9, 1):
        make_run(f"S/seed={number}", [0.5])
    result, _ = compare_lines("S", "S/seed=9", "--plot=none")
    assert [run["name"] for run in result["runs"]] == ["seed=1", "seed=9", "seed=10"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            "",
            "towers compare needs the folders of runs: towers compare RUN RUN, or that of a sweep",
        ),
        ("a", "a is one run: name another to compare it with, towers compare a RUN"),
        ("a a", "a is one run: name another to compare it with, towers compare a RUN"),
        ("a b", "b: No such file or directory"),
        ("a empty", "empty: there is no run; name the folder of a run, or of a sweep"),
        ("a file", "file: Not a directory"),
        ("a c --plot=x.jpg", "--plot=x.jpg: a name that ends in .png is needed, or none"),
        ("a c --plot=no/x.png", "--plot=no/x.png: there is no folder no to write to"),
        ("a c --accuracy=90", "--accuracy=90.0: a number from 0 to 1 is needed"),
        ("a c --runs=d", "there is no flag --runs; see towers compare --help"),
    ],
)
def test_bad_input_gets_one_line(folder, capsys, argv, message):
    make_run("a", [0.5])
    make_run("c", [0.5])
    Path("empty").mkdir()
    Path("file").touch()
    before = tiny.files(folder)
    assert cli.main(["compare", *argv.split()]) == 2
    assert capsys.readouterr() == ("", f"towers: {message}\n")
    assert tiny.files(folder) == before


def test_json_stands_alone(capsys):
    make_run("a", [0.5], seed=1)
    make_run("b", [0.6], seed=2)
    assert cli.main(["compare", "a", "b", "--json", "--plot=none"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["runs"][1]["flags"] == {"seed": "2"}
    assert "flags that differ" in err


def test_many_flags_of_few_runs_are_turned_round():
    changes = dict(
        learning_rate=1.0, momentum=0.5, seed=3, optimizer="sgd", schedule="constant",
        ema_decay=0.5, label_smoothing=0.1, weight_decay=0.1,
    )  # fmt: skip
    make_run("a", [0.5])
    make_run("b", [0.5], **changes)
    _, lines = compare_lines("a", "b", "--plot=none")
    rows = cells(lines, "flags that differ")
    assert rows[0] == ["run", "a", "b"] and ["seed", "0", "3"] in rows and len(rows) == 9
    assert max(map(len, lines)) < 130


def test_tables_keep_their_columns():
    assert table(["rate", "n"], [[0.1, 2], [0.05, None]]) == ["rate  n", " 0.1  2", "0.05  -"]
    assert table(["name", "n"], [["a", 10], ["long", 2]]) == ["name   n", "a     10", "long   2"]
    assert table(["name"], []) == ["name"]
    assert cut("0123456789", 7) == "01...89" and cut("0123456", 7) == "0123456"


# ---------------------------------------------------------------------------- Curves


def test_seconds_are_examples_by_speed():
    nan = math.nan
    assert training_seconds(np.array([10, 110, 310]), np.array([nan, 100, 50])) == pytest.approx(
        [0, 0.1, 1.1, 5.1]
    )
    stopped = training_seconds(np.array([10, 110, 120, 220]), np.array([nan, 100, nan, 10]))
    assert stopped == pytest.approx([0, 0.1, 1.1, 2.1, 12.1])
    assert training_seconds(np.array([10, 20]), np.array([10, nan])) == pytest.approx([0, 1, 2])
    assert np.isnan(training_seconds(np.array([10.0]), np.array([nan]))[1:]).all()
    assert len(training_seconds(np.array([]), np.array([]))) == 0


def test_a_night_between_two_sessions_is_not_counted():
    run = make_run("a", [0.5, 0.7])
    whole = read_curves(run)
    write_events(run / "train", train_points([1, 50, 100]), 1000)
    write_events(run / "train", train_points([101, 150, 200]), 2000, wall_time=40_000.0)
    continued = read_curves(run)
    assert continued.seconds_at(2000) == pytest.approx(whole.seconds_at(2000)) == 20
    assert continued.seconds_at(1000) == pytest.approx(10)


def test_what_is_computed_again_after_a_crash_stands_once():
    run = make_run("a", [0.5, 0.7])
    write_events(run / "train", train_points([1, 50, 100, 150, 170]), 1000)
    write_events(run / "train", train_points([101, 150, 200], rate=50.0), 2000)
    write_events(run / "eval", [(100, {"accuracy": 0.5}), (150, {"accuracy": 0.1})], 1000)
    write_events(run / "eval", [(140, {"accuracy": 0.6}), (200, {"accuracy": 0.7})], 2000)
    curves = read_curves(run)
    assert curves.loss.x.tolist() == [0, 49, 99, 100, 149, 199]
    assert curves.accuracy.x.tolist() == [100, 140, 200]
    assert curves.accuracy.examples.tolist() == [1000, 1400, 2000]
    assert curves.seconds_at(2000) == pytest.approx(10 + 20)


@pytest.mark.parametrize("keep", [0, 5, 40, -1, -3, -20])
def test_a_file_that_a_crash_cut_off_is_read_up_to_there(keep):
    path = write_events(Path("a/train"), train_points([1, 50, 100]))
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    assert read_curves(Path("a")).loss.x.tolist() == ([0, 49] if keep < 0 else [])
    path.write_bytes(data[:-20] + b"\xff" * 40)
    assert read_curves(Path("a")).loss.x.tolist() == [0, 49]


def test_pictures_beside_curves_are_passed_over():
    path = write_events(Path("a/train"), train_points([1, 50]))
    event = Event(step=49)
    event.summary.value.add(tag="loss/data").tensor.tensor_shape.dim.add(size=3)
    event.summary.value.add(tag="images/tower_0").tensor.string_val.append(b"png")
    event.summary.value.add(tag="weights", simple_value=3.0)
    with open(path, "ab") as file:
        RecordWriter(file).write(event.SerializeToString())
    assert read_curves(Path("a")).loss.x.tolist() == [0, 49]


# ---------------------------------------------------------------------------- The picture


def size_of_png(path):
    data = Path(path).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_the_picture_lies_where_the_runs_are_or_where_it_is_asked_for():
    make_run("runs/a", [0.5, 0.7], seed=1)
    make_run("runs/b", [0.5], seed=2)
    result, lines = compare_lines("runs/a", "runs/b")
    width, height = size_of_png("runs/compare.png")
    assert width > 1000 and height > 400
    assert lines[-1].endswith("/runs/compare.png") and result["plot"].endswith("compare.png")
    compare_lines("runs", "--plot=mine.PNG")
    assert size_of_png("mine.PNG") == (width, height)


def test_fifty_runs_have_a_bounded_legend():
    for number in range(50):
        make_run(f"S/learning_rate={number}{'x' * 80}", [number / 50], seed=number)
    compare_lines("S")
    width, height = size_of_png("S/compare.png")
    assert height < width
    colours = [tuple(np.round(colour[:3], 4)) for colour in compare_plot.colours(50)]
    assert len(set(colours)) == 50
    assert len({tuple(colour) for colour in compare_plot.colours(20)}) == 20


def test_steps_of_different_batches_are_drawn_over_examples():
    def axes_of(**changes):
        flags = {"batch_size": "10", "tensorboard_x": "step"}
        return compare_plot.same_batches([FakeRun(flags), FakeRun(flags | changes)])

    assert axes_of()
    assert not axes_of(batch_size="20")
    assert not axes_of(tensorboard_x="examples")


class FakeRun:
    def __init__(self, flags):
        self.flags = flags


def test_the_line_of_a_loss_is_a_mean_of_its_last_values():
    assert compare_plot.smooth(np.array([3.0, 1.0])).tolist() == [3, 1]
    values = compare_plot.smooth(np.arange(100.0))
    assert values[:4].tolist() == [0, 0.5, 1, 2] and values[-1] == 98


def test_without_matplotlib_the_tables_still_come(monkeypatch):
    make_run("a", [0.5], seed=1)
    make_run("b", [0.5], seed=2)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    result, lines = compare_lines("a", "b", "--plot=x.png")
    assert lines[-1] == "plot        none: it needs matplotlib: pip install matplotlib"
    assert lines[0] == "flags that differ" and result["plot"] is None
    assert not Path("x.png").exists()


def test_a_picture_that_cannot_be_written_is_a_line():
    make_run("a", [0.5], seed=1)
    make_run("b", [0.5], seed=2)
    Path("compare.png").mkdir()
    result, lines = compare_lines("a", "b")
    assert "cannot be written: Is a directory; try --plot=FILE.png" in lines[-1]
    assert result["plot"] is None
