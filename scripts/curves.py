"""Draws the training loss of the same steps on 1, 2 and 4 towers, and how far they lie apart.

    python scripts/curves.py [--data_dir=DIR] [--steps=200] [--num_towers=1,2,4]
        [--control] [--output=scripts/images/curves.png] [--flagfile=configs/cifar10_cnn_fast.cfg]

Trains the first steps of a flagfile on logical CPU devices with each number of towers, from the
same seed. Prints a table of the losses and their largest difference, and writes a figure: above the
curves, below their differences from one tower. Without a data_dir it trains on the shapes. Any flag
of `towers train` may follow.

Training amplifies rounding: --control adds one tower whose first kernel is changed in the last
bit, which shows how far that alone leads. --num_towers=1,1,2 trains one tower twice: what repeats.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    from matplotlib.figure import Figure  # draws with Agg: no display, no global state
except ImportError:
    print("there is no matplotlib: type pip install -e '.[plot]' in the checkout", file=sys.stderr)
    sys.exit(2)

import numpy as np  # noqa: E402

from towers.cli import quiet_start  # noqa: E402

with quiet_start(level=3):
    import tensorflow as tf

from towers.devices.selection import tower_devices  # noqa: E402
from towers.errors import InputError, RunError  # noqa: E402
from towers.options import flags  # noqa: E402
from towers.options.run import Options  # noqa: E402
from towers.training.run.setup import prepare  # noqa: E402

# Each curve is narrower than the one below it, so that all of them are seen.
STYLES = [
    {"color": "#9ecae1", "linewidth": 10},
    {"color": "#d94801", "linewidth": 6},
    {"color": "#08306b", "linewidth": 3},
    {"color": "#31a354", "linewidth": 1},
    {"color": "#fee391", "linewidth": 0.5},
]


def numbers(text: str) -> list[int]:
    """Return "1,2,4" as numbers of towers; what the others are compared with comes first."""
    values = [int(part) for part in text.split(",")]
    if values[0] != 1 or min(values) < 1 or len(values) >= len(STYLES):
        raise argparse.ArgumentTypeError(
            f"{text}: 1 must come first, then up to {len(STYLES) - 2} numbers, as in 1,2,4"
        )
    return values


def train(options: Options, num_steps: int, control: bool = False) -> np.ndarray:
    """Return the training loss of each of the first steps, `[num_steps]`.

    A control starts from weights whose first kernel is changed in the last bit.
    """
    run = prepare(options)
    if control:
        kernel = run.train_state.model.trainable_variables[0]
        kernel.assign(np.nextafter(kernel.numpy(), np.inf))
    train_loop = run.train_loop()
    batches = iter(run.data.train.train_batches(options.batch_size, seed=options.seed))
    one = tf.constant(1)
    return np.array([float(train_loop(batches, one)["loss"]) for _ in range(num_steps)])


def draw(curves: Sequence[tuple[str, np.ndarray]], title: str) -> Figure:
    """Return the figure of (label, losses) pairs; the others are compared with the first."""
    figure = Figure(figsize=(12, 8), dpi=100, layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    reference = curves[0][1]
    steps = np.arange(1, len(reference) + 1)
    for (label, losses), style in zip(curves, STYLES, strict=False):
        above.plot(steps, losses, label=label, **style)
    for (label, losses), style in zip(curves[1:], STYLES[1:], strict=False):
        difference = np.abs(losses - reference)
        difference[difference == 0] = np.nan  # a log axis has no place for it
        below.plot(steps, difference, ".-", label=label, color=style["color"], linewidth=1)
    spacing = np.spacing(reference.astype(np.float32))
    below.plot(steps, spacing, color="gray", linestyle="--", label="spacing of float32")
    below.set_yscale("log")
    above.set(title=title, ylabel="training loss (nats per example)")
    below.set(xlabel="step", ylabel="|difference from 1 tower|\n(nats per example; 0 not drawn)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data_dir", default="")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--num_towers", type=numbers, default=[1, 2, 4])
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("scripts/images/curves.png"))
    parser.add_argument("--flagfile", default="configs/cifar10_cnn_fast.cfg")
    arguments, others = parser.parse_known_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    data = f"--data_dir={arguments.data_dir}" if arguments.data_dir else "--dataset=shapes"
    common = [f"--flagfile={arguments.flagfile}", data, *others, "--devices=cpu"]
    runs = [flags.parse([*common, f"--num_towers={n}"]) for n in arguments.num_towers]
    tower_devices(max(arguments.num_towers), "cpu")  # before TensorFlow starts
    curves = []
    for options in runs:
        count = f"{options.num_towers} tower{'s' * (options.num_towers > 1)}"
        again = ", again" * any(label == count for label, _ in curves)
        curves.append((count + again, train(options, arguments.steps)))
    options = runs[0]
    if arguments.control:
        label = "1 tower, changed in the last bit"
        curves.append((label, train(options, arguments.steps, control=True)))
    title = (
        f"{options.model}({options.model_args}) on {options.dataset}, "
        f"batch size {options.batch_size}, {options.dtype}, seed {options.seed}"
    )
    print(f"{title}; {arguments.steps} steps, TensorFlow {tf.__version__}\n")
    print("| towers | first loss | last loss | largest difference from 1 tower | at step |")
    print("|---|---|---|---|---|")
    for label, losses in curves:
        difference = np.abs(losses - curves[0][1])
        largest, where = difference.max(), difference.argmax() + 1 if difference.any() else "-"
        print(f"| {label} | {losses[0]:.7f} | {losses[-1]:.7f} | {largest:.2g} | {where} |")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, title).savefig(arguments.output, pil_kwargs={"optimize": True})
    print(f"\n{arguments.output}")


if __name__ == "__main__":
    try:
        main()
    except (InputError, RunError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
