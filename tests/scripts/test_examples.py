"""scripts/examples: programs that run; that they have plain Keras' numbers is in test_parallel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ["images", "pairs", "segmentation", "table", "text", "two_outputs"]


@pytest.mark.unit
def test_there_are_six():
    assert sorted(path.stem for path in (ROOT / "scripts/examples").glob("*.py")) == EXAMPLES


@pytest.mark.process
@pytest.mark.extended
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_program_runs(name):
    done = subprocess.run(
        [sys.executable, f"scripts/examples/{name}.py", "--num_towers=2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [line.split("- loss: ")[1].split()[0] for line in done.stdout.splitlines()[1::2]]
    assert len(losses) == 5 and float(losses[-1]) < 0.7 * float(losses[0])
