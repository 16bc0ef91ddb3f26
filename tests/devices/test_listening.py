"""Keeping a port to one address; no TensorFlow is needed."""

import socket

import pytest

from towers.devices.listening import Reached, only_to
from towers.errors import RunError

PATIENCE_SECONDS = 0.5


@pytest.fixture
def listener():
    """Listen as TensorFlow does: at every address, of IPv4 and IPv6."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        yield server


def answers(host, port):
    try:
        socket.create_connection((host, port), timeout=PATIENCE_SECONDS).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("ip, other", [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
def test_it_is_reached_at_one_address_alone(listener, ip, other):
    port = listener.getsockname()[1]
    assert answers(ip, port) and answers(other, port) and answers("::1", port)
    for _ in range(3):
        listener.accept()[0].close()
    only_to(ip, port)
    assert answers(ip, port) and not answers(other, port) and not answers("::1", port)


def test_ipv6_is_kept_likewise(listener):
    port = listener.getsockname()[1]
    only_to("::1", port)
    assert answers("::1", port) and not answers("127.0.0.1", port)


def test_data_pass(listener):
    port = listener.getsockname()[1]
    only_to("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port), 5) as client, listener.accept()[0] as server:
        client.sendall(b"x" * 2**17)
        client.shutdown(socket.SHUT_WR)
        assert sum(map(len, iter(lambda: server.recv(2**16), b""))) == 2**17


def test_somebody_who_came_before_is_told(listener):
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.2", port)):
        with pytest.raises(Reached, match="reached port .* at 127.0.0.2, not 127.0.0.1"):
            only_to("127.0.0.1", port)


def test_a_port_on_which_nobody_listens_is_told(listener):
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(RunError, match="cannot be kept to 127.0.0.1"):
        only_to("127.0.0.1", port)
