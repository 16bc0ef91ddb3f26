"""What TensorBoard's HParams table shows of a sweep: its columns, the varied flags first.

The rows are written by the runs, in folders below. No TensorFlow is needed here: a sweep takes no
GPU from its runs, and starts at once.
"""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from towers.errors import RunError
from towers.monitoring import hparams


def sweep_hparams(folder: Path, varied: Sequence[str]) -> None:
    """Write the event file of a sweep's folder, with these flags first; older ones are replaced.

    Raises:
        RunError: it cannot be written.
    """
    now = time.time()
    old = list(folder.glob("events.out.tfevents.*.sweep"))  # others' files stay
    path = folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}.sweep"
    header = Event(wall_time=now, file_version="brain.Event:2")
    columns = Event(wall_time=now, summary=hparams.experiment(varied))
    try:
        with open(path, "wb") as file:
            for event in (header, columns):
                RecordWriter(file).write(event.SerializeToString())
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None
    for other in old:
        other.unlink(missing_ok=True)
