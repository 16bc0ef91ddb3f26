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
def test_a_step_sends_what_it_must_and_no_more():
    cpu, sharded = network_bytes.measure(2)
    size = cpu["gradients"]
    assert [row["variables"] for row in (cpu, sharded)] == ["cpu", "sharded"]
    assert [sent / size for sent in cpu["sent"]] == pytest.approx([2, 1, 1], rel=0.1)
    assert [sent / size for sent in sharded["sent"]] == pytest.approx([0, 1, 1], rel=0.1, abs=0.1)
