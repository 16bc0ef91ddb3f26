"""Measures how long a run takes to its first step, beside what importing TensorFlow alone takes.

    python scripts/startup.py [--runs=5] [--towers=1,2,8]

The two take turns. The first is `python -c "import tensorflow"`, a whole process; the second is
`towers train` from its start until its first step is done (seconds_to_first_step of result.json),
on the tutorial's CNN and images drawn in code. Then the graph of a step is built for more towers.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = """
import time, tensorflow as tf
from towers.options.run import Options
from towers.training.run import prepare
run = prepare(Options(model="{model}", num_towers={towers}, devices="cpu"))
batches = iter(run.data.train.train_batches(128, seed=0))
start = time.perf_counter()
run.train_loop()(batches, tf.constant(0))
print(time.perf_counter() - start)
"""


def python(*arguments: str) -> str:
    """Run Python in the checkout; return what it prints."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def first_step(towers: int) -> float:
    """Return the seconds from the command to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--max_steps=1 --num_towers={towers} --devices=cpu --json --train_dir={folder}/run"
        return json.loads(python("-m", "towers", "train", *flags.split()))["seconds_to_first_step"]


def summary(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--towers", default="1,2,8")
    arguments = parser.parse_args()
    floor, ours = [], []
    first_step(2)  # the images are drawn at the first use
    for _ in range(arguments.runs):
        start = time.perf_counter()
        python("-c", "import tensorflow")
        floor.append(time.perf_counter() - start)
        ours.append(first_step(2))
    ratios = [our / their for our, their in zip(ours, floor, strict=True)]
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {arguments.runs} runs each\n"
    )
    print("| measure | median (range) |\n|---|---|")
    print(f"| `import tensorflow`, a whole process, s | {summary(floor)} |")
    print(f"| command to the end of the first step, 2 towers, s | {summary(ours)} |")
    print(f"| the second / the first | {summary(ratios)} |")
    for model in ("models.cnn:cnn", "models.resnet:resnet20"):
        for towers in map(int, arguments.towers.split(",")):
            seconds = float(python("-c", BUILD.format(model=model, towers=towers)))
            print(f"| the graph of a step, {model}, {towers} towers, s | {seconds:.2f} |")


if __name__ == "__main__":
    main()
