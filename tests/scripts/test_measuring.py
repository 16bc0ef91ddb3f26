"""Scripts that measure or compare, on the tiniest input: their tables, and what they compare."""

import argparse
import os
import subprocess
import sys

import pytest
from matplotlib import image

from scripts import curves as curves_script
from scripts import network_bytes
from tests.programs import ROOT, TENSORFLOWS_LINES, python

pytestmark = pytest.mark.process
TEXTS = {path: path.read_text() for path in (ROOT / "scripts").glob("*.py")}
SCRIPTS = sorted(p.name for p, text in TEXTS.items() if "tensorflow" in text and "__main__" in text)


def table(printed):
    """Return {heading: cell} of each row that a script printed."""
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    heading, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert set(rule) == {"---"}
    return [dict(zip(heading, row, strict=True)) for row in rows]


@pytest.mark.extended
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_without_tensorflows_lines(name):
    """Of one that is run, tests/graphs/test_placement.py looks at the lines."""
    done = python(f"scripts/{name}", "--help")
    assert done.returncode == 0 and done.stdout
    assert not TENSORFLOWS_LINES.search(done.stderr), done.stderr


# curves.py.


@pytest.mark.extended
@pytest.mark.run
def test_curves_are_real_and_differ_by_rounding(tmp_path, monkeypatch, capsys):
    path = tmp_path / "new folder" / "curves.png"
    tiny = ("--model=tests.tiny:dense", "--model_args=", "--dataset=tests.tiny:images")
    arguments = ("--steps=5", "--num_towers=1,1,2", "--control", "--batch_size=7", *tiny)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["curves.py", *arguments, f"--output={path}"])
    curves_script.main()
    printed = capsys.readouterr().out
    title = "tests.tiny:dense() on tests.tiny:images, batch size 7, float32, seed 0; 5 steps, "
    assert printed.startswith(title) and printed.splitlines()[-1] == str(path)
    assert image.imread(path).shape == (800, 1200, 4)

    one, again, two, control = rows = table(printed)
    names = ["1 tower", "1 tower, again", "2 towers", "1 tower, changed in the last bit"]
    assert [row["towers"] for row in rows] == names
    largest = "largest difference from 1 tower"
    assert one[largest] == again[largest] == "0" and one["at step"] == "-"
    assert 0 < float(two[largest]) < 1e-5 and 0 < float(control[largest]) < 1e-5
    assert 1 <= int(two["at step"]) <= 5
    for row in rows:
        assert abs(float(row["first loss"]) - float(row["last loss"])) > 1e-3
    assert float(one["last loss"]) == pytest.approx(float(two["last loss"]), abs=1e-5)


@pytest.mark.unit
def test_one_tower_comes_first():
    for value in ("2,4", "1,0", "1,2,3,4,5"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{value}: 1 must come first"):
            curves_script.numbers(value)


def test_without_matplotlib_one_line_says_what_to_type(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "runpy.run_path('scripts/curves.py', run_name='__main__')"
    )
    done = python("-c", program)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.endswith("type pip install -e '.[plot]' in the checkout")


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


@pytest.mark.extended
@pytest.mark.parametrize("towers_per_worker", [1, 2])
def test_a_step_sends_what_it_must_and_no_more(towers_per_worker):
    """By the counters of the machines' cards."""
    if os.geteuid() != 0 or not has_namespaces():
        pytest.skip("network namespaces are root's to make")
    cpu, sharded = network_bytes.measure(2, towers_per_worker)
    size = cpu["gradients"]
    mean = 0.1 if towers_per_worker > 1 else 0.0  # comes back to each worker in one step of ten
    assert [row["variables"] for row in (cpu, sharded)] == ["cpu", "sharded"]
    assert [sent / size for sent in cpu["sent"]] == pytest.approx([2 + 2 * mean, 1, 1], rel=0.1)
    least = [0, 1 + mean / 2, 1 + mean / 2]
    assert [sent / size for sent in sharded["sent"]] == pytest.approx(least, rel=0.1, abs=0.1)


def has_namespaces():
    made = subprocess.run(["ip", "netns", "add", "tptry"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", "tptry"], capture_output=True, check=False)
    return made.returncode == 0 and os.path.exists("/dev/net/tun")
