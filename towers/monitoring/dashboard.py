"""Everything in TensorBoard except curves and pictures, in one event file in train_dir.

It holds the layout of the curves, flags and results (HParams), texts, and the graph of a step, and
is replaced whenever a run starts or continues, so that there is one of each:

    open_root(folder, options, devices, texts, placement, graph)
    ...                                                 # training
    close_root(folder, result, step)

In the HParams table each run is one row, named after its folder.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.summary import session_end_pb
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from towers import devices
from towers.devices import host
from towers.errors import RunError
from towers.graphs.placement import Placement
from towers.graphs.step_graph import step_graph
from towers.monitoring import custom_scalars
from towers.monitoring.event_writer import append, beginning
from towers.monitoring.results import number
from towers.options.run import Options, names_that_affect

_FILES = "events.out.tfevents.*.root"  # written only here
_MAX_GRAPH_BYTES = 50 * 2**20


def open_root(
    folder: Path,
    options: Options,
    tower_devices: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    placement: Placement,
    graph: tf.Graph,
    metrics: Sequence[str] = ("test accuracy",),
) -> None:
    """Write the event file of a run, and delete older ones.

    Args:
        folder: folder of the run.
        options: options of the run.
        tower_devices: device of each tower.
        texts: {tag: lines} to show beside flags and environment.
        placement: placement of `graph`.
        graph: the traced train loop.
        metrics: names of charts, see `custom_scalars.layout`.

    Raises:
        RunError: the file cannot be written.
    """
    flags = options.to_flagfile().splitlines()
    texts = {**texts, "flags": flags, "environment": environment(tower_devices)}
    hparams = hparams_of(options) | {"num_towers": len(tower_devices)}
    summaries = [
        custom_scalars.layout(metrics),
        hparams_pb(hparams, trial_id=""),  # the default joins the rows of runs with equal flags
        *(text_summary(tag, lines) for tag, lines in texts.items()),
    ]
    write_root(folder, summaries, step_graph(graph, placement))


def write_root(folder: Path, summaries: Iterable[Any], step: Any) -> None:
    """Write an event file of summaries and the graph of a step, and delete older ones.

    Args:
        folder: where the file is written.
        summaries: protos to write.
        step: graph of a step; one that no browser could draw is left out.

    Raises:
        RunError: the file cannot be written.
    """
    if step.ByteSize() > _MAX_GRAPH_BYTES:
        step.Clear()
    graph_of_step = Event(graph_def=step.SerializeToString(), wall_time=time.time())
    # START tells a TensorBoard that has read an older file to drop its points.
    _append(folder, *beginning(0), _event(summaries), graph_of_step, replaces=True)


def close_root(folder: Path, result: Mapping[str, Any], step: int) -> None:
    """Append the final metrics to the file of `open_root`.

    Args:
        folder: folder of the run.
        result: content of result.json.
        step: the last step.

    Raises:
        RunError: the file cannot be written.
    """
    values = {name: number(result, name) for name in result}
    scalars = [scalar_pb(f"result/{n}", value) for n, value in values.items() if value is not None]
    scalars.append(session_end_pb(api_pb2.STATUS_SUCCESS))
    _append(folder, _event(scalars, step))


def text_summary(tag: str, lines: Iterable[str]) -> Any:
    """Return the Summary of lines, shown verbatim.

    Args:
        tag: name under which TensorBoard shows them.
        lines: the lines.
    """
    return text_pb(tag, "\n".join(["```", *lines, "```"]))


def environment(tower_devices: Sequence[str]) -> list[str]:
    """Return lines on versions, machine, environment variables and devices."""
    known = host.versions() | {"processor": host.processor()} | host.environment()
    lines = [f"{name}: {value}" for name, value in known.items() if value is not None]
    return [*lines, "", *devices.report(tower_devices)]


def hparams_of(options: Options) -> dict[str, Any]:
    """Return {flag: value} of all flags except those of one call."""
    names = names_that_affect("result", "speed", "machine", "report")
    return {name: getattr(options, name) for name in names}


def _event(summaries: Iterable[Any], step: int = 0) -> Event:
    event = Event(step=step, wall_time=time.time())
    for summary in summaries:  # some are of TensorFlow's own class
        event.summary.MergeFromString(summary.SerializeToString())
    return event


def _append(folder: Path, *events: Event, replaces: bool = False) -> None:
    try:
        paths = list(folder.glob(_FILES))
        while replaces and paths:
            paths.pop().unlink()
        append([*paths, folder / _FILES.replace("*", f"{time.time():.6f}")][0], *events)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from None
