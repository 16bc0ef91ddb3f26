"""scripts/curves.py and scripts/exactness_cost.py: tables, figure, what they compare."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import image

from scripts import curves as curves_script
from scripts import exactness_cost

ROOT = Path(__file__).resolve().parents[2]
CONTROL = "1 tower, changed in the last bit"
TINY = ("--model=tests.tiny:dense", "--model_args=", "--dataset=tests.tiny:images")


def script(*arguments):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)


def table(done):
    """Return {heading: cell} of each row that a script printed."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    heading, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert set(rule) == {"---"}
    return [dict(zip(heading, row, strict=True)) for row in rows]


# ---------------------------------------------------------------------------- curves.py


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Return what curves.py printed of a few steps, and where its figure is."""
    path = tmp_path_factory.mktemp("curves") / "new folder" / "curves.png"
    arguments = ("--steps=5", "--num_towers=1,1,2", "--control", "--batch_size=7")
    return script("scripts/curves.py", *arguments, f"--output={path}", *TINY), path


def test_curves_are_real_and_differ_by_rounding(curves):
    rows = table(curves[0])
    assert [row["towers"] for row in rows] == ["1 tower", "1 tower, again", "2 towers", CONTROL]
    one, again, two, control = rows
    largest = "largest difference from 1 tower"
    assert one[largest] == again[largest] == "0"
    assert one["at step"] == "-"
    assert 0 < float(two[largest]) < 1e-5
    assert 0 < float(control[largest]) < 1e-5
    assert 1 <= int(two["at step"]) <= 5
    for row in rows:
        assert abs(float(row["first loss"]) - float(row["last loss"])) > 1e-3
    assert float(one["last loss"]) == pytest.approx(float(two["last loss"]), abs=1e-5)


def test_the_figure_is_written_and_named(curves):
    done, path = curves
    title = "tests.tiny:dense() on tests.tiny:images, batch size 7, float32, seed 0; 5 steps, "
    assert done.stdout.startswith(title) and done.stdout.splitlines()[-1] == str(path)
    assert image.imread(path).shape == (800, 1200, 4)


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
    done = script("-c", program)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.endswith("type pip install -e '.[plot]' in the checkout")


# ---------------------------------------------------------------------------- exactness_cost.py


def test_cost_is_a_table_of_pairs():
    arguments = ("--windows=2", "--seconds=0.05", "--batch_size=8", "--num_towers=2", "--depth=8")
    rows = table(script("scripts/exactness_cost.py", *arguments))
    variants = ["batch_norm=sync", "batch_norm=local", "draws by example", "draws by tower"]
    assert [row["variant"].split(", ")[1] for row in rows] == variants
    for row in rows:
        assert row["towers"] == "2" and values(row["examples/s, median (range)"])[1] > 0
    ratio = "exact / this, median (range)"
    for exact, other in (rows[:2], rows[2:]):
        assert exact[ratio] == "exact"
        low, middle, high = values(other[ratio])
        assert 0 < low <= middle <= high
        # The ratio of the medians lies within the ratios of the windows, up to rounding.
        ours, theirs = (values(r["examples/s, median (range)"])[1] for r in (exact, other))
        assert low - 0.05 <= ours / theirs <= high + 0.05


def values(cell):
    """Return lowest, median and highest of "12 (10 to 13)"."""
    found = re.fullmatch(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", cell)
    assert found, cell
    middle, low, high = map(float, found.groups())
    return low, middle, high


def test_only_draws_by_example_compute_what_one_tower_computes():
    exact, other = exactness_cost.make_pairs(depth=8)[1]

    def first_loss(variant, num_towers):
        return exactness_cost.make_step(variant, num_towers, batch_size=8)()

    one = first_loss(exact, 1)
    assert first_loss(exact, 2) == pytest.approx(one, abs=1e-5)
    assert first_loss(other, 2) != pytest.approx(one, abs=1e-4)
