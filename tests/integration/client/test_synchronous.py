"""The synchronous client of programs that leave it open, and of callers that are interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slatemq.client
import slatemq.sync
from slatemq._consume.gathering import claim_from_all
from slatemq._rpc.blocking import Loop
from tests.acceptance.local_stack import wait_until
from tests.integration.client.peers import Instance
from tests.interrupts import interrupt, interrupts

ROOT = Path(__file__).parents[3]

BEGIN = """
import sys
import slatemq.sync

client = slatemq.sync.connect(sys.argv[1])
"""

PROGRAMS = {
    "an iterator that was not finished": """
changes = client.watch_queues()
next(changes)
print("end")
""",
    "an iterator in a traceback": """
def work():
    changes = client.watch_queues()
    next(changes)
    print("end", flush=True)
    sys.excepthook = lambda *_: None
    raise ValueError
work()
""",
    "an iterator that outlives its client": """
with client:
    changes = client.watch_queues()
    next(changes)
print("end")
""",
    "a consumer": """
messages = client.consume("q")
next(messages)
print("end")
""",
    "a generator that would close its client": """
def work():
    with client:
        yield next(client.watch_queues())
working = work()
next(working)
print("end")
""",
}


@pytest.fixture
def instance() -> Iterator[Instance]:
    """On a loop of its own: this thread waits."""
    servers, made = Loop(), Instance()
    servers.run(made.__aenter__)
    made.broker.available.append((b"work", 0))
    yield made
    servers.run(made.__aexit__)
    servers.close()


def run(program: str, instance: Instance) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", program, instance.endpoint]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_that_leaves_something_open(instance: Instance, name: str) -> None:
    ended = run(BEGIN + PROGRAMS[name], instance)
    assert ended.stdout == "end\n"
    assert ended.stderr == ""
    assert ended.returncode == (1 if "traceback" in name else 0)


EXIT_HANDLERS = """
import atexit, sys
import slatemq.errors

def publish():
    try:
        client.publish(b"last words")
    except slatemq.errors.SlateMQError as error:
        print(error)

atexit.register(publish)
import slatemq.sync
client = slatemq.sync.connect(sys.argv[1])
atexit.register(publish)
"""


def test_exit_handlers_may_use_a_client_that_is_left_open(instance: Instance) -> None:
    # Given a program with handlers from before and after the client was imported
    assert run(EXIT_HANDLERS, instance).stdout == ""
    assert instance.ingest.stored == [b"last words"] * 2


def test_a_claim_whose_caller_was_interrupted_gives_back_what_it_brings(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a claim whose messages come just as a signal interrupts its caller
    async def claim_and_interrupt(*arguments: Any) -> Any:
        claimed = await claim_from_all(*arguments)
        interrupt()
        return claimed

    monkeypatch.setattr(slatemq.client, "claim_from_all", claim_and_interrupt)
    with (
        slatemq.sync.connect(instance.endpoint) as client,
        interrupts(KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        client.claim("q")
    # Then they go back, and no attempt is counted
    assert instance.broker.nacked == [(b"work", "", True)]


def test_the_pause_of_a_queue_is_seen_while_another_thread_iterates(instance: Instance) -> None:
    instance.broker.paused = True
    with slatemq.sync.connect(instance.endpoint) as client, client.consume("q") as messages:
        iterating = threading.Thread(target=list, args=[messages])
        iterating.start()
        wait_until(lambda: messages.paused, 60)
        assert messages.outage is None
        messages.close()
        iterating.join(60)
        assert not iterating.is_alive()
