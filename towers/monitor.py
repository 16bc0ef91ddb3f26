"""What a run shows: lines and a bar on the terminal, scalars in TensorBoard.

The x-axis of every point is the number of updates that the weights had had when it was measured:
the loss of the first batch stands at step 0, as in the tutorial.
"""

import contextlib
import datetime
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import tensorflow as tf
from tqdm import tqdm


class Monitor:
    """Writes the points of a run to its event files and to the terminal, and keeps its speed."""

    def __init__(
        self,
        train_dir: Path,
        *,
        total_steps: int,
        step: int = 0,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Open one event file each in train_dir/train and train_dir/eval.

        Args:
            train_dir: folder of the run.
            total_steps: where the run will end, for the bar.
            step: where it starts.
            out: of the lines, standard output by default.
            clock: returns seconds.
        """
        self._train = tf.summary.create_file_writer(str(train_dir / "train"))
        self._eval = tf.summary.create_file_writer(str(train_dir / "eval"))
        self._out = out or sys.stdout
        self._clock = clock
        self._bar = tqdm(
            total=total_steps, initial=step, unit="step", disable=not sys.stderr.isatty()
        )
        self._window_start: tuple[float, int, int] | None = None
        self._paused_seconds = 0.0
        self._rates: list[float] = []

    def say(self, line: str = "") -> None:
        """Print a line, above the bar if there is one."""
        tqdm.write(line, file=self._out)
        self._out.flush()

    def progress(self, step: int) -> None:
        """Move the bar to `step`."""
        self._bar.update(step - self._bar.n)

    def train_point(
        self, step: int, examples: int, epoch: float, metrics: Mapping[str, float]
    ) -> None:
        """Write what was measured in step number `step`, which is done.

        Args:
            step: steps done; the point stands at `step` - 1, the updates before it.
            examples: examples seen by now.
            epoch: the same in epochs.
            metrics: "loss", "penalty", "gradient_norm", "learning_rate".
        """
        scalars = {
            "loss/data": metrics["loss"],
            "loss/regularisation": metrics["penalty"],
            "loss/total": metrics["loss"] + metrics["penalty"],
            "learning_rate": metrics["learning_rate"],
            "gradient_norm": metrics["gradient_norm"],
            "progress/examples": examples,
            "progress/epoch": epoch,
        }
        speed = ""
        now = self._clock()
        if self._window_start is not None:
            start, start_step, start_examples = self._window_start
            seconds = now - start - self._paused_seconds
            rate = (examples - start_examples) / seconds
            self._rates.append(rate)
            scalars["speed/examples_per_second"] = rate
            scalars["speed/seconds_per_step"] = seconds / (step - start_step)
            speed = f" ({rate:.1f} examples/s; {seconds / (step - start_step):.3f} s/step)"
        self._window_start, self._paused_seconds = (now, step, examples), 0.0
        _write(self._train, step - 1, scalars)
        self.say(
            f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}: step {step - 1}, examples {examples}, "
            f"loss = {metrics['loss']:.4f}, learning rate {metrics['learning_rate']:.5f}{speed}"
        )

    def eval_point(self, step: int, epoch: float, scalars: Mapping[str, float | None]) -> None:
        """Write the figures of an evaluation after `step` updates; None is left out."""
        known = {name: value for name, value in scalars.items() if value is not None}
        _write(self._eval, step, known)
        figures = ", ".join(f"{name} {value:.4f}" for name, value in known.items())
        self.say(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}: epoch {epoch:.2f}, test: {figures}")

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time of the block out of the speed of training."""
        start = self._clock()
        yield
        self._paused_seconds += self._clock() - start

    def examples_per_second(self) -> float | None:
        """Return the median over windows; the first is left out as warm-up if there are others."""
        rates = self._rates[1:] or self._rates
        return statistics.median(rates) if rates else None

    def close(self) -> None:
        """Flush the event files and end the bar."""
        self._bar.close()
        self._train.close()
        self._eval.close()


def _write(writer: tf.summary.SummaryWriter, step: int, scalars: Mapping[str, float]) -> None:
    """Write scalars at `step`; TensorBoard shows them at once."""
    with writer.as_default(step=step):  # which flushes at its end
        for name, value in scalars.items():
            tf.summary.scalar(name, value)


def tensorboard_command(train_dir: str) -> str:
    """Return the command that shows a run, as it can be typed here."""
    command = ["tensorboard"]
    if not shutil.which(*command):  # a virtual environment that is not active
        program, cwd = Path(sys.executable).with_name(*command), Path.cwd()
        known = program.relative_to(cwd) if program.is_relative_to(cwd) else program
        command = [str(known)] if program.exists() else [sys.executable, "-m", "tensorboard.main"]
    return shlex.join([*command, "--logdir", train_dir])
