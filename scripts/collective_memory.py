"""Measures how many bytes of host memory each collective of a traced function leaves behind.

    python scripts/collective_memory.py [--calls=500] [--collectives=40] [--num_towers=2]

A function sums and stacks in turn, on logical CPUs that stand in for GPUs; the table of keys that
TensorFlow keeps is the same on GPUs. A function without collectives is measured beside it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

from towers import devices  # noqa: E402
from towers.builder.collectives import Collective  # noqa: E402
from towers.formatting import markdown  # noqa: E402

FIRST_CALLS = 200  # until each key has been used, and the allocators have what they need


def resident() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def growth(calls: int, num_collectives: int, names: list[str]) -> list[float]:
    """Return by how many MiB the memory has grown after each fifth of the calls."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        values = [x] * len(names)
        for i in range(num_collectives):
            collective, halves = Collective(names), zip(values, names, strict=True)
            if i % 2:
                values = [collective.sum(value * 0.5, name) for value, name in halves]
            else:
                values = [collective.stack(value, name)[0] for value, name in halves]
        return values

    x, marks = tf.ones([4]), []
    for _ in range(FIRST_CALLS):
        step(x)
    before = resident()
    for i in range(1, calls + 1):
        step(x)
        if i % (calls // 5) == 0:
            marks.append(resident() - before)
    return marks


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in ("--calls", 500), ("--collectives", 40), ("--num_towers", 2):
        parser.add_argument(name, type=int, default=default)
    flags = parser.parse_args()
    names = devices.tower_devices(flags.num_towers + 1, "cpu")[1:]
    rows = []
    for number in (0, flags.collectives):
        marks = growth(flags.calls, number, names)
        each = f"{marks[-1] * 2**20 / (flags.calls * number):.0f}" if number else "-"
        rows.append([flags.calls * number, *(f"{mark:.1f}" for mark in marks), each])
    fifths = [f"MiB after {i}/5" for i in range(1, 6)]
    print("\n".join(markdown(["collectives", *fifths, "bytes each"], rows)))


if __name__ == "__main__":
    main()
