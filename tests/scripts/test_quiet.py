"""What scripts print is their own: no line of TensorFlow's start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOG_LINE = re.compile(r"^[IWEF]\d{4} |^WARNING: All log messages|^To enable the following", re.M)
TEXTS = {path: path.read_text() for path in (ROOT / "scripts").glob("*.py")}
SCRIPTS = [path for path, text in TEXTS.items() if "tensorflow" in text and "__main__" in text]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SCRIPTS), ids=lambda path: path.name)
def test_a_script_starts_without_tensorflows_lines(path):
    environment = {n: v for n, v in os.environ.items() if n != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, path, "--help"],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout
    assert not LOG_LINE.search(done.stderr), done.stderr
