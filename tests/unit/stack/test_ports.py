import socket
import subprocess
import sys
from ast import literal_eval
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


def test_ports_that_others_of_the_stack_will_take_are_no_choice() -> None:
    first = choose_ports(None, ["a", "b"])

    second = choose_ports(None, ["a", "b"], first.values())

    assert not set(first.values()) & set(second.values())
    with pytest.raises(PortInUse, match="for a, is in use"):
        choose_ports(first["a"], ["a"], first.values())


def test_a_free_port_that_was_taken_meanwhile_is_passed_over() -> None:
    (first,) = choose_ports(None, ["a"]).values()
    with socket.socket() as listener:
        # Connections that a service of another test had at this port may still count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, first))
        listener.listen()

        assert first not in choose_ports(None, ["a", "b"]).values()


def test_processes_that_start_one_after_the_other_choose_different_ports() -> None:
    program = "from services.stack.ports import choose_ports; print(choose_ports(None, 'abcde'))"
    said = [subprocess.check_output([sys.executable, "-c", program]) for _ in range(2)]
    one, other = (set(literal_eval(words.decode()).values()) for words in said)

    assert not one & other
