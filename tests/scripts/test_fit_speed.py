"""scripts/fit_speed.py: a table of three ways to fit, in turn."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_three_ways_are_compared():
    tiny = ["--example=pairs", "--batch_size=8", "--windows=1", "--steps=2"]
    command = [sys.executable, "scripts/fit_speed.py", *tiny]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["2 towers", "one device", "MirroredStrategy"]
    assert rows[0][2] == "1.00 (1.00 to 1.00)"
    assert all(float(row[1].split()[0]) > 0 for row in rows)
