"""`towers worker`: lends this machine's devices to one program at a time."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from towers.options.fields import check_values, option
from towers.options.run import Options
from towers.workers.addresses import PORT, parse_address


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """Options of `towers worker`: its address, and in `run` its GPU options."""

    EXAMPLES: ClassVar[str] = f"""\
It runs TensorFlow's server on this machine, for one program at a time. Press Ctrl-C to stop it.

Examples:

  towers worker --address=10.0.0.5:{PORT}                    on each machine
  towers train --workers=10.0.0.5:{PORT},10.0.0.6:{PORT} ...  on one of them, or another"""

    run: Options = dataclasses.field(default_factory=Options)
    address: str = option(
        "", "Where it listens", "HOST:PORT, the address at which the program and the other workers "
        f"reach this machine. The default port is {PORT}; 0: any free one. Anyone who can reach "
        "the port, at any address of the machine, can run code here.",
        required="towers worker needs --address=HOST:PORT, the address of this machine in the "
        f"network of the program, such as --address=10.0.0.5:{PORT}; see hostname -I",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raise InputError for an invalid address."""
        check_values(self)
        parse_address(self.address, "address")


def run(options: WorkerOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Serve until Ctrl-C or another signal; return {}; see `flags.Verb`."""
    from towers.workers import server  # not needed for help and usage errors

    server.serve(*parse_address(options.address, "address"), options.run.gpu_options(), say)
    return {}
