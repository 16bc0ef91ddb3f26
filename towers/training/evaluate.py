"""`towers evaluate`: output towers over the whole test set, every example counted once."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from towers import devices
from towers.errors import InputError
from towers.formatting import count, figure, table
from towers.options.flags import options_from_call
from towers.options.functions import may_be_same_object
from towers.options.run import Options
from towers.training.load import KINDS, assign, read_weights
from towers.training.run import manifest
from towers.training.run.process_state import preserve_rng
from towers.training.run.setup import prepare
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.training.step.evaluation import AVERAGED


@preserve_rng()
def evaluate(
    options: Options | None = None, /, say: Callable[[str], None] = print, **fields: Any
) -> dict[str, Any]:
    """Evaluate the best checkpoint of `train_dir` if one is kept, otherwise the newest.

        figures = towers.evaluate(train_dir="runs/mine", model=build, dataset=data)

    Args:
        options: of the run; None: those of `fields`, on top of its flags.cfg.
        say: prints a line of the report.
        **fields: of `towers.Options`. Functions that have no importable name, such as those of a
            notebook, must be passed again.

    Returns:
        The metrics of an `Evaluation`, "examples", the checkpoint's "step", and "num_towers".

    Raises:
        InputError: there is no checkpoint, or it is of another model.
        RunError: the test set cannot be read.
    """
    options = options_from_call(options, fields, verb="evaluate")
    with devices.loose_ops_on(options.devices):
        return _evaluate(options, say)


def _evaluate(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    step, values = read_weights(Path(options.train_dir))
    recorded = manifest.read(Path(options.train_dir))
    task, flags = recorded.get("task", {}), recorded.get("flags", {})
    for name in "model", "model_args":
        now = getattr(options, name)
        then = flags.get(name, now)
        if then != now and not may_be_same_object(then, now):
            raise InputError(
                f"--{name}={now}: the run in {options.train_dir} has --{name}={then}; leave "
                f"--{name} out"
            )
    changes = dict(variables="default", jit_compile=False, on_inexact="warn")
    run = prepare(dataclasses.replace(options, **changes))
    run.builder.checks.passed |= manifest.passed(run.folder)
    manifest.check_data(run.data, options, task)
    now: dict[str, Any] = {"code": run.code}
    same = flags.get("dataset") == options.dataset
    if same or run.data.test_is_held_out:
        now["data"] = {"test": run.data.test.checksum()}
    warnings = [f"warning     {line}" for line in manifest.differences(now, recorded)]
    for line in [*warnings, *run.data.notes]:
        say(line)
    variables = {n: v for n, v in run.train_state.variables().items() if n.startswith(KINDS)}
    try:
        assign(options, step, variables, values)
    except InputError:
        manifest.check_data(run.data, options, task, number=True)  # why shapes are others
        raise
    run.train_state.set_copies()
    with user_facing_errors():
        result = run.task.make_evaluator(run.data.test)()
    for line in run.take_diagnostics():
        say(f"warning     {line}")
    num_towers = len(run.builder.devices)
    heading = f"step {step}, {result.examples} test examples, {count(num_towers, 'tower')}"
    for line in [*devices.report(run.builder.devices), heading, *_table(result.metrics)]:
        say(line)
    return {**result.metrics, "examples": result.examples, "step": step, "num_towers": num_towers}


def _table(metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics as the lines of a table, those of the moving averages beside them."""
    names = [name for name in metrics if not name.endswith(AVERAGED)]
    columns = ["weights", "EMA"] if len(names) < len(metrics) else ["weights"]
    shown = {name: figure(value) for name, value in metrics.items()}
    rows = [[name, shown[name], shown.get(f"{name}{AVERAGED}")] for name in names]
    return table(["", *columns], [row[: 1 + len(columns)] for row in rows])
