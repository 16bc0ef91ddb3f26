"""`train_dir/result.json`: what a run came to, written last, and its table."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from towers import files
from towers.devices.shown_names import shown_name
from towers.formatting import figure
from towers.monitoring import dashboard
from towers.monitoring.monitor import Monitor, tensorboard_command
from towers.options.flags import MANIFEST, RESULT
from towers.options.functions import PREFIX
from towers.options.run import text_of
from towers.training.run import manifest
from towers.training.run.prepare_run import PreparedRun, Restored
from towers.training.run.setup import RunContext
from towers.training.step.evaluation import Evaluation


def write_result(
    prepared: PreparedRun, monitor: Monitor, evaluations: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """Write and print the result of a run, from the evaluations of its final weights, by split.

    For the rest see `PreparedRun`.
    """
    run, place, last = prepared.run, prepared.restored.place, prepared.timetable.last_step
    step, devices, due = run.steps_done(), run.builder.devices, run.due
    skipped, (name, direction) = run.task.num_skipped(), run.monitored
    result = {
        "steps": step,
        "examples": prepared.timetable.examples(step),
        "examples_per_second": place.examples_per_second,
        "seconds_to_first_step": monitor.seconds_to_first_step,
        "train_loss": place.train_loss,
        **{f"{s}_{n}": v for s, e in evaluations.items() for n, v in e.metrics.items()},
        "test_examples": evaluations["test"].examples,
        **({} if skipped is None else {"skipped_steps": skipped}),
        **({"best_step": prepared.restored.best.step} if due.keep_best else {}),
        **({"planned_steps": last} if step < last and place.stopped_by else {}),
        "monitor": f"{'validation' if 'validation' in evaluations else 'test'}_{name}",
        "direction": direction,
        "num_towers": len(devices),
        "devices": list(map(shown_name, devices)),
        "batch_size": run.task.options.batch_size,
        "train_dir": str(run.folder),
    }
    if skipped:
        monitor.say(f"skipped     {skipped} of {step} steps: the loss or a gradient was not finite")
    final = manifest.finish(run.train_state.variables())
    dashboard.write_result(run.folder, result, step)
    files.update_json(run.folder / MANIFEST, final=final)
    files.write_json(run.folder / RESULT, result)  # written last: it marks the run as finished
    return result


def tell_finished(run: RunContext, found: Restored, say: Callable[[str], None]) -> dict[str, Any]:
    """Print and return the result of a finished run, see `Restored`; say how to continue it."""
    result = dict(found.result) | {"train_dir": str(run.folder)}  # it may have been moved
    trained = found.manifest.get("sessions", [{}])[-1]
    now = {"code": run.code, "data": manifest.data_record(run)}
    for line in manifest.differences(now, trained, "when it was trained"):
        say(f"warning     {line}; the result is for the old version")
    done, longer = f"has all its {found.step} steps", "raise --num_epochs or --max_steps"
    if found.step < (last := run.timetable().last_step):
        done = f"ended early, at step {found.step} of {last}"
        longer = "raise --early_stopping_epochs"
        if "planned_steps" in result:
            longer = "change --callbacks (empty: none) or raise --num_epochs"
    line = f"finished    {run.folder} {done}; to train longer, {longer}; --overwrite starts again"
    flags = trained.get("flags", {})
    unused = [
        f"--{field.name}={f'{now:g}' if isinstance(now, float) else text_of(now)}"
        for field in dataclasses.fields(run.options)
        if field.metadata["affects"] == "result"
        and flags.get(field.name, now := getattr(run.options, field.name)) != now
        and not str(now).startswith(PREFIX)  # an object, which has no lasting name
    ]
    say(f"{line}; it was not trained with {' '.join(unused)}" if unused else line)
    return result


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the result as the lines of a table, without values of None."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.1f}" if 100 <= abs(value) < 1e5 else figure(value)
        return ", ".join(value) if isinstance(value, list) else str(value)

    width = max(22, *map(len, result))
    known = {name: value for name, value in result.items() if value is not None}
    lines = [f"  {name:{width}} {cell(value)}" for name, value in known.items()]
    return ["result", *lines, tensorboard_command(result["train_dir"])]
