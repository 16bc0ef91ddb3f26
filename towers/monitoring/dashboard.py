"""Everything in TensorBoard except curves and histograms, in one event file in train_dir.

It holds the layout of the curves, texts, and the graph of a step, and is replaced whenever a run
starts or continues, so that there is one of each.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.text.summary_v2 import text_pb

from towers import devices
from towers.devices import host
from towers.errors import RunError
from towers.monitoring import custom_scalars
from towers.monitoring.event_writer import append, beginning

_FILES = "events.out.tfevents.*.root"  # written only here
_MAX_GRAPH_BYTES = 50 * 2**20


def write_root(
    folder: Path, metrics: Sequence[str], texts: Mapping[str, Iterable[str]], step: Any
) -> None:
    """Write the event file of a run, and delete older ones.

    Args:
        folder: where the file is written.
        metrics: names of charts, see `custom_scalars.layout`.
        texts: {tag: lines}, shown verbatim.
        step: graph of a step; one that no browser could draw is left out.

    Raises:
        RunError: the file cannot be written.
    """
    if step.ByteSize() > _MAX_GRAPH_BYTES:
        step.Clear()
    now = time.time()
    shown = Event(wall_time=now)
    texts_shown = [text_pb(tag, "\n".join(["```", *lines, "```"])) for tag, lines in texts.items()]
    for summary in (custom_scalars.layout(metrics), *texts_shown):  # some are of TensorFlow's class
        shown.summary.MergeFromString(summary.SerializeToString())
    graph_of_step = Event(graph_def=step.SerializeToString(), wall_time=now)
    try:
        for path in folder.glob(_FILES):
            path.unlink()
        # START tells a TensorBoard that has read an older file to drop its points.
        path = folder / _FILES.replace("*", f"{now:.6f}")
        append(path, *beginning(0), shown, graph_of_step)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from None


def environment(tower_devices: Sequence[str]) -> list[str]:
    """Return lines on versions, machine, environment variables and devices."""
    known = host.versions() | {"processor": host.processor()} | host.environment()
    lines = [f"{name}: {value}" for name, value in known.items() if value is not None]
    return [*lines, "", *devices.report(tower_devices)]
