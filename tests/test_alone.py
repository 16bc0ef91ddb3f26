"""The modules that cannot share a process with others, see `alone`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.alone import ALONE

TESTS = Path(__file__).parent


@pytest.mark.parametrize("path", ALONE)
def test_it_passes_in_a_process_of_its_own(path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS / path]
    run = subprocess.run(
        command, cwd=TESTS.parent, stdin=subprocess.DEVNULL, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
