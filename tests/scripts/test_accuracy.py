"""scripts/accuracy: a row of several seeds, which are trained once; and the table of configs/."""

import re
import shlex
import types

import pytest

from tests.programs import ROOT, script

pytestmark = pytest.mark.unit

TABLES = (ROOT / "configs" / "README.md").read_text()
SHORT = "--model=tests.tiny:cnn --dataset=shapes --max_steps=30 --batch_size=32 --dtype=float64 "
SHORT += "--devices=cpu --learning_rate=0.05 --optimizer=momentum --schedule=onecycle "
SHORT += "--weight_decay=0.001 --clip_global_norm=1 --label_smoothing=0.1 --ema_decay=0.9"


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.chdir(ROOT)
    return script("accuracy")


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.timeout(600)  # of a busy machine
def test_a_seed_is_trained_once_and_fit_learns_the_same(accuracy, tmp_path, capfd, monkeypatch):
    config = tmp_path / "short.cfg"
    config.write_text(SHORT.replace(" ", "\n"))
    argv = [str(config), "--num_towers=2", "--seeds=1", "--peer=fit", f"--runs={tmp_path}"]
    assert accuracy.main(argv) == 0
    out, err = capfd.readouterr()
    ours, theirs = (line.split(" | ") for line in out.splitlines())
    assert ours[0] == f"| `scripts/accuracy {config} --num_towers=2 --seeds=1 --peer=fit`"
    assert (ours[1], theirs[1]) == ("towers", "Keras fit")
    assert ours[2] == theirs[2]  # in float64, of 4,000 images
    assert re.fullmatch(r"0\.\d{4} \(0\.\d{4} to 0\.\d{4}\)", ours[3]) and ours[4] == "1"
    assert all(f"{way}, seed 0: accuracy" in err for way in ("towers", "Keras fit"))
    monkeypatch.setattr(accuracy.subprocess, "run", None)
    assert accuracy.main(argv) == 0
    assert capfd.readouterr().out == out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("", "required: config"),
        ("configs/quickstart.cfg --seeds=0", "--seeds=0: there must be at least 1"),
        ("configs/quickstart.cfg --seeds=x", "--seeds: invalid int value: 'x'"),
        ("configs/quickstart.cfg --peer=ddp", "choose from 'fit'"),
        ("configs/quickstart.cfg --train_dir=x", "--train_dir is set for each run"),
        ("configs/quickstart.cfg --batchsize=3", "--batch_size"),
        ("configs/none.cfg", "configs/none.cfg"),
    ],
)
def test_bad_input_is_one_line(accuracy, tmp_path, capsys, argv, line):
    assert accuracy.main([*argv.split(), f"--runs={tmp_path}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and line in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_says_so(accuracy, tmp_path, capfd, monkeypatch):
    ended = types.SimpleNamespace(returncode=75)
    monkeypatch.setattr(accuracy.subprocess, "run", lambda *_, **__: ended)
    assert accuracy.main(["configs/quickstart.cfg", f"--runs={tmp_path}"]) == 75
    assert "seed_0 ended with exit code 75" in capfd.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.cfg")), ids=lambda p: p.name)
def test_every_config_is_described_and_has_rows_that_can_be_made(accuracy, tmp_path, path):
    assert f"| `{path.name}` |" in TABLES
    commands = re.findall(rf"^\| `scripts/accuracy (configs/{path.name}.*?)` \|", TABLES, re.M)
    assert commands
    for command in commands:
        accuracy.plan([*shlex.split(command), f"--runs={tmp_path}"])


def test_the_table_has_the_columns_of_the_rows_and_a_row_the_range_of_all_seeds(accuracy):
    assert accuracy.markdown(accuracy.HEADER, [])[0] in TABLES
    planned = accuracy.plan(["configs/quickstart.cfg", "--seeds=2", "--peer=fit"])
    assert [(run.seed, run.way) for run in planned] == [
        (seed, way) for seed in (0, 1) for way in ("towers", "fit")
    ]
    ends = [{"test_accuracy": a, "training_seconds": 1.0} for a in (0.5, 0.75)]
    cells = accuracy.row("command", "towers", ends)
    assert cells[2] == "0.6250 (0.5000 to 0.7500)" and cells[4] == 2
