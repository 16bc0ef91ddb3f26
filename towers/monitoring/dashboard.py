"""What TensorBoard shows of a run beside its curves: one event file, in train_dir itself.

Layout of the curves, table of flags and results, texts, and the graph of a step. The file is made
anew whenever a run starts or goes on, so that there is one of each, however often that was:

    open_root(folder, options, devices, texts, placement, graph)
    ...                                                 # training
    close_root(folder, result, step)
"""

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from towers import devices
from towers.devices import host
from towers.errors import RunError
from towers.graphs.placement import Placement
from towers.graphs.step_graph import step_graph
from towers.monitoring import charts, events, hparams
from towers.monitoring.results import noted_runs
from towers.options.run import Options


def open_root(
    folder: Path,
    options: Options,
    tower_devices: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    placement: Placement,
    graph: tf.Graph,
) -> None:
    """Write the event file of the run in `folder`; older ones are replaced.

    `texts` are {tag: lines}, beside those of the flags and of the environment; `graph` is that of
    the train loop, as traced, and `placement` is read from it.

    Raises:
        RunError: the file cannot be written.
    """
    of_sweep = noted_runs(folder.absolute().parent)
    columns = [name for run in of_sweep[:1] for name in run.get("flags", ())]  # that are varied
    if not columns:
        columns = [n for n, value in hparams.hparams_of(options).items() if value != _default(n)]
    summaries = [
        charts.layout(any(name.startswith("/gpu") for name in tower_devices)),
        hparams.experiment(columns),
        hparams.session_start(options, len(tower_devices)),
        *(text_pb(tag, _verbatim(lines)) for tag, lines in texts.items()),
        text_pb("flags", flags_table(options)),
        text_pb("environment", environment(tower_devices)),
    ]
    step = step_graph(graph, placement)
    if step.ByteSize() > options.max_event_mib * 2**20 / 4:  # no browser would draw it either
        step.Clear()
    with _one_line_errors(folder):
        _replace(folder, [_event(summaries), Event(graph_def=step.SerializeToString())])


def close_root(folder: Path, result: Mapping[str, Any] | None, step: int = 0) -> None:
    """Add the final metrics, at `step`, to what `open_root` wrote; those of a failure are None.

    Raises:
        RunError: the file cannot be written.
    """
    end = _event(hparams.session_end(result), step)
    with _one_line_errors(folder):
        path = [_new_path(folder), *_event_files(folder)][-1]  # somebody may have tidied up
        with path.open("ab") as file:
            RecordWriter(file).write(end.SerializeToString())


@contextlib.contextmanager
def failing(folder: Path) -> Iterator[None]:
    """Mark the run as failed in TensorBoard's table if the block ends in a RunError."""
    try:
        yield
    except RunError:
        with contextlib.suppress(RunError):  # a full disk
            close_root(folder, None)
        raise


def flags_table(options: Options) -> str:
    """Return the flags in markdown: first those that differ from their defaults, in bold."""
    rows = []
    for name in Options.__dataclass_fields__:
        value, default = getattr(options, name), _default(name)
        mark = "**" if value != default else ""
        rows.append((f"{mark}--{name}{mark}", _code(value), _code(default)))
    rows.sort(key=lambda row: not row[0].startswith("**"))
    return _table(("flag", "value", "default"), rows)


def environment(tower_devices: Sequence[str]) -> str:
    """Return versions, machine, environment variables and devices, in markdown."""
    parts = (host.versions(), host.machine(), host.environment())
    rows = [(n, _code(value)) for part in parts for n, value in part.items() if value is not None]
    return f"{_table(('', ''), rows)}\n\n{_verbatim(devices.report(tower_devices))}"


def _default(name: str) -> Any:
    return Options.__dataclass_fields__[name].default


def _verbatim(lines: Iterable[str]) -> str:
    return "\n".join(["```", *lines, "```"])


def _code(value: Any) -> str:
    """Return a value as a cell of a table."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`".replace("|", r"\|") if text else ""


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _event(summaries: Iterable[Any], step: int = 0) -> Event:
    """Return one event of Summary protos, some of which are of TensorFlow's own class."""
    event = Event(step=step, wall_time=time.time())
    for summary in summaries:
        event.summary.MergeFromString(summary.SerializeToString())
    return event


def _replace(folder: Path, parts: Sequence[Event]) -> None:
    """Put a whole event file in the place of those that this wrote before.

    The old ones go last: a crash leaves one too many, and none too few. To a TensorBoard that has
    read them, the START says that what it knows of this run is over.
    """
    start = SessionLog(status=SessionLog.START)
    head = Event(file_version="brain.Event:2"), Event(session_log=start)
    old = _event_files(folder)
    with tempfile.TemporaryDirectory(prefix=".root.", dir=folder) as place:
        path = Path(place) / "records"  # a name that TensorBoard passes over
        with tf.io.TFRecordWriter(str(path)) as writer:
            for event in (*head, *parts):
                event.wall_time = time.time()
                writer.write(event.SerializeToString())
        os.replace(path, _new_path(folder))
    for other in old:
        other.unlink(missing_ok=True)


def _new_path(folder: Path) -> Path:
    name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.root"
    return folder / name


def _event_files(folder: Path) -> list[Path]:
    """Return what this wrote there, the newest last."""
    return [path for path in events.paths(folder) if path.suffix == ".root"]


@contextlib.contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.message
        raise RunError(f"{folder} cannot be written: {reason}") from None
