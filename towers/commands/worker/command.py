"""`towers worker`: lends this machine's devices to one program at a time."""

from collections.abc import Callable
from typing import Any

from towers.commands.worker.options import WorkerOptions
from towers.workers import server
from towers.workers.addresses import parse_address


def run(options: WorkerOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Serve until Ctrl-C or another signal; raises as `towers.workers.server.serve` does."""
    host, port = parse_address(options.address, "address")
    server.serve(host, port, options.run.gpu_options(), options.any_address, say)
    return {}
