"""`towers replay`: repeats a step that was not finite, and shows its tensors layer by layer."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from towers.errors import InputError
from towers.formatting import table
from towers.options.run import Options
from towers.training.callbacks import nonfinite
from towers.training.callbacks.replay_step import replay_step
from towers.training.run.setup import find

_HEADINGS = {
    "data": "batch",
    "layer": "outputs of layers, in the order of their calls",
    "loss": "loss",
    "gradient": "gradients",
    "variable": "variables before the step",
}
_COLUMNS = ("least", "greatest", "not finite", "of")


def run(options: Options, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Repeat the step saved in train_dir/nan and report which tensors are not finite.

    Args:
        options: the run and the device.
        say: called with each line to print.

    Returns:
        {"step", "again": whether the step was not finite again, "inputs_at_fault": whether the
        batch was not, "fault" and "name" of the first tensor that is not finite, "rows" of the
        examples, "loss", "device", "ranges": the fields of each tensor's `TensorRange`}.
    """
    folder = Path(options.train_dir)
    report = nonfinite.read_report(folder)
    first = options.devices.partition(",")[0]
    (device, *_), dataset = find(dataclasses.replace(options, num_towers=1, devices=first))
    state, batch = nonfinite.read(folder, (dataset.spec, None))
    again = replay_step(options, dataset, device, state, batch)
    if again.reason:
        raise InputError(f"--train_dir={folder}: its step cannot be made again: {again.reason}")
    fault = again.fault
    say(f"step {report['step']} again, on {device}: the loss is {again.loss:g}")
    for kind, heading in _HEADINGS.items():
        rows = []
        for tensor in (tensor for tensor in again.ranges if tensor.kind == kind):
            ends = [n if n is None else f"{n:.4g}" for n in (tensor.low, tensor.high)]
            rows.append([tensor.name, *ends, tensor.not_finite, tensor.size])
        for line in table([heading, *_COLUMNS], rows, widest=100) if rows else ():
            say(line)
    say(f"then        {report['line']}")
    if again.is_finite:
        say("now         the step is finite: what it met then does not come again here")
    else:
        first = f"{fault.name} ({fault.kind})" if fault else "not found"
        say(f"now         it comes again; the first that is not finite: {first}")
        guilty = "are at fault" if fault and fault.of_data else "are finite, and not at fault"
        say(f"inputs      {guilty}")
    return {
        "step": report["step"],
        "again": not again.is_finite,
        "inputs_at_fault": bool(fault and fault.of_data),
        "fault": fault and fault.kind,
        "name": fault and fault.name,
        "rows": report["rows"],
        "loss": f"{again.loss:g}",
        "device": device,
        "ranges": [dataclasses.asdict(tensor) for tensor in again.ranges],
    }
