"""`train_dir/result.json`: what a run ended with, and the table that a person reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towers import files
from towers.monitoring.monitor import Monitor, tensorboard_command
from towers.options.timetable import Timetable
from towers.training.evaluate import Evaluation
from towers.training.run import Run

NAME = "result.json"


def result_of(
    run: Run, timetable: Timetable, monitor: Monitor, seconds: float | None, evaluation: Evaluation
) -> dict[str, Any]:
    """Return what result.json is to hold; `seconds` are those to the first step."""
    return {
        "steps": timetable.last_step,
        "examples": timetable.examples(timetable.last_step),
        "examples_per_second": monitor.examples_per_second(),
        "seconds_to_first_step": seconds,
        "train_loss": monitor.last_loss,
        "gradient_noise_scale": monitor.noise_scale(),
        "test_accuracy": evaluation.accuracy,
        "test_accuracy_ema": evaluation.accuracy_ema,
        "test_loss": evaluation.loss,
        "test_loss_ema": evaluation.loss_ema,
        "test_examples": evaluation.examples,
        "num_towers": len(run.builder.devices),
        "devices": run.builder.devices,
        "batch_size": run.options.batch_size,
        "train_dir": run.options.train_dir,
    }


def finished(timetable: Timetable, folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that has nothing left to do, None for any other."""
    result = files.read_json(folder / NAME)
    if not timetable.first_step == timetable.last_step == result.get("steps"):
        return None
    return result | {"train_dir": str(folder)}  # it may have been moved since


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table at a run's end."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"
        return "-" if value is None else ", ".join(value) if isinstance(value, list) else str(value)

    lines = [f"  {name:22} {cell(value)}" for name, value in result.items()]
    return ["result", *lines, tensorboard_command(result["train_dir"])]
