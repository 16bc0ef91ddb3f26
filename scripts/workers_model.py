"""Compares what `towers plan` reckons for workers with steps that were measured.

    python scripts/workers_model.py fixed      # what a tower and a tensor cost the program
    python scripts/workers_model.py check      # predicted / measured; network namespaces: as root

Workers are TensorFlow's servers, started by this program on this machine and ended with it. In
namespaces each of them, and the program, has a network card of its own, see `slow_network`.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from slow_network import enter, slow_network

from towers.commands.plan import workers
from towers.commands.plan.cost_model import Link, Work, largest_shard

ROOT = Path(__file__).resolve().parent.parent
FIRST_PORT, NUM_CPUS, BATCH = 24110, 16, 64
TERMS = "", " a tower", " a tensor of a tower"  # two tensors a weight: there and back
# (workers, rate of each card in Mbit/s, delay of each way in ms); 0: loopback
CASES = [(1, 0, 0), (2, 0, 0), (4, 0, 0), (2, 1000, 0.25), (4, 1000, 0.25), (2, 200, 0.25)]
CASES += [(4, 200, 0.25), (2, 1000, 5), (4, 1000, 5)]
SERVER = """
import sys
import tensorflow as tf
cpus = tf.compat.v1.ConfigProto(device_count={"CPU": int(sys.argv[2]), "GPU": 0})
tf.distribute.Server({"worker": [sys.argv[1]]}, job_name="worker", task_index=0, config=cpus)
print("ready", flush=True)
sys.stdin.read()  # ends with the program
"""


def chain(num_classes: int, image_shape: tuple, layers: int = 1, width: int = 4) -> Any:
    """Build a model that computes next to nothing, with two weights a layer."""
    import keras

    x = inputs = keras.Input(image_shape)
    x = keras.layers.Flatten()(keras.layers.AveragePooling2D(8)(x))
    for _ in range(layers - 1):
        x = keras.layers.Dense(width, "relu")(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


@contextlib.contextmanager
def servers(hosts: Sequence[str], prefixes: Sequence[list[str]] = ()) -> Iterator[list[str]]:
    """Start a server for each host, with what is before its command; yield their addresses."""
    addresses = [f"{host}:{FIRST_PORT + i}" for i, host in enumerate(hosts)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = []
    try:
        for prefix, address in itertools.zip_longest(prefixes, addresses, fillvalue=[]):
            command = [*prefix, sys.executable, "-c", SERVER, address, str(NUM_CPUS)]
            started.append(subprocess.Popen(command, text=True, env=quiet(), **pipes))
        for server in started:
            if server.stdout.readline() != "ready\n":
                sys.exit("a server did not start")
        yield addresses
    finally:
        for server in started:
            server.kill()
            server.communicate()


def quiet() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    more = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    return os.environ | more


def program(prefix: Sequence[str] = (), **what: Any) -> dict[str, Any]:
    """Run `measure` in a process of its own; return what it found."""
    command = [*prefix, sys.executable, __file__, "measure", json.dumps(what)]
    done = subprocess.run(command, capture_output=True, text=True, env=quiet(), timeout=400)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    towers: int,
    batch_sizes: Sequence[int],
    placements: Sequence[str],
    addresses: Sequence[str] = (),
    own: str = "",
    model: str = "models.cnn:cnn",
    model_args: str = "lrn=false",
    seconds: float = 4.0,
) -> dict[str, Any]:
    """Make steps; return how long each took to build, its medians, and the network.

    "seconds" are those of a step; "cpu_seconds" are what this process took of its processors.
    """
    import tensorflow as tf

    from towers import tf_private
    from towers.commands.plan.network import measure_network
    from towers.options.run import Options
    from towers.training.run import assemble, load_data

    result: dict[str, Any] = {}
    names = [f"/cpu:{i}" for i in range(towers)]
    if addresses:
        tf_private.connect(dict(enumerate(addresses)), own)
        jobs, each = range(len(addresses)), range(towers // len(addresses))
        names = [f"/job:worker/task:{i}/cpu:{j}" for i in jobs for j in each]
        network = measure_network([f"/job:worker/task:{i}/cpu:0" for i in jobs])
        result["network"] = dataclasses.asdict(network)
    steps = {}
    for placement in placements:
        for size in batch_sizes:
            options = Options(
                model=model, model_args=model_args, dataset="shapes", batch_size=size,
                variables=placement, devices="cpu", optimizer="momentum",
            )  # fmt: skip
            dataset = load_data(options, lambda line: None)
            start = time.perf_counter()
            run = assemble(options, names, dataset)
            loop = run.train_loop(telemetry=False)
            batches = iter(dataset.train.train_batches(size, seed=0).take(1).cache().repeat())
            loop(batches, tf.constant(1))["loss"].numpy()
            built = time.perf_counter() - start
            weights = [v.value.shape.num_elements() * 4 for v in run.masters.model.weights]
            once = [loop, batches, 1, []]
            steps[f"{placement} {size}"] = once
            result[f"{placement} {size}"] = {"build_seconds": built, "weights": weights}
    for once in steps.values():  # as many steps in a call as take a fifth of a second
        loop, batches, *_ = once
        start = time.perf_counter()
        loop(batches, tf.constant(5))["loss"].numpy()
        once[2] = max(1, round(0.2 * 5 / (time.perf_counter() - start)))
    end = time.perf_counter() + seconds * len(steps)
    while time.perf_counter() < end:
        for loop, batches, number, times in steps.values():  # in turn
            start = time.perf_counter(), time.process_time()
            loop(batches, tf.constant(number))["loss"].numpy()
            took = time.perf_counter() - start[0], time.process_time() - start[1]
            times.append([of_all / number for of_all in took])
    for name, (*_, times) in steps.items():
        medians = map(statistics.median, zip(*times, strict=True))
        result[name] |= dict(zip(("seconds", "cpu_seconds"), medians, strict=True))
    return result


def fixed() -> None:
    """Print what a step and its graph take with more towers, a fit, and what it says of 1,024."""
    print("| weights | towers | graph, s | step, ms | of it the program's processor |")
    print("|---|---|---|---|---|")
    rows = []
    with servers(["127.0.0.1"] * 2) as addresses:
        for layers, towers in itertools.product((1, 10), (2, 8, 32)):
            size = 2 * towers
            found = program(
                addresses=addresses, own="127.0.0.1", towers=towers, batch_sizes=[size],
                placements=["cpu"], model="workers_model:chain", model_args=f"layers={layers}",
                seconds=8,
            )[f"cpu {size}"]  # fmt: skip
            rows.append((2 * layers, towers, found["build_seconds"], found["cpu_seconds"]))
            times = f"{found['seconds'] * 1e3:.1f} | {found['cpu_seconds'] * 1e3:.1f}"
            print(
                f"| {2 * layers} | {towers} | {found['build_seconds']:.1f} | {times} |", flush=True
            )
    weights, towers, built, seconds = np.array(rows).T
    terms = np.stack([np.ones_like(towers), towers, 2 * weights * towers], 1)
    for name, measured in ("processor of a step", seconds), ("graph", built):
        # Relative errors count: else the largest time is all that is fitted.
        fit = np.linalg.lstsq(terms / measured[:, None], np.ones_like(measured), rcond=None)[0]
        text = " + ".join(f"{1e3 * x:.3g} ms{of}" for x, of in zip(fit, TERMS, strict=True))
        off = 100 * np.abs(terms @ fit / measured - 1).max()
        many = [f"{fit @ [1, 1024, 2 * n * 1024]:.3g} s with {n} weights" for n in (10, 60, 160)]
        print(f"\n{name}: {text}; at most {off:.0f} % off\n  1,024 towers: {', '.join(many)}")


def check() -> None:
    """Print the times that were predicted and measured of the tutorial's CNN."""
    alone = program(towers=1, batch_sizes=[BATCH // 2, BATCH], placements=["cpu"])
    print("| workers | network | variables | predicted, ms | measured, ms | ratio |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for number, mbits, delay in CASES:
        what = dict(towers=number, batch_sizes=[BATCH], placements=list(workers.WAYS))
        with contextlib.ExitStack() as stack:
            hosts, own, prefixes = ["127.0.0.1"] * number, "127.0.0.1", [[]] * (number + 1)
            if mbits:
                own, *hosts = stack.enter_context(slow_network(number + 1, mbits, delay))
                prefixes = [enter(i) for i in range(number + 1)]
            addresses = stack.enter_context(servers(hosts, prefixes[1:]))
            found = program(prefixes[0], addresses=addresses, own=own, **what)
        network = Link(**found["network"])
        where = f"{mbits} Mbit/s, {delay} ms" if mbits else "loopback"
        for placement in workers.WAYS:
            predicted = predict(alone, network, number, placement, bool(mbits))
            measured = found[f"{placement} {BATCH}"]["seconds"]
            ratios.append(predicted / measured)
            times = f"{predicted * 1e3:.1f} | {measured * 1e3:.1f} | {ratios[-1]:.2f}"
            print(f"| {number} | {where} | {placement} | {times} |", flush=True)
        print(network, found, file=sys.stderr, flush=True)
    off = [abs(ratio - 1) for ratio in ratios]
    print(f"\nmedian {100 * statistics.median(off):.0f} % off, at most {100 * max(off):.0f} %")


def predict(
    alone: dict[str, Any], network: Link, number: int, placement: str, has_cards: bool
) -> float:
    """Return the seconds of a step, from those of one tower in one process and timed copies.

    All workers share this machine's cores: computing takes what it takes one tower, and launches
    take turns. Over loopback a copy is work of the same cores: what all workers send takes its
    turn, not what the busiest sends, and nothing hides behind computing.
    """
    half, whole = (alone[f"cpu {size}"] for size in (BATCH // 2, BATCH))
    computing = min(2 * (whole["seconds"] - half["seconds"]), whole["seconds"])
    launches = (whole["seconds"] - computing) * max(1.0, number / (os.cpu_count() or 1))
    work = Work(
        tower_seconds=computing + launches, launch_seconds=0.0, update_launch_seconds=0.0,
        slice_bytes=BATCH * 24 * 24 * 3 * 4 / number, weights=whole["weights"], exchange_bytes=0.0,
        host_copies=0,
    )  # fmt: skip
    if not has_cards and placement == "sharded":
        of_busiest = largest_shard(work.weights, number) / sum(work.weights)
        network = dataclasses.replace(network, gb_per_second=network.gb_per_second * of_busiest)
    nothing = Link("handed over", math.inf, 1.0, 0.0)
    cluster = workers.Cluster(
        network, nothing, towers_per_worker=1, spread=0.0, overlap=float(has_cards), sends_rows=True
    )
    return sum(workers.parts(work, placement, number, cluster).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["fixed", "check", "measure"])
    parser.add_argument("given", nargs="?", default="")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        print(json.dumps(measure(**json.loads(arguments.given))))
    else:
        {"fixed": fixed, "check": check}[arguments.what]()


if __name__ == "__main__":
    main()
