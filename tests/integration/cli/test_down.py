"""Commands whose services go down: they tell that from an empty queue, and outlast a restart."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc
import pytest

from tests.acceptance.local_stack import LocalStack
from tests.integration.cli.stack import Cli

pytestmark = pytest.mark.stack

END_SECONDS = 120.0
"""For a command to end, on a busy machine."""


class Ended(NamedTuple):
    """How a command ended, and what it wrote after its first line."""

    code: int
    out: bytes
    err: bytes


CONSUMERS = {
    "for ever": ("--timeout", "30s"),
    "with a wait": ("--timeout", "30s", "--wait", "25s"),
}
"""The wait is the shorter one, and longer than the broker takes to end, as one of the last."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    """Commands that were at work when everything stopped."""
    folder = tmp_path_factory.mktemp("down")
    started: dict[str, subprocess.Popen[bytes]] = {}
    with LocalStack(folder / "stack", ready=True) as stack:
        cli = Cli(stack, folder / "state")

        def start(name: str, *arguments: str) -> None:
            started[name] = cli.start(*arguments)

        # Given a claim that waits at the broker
        cli.ok("queue", "create", "empty")
        start("claim", "claim", "empty", "--timeout", "10s", "--wait", "10m")
        # And a watch that has told a delayed message
        cli.ok("queue", "create", "reminders")
        cli.ok("publish", "--to", "reminders", "later", "--visible-at", "2100-01-01T00:00:00Z")
        start("watch", "message", "watch", "reminders", "--timeout", "10s", "--json")
        assert b"message_id" in _first_line(started["watch"])
        # And consumers that have had a message, the one that does not wait for long at last
        for number in range(len(CONSUMERS)):
            cli.ok("queue", "create", f"q{number}")
            cli.ok("publish", "--to", f"q{number}", "first")
        for number, (name, options) in enumerate(CONSUMERS.items()):
            start(name, "consume", f"q{number}", *options)
            assert _first_line(started[name]) == b"first\n"

        # When everything stops
        stack.terminate()
        return {name: _ended(one) for name, one in started.items()}


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def _ended(process: subprocess.Popen[bytes]) -> Ended:
    out, err = process.communicate(timeout=END_SECONDS)
    return Ended(process.returncode, out, err)


@pytest.mark.parametrize("name", CONSUMERS)
def test_consume_ends_with_3_when_everything_stays_down(
    ended: Mapping[str, Ended], name: str
) -> None:
    """It does not take that for an empty queue."""
    code, out, err = ended[name]
    assert (code, out) == (3, b""), err
    assert b"not answered for" in err


def test_claim_waits_for_messages_but_not_so_long_for_a_broker(ended: Mapping[str, Ended]) -> None:
    """It ends long before its wait, of ten minutes."""
    code, _, err = ended["claim"]
    assert code == 3, err


def test_a_watch_ends_with_3_when_everything_stays_down(ended: Mapping[str, Ended]) -> None:
    """It does not look like a queue in which nothing is delayed."""
    code, _, err = ended["watch"]
    assert code == 3, err
    assert b"not answered for" in err
    assert b"--position" in err


def test_consume_sums_nothing_up_where_no_server_was_there(cli: Cli) -> None:
    program = ("--exec", "true", "--wait")
    unknown = cli.run("consume", "no-such-queue", *program, "30s")
    unreachable = cli.run("consume", "some", *program, "30s", "--endpoint", "127.0.0.1:1")

    assert (unknown.code, unreachable.code) == (1, 3)
    assert "acked" not in unknown.err + unreachable.err
    # But where there was nothing to do
    cli.ok("queue", "create", "some")
    assert "0 acked, 0 nacked" in cli.ok("consume", "some", *program, "2s").err


def test_any_one_of_several_addresses_will_do(cli: Cli) -> None:
    several = f"127.0.0.1:1, {cli.stack.endpoint}"
    cli.ok("queue", "create", "q", "--endpoint", several)
    listed = cli.run("queue", "ls", "--json", environ={"SLATEMQ_ENDPOINT": several})
    assert "q" in [queue["queue_id"] for queue in listed.objects]

    wrong = cli.run("status", "--endpoint", f"{cli.stack.endpoint},http://127.0.0.1:1")
    assert (wrong.code, "'http://127.0.0.1:1' is not an address" in wrong.err) == (2, True)


def test_another_server_behind_the_address_is_not_called_a_fault_of_ours(cli: Cli) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    other = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        result = cli.run("status", "--endpoint", other)
    finally:
        server.stop(None).wait()
    assert result.code == 3
    assert f"--endpoint: {other} is not SlateMQ: a gRPC server answers there" in result.err
    assert "--endpoint" in result.err
    assert "report" not in result.err
