"""Everything in TensorBoard except curves and histograms, in one event file in train_dir.

It holds the layout of the curves, texts, the graph of a step, and flags and results: in the HParams
table each run is one row, named after its folder. The file is replaced whenever a run starts or
continues, so that there is one of each.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.summary import session_end_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from towers import devices
from towers.devices import host
from towers.errors import RunError
from towers.monitoring import custom_scalars
from towers.monitoring.event_writer import append, beginning
from towers.monitoring.results import number

_FILES = "events.out.tfevents.*.root"  # written only here
_MAX_GRAPH_BYTES = 50 * 2**20


def write_root(
    folder: Path,
    metrics: Sequence[str],
    texts: Mapping[str, Iterable[str]],
    step: Any,
    flags: Mapping[str, Any] | None = None,
) -> None:
    """Write the event file of a run, and delete older ones.

    Args:
        folder: where the file is written.
        metrics: names of charts, see `custom_scalars.layout`.
        texts: {tag: lines}, shown verbatim.
        step: graph of a step; one that no browser could draw is left out.
        flags: the run's row of the HParams table.

    Raises:
        RunError: the file cannot be written.
    """
    if step.ByteSize() > _MAX_GRAPH_BYTES:
        step.Clear()
    summaries = [text_pb(tag, "\n".join(["```", *lines, "```"])) for tag, lines in texts.items()]
    summaries.append(custom_scalars.layout(metrics))
    if flags:  # by the default trial_id rows of runs with equal flags would be one
        summaries.append(hparams_pb(flags, trial_id=""))
    graph_of_step = Event(graph_def=step.SerializeToString(), wall_time=time.time())
    for path in folder.glob(_FILES):
        path.unlink(missing_ok=True)
    # START tells a TensorBoard that has read an older file to drop its points.
    _append(folder, *beginning(0), _event(summaries), graph_of_step)


def write_result(folder: Path, result: Mapping[str, Any], step: int) -> None:
    """Add the results to the run's row of the HParams table, see `write_root`.

    Raises:
        RunError: the file cannot be written.
    """
    values = {name: number(result, name) for name in result}
    scalars = [scalar_pb(f"result/{n}", value) for n, value in values.items() if value is not None]
    _append(folder, _event([*scalars, session_end_pb(api_pb2.STATUS_SUCCESS)], step))


def _event(summaries: Iterable[Any], step: int = 0) -> Event:
    event = Event(step=step, wall_time=time.time())
    for summary in summaries:  # some are of TensorFlow's own class
        event.summary.MergeFromString(summary.SerializeToString())
    return event


def _append(folder: Path, *events: Event) -> None:
    new = folder / _FILES.replace("*", f"{time.time():.6f}")
    try:
        append(next(folder.glob(_FILES), new), *events)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from None


def environment(tower_devices: Sequence[str]) -> list[str]:
    """Return lines on versions, machine and devices."""
    known = host.versions() | {"processor": host.processor()}
    lines = [f"{name}: {value}" for name, value in known.items() if value is not None]
    return [*lines, "", *devices.report(tower_devices)]
