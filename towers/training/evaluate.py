"""`towers evaluate`: output towers over the whole test set, every example counted once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from towers import devices
from towers.errors import InputError
from towers.options.flags import options_of
from towers.options.run import Options
from towers.training import best, checkpoint
from towers.training.guest import as_a_guest
from towers.training.run import prepare
from towers.training.saving import Checkpoints
from towers.training.tensorflow_errors import one_line_errors


@as_a_guest()
def evaluate(
    options: Options | None = None, /, say: Callable[[str], None] = print, **fields: Any
) -> dict[str, Any]:
    """Evaluate the best checkpoint of `train_dir` where one is kept, else the newest.

        figures = towers.evaluate(train_dir="runs/mine", model=build, dataset=data)

    Args:
        options: of the run; None: as its flags.cfg says, but for the fields that are given.
        say: is given each line of the report.
        **fields: of `towers.Options`. What flags.cfg cannot name, such as a function of a notebook,
            is to be given again.

    Returns:
        The figures of an `Evaluation`, the checkpoint's "step", and "num_towers".

    Raises:
        InputError: there is no checkpoint, or it is of another model.
        RunError: the test set cannot be read.
    """
    options = options_of(options, fields, verb="evaluate")
    folder = Path(options.train_dir, "checkpoints")
    if not checkpoint.find(folder):
        raise InputError(
            f"--train_dir={options.train_dir}: there is no checkpoint in {folder}; train first, or "
            "name the folder of a run"
        )
    run = prepare(dataclasses.replace(options, variables="default"))  # they are only read
    variables = run.masters.variables().items()
    step = Checkpoints(
        folder,
        {name: v for name, v in variables if name.startswith(("model/", "average/"))},
        {name: getattr(run.options, name) for name in ("model", "model_args", "augment")},
        exact=False,  # the optimizer and the loss scale matter no more
    ).restore(say, best.step_of(Path(options.train_dir)))
    run.masters.set_copies()
    with one_line_errors(options):
        result = run.task.make_evaluator(run.data.test)()
    num_towers = len(run.builder.devices)
    plural = "tower" if num_towers == 1 else "towers"
    heading = f"step {step}, {result.examples} test examples, {num_towers} {plural}"
    for line in [*devices.report(run.builder.devices), heading, *result.table()]:
        say(line)
    return result.figures() | {"step": step, "num_towers": num_towers}
