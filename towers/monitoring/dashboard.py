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
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as layout_summary
from tensorboard.plugins.text.summary_v2 import text_pb

from towers import devices
from towers.devices import host
from towers.errors import RunError
from towers.graphs.placement import Placement
from towers.graphs.step_graph import step_graph
from towers.monitoring import hparams
from towers.options.run import Options

# {category: {chart: regular expressions of its tags}}. TensorBoard tries them on the tags of every
# run, from the tag's first letter on.
LAYOUT = {
    "run": {
        "loss": (r"loss/(data|total)$", r"loss(_ema)?$"),
        "test accuracy": (r"accuracy(_ema)?$",),
        "learning rate": (r"learning_rate$",),
        "gradient norm": (r"gradient_norm$",),
        "update to weight ratio": (r"update_to_weight_ratio$",),
        "regularisation": (r"loss/regularisation$",),
        "noise scale, in examples": (r"noise_scale/examples$",),
        "noise scale: trace of the covariance, squared norm of the gradient": (
            r"noise_scale/(trace|squared_norm)$",
        ),
        "epoch": (r"progress/epoch$",),
        "examples": (r"progress/examples$",),
    },
    "towers": {
        "loss of each tower": (r"tower_\d+/loss$",),
        "gradient norm of each tower": (r"tower_\d+/gradient_norm$",),
        "cosine between a tower's gradient and the mean": (r"tower_\d+/cosine_to_mean$",),
        "seconds of each tower's step": (r"tower_\d+/step_seconds$",),
        "memory of each tower, MiB": (r"tower_\d+/memory_mib$",),
        "peak memory of each tower, MiB": (r"tower_\d+/peak_memory_mib$",),
        "spread of losses": (r"towers/loss_spread$",),
        "spread of gradient norms": (r"towers/gradient_norm_spread$",),
        "spread of step seconds": (r"towers/step_seconds_spread$",),
    },
    "GPUs": {
        "utilisation, %": (r"gpu_\d+/utilisation_percent$",),
        "memory utilisation, %": (r"gpu_\d+/memory_utilisation_percent$",),
        "memory used, MiB": (r"gpu_\d+/memory_used_mib$",),
        "power, W": (r"gpu_\d+/power_watts$",),
        "temperature, °C": (r"gpu_\d+/temperature_celsius$",),
        "clocks, MHz": (r"gpu_\d+/(sm|memory)_clock_mhz$",),
    },
    "speed": {
        "examples/s": (r"speed/examples_per_second$",),
        "seconds of a step": (r"speed/seconds_per_step$",),
        "where a step's seconds go": (r"speed/(input_wait|compute|gather|update)_seconds$",),
        "seconds of a checkpoint": (r"checkpoint_seconds$",),
    },
}


def open_root(
    folder: Path,
    options: Options,
    tower_devices: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    placement: Placement,
    graph: tf.Graph,
) -> None:
    """Write the event file of the run itself; older ones are replaced.

    Args:
        folder: train_dir of the run.
        options: of the run.
        tower_devices: in tower order.
        texts: {tag: lines}, beside those of the flags and of the environment.
        placement: read from its train loop.
        graph: of the train loop, as traced.

    Raises:
        RunError: the file cannot be written.
    """
    differing = [n for n, value in hparams.hparams_of(options).items() if value != _default(n)]
    varied = hparams.varied(_declared(folder.absolute().parent))  # by the sweep it is part of
    summaries = [
        layout(any(name.startswith("/gpu") for name in tower_devices)),
        hparams.experiment(varied or differing),
        hparams.session_start(options, len(tower_devices)),
        *(text_pb(tag, _verbatim(lines)) for tag, lines in texts.items()),
        text_pb("flags", flags_table(options)),
        text_pb("environment", environment(tower_devices)),
    ]
    step = step_graph(graph, placement)
    if step.ByteSize() > options.max_event_mib * 2**20 / 4:  # no browser would draw it either
        step.Clear()
    _replace(folder, [_event(summaries), tf.compat.v1.Event(graph_def=step.SerializeToString())])


def close_root(folder: Path, result: Mapping[str, Any] | None, step: int = 0) -> None:
    """Add the final metrics to what `open_root` wrote.

    Args:
        folder: train_dir of the run.
        result: what result.json is to hold; None for a run that failed.
        step: where the points of the metrics stand.

    Raises:
        RunError: the file cannot be written.
    """
    end = _event(hparams.session_end(result), step)
    if not (files := _event_files(folder)):  # somebody has tidied up
        return _replace(folder, [end])
    with _records(folder, [end]) as written, files[-1].open("ab") as file:
        file.write(written.read_bytes())


@contextlib.contextmanager
def failing(folder: Path) -> Iterator[None]:
    """Mark the run as failed in TensorBoard's table if the block ends in a RunError."""
    try:
        yield
    except RunError:
        with contextlib.suppress(RunError):  # a full disk
            close_root(folder, None)
        raise


def layout(gpus: bool) -> Any:
    """Return the Summary of the custom-scalars dashboard, the same at any number of towers.

    Args:
        gpus: whether there are any; without, their empty charts are folded up.
    """
    categories = [
        layout_pb2.Category(
            title=category,
            closed=category == "GPUs" and not gpus,
            chart=[
                layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
                for title, tags in charts.items()
            ],
        )
        for category, charts in LAYOUT.items()
    ]
    return layout_summary.pb(layout_pb2.Layout(category=categories))


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


def _event(summaries: Iterable[Any], step: int = 0) -> tf.compat.v1.Event:
    """Return one event of several Summary protos."""
    event = tf.compat.v1.Event(step=step)
    for summary in summaries:
        event.summary.MergeFromString(summary.SerializeToString())
    return event


def _replace(folder: Path, events: Sequence[tf.compat.v1.Event]) -> None:
    """Put a whole event file in the place of those in `folder`.

    The old ones go last: a crash leaves one too many, and none too few. To a TensorBoard that has
    read them, the START says that what it knows of this run is over.
    """
    start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
    head = [
        tf.compat.v1.Event(file_version="brain.Event:2"),
        tf.compat.v1.Event(session_log=start),
    ]
    name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.root"
    with _records(folder, [*head, *events]) as written:
        old = _event_files(folder)
        os.replace(written, folder / name)
        for path in old:
            path.unlink(missing_ok=True)


def _event_files(folder: Path) -> list[Path]:
    """Return what `_replace` wrote there, the newest last: names begin with the time."""
    return sorted(folder.glob("events.out.tfevents.*.root"))


def _declared(folder: Path) -> Iterator[tf.compat.v1.Event]:
    """Yield what stands at the beginning of the event files of a folder, if there are any."""
    for path in sorted(folder.glob("events.out.tfevents.*.sweep")):
        with contextlib.suppress(Exception):  # a file that is damaged declares nothing
            for record in tf.data.TFRecordDataset(str(path)).take(4):
                yield tf.compat.v1.Event.FromString(record.numpy())


@contextlib.contextmanager
def _records(folder: Path, events: Iterable[tf.compat.v1.Event]) -> Iterator[Path]:
    """Write events to a temporary file for the block, under a name that TensorBoard passes over.

    Raises:
        RunError: it, or what the block writes, cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".root.", dir=folder) as place:
            path = Path(place) / "records"
            with tf.io.TFRecordWriter(str(path)) as writer:
                for event in events:
                    event.wall_time = time.time()
                    writer.write(event.SerializeToString())
            yield path
    except tf.errors.OpError as error:
        raise RunError(f"{folder} cannot be written: {error.message}") from None
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}") from None
