"""What TensorBoard shows of a run beside its curves: one event file, in train_dir itself.

Layout of the curves, table of flags and results, texts, and the graph of a step. The file is made
anew whenever a run starts or goes on, so that there is one of each, however often that was:

    open_root(folder, options, devices, texts, placement, graph)
    ...                                                 # training
    close_root(folder, result, step)
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.text.summary_v2 import text_pb

from towers import devices
from towers.builder.kinds import are_remote
from towers.devices import host
from towers.errors import RunError
from towers.graphs.placement import Placement
from towers.graphs.step_graph import step_graph
from towers.monitoring import charts, events, hparams
from towers.monitoring.results import noted_runs
from towers.options.run import Options, text_of

_FILES = "events.out.tfevents.*.root"  # which are written here, and no others


def open_root(
    folder: Path,
    options: Options,
    tower_devices: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    placement: Placement,
    graph: tf.Graph,
    figures: Sequence[str] = ("test_accuracy", "test_loss"),
) -> None:
    """Write the event file of the run in `folder`; older ones are deleted.

    `texts` are {tag: lines}, beside those of the flags and of the environment; `graph` is that of
    the train loop, as traced, and `placement` is read from it. `figures` are those of evaluations
    that the result will have, of what is evaluated on the way first.

    Raises:
        RunError: the file cannot be written.
    """
    texts = {**texts, "flags": flags_lines(options), "environment": environment(tower_devices)}
    of_sweep = noted_runs(folder.absolute().parent)
    columns = [name for run in of_sweep[:1] for name in run.get("flags", ())]  # that are varied
    if not columns:
        columns = [n for n, value in hparams.hparams_of(options).items() if value != _default(n)]
    part = figures[0].partition("_")[0]
    shown = [name.replace("_", " ", 1) for name in figures if name.startswith(f"{part}_")]
    shown = [name for name in shown if name != f"{part} loss"]  # the loss has a chart
    summaries = [
        charts.layout(
            any(name.startswith("/gpu") for name in tower_devices),
            shown,
            workers=are_remote(tower_devices),
        ),
        hparams.experiment(columns, figures),
        hparams.session_start(options, len(tower_devices)),
        *(text(tag, lines) for tag, lines in texts.items()),
    ]
    write_root(folder, summaries, step_graph(graph, placement), options.max_event_mib)


def write_root(folder: Path, summaries: Iterable[Any], step: Any, max_mib: float) -> None:
    """Write an event file of summaries, and the graph of a step; older ones are deleted.

    Raises:
        RunError: the file cannot be written.
    """
    if step.ByteSize() > max_mib * 2**20 / 4:  # no browser would draw it either
        step.Clear()
    # To a TensorBoard that has read an older file, it says that what that one told is over.
    start = Event(session_log=SessionLog(status=SessionLog.START), wall_time=time.time())
    header = Event(file_version="brain.Event:2", wall_time=time.time())
    graph_of_step = Event(graph_def=step.SerializeToString(), wall_time=time.time())
    with _one_line_errors(folder):
        for path in folder.glob(_FILES):
            path.unlink()
        events.append(_new_path(folder), header, start, _event(summaries), graph_of_step)


def close_root(folder: Path, result: Mapping[str, Any], step: int) -> None:
    """Add the final metrics, at `step`, to what `open_root` wrote.

    Raises:
        RunError: the file cannot be written.
    """
    end = _event(hparams.session_end(result), step)
    with _one_line_errors(folder):
        path = next(folder.glob(_FILES), _new_path(folder))  # somebody may have tidied up
        events.append(path, end)


def text(tag: str, lines: Iterable[str]) -> Any:
    """Return the Summary of lines that are shown as they are."""
    return text_pb(tag, "\n".join(["```", *lines, "```"]))


def flags_lines(options: Options) -> list[str]:
    """Return the flags, first those that differ from their defaults."""
    pairs = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    changed = {name: value for name, value in pairs.items() if value != _default(name)}
    lines = [f"--{name}={text_of(value)}" for name, value in (changed | pairs).items()]
    return [*lines[: len(changed)], "", "# as by default", *lines[len(changed) :]]


def environment(tower_devices: Sequence[str]) -> list[str]:
    """Return versions, machine, environment variables and devices."""
    known = host.versions() | host.machine() | host.environment()
    lines = [f"{name}: {value}" for name, value in known.items() if value is not None]
    return [*lines, "", *devices.report(tower_devices)]


def _default(name: str) -> Any:
    return Options.__dataclass_fields__[name].default


def _event(summaries: Iterable[Any], step: int = 0) -> Event:
    """Return one event of Summary protos, some of which are of TensorFlow's own class."""
    event = Event(step=step, wall_time=time.time())
    for summary in summaries:
        event.summary.MergeFromString(summary.SerializeToString())
    return event


def _new_path(folder: Path) -> Path:
    return folder / _FILES.replace("*", f"{time.time():.6f}")


@contextlib.contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from None
