"""`towers tensorboard`: TensorBoard on a run or a folder of runs, without downsampling."""

import contextlib
import dataclasses
import glob
import io
import os
import time
from collections.abc import Callable
from typing import Any

from towers.errors import InputError
from towers.options.fields import check_values, option
from towers.options.flags import NO_TRAIN_DIR
from towers.options.run import Options
from towers.signals import StopRequest

# Points kept of each tag. By default TensorBoard keeps a random 1000 of a curve and 10 pictures; 0,
# which its help calls all, draws empty curves.
SAMPLES = "scalars=1000000,images=50,histograms=200"
_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class TensorboardOptions:
    """Options of `towers tensorboard`; `run` holds the other flags of a flagfile."""

    run: Options = dataclasses.field(default_factory=Options)
    train_dir: str = option(
        Options.train_dir, "The run", "Folder of a run, or of several: that of a sweep."
    )
    port: int = option(
        6006, "TensorBoard", "Port of its address on this machine; if 6006 is taken and none is "
        "given, the next free one; 0: any free one.", minimum=0, maximum=65535,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raise InputError for a value out of range, or if there is nothing to show."""
        check_values(self)
        there = f"--train_dir={self.train_dir}: there are"
        try:
            has_events = any(glob.iglob("**/*tfevents*", root_dir=self.train_dir, recursive=True))
        except RecursionError:
            raise InputError(
                f"{there} too many folders within folders; name that of a run"
            ) from None
        if not has_events and self.train_dir == TensorboardOptions.train_dir:
            raise InputError(NO_TRAIN_DIR)
        if not has_events:
            raise InputError(
                f"{there} no event files; train first, or name the folder of a run or of a sweep"
            )


def run(options: TensorboardOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Serve until Ctrl-C; return {}.

    Args:
        options: the folder and the port.
        say: called with each line to print.
    """
    address = start(options)
    # Polled: an exception of Ctrl-C has ended it with 130 now and then.
    with StopRequest() as stop:
        say(f"TensorBoard of {options.train_dir}: {address} (Ctrl-C ends it)")
        while not stop():
            time.sleep(_POLL_SECONDS)
    say("ended")
    return {}


def start(options: TensorboardOptions) -> str:
    """Start a server in threads of this process; return its URL."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it may load TensorFlow; leave the GPUs to runs
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tensorboard import default, program

    server = program.TensorBoard(default.get_plugins())
    by_default = options.port == TensorboardOptions.port  # TensorBoard then takes the next free one
    port = [] if by_default else [f"--port={options.port}"]
    server.configure(argv=["tensorboard", *arguments(options.train_dir), *port])
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a note on how it reads files
            return server.launch()
    except program.TensorBoardServerException as error:
        raise InputError(f"--port={options.port}: {error}") from None


def arguments(folder: str) -> list[str]:
    """Return TensorBoard's options for a folder."""
    return [
        f"--logdir={folder}",
        "--host=localhost",
        "--reload_multifile=true",  # a continued run has several event files
        f"--samples_per_plugin={SAMPLES}",
    ]
