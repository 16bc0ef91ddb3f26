"""Measures what watching a run costs: its steps with everything that is shown, and without.

    python scripts/telemetry_cost.py [--windows=9] [--flagfile=FILE] [--num_towers=2] ...

A window is as many steps as a point of TensorBoard is for (--log_every_steps, 100). With: the times
of each step, what is measured of each tower, and the point itself, written to event files and to
the terminal's line. Without: the same steps alone. The two take turns on the same weights, so that
a slow minute of the machine slows both; a ratio is that of two neighbouring windows. Other flags
are those of `towers train`, at their defaults.
"""

import argparse
import contextlib
import io
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

from towers.errors import InputError, RunError  # noqa: E402
from towers.monitoring.monitor import Monitor  # noqa: E402
from towers.options import flags  # noqa: E402
from towers.options.timetable import Timetable  # noqa: E402
from towers.training.run import Run, prepare  # noqa: E402


def make_windows(run: Run, monitor: Monitor) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return two functions that make a window's steps, with telemetry and without.

    Each returns its seconds per step.
    """
    options = run.options
    batches = iter(run.data.train.train_batches(options.batch_size, seed=options.seed))
    calls, rest = divmod(options.log_every_steps, options.steps_per_loop)
    lengths = [options.steps_per_loop] * calls + [rest] * (rest > 0)
    step = 0

    def window(telemetry: bool) -> Callable[[], float]:
        loop = run.train_loop(telemetry=telemetry)

        def make() -> float:
            nonlocal step
            start = time.perf_counter()
            for num_steps in lengths:
                values = loop(batches, tf.constant(num_steps))
                step += num_steps
                if telemetry:
                    monitor.progress(step, values)
            numbers = {name: value.numpy().tolist() for name, value in values.items()}
            if telemetry:
                monitor.train_point(step, numbers)
            return (time.perf_counter() - start) / options.log_every_steps

        return make

    return window(True), window(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=9)
    arguments, rest = parser.parse_known_args()
    try:
        run = prepare(flags.parse(["--num_towers=2", *rest]))
    except (InputError, RunError) as error:
        sys.exit(f"telemetry_cost.py: {error}")
    plan = Timetable(0, 0, 10**9, run.data.train.size, run.options)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        monitor = Monitor(Path(folder), plan, run.builder.devices, out=io.StringIO())
        stack.enter_context(contextlib.closing(monitor))
        with_it, without = make_windows(run, monitor)
        with_it(), without()  # builds the graphs, and warms up
        pairs = []
        for i in range(arguments.windows):  # who begins changes, too
            order = (with_it, without) if i % 2 == 0 else (without, with_it)
            seconds = {make: make() for make in order}
            pairs.append((seconds[with_it], seconds[without]))
            print(f"  {pairs[-1][0]:.5f} s  {pairs[-1][1]:.5f} s", file=sys.stderr, flush=True)
    ratios = [ours / alone for ours, alone in pairs]
    print("| model | towers | s/step with | s/step without | with / without, median (range) |")
    print("|---|---|---|---|---|")
    print(
        f"| {run.options.model.partition(':')[2]} | {len(run.builder.devices)} "
        f"| {statistics.median(p[0] for p in pairs):.4f} "
        f"| {statistics.median(p[1] for p in pairs):.4f} "
        f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |"
    )
    print(
        f"\n{os.cpu_count()} cores, Python {platform.python_version()}, TensorFlow "
        f"{tf.__version__}, {run.options.dtype}, batch {run.options.batch_size}, "
        f"{arguments.windows} pairs of windows of {run.options.log_every_steps} steps"
    )


if __name__ == "__main__":
    main()
