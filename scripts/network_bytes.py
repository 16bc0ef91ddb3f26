"""Counts what a training step sends over the network, by the connections of each process.

    scripts/local_cluster --workers=2 [--towers_per_worker=2] -- python scripts/network_bytes.py

The model is the tutorial's CNN, and G is what its gradients take. With `--variables=cpu` each
worker is sent the weights, and sends its gradients: the program sends W x G. With `sharded` a
worker sends the weights that it holds to the W-1 others, and each of them the gradients of theirs:
2(W-1)/W x G in the mean over the workers, which is the least that a ring could do; where one weight
is most of the model, its worker sends more. A worker with several towers sends their sum. `ss` of
iproute2 counts the bytes.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

from towers import formatting  # noqa: E402
from towers.options.run import Options  # noqa: E402
from towers.training.run.setup import assemble, load_data  # noqa: E402
from towers.workers import cluster  # noqa: E402

_STEPS = 10
HEADER = "variables", "program sends", "expected", "each worker sends: mean", "expected"


def sent() -> dict[int, int]:
    """Return {process: bytes that its connections have sent}."""
    total: collections.Counter[int] = collections.Counter()
    for line in subprocess.check_output(["ss", "-tinpHO"], text=True).splitlines():
        if (process := re.search(r"pid=(\d+)", line)) and (num := re.search(r"_sent:(\d+)", line)):
            total[int(process[1])] += int(num[1])
    return total


def listening(address: str) -> int:
    """Return the process that listens at an address."""
    port = address.rpartition(":")[2]
    line = subprocess.check_output(["ss", "-tlnpHO", f"sport = :{port}"], text=True)
    return int(re.search(r"pid=(\d+)", line)[1])


def measure(addresses: Sequence[str], towers_per_worker: int, variables: str) -> list[float]:
    """Return what the program and each worker send in a step, in parts of G."""
    workers = cluster.connect(addresses, towers_per_worker)
    processes = [os.getpid(), *map(listening, addresses)]
    options = Options(variables=variables, batch_size=8 * len(workers.devices))
    run = assemble(options, workers.devices, load_data(options))
    size = sum(4 * v.shape.num_elements() for v in run.train_state.model.trainable_variables)
    train_loop, batches = run.train_loop(), iter(run.batches(0, 0))
    train_loop(batches, tf.constant(2))["loss"].numpy()
    before = sent()
    train_loop(batches, tf.constant(_STEPS))["loss"].numpy()
    after = sent()
    return [(after[process] - before[process]) / _STEPS / size for process in processes]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", required=True, help="their addresses")
    parser.add_argument("--towers_per_worker", type=int, default=1, help="how many each has")
    flags = parser.parse_args()
    addresses = flags.workers.split(",")
    number, rows = len(addresses), []
    expected = {"cpu": (number, 1), "sharded": (0, 2 * (number - 1) / number)}
    for variables, (of_program, of_worker) in expected.items():
        program, *workers = measure(addresses, flags.towers_per_worker, variables)
        each = f"{sum(workers) / number:.2f} ({', '.join(f'{part:.2f}' for part in workers)})"
        rows.append([variables, f"{program:.2f}", of_program, each, f"{of_worker:.2f}"])
    print("\n".join(formatting.markdown(HEADER, rows)))


if __name__ == "__main__":
    main()
