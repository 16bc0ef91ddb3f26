"""Scripts that measure or compare, on the tiniest input: their tables, and what they compare."""

import json
import re
import shlex

import pytest

from tests.programs import ROOT, TENSORFLOWS_LINES, python, script

pytestmark = pytest.mark.process
TEXTS = {path: path.read_text() for path in (ROOT / "scripts").glob("*.py")}
SCRIPTS = sorted(p.name for p, text in TEXTS.items() if "tensorflow" in text and "__main__" in text)
TABLES = (ROOT / "configs" / "README.md").read_text()


@pytest.mark.extended
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_without_tensorflows_lines(name):
    """Of one that is run, tests/graphs/test_placement.py looks at the lines."""
    done = python(f"scripts/{name}", "--help")
    assert done.returncode == 0 and done.stdout
    assert not TENSORFLOWS_LINES.search(done.stderr), done.stderr


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "given", "remedy"),
    [
        ("accuracy", "", "required: config"),
        ("accuracy", "configs/quickstart.cfg --seeds=0", "--seeds=0: there must be at least 1"),
        ("accuracy", "configs/quickstart.cfg --train_dir=x", "--train_dir is set for each run"),
        ("accuracy", "configs/quickstart.cfg --batchsize=3", "batch_size"),
        ("accuracy", "configs/none.cfg", "configs/none.cfg"),
        ("speed", "--against=fit,tensorpack", "there are mirrored"),
        ("speed", "--against=fit --windows=0", "at least 1"),
    ],
)
def test_bad_input_is_one_line(folder, monkeypatch, capsys, name, given, remedy):
    monkeypatch.chdir(ROOT)
    runs = [f"--runs={folder}"] if name == "accuracy" else []
    assert script(name).main([*given.split(), *runs]) == 2
    out, err = capsys.readouterr()
    assert out == "" and remedy in err and len(err.splitlines()) == 1
    assert not list(folder.iterdir())


# Beside what others do.


@pytest.mark.extended
def test_towers_have_none_of_the_three_faults_of_mirrored_strategy():
    done = python("scripts/mirrored_faults.py")
    assert done.returncode == 0, done.stderr
    header, updates, weights, variances = [line.split() for line in done.stdout.splitlines()]
    assert header == ["one", "device", "2", "towers", "MirroredStrategy"]
    assert updates[-3:] == ["1.0000", "1.0000", "1.4142"]
    assert weights[-6:] == ["0", "0", "0", "0", "nan", "nan"]
    assert variances[-3:] == ["1", "1", "0"]


# scripts/accuracy, and the table of configs/.


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.chdir(ROOT)
    return script("accuracy")


@pytest.mark.unit
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.cfg")), ids=lambda p: p.name)
def test_every_config_is_described_and_has_rows_that_can_be_made(accuracy, tmp_path, path):
    assert f"| `{path.name}` |" in TABLES
    commands = re.findall(rf"^\| `scripts/accuracy (configs/{path.name}.*?)` \|", TABLES, re.M)
    assert commands
    for command in commands:
        accuracy.plan([*shlex.split(command), f"--runs={tmp_path}"])


@pytest.mark.unit
def test_the_table_has_the_columns_of_the_rows_and_a_row_the_range_of_all_seeds(accuracy):
    assert accuracy.markdown(accuracy.HEADER, [])[0] in TABLES
    planned = accuracy.plan(["configs/quickstart.cfg", "--seeds=2"])
    assert [run.seed for run in planned] == [0, 1]
    ends = [{"test_accuracy": a, "training_seconds": 1.0} for a in (0.5, 0.75)]
    cells = accuracy.row("command", ends)
    assert cells[1] == "0.6250 (0.5000 to 0.7500)" and cells[3] == 2


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "scripts/examples").glob("*.py")))
def test_the_program_runs(name):
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    done = python(f"scripts/examples/{name}.py", "--num_towers=2", variables=no_gpu)
    assert done.returncode == 0, done.stderr
    losses = [line.split("- loss: ")[1].split()[0] for line in done.stdout.splitlines()[1::2]]
    assert len(losses) == 5 and float(losses[-1]) < 0.7 * float(losses[0])


# scripts/soak: a few of its rounds, and that it notices what is wrong.


@pytest.mark.extended
@pytest.mark.timeout(600)  # of a busy machine
def test_some_rounds_pass(tmp_path):
    faults, folder = ["terminated", "killed_in_save", "damaged", "blocked"], tmp_path / "soak"
    flags = [f"--rounds={len(faults)}", f"--faults={','.join(faults)}", f"--folder={folder}"]
    done = python("scripts/soak", *flags, "--json")
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    assert sorted(r["fault"] for r in rounds) == sorted(faults)
    assert not any(r["wrong"] for r in rounds) and not folder.exists()
