"""Commands whose services go away: they tell that from an empty queue, and outlast a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.acceptance.local_stack import LocalStack
from tests.integration.cli_stack import Cli

pytestmark = pytest.mark.stack

START_SECONDS = 20.0
"""For a command to start and to end, on a busy machine."""


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    with LocalStack(tmp_path / "stack") as stack:
        yield Cli(stack, tmp_path / "state")


def test_consume_sums_nothing_up_where_nobody_was_there(cli: Cli) -> None:
    program = ("--exec", "true", "--wait", "2s")
    unknown = cli.run("consume", "no-such-queue", *program)
    nobody = cli.run("consume", "q", *program, "--endpoint", "127.0.0.1:1")

    assert (unknown.code, nobody.code) == (1, 3)
    assert "acked" not in unknown.err + nobody.err
    # But where there was nothing to do
    cli.ok("queue", "create", "q")
    assert "0 acked, 0 nacked" in cli.ok("consume", "q", *program).err


@pytest.mark.parametrize("wait", [("--wait", "2s"), ()])
def test_consume_ends_with_3_when_everything_stays_away(cli: Cli, wait: tuple[str, ...]) -> None:
    # Given a consumer that has had a message
    cli.ok("queue", "create", "q")
    cli.ok("publish", "--to", "q", "first")
    consumer = cli.start("consume", "q", "--timeout", "3s", *wait)
    assert consumer.stdout is not None
    assert consumer.stdout.readline() == b"first\n"

    # When everything stops
    cli.stack.terminate()

    # Then it does not take that for an empty queue
    out, err = consumer.communicate(timeout=3 + START_SECONDS)
    assert consumer.returncode == 3, err
    assert out == b""
    assert b"not answered for" in err


def test_claim_waits_for_messages_but_not_so_long_for_a_broker(cli: Cli) -> None:
    # Given a claim that waits at the broker
    cli.ok("queue", "create", "q")
    began = time.monotonic()
    waiting = cli.start("claim", "q", "--timeout", "2s", "--wait", "60s")

    # When everything stops
    cli.stack.terminate()

    # Then the claim ends, long before its wait
    _, err = waiting.communicate(timeout=2 + START_SECONDS)
    assert waiting.returncode == 3, err
    assert time.monotonic() - began < 45


def test_a_watch_ends_with_3_when_everything_stays_away(cli: Cli) -> None:
    # Given a watch that has told a delayed message
    cli.ok("queue", "create", "reminders")
    cli.ok("publish", "--to", "reminders", "later", "--visible-at", "2100-01-01T00:00:00Z")
    watch = cli.start("message", "watch", "reminders", "--timeout", "2s", "--json")
    assert watch.stdout is not None
    assert b"message_id" in watch.stdout.readline()

    # When everything stops
    cli.stack.terminate()

    # Then it does not look like a queue in which nothing is delayed
    _, err = watch.communicate(timeout=2 + START_SECONDS)
    assert watch.returncode == 3, err
    assert b"not answered for" in err
    assert b"--position" in err


def test_any_one_of_several_addresses_will_do(cli: Cli) -> None:
    several = f"127.0.0.1:1, {cli.stack.endpoint}"
    cli.ok("queue", "create", "q", "--endpoint", several)
    listed = cli.run("queue", "ls", "--json", environ={"SLATEMQ_ENDPOINT": several})
    assert [queue["queue_id"] for queue in listed.objects] == ["q"]

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
    assert result.code == 1
    assert f"{other} is not SlateMQ: a gRPC server answers there" in result.err
    assert "--endpoint" in result.err
    assert "report" not in result.err
