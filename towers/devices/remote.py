"""Devices of other machines: the interface of `towers.workers` for the rest of the library.

Without other machines `current_cluster()` is None, and nothing here does anything.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from towers import signals
from towers.options.lazy import lazily

_CLUSTER = "towers.workers.cluster"
__getattr__ = lazily(__name__, dict.fromkeys(("connect", "connect_run"), _CLUSTER))
_cluster: Any = None  # the `Cluster` of this program


class DevicesLost(Exception):
    """Machines were lost, or are not there, and the same command continues the run later."""


def set_cluster(cluster: Any) -> None:
    """Set the machines that this program is connected to."""
    global _cluster
    _cluster = cluster


def current_cluster() -> Any:
    """Return the machines that this program is connected to, or None."""
    return _cluster


@contextlib.contextmanager
def loss_is_an_end() -> Iterator[None]:
    """End the block with a message if machines are lost in it."""
    try:
        yield
    except DevicesLost as error:
        signals.print_error(error)


def saved_when_lost(
    save: Callable[[], str], say: Callable[[str], None]
) -> contextlib.AbstractContextManager[None]:
    """See `Cluster.saved_when_lost`; nothing is done if no machine is connected."""
    if _cluster is None:
        return contextlib.nullcontext()
    return _cluster.saved_when_lost(save, say)
