"""Count what a training step sends over the network, by the machines' own cards. Root only.

    python scripts/network_bytes.py --workers=2,3 [--towers_per_worker=2]

The machines are network namespaces (`slow_network`), the model is the tutorial's CNN, and G is what
its gradients take. With `--variables=cpu` each worker is sent the weights, and sends its gradients:
the program sends W x G. With `sharded` a worker sends the weights that it holds to the W-1 others,
and each of them the gradients of theirs: 2(W-1)/W x G in the mean over the workers, which is the
least that a ring could do; where one weight is most of the model, its worker sends more. A worker
with several towers sends their sum.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.slow_network import enter, slow_network  # noqa: E402 - found by the line above

_PORT, _STEPS, _MBITS = 2222, 10, 10_000


def sent(machine: int) -> int:
    """Return how many bytes a machine's card has sent."""
    path = f"/sys/class/net/tpc{machine}/statistics/tx_bytes"
    return int(subprocess.check_output([*enter(machine), "cat", path]))


def program(addresses: list[str], towers_per_worker: int) -> Iterator[dict[str, Any]]:
    """Make steps, and yield what each machine has sent in one, the program first."""
    import tensorflow as tf

    from towers.options.run import Options
    from towers.training.run.setup import assemble, load_data
    from towers.workers import cluster

    workers = cluster.connect(addresses, towers_per_worker)
    machines = range(len(addresses) + 1)
    for variables in ("cpu", "sharded"):
        options = Options(variables=variables, batch_size=8 * len(workers.devices))
        run = assemble(options, workers.devices, load_data(options))
        size = sum(4 * v.shape.num_elements() for v in run.train_state.model.trainable_variables)
        train_loop, batches = run.train_loop(), iter(run.batches(0, 0))
        train_loop(batches, tf.constant(2))["loss"].numpy()
        before = list(map(sent, machines))
        train_loop(batches, tf.constant(_STEPS))["loss"].numpy()
        by_machine = [(sent(m) - b) / _STEPS for m, b in zip(machines, before, strict=True)]
        yield {"variables": variables, "gradients": size, "sent": by_machine}
    workers.close()


def measure(num_workers: int, towers_per_worker: int = 1) -> list[dict[str, Any]]:
    """Return what `program` yields on so many workers, each a machine of its own."""
    with slow_network(num_workers + 1, _MBITS, 0.0) as hosts:
        addresses = [f"{host}:{_PORT}" for host in hosts[1:]]
        python, processes = [sys.executable, "-u"], []
        try:
            for machine, address in enumerate(addresses, start=1):
                command = [*enter(machine), *python, "-m", "towers", "worker"]
                processes.append(
                    subprocess.Popen(
                        [*command, f"--address={address}"],
                        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                    )
                )  # fmt: skip
            for process in processes:
                next(line for line in process.stdout if line.startswith("free"))
            chief_command = [*enter(0), *python, __file__, f"--program={','.join(addresses)}"]
            chief_command.append(f"--towers_per_worker={towers_per_worker}")
            quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
            out = subprocess.run(
                chief_command, cwd=ROOT, env=quiet, check=True, stdout=subprocess.PIPE, text=True
            )
            return json.loads(out.stdout.splitlines()[-1])
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def main() -> None:
    """Print a table, in parts of G."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="2,3", help="numbers of workers")
    parser.add_argument("--towers_per_worker", type=int, default=1, help="how many each has")
    parser.add_argument("--program", help="addresses of workers: be the program")
    arguments = parser.parse_args()
    if arguments.program:
        addresses = arguments.program.split(",")
        print(json.dumps(list(program(addresses, arguments.towers_per_worker))))
        return
    print("| variables | workers | program sends | expected | each worker sends: mean | expected |")
    print("|---|---|---|---|---|---|")
    for number in map(int, arguments.workers.split(",")):
        for row in measure(number, arguments.towers_per_worker):
            of_program, *of_workers = [size / row["gradients"] for size in row["sent"]]
            sharded = row["variables"] == "sharded"
            share = (number - 1) / number
            expected = (0, 2 * share) if sharded else (number, 1)
            each = ", ".join(f"{size:.2f}" for size in of_workers)
            print(
                f"| {row['variables']} | {number} | {of_program:.2f} | {expected[0]:.2f} | "
                f"{sum(of_workers) / number:.2f} ({each}) | {expected[1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
