"""What crosses between machines in a step, by the counters of their cards."""

import os
import subprocess

import pytest

from scripts import network_bytes


def has_namespaces():
    made = subprocess.run(["ip", "netns", "add", "tptry"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", "tptry"], capture_output=True, check=False)
    return made.returncode == 0 and os.path.exists("/dev/net/tun")


@pytest.mark.skipif(
    os.geteuid() != 0 or not has_namespaces(), reason="network namespaces are root's to make"
)
@pytest.mark.parametrize("towers_per_worker", [1, 2])
def test_a_step_sends_what_it_must_and_no_more(towers_per_worker):
    cpu, sharded = network_bytes.measure(2, towers_per_worker)
    size = cpu["gradients"]
    mean = 0.1 if towers_per_worker > 1 else 0.0  # comes back to each worker in one step of ten
    assert [row["variables"] for row in (cpu, sharded)] == ["cpu", "sharded"]
    assert [sent / size for sent in cpu["sent"]] == pytest.approx([2 + 2 * mean, 1, 1], rel=0.1)
    least = [0, 1 + mean / 2, 1 + mean / 2]
    assert [sent / size for sent in sharded["sent"]] == pytest.approx(least, rel=0.1, abs=0.1)
