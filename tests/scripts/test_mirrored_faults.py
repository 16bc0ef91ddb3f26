"""scripts/mirrored_faults.py: two towers beside one device, where MirroredStrategy goes wrong."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_towers_have_none_of_the_three_faults():
    command = [sys.executable, "scripts/mirrored_faults.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    header, *rows = [line.split() for line in done.stdout.splitlines()]
    assert header == ["one", "device", "2", "towers", "MirroredStrategy"]
    updates, weights, variances = rows
    assert updates[-3:] == ["1.0000", "1.0000", "1.4142"]
    assert weights[-6:] == ["0", "0", "0", "0", "nan", "nan"]
    assert variances[-3:] == ["1", "1", "0"]
