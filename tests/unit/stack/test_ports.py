import socket
from collections.abc import Iterator

import pytest

from services.stack.ports import FREE_PORTS, HOST, PortInUse, choose_ports, is_free


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_ports_follow_one_another_from_the_base() -> None:
    (base,) = choose_ports(None, ["probe"]).values()

    assert choose_ports(base, ["a"]) == {"a": base}


def test_a_port_in_use_is_named_with_the_service_that_wants_it(taken: int) -> None:
    with pytest.raises(PortInUse, match=rf"port {taken} .* for b, is in use"):
        choose_ports(taken - 1, ["a", "b"]) if is_free(taken - 1) else choose_ports(taken, ["b"])


def test_free_ports_differ_and_lie_below_those_of_outgoing_connections() -> None:
    ports = choose_ports(None, ["a", "b", "c"])

    assert len(set(ports.values())) == 3
    assert set(ports.values()) <= set(FREE_PORTS)
