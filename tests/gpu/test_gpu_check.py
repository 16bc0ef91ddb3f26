"""scripts/gpu_check.py runs through; what cannot be asked of these GPUs is said, not a failure."""

import pytest

from scripts import gpu_check
from tests import programs

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "flags, least",
    [("--only=1,12", 1), pytest.param("", 18, marks=[pytest.mark.extended])],
)
@pytest.mark.timeout(1800)
def test_it_runs_through(flags, least, tmp_path):
    done = programs.python("scripts/gpu_check.py", f"--folder={tmp_path}", *flags.split())
    assert done.returncode == 0, done.stdout + done.stderr
    ends = gpu_check.outcomes(tmp_path)
    assert list(ends.values()).count(gpu_check.OK) >= least
    assert "1 kernels: ok" in done.stdout and "12 rows: cannot be asked here" in done.stdout
