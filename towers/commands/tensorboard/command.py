"""TensorBoard on a run, or on a folder of runs, with the options that show all of it."""

import contextlib
import getpass
import glob
import io
import os
import socket
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

from towers.commands.tensorboard.options import TensorboardOptions
from towers.errors import InputError

# Points that are kept of each tag. By itself TensorBoard keeps a random 1000 of a curve, and 10
# pictures; and 0, which its help calls all, draws empty curves.
SAMPLES = "scalars=1000000,images=50,histograms=200"


def run(options: TensorboardOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Serve until Ctrl-C; return {}.

    Raises:
        InputError: the folder holds nothing to show, or the port is taken.
    """
    url = start(options)
    port = urllib.parse.urlparse(url).port
    say(f"TensorBoard of {options.train_dir}: {url} (Ctrl-C ends it)")
    there = socket.gethostname()
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        there = f"{getpass.getuser()}@{there}"
    say(f"from another machine: ssh -N -L {port}:localhost:{port} {there}, then the same address")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        say("ended")
    return {}


def start(options: TensorboardOptions) -> str:
    """Start a server in threads of this process, and return its address; raises as `run` does."""
    if not any(glob.iglob("**/*tfevents*", root_dir=options.train_dir, recursive=True)):
        raise InputError(
            f"--train_dir={options.train_dir}: there are no event files; train first, or name the "
            "folder of a run or of a sweep"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it may load TensorFlow, and takes no GPU from a run
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tensorboard import default, program

    server = program.TensorBoard(default.get_plugins())
    by_default = options.port == TensorboardOptions.port  # it takes the next free one itself
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
