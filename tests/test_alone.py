"""The modules that cannot share a process with other tests, see `alone`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.alone import ALONE

pytestmark = pytest.mark.process
TESTS = Path(__file__).parent


@pytest.mark.timeout(900)
def test_they_pass_in_a_process_of_their_own(request):
    """What was asked for: all, or what is not extended."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [*(TESTS / path for path in ALONE), "-m", request.config.getoption("markexpr")]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = subprocess.run(command, cwd=TESTS.parent, stdin=subprocess.DEVNULL, **pipes)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
