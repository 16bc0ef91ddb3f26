"""The modules that cannot share a process with others, see `alone`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.alone import ALONE

pytestmark = pytest.mark.process
TESTS = Path(__file__).parent


@pytest.mark.parametrize("path", ALONE)
def test_it_passes_in_a_process_of_its_own(path, request):
    """Of each module what was asked for: all, or what is not extended."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS / path]
    command += ["-m", request.config.getoption("markexpr")]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = subprocess.run(command, cwd=TESTS.parent, stdin=subprocess.DEVNULL, **pipes)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
