"""Scripts that measure or compare, on the tiniest input: their tables, and what they compare."""

import os
import subprocess

import pytest

from scripts import network_bytes
from tests.programs import ROOT, TENSORFLOWS_LINES, python

pytestmark = pytest.mark.process
TEXTS = {path: path.read_text() for path in (ROOT / "scripts").glob("*.py")}
SCRIPTS = sorted(p.name for p, text in TEXTS.items() if "tensorflow" in text and "__main__" in text)


@pytest.mark.extended
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_without_tensorflows_lines(name):
    """Of one that is run, tests/graphs/test_placement.py looks at the lines."""
    done = python(f"scripts/{name}", "--help")
    assert done.returncode == 0 and done.stdout
    assert not TENSORFLOWS_LINES.search(done.stderr), done.stderr


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
    assert [row["variables"] for row in (cpu, sharded)] == ["cpu", "sharded"]
    assert [sent / size for sent in cpu["sent"]] == pytest.approx([2, 1, 1], rel=0.05)
    assert [sent / size for sent in sharded["sent"]] == pytest.approx([0, 1, 1], rel=0.05, abs=0.05)


def has_namespaces():
    made = subprocess.run(["ip", "netns", "add", "tptry"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", "tptry"], capture_output=True, check=False)
    return made.returncode == 0 and os.path.exists("/dev/net/tun")
