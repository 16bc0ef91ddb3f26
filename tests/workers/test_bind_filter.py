"""Keeping a port to one address; no TensorFlow is needed."""

import socket

import pytest

from towers.errors import RunError
from towers.workers.bind_filter import Reached, only_to

pytestmark = pytest.mark.unit

ADDRESSES = ["127.0.0.1", "127.0.0.2", "::1"]
# The kernel answers by itself, within the call that connects; what it drops is never answered.
PATIENCE_SECONDS = 0.1


@pytest.fixture
def listener():
    """Listen as TensorFlow does: at every address, of IPv4 and IPv6."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        yield server


def answers(host, port, seconds=10.0):
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("ip", ADDRESSES)
def test_it_is_reached_at_one_address_alone(listener, ip):
    port = listener.getsockname()[1]
    for address in ADDRESSES:
        assert answers(address, port)
        listener.accept()[0].close()
    only_to(ip, port)
    assert answers(ip, port)
    others = [address for address in ADDRESSES if address != ip]
    assert not any(answers(other, port, PATIENCE_SECONDS) for other in others)


def test_data_pass_and_what_was_before_is_told(listener):
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.2", port)), listener.accept()[0]:
        with pytest.raises(Reached, match="reached port .* at 127.0.0.2, not 127.0.0.1"):
            only_to("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port), 5) as client, listener.accept()[0] as server:
        client.sendall(b"x" * 2**17)
        client.shutdown(socket.SHUT_WR)
        assert sum(map(len, iter(lambda: server.recv(2**16), b""))) == 2**17
    listener.close()
    with pytest.raises(RunError, match="cannot be kept to 127.0.0.1"):  # nobody listens
        only_to("127.0.0.1", port)
