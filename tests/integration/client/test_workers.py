"""`process` as a worker's main loop: failures in the log, and an orderly end at SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import slatemq
from slatemq._consume import processing
from slatemq.errors import InvalidArgument
from tests.integration.client.peers import Instance

ROOT = Path(__file__).parents[3]

WORKERS_PAGE = ROOT / "docs" / "how-to" / "workers.md"

PAYLOADS = [b"1", b"2", b"3", b"4"]

PROGRAM = """
import asyncio, signal, sys
import slatemq

endpoint, mode = sys.argv[1:]

async def handle(message):
    print("working", flush=True)
    await asyncio.sleep(600)

async def main():
    if mode == "own":
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with slatemq.connect(endpoint) as client:
            if mode == "two":
                await asyncio.gather(*(client.process("q", handle, concurrency=1) for _ in "ab"))
            else:
                await client.process("q", handle, concurrency=2)
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        if mode != "own":
            raise
    finally:
        print("closed", flush=True)

asyncio.run(main())
"""


async def start(instance: Instance, mode: str) -> asyncio.subprocess.Process:
    """A worker that has begun with two messages, and has two more fetched ahead."""
    instance.broker.available.extend([(payload, 0) for payload in PAYLOADS])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", PROGRAM, instance.endpoint, mode),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        for _ in range(2):
            assert await process.stdout.readline() == b"working\n"
    return process


@pytest.mark.parametrize(
    ("mode", "status", "printed"),
    [
        ("plain", 143, b"closed\n"),
        ("two", 143, b"closed\n"),
        ("own", 0, b"cancelled\nclosed\n"),
    ],
)
async def test_a_worker_that_gets_sigterm_releases_what_is_in_work(
    instance: Instance, mode: str, status: int, printed: bytes
) -> None:
    process = await start(instance, mode)
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert (process.returncode, out) == (status, printed)
    if mode != "two":  # asyncio itself speaks of each task that ends the loop.
        assert err == b""
    # Then all went back, and no attempt is counted
    assert sorted(instance.broker.nacked) == [(payload, "", True) for payload in PAYLOADS]


def documented(begins: str, work: str) -> str:
    """The program on the page of workers that begins so, which says that it works, then does."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", WORKERS_PAGE.read_text(), re.DOTALL)
    (program,) = [block for block in blocks if block.startswith(begins)]
    for what, instead in (
        ('"127.0.0.1:7420"', "__import__('sys').argv[1]"),
        ('"charges", prefetch=1', '"q", prefetch=1'),
        ("print(message.message_id)", f'print("working", flush=True); {work}'),
    ):
        assert what in program
        program = program.replace(what, instead)
    return program


@pytest.mark.parametrize(
    ("begins", "work", "status"),
    [
        ("import signal\n\nimport slatemq.sync\n", "__import__('time').sleep(600)", 143),
        ("import asyncio\nimport signal\n", "await asyncio.sleep(600)", 0),
    ],
    ids=["sync", "asyncio"],
)
async def test_a_documented_program_that_gets_sigterm_releases_what_it_works_on(
    instance: Instance, begins: str, work: str, status: int
) -> None:
    # Given a program of the page, which has begun with a message and has one more fetched ahead
    instance.broker.available.extend([(payload, 0) for payload in PAYLOADS[:2]])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", documented(begins, work), instance.endpoint),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"working\n"
        await instance.broker.until(lambda: len(instance.broker.leases) == 2)

        # When it gets SIGTERM
        process.send_signal(signal.SIGTERM)
        ended = await process.communicate()

    # Then it ends as documented, and both messages went back without an attempt counted
    assert (process.returncode, ended) == (status, (b"", b""))
    assert sorted(instance.broker.nacked) == [(payload, "", True) for payload in PAYLOADS[:2]]


async def test_a_program_may_go_on_after_process_with_sigterm_as_it_was(
    instance: Instance,
) -> None:
    async with slatemq.connect(instance.endpoint) as client:
        begun = asyncio.Event()

        async def handle(message: slatemq.Received) -> None:
            begun.set()

        instance.broker.available.append((b"x", 0))
        work = asyncio.create_task(client.process("q", handle))
        await begun.wait()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_handler_that_fails_is_logged_with_its_traceback(
    instance: Instance, caplog: pytest.LogCaptureFixture
) -> None:
    logged = asyncio.Event()

    class Signal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    async def handle(message: slatemq.Received) -> None:
        raise KeyError("the-key")

    instance.broker.available.append((b"x", 2))
    async with slatemq.connect(instance.endpoint) as client:
        with caplog.at_level(logging.WARNING, "slatemq"):
            processing.log.addHandler(watcher := Signal())
            work = asyncio.create_task(client.process("q", handle))
            await logged.wait()
            processing.log.removeHandler(watcher)
            work.cancel()
            await asyncio.wait([work])
    assert "of queue 'q' failed, attempt 3" in caplog.text
    assert 'raise KeyError("the-key")' in caplog.text
    assert instance.broker.nacked == [(b"x", "KeyError: 'the-key'", False)]


async def test_process_holds_no_more_messages_than_its_prefetch() -> None:
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        # Given a broker that fails a stream with more credit than one message
        instance.broker.prefetch_max = 1
        instance.broker.available.extend((payload, 0) for payload in PAYLOADS)
        handled: list[bytes] = []
        done = asyncio.Event()

        async def handle(message: slatemq.Received) -> None:
            handled.append(message.payload)
            if len(handled) == len(PAYLOADS):
                done.set()

        working = asyncio.create_task(client.process("q", handle, concurrency=1, prefetch=1))
        async with asyncio.timeout(60):
            await done.wait()
        working.cancel()
        await asyncio.wait([working])
        assert (handled, instance.broker.streams) == (PAYLOADS, 1)


@pytest.mark.parametrize("handler", [5, None, "handle"])
async def test_a_handler_that_cannot_be_called_is_refused_before_anything_is_claimed(
    handler: Any, instance: Instance
) -> None:
    async with slatemq.connect(instance.endpoint) as client:
        with pytest.raises(InvalidArgument, match="handler: must be an async function, not"):
            await client.process("q", handler)
    assert instance.broker.streams == 0


async def generator(message: slatemq.Received) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("handler", [lambda message: message.payload, generator, str])
async def test_a_handler_that_is_not_async_ends_process_and_fails_no_message(
    handler: Any, instance: Instance
) -> None:
    # Given messages that have come before the first is handled
    instance.broker.available.extend((payload, 0) for payload in PAYLOADS)
    calls: list[slatemq.Received] = []

    def counted(message: slatemq.Received) -> Any:
        calls.append(message)
        return handler(message)

    # When a handler returns something that cannot be awaited
    async with slatemq.connect(instance.endpoint) as client:
        with pytest.raises(InvalidArgument, match=r"async function.*asyncio\.to_thread") as refused:
            await client.process("q", counted, concurrency=4)

    # Then it is called once, and every message is released
    assert refused.value.field == "handler"
    assert len(calls) == 1
    assert sorted(instance.broker.nacked) == [(payload, "", True) for payload in PAYLOADS]
    assert instance.broker.acked == []


class AsyncCall:
    async def __call__(self, message: slatemq.Received, done: asyncio.Event) -> None:
        done.set()


@pytest.mark.parametrize(
    "make",
    [
        lambda done: lambda message: AsyncCall()(message, done),
        lambda done: partial(AsyncCall(), done=done),
        lambda done: lambda message: asyncio.ensure_future(AsyncCall()(message, done)),
    ],
)
async def test_whatever_returns_an_awaitable_is_a_handler(make: Any, instance: Instance) -> None:
    instance.broker.available.append((b"x", 0))
    done = asyncio.Event()
    async with slatemq.connect(instance.endpoint) as client:
        working = asyncio.create_task(client.process("q", make(done)))
        async with asyncio.timeout(60):
            await done.wait()
            await instance.broker.until(lambda: instance.broker.acked)
        working.cancel()
        await asyncio.wait([working])
    assert instance.broker.acked == [b"x"]


async def test_an_async_function_that_would_never_be_awaited_is_no_callback() -> None:
    async def report(_: object) -> None:
        """Would be called without being awaited."""

    wrong: Any = report
    client = slatemq.connect("127.0.0.1:1", call_timeout=0.1)
    with pytest.raises(InvalidArgument, match="on_progress: must be a plain function, not an"):
        await client.wait_redrive("0-1", on_progress=wrong)
    with pytest.raises(InvalidArgument, match="on_progress: must be a plain function, not an"):
        await anext(client.find_message(1, on_progress=wrong))
