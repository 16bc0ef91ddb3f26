"""Comparisons: what is read of runs, the tables, the picture."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from tests import tiny
from tests.runs import command as command_line
from towers import cli
from towers.commands.compare import command
from towers.monitoring import events
from towers.monitoring.scalar_reader import read_curves, training_seconds
from towers.options.run import Options

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("folder")]


def write_events(folder, points, began=1000, wall_time=0.0):
    """Write an event file of [(x, {tag: value})]; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{began}.host.1.v2"
    found = [Event(wall_time=wall_time, file_version="brain.Event:2")]
    for x, values in points:
        found.append(Event(wall_time=wall_time + x, step=x))
        for tag, value in values.items():
            found[-1].summary.value.extend(scalar_pb(tag, value).value)
    path.unlink(missing_ok=True)
    events.append(path, *found)
    return path


def train_points(steps, rate=100.0, by_examples=False):
    """Return the points after these numbers of steps of 10 examples; the first has no speed."""
    points = []
    for step in steps:
        values = {"loss/data": 10 / step, "progress/examples": step * 10}
        values |= {"progress/epoch": step / 100}
        values |= {"speed/examples_per_second": rate} if step != steps[0] else {}
        points.append(((step - 1) * (10 if by_examples else 1), values))
    return points


def make_run(name, accuracies, result=None, rate=100.0, by_examples=False, **changes):
    """Make the folder of a run of 10 examples a step, evaluated after each 100 steps."""
    folder = Path(name)
    folder.mkdir(parents=True)
    x = "examples" if by_examples else "step"
    options = Options(train_dir=name, batch_size=10, tensorboard_x=x, **changes)
    (folder / "flags.cfg").write_text(options.to_flagfile())
    steps = [1, *range(50, 100 * len(accuracies) + 1, 50)]
    write_events(folder / "train", train_points(steps, rate, by_examples))
    between = 1000 if by_examples else 100
    points = [((i + 1) * between, {"accuracy": value}) for i, value in enumerate(accuracies)]
    write_events(folder / "eval", points)
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def compare_lines(*argv):
    lines = []
    result = command.run(cli.parse("compare", list(argv)), lines.append)
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


def test_flags_results_and_times():
    make_run("runs/a", [0.5, 0.7, 0.9], RESULT, learning_rate=0.1)
    make_run("runs/b", [0.6, 0.8], rate=50.0, learning_rate=0.2, optimizer="adamw")
    result, lines = compare_lines("runs/a", "runs/b")
    assert cells(lines, "flags that differ") == [
        ["run", "optimizer", "learning_rate"],
        ["a", "momentum", "0.1"],
        ["b", "adamw", "0.2"],
    ]
    assert cells(lines, "results") == [
        "run status accuracy test_loss examples/s examples seconds".split(),
        "a finished 0.9000 0.2500 99.5 3000 30.00".split(),
        "b unfinished 0.8000 - 50.0 2000 40.00".split(),
    ]
    assert cells(lines, "to a test accuracy of 0.8000")[:3] == [
        "run seconds steps examples".split(),
        "a 30.00 300 3000".split(),
        "b 40.00 200 2000".split(),
    ]
    assert result["differing_flags"] == ["optimizer", "learning_rate"]
    assert result["runs"][1]["to_target"]["seconds"] == pytest.approx(40)


def test_an_accuracy_may_never_be_reached_and_is_reached_when_it_is_equal():
    make_run("a", [0.5, 0.9])  # event files hold it in 32 bits, where it is less than 0.9
    make_run("b", [0.5, 0.6])
    _, lines = compare_lines("a", "b", "--accuracy=0.9")
    assert cells(lines, "to a test accuracy of 0.9000")[1:3] == [
        "a 20.00 200 2000".split(),
        "b - - -".split(),
    ]
    assert cells(lines, "no flag differs") == []


def test_runs_over_examples_and_over_steps_are_the_same():
    make_run("a", [0.5, 0.7])
    make_run("b", [0.5, 0.7], by_examples=True)
    result, _ = compare_lines("a", "b", "--accuracy=0.6")
    left, right = (run["to_target"] for run in result["runs"])
    assert left == pytest.approx(right)
    assert (left["steps"], left["examples"]) == (200, 2000)


def test_the_moving_average_and_the_newest_result_count():
    make_run("a", [0.5, 0.6, 0.7], RESULT | {"examples": 2000})  # and went on
    make_run("b", [0.5, 0.6, 0.7], RESULT)
    averaged = [(100, {"accuracy": 0.5, "accuracy_ema": 0.75})]
    write_events(make_run("c", [0.5]) / "eval", averaged)
    result, _ = compare_lines("a", "b", "c")
    statuses = [run["status"] for run in result["runs"]]
    assert statuses == ["unfinished", "finished", "unfinished"]
    found = [run["metrics"]["objective"] for run in result["runs"]]
    assert found == pytest.approx([0.7, 0.9, 0.75])


@pytest.mark.parametrize(
    "damage",
    [
        "[" * 100_000,
        "[]",
        '{"steps": []}',
        '{"steps": 3, "examples": "x"}',
        '{"steps": 3, "objective": ["a"]}',
        '{"steps": 3, "direction": "up"}',
        '{"steps": 3, "test_accuracy": [[1]]}',
    ],
)
def test_a_damaged_result_is_as_none_and_said(damage, capsys):
    make_run("a", [0.5, 0.7], RESULT)
    Path("a/result.json").write_text(damage)
    Path("sweep.json").write_text('{"runs": [{"name": []}]}')
    make_run("b", [0.5, 0.7])
    result, _ = compare_lines(".")
    assert [run["status"] for run in result["runs"]] == ["unfinished"] * 2
    said = [line.split()[:4] for line in capsys.readouterr().err.splitlines()]
    assert said == [["warning", f"{name}.json", "is", "damaged,"] for name in ("a/result", "sweep")]


def test_flags_that_are_damaged_or_odd(capsys):
    make_run("a", [0.5, 0.7], RESULT | {"test_accuracy": 10**400})
    make_run("b$x_{", [0.5, 0.7])
    Path("a/flags.cfg").write_bytes(b"--batch_size=0\n--batch_size=\xff")
    Path("b$x_{/flags.cfg").write_text("--batch_size=x\n--seed\n")
    result, _ = compare_lines("a", "b$x_{")
    assert [run["metrics"]["objective"] for run in result["runs"]] == pytest.approx([0.7, 0.7])
    assert "a/flags.cfg is damaged" in capsys.readouterr().err


def test_empty_and_failed_runs_are_named():
    make_run("S/a", [0.5])
    (Path("S/b") / "checkpoints").mkdir(parents=True)
    (Path("S/nothing")).mkdir()
    noted = {"runs": [{"name": "c", "status": "failed", "error": "exit code 2: no"}]}
    Path("S/sweep.json").write_text(json.dumps(noted))
    result, lines = compare_lines("S")
    assert [run["status"] for run in result["runs"]] == ["unfinished", "empty"]
    assert "failed: c: exit code 2: no" in lines
    assert cells(lines, "results")[2] == ["b", "empty", *"-----"]


def test_a_folder_of_runs_stands_for_all_of_them_once_and_in_order(capsys):
    for number in (3, 2, 1):
        make_run(f"S/seed={number}", [0.5], seed=number)
    code, out, err = command_line(capsys, "compare", "S", "S/seed=2", "--json")
    assert code == 0
    runs = json.loads(out)["runs"]
    assert [run["name"] for run in runs] == ["seed=1", "seed=2", "seed=3"]
    assert runs[1]["flags"] == {"seed": "2"} and "flags that differ" in err


@pytest.mark.parametrize(
    "argv, message",
    [
        ("", "towers compare RUN RUN"),
        ("a a", "towers compare a RUN"),
        ("a b", "b: No such file or directory"),
        ("a empty", "empty: there is no run"),
        ("a file", "file: Not a directory"),
        ("a c --accuracy=90", "--accuracy=90.0: a number from 0 to 1"),
        ("a c --monitor=auc", "--monitor=auc: allowed are accuracy, with max: or min:"),
        ("a c --target_value=high", "--target_value=high: a number is needed"),
        ("a c --target_value=1 --accuracy=0.5", "--accuracy and --target_value: give one of them"),
        ("a c --runs=d", "there is no flag --runs"),
    ],
)
def test_bad_input_gets_one_line(folder, capsys, argv, message):
    make_run("a", [0.5])
    make_run("c", [0.5])
    Path("empty").mkdir()
    Path("file").touch()
    before = tiny.files(folder)
    code, out, err = command_line(capsys, "compare", *argv.split())
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert tiny.files(folder) == before


def make_regression(name, errors, result=True, **more):
    """Make the folder of a run whose mae was these, and whose average's was half of that."""
    folder = make_run(name, [], **more)
    points = [((i + 1) * 100, {"mae": v, "mae_ema": v / 2}) for i, v in enumerate(errors)]
    write_events(folder / "eval", points, began=2000)
    found = {"steps": 300, "objective": "test_mae", "direction": "min", "test_mae": errors[-1]}
    found |= {"test_mae_ema": errors[-1] / 2, "test_loss": 0.5, "examples": 3000}
    if result:
        (folder / "result.json").write_text(json.dumps(found))
    return folder


def test_runs_are_compared_by_their_own_objective_which_may_be_better_when_it_is_lower():
    make_regression("a", [0.9, 0.5, 0.7])
    make_regression("b", [0.8, 0.7, 0.6])
    result, lines = compare_lines("a", "b")
    assert cells(lines, "results")[0][:4] == ["run", "status", "mae", "test_loss"]
    assert [row[2] for row in cells(lines, "results")[1:]] == ["0.3500", "0.3000"]
    assert [row[2] for row in cells(lines, "to a test mae of 0.3001")[1:3]] == ["200", "300"]
    assert (result["objective"], result["direction"]) == ("test_mae", "min")
    assert result["target"] == 0.3001
    _, lines = compare_lines("a", "b", "--target_value=0.4")
    assert [row[2] for row in cells(lines, "to a test mae of 0.4000")[1:3]] == ["200", "100"]


def test_another_objective_can_be_named_and_different_ones_are_told():
    make_regression("a", [0.9])
    make_run("b", [0.5], RESULT)
    result, lines = compare_lines("a", "b")
    assert lines[0] == (
        "objective   the runs have different objectives, test_mae, test_accuracy: compared by "
        "test_loss"
    )
    assert [run["metrics"]["objective"] for run in result["runs"]] == [0.5, 0.25]
    result, lines = compare_lines("a", "b", "--monitor=max:mae")
    assert (result["objective"], result["direction"]) == ("test_mae", "max")
    assert [run["metrics"]["objective"] for run in result["runs"]] == [0.45, None]
    for name, error in ("c", 0.9), ("d", 0.8):  # without a result: by what they have
        make_regression(name, [error], result=False)
    result, _ = compare_lines("c", "d", "--monitor=min:mae")
    assert [run["metrics"]["objective"] for run in result["runs"]] == pytest.approx([0.45, 0.4])
    assert compare_lines("c", "d")[0]["objective"] == "test_loss"


def test_seconds_are_examples_by_speed():
    for examples, rates, seconds in (
        ([10, 110, 310], [math.nan, 100, 50], [0, 0.1, 1.1, 5.1]),
        ([10, 110, 120, 220], [math.nan, 100, math.nan, 10], [0, 0.1, 1.1, 2.1, 12.1]),
        ([10, 20], [10, math.nan], [0, 1, 2]),
        ([10], [math.nan], [0, math.nan]),
        ([], [], []),
    ):
        found = training_seconds(np.array(examples, float), np.array(rates, float))
        assert found == pytest.approx(seconds, nan_ok=True)


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
    assert curves.loss.examples.tolist() == [0, 490, 990, 1000, 1490, 1990]
    assert curves.of("accuracy").examples.tolist() == [1000, 1400, 2000]
    assert curves.seconds_at(2000) == pytest.approx(10 + 20)


def test_a_file_is_read_up_to_where_a_crash_cut_it_off_and_pictures_are_passed_over():
    path = write_events(Path("a/train"), train_points([1, 50]))
    picture, late = Event(step=49), Event(step=99, summary=scalar_pb("loss/data", 1.0))
    picture.summary.value.add(tag="loss/data").tensor.tensor_shape.dim.add(size=3)
    picture.summary.value.add(tag="images/tower_0").tensor.string_val.append(b"png")
    events.append(path, picture, late)
    assert read_curves(Path("a"), 10).loss.examples.tolist() == [0, 490, 990]
    path.write_bytes(path.read_bytes()[:-3])
    assert read_curves(Path("a")).loss.examples.tolist() == [0, 490]
