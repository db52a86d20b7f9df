"""The client against the real stack, whose services are killed under it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import slatemq
import slatemq.sync
from slatemq import BatchSettings
from slatemq._admin import instance
from slatemq._consume import consumer as consuming
from slatemq.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable
from tests.acceptance.local_stack import LocalStack
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("stack"), ready=True) as running:
        yield running


def kill(stack: LocalStack, service: str) -> None:
    pid = stack.signal(service, signal.SIGKILL)
    stack.wait_restarted(service, pid)


async def test_publishes_survive_kills_of_ingest_once_each(stack: LocalStack) -> None:
    settings = BatchSettings(messages_max=20)
    async with slatemq.connect(stack.endpoint, batches=settings) as client:
        await client.create_queue("kills")

        # Given publishes under way, one by one and in requests
        async def singly() -> None:
            for start in range(0, 600, 60):
                numbers = range(start, start + 60)
                await asyncio.gather(
                    *(client.publish(b"%d" % n, {"queue": "kills"}) for n in numbers)
                )

        many = [slatemq.OutgoingMessage(b"%d" % n, {"queue": "kills"}) for n in range(600, 3000)]
        work = asyncio.gather(singly(), client.publish_many(many, in_flight=4))

        # When ingest is killed twice
        for _ in range(2):
            await asyncio.to_thread(kill, stack, "ingest")
        await work

        # Then each message is there once
        got: list[bytes] = []
        async with client.consume_batches("kills", 500) as batches, asyncio.timeout(60):
            async for batch in batches:
                async with batch:
                    got += [message.payload for message in batch]
                if len(got) >= 3000:
                    break
    assert Counter(got) == Counter(b"%d" % n for n in range(3000))


async def test_a_consumer_outlives_kills_of_the_broker(stack: LocalStack) -> None:
    async with slatemq.connect(stack.endpoint) as client:
        await client.create_queue("outlive")
        expected = {b"%d" % n for n in range(2000)}
        await client.publish_many(
            [slatemq.OutgoingMessage(payload, {"queue": "outlive"}) for payload in expected]
        )
        got: set[bytes] = set()
        async with client.consume("outlive", lease=2) as messages, asyncio.timeout(90):
            async for message in messages:
                async with message:
                    got.add(message.payload)
                if len(got) in (300, 900) and message.attempts_count == 1:
                    await asyncio.to_thread(kill, stack, "broker")
                if got == expected:
                    break
        # What got lost on its way in the kills is acked when it comes again, or already was
        queue = await client.get_queue("outlive")
    assert got == expected
    assert queue.counts.failed_count == 0


async def test_buffered_messages_lose_no_attempt(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "CLOSE_S", 60.0)
    # Given consumers that take a few messages each and leave, with a full buffer every time
    async with slatemq.connect(stack.endpoint) as client:
        await client.create_queue("polite", max_attempts=1)
        await client.publish_many(
            [slatemq.OutgoingMessage(b"%d" % n, {"queue": "polite"}) for n in range(500)]
        )
        got: list[bytes] = []
        while len(got) < 500:
            async with client.consume("polite", prefetch=200) as messages:
                async for message in messages:
                    assert message.attempts_count == 1
                    async with message:
                        got.append(message.payload)
                    if len(got) % 70 == 0 or len(got) == 500:
                        break
        queue = await client.get_queue("polite")
    assert sorted(got) == sorted(b"%d" % n for n in range(500))
    assert (queue.counts.done_count, queue.counts.failed_count) == (500, 0)


async def test_errors_have_their_types(stack: LocalStack) -> None:
    async with slatemq.connect(stack.endpoint) as client:
        await client.create_queue("typed")
        with pytest.raises(AlreadyExists):
            await client.create_queue("typed")
        with pytest.raises(InvalidArgument):
            await client.create_queue("bad", filter="headers[")
        for call in (client.claim("nobody"), client.get_queue("nobody")):
            with pytest.raises(NotFound):
                await call
        with pytest.raises(NotFound):
            await anext(client.consume("nobody"))
        with pytest.raises(InvalidArgument) as refused:
            await client.publish(b"x", {f"h{n}": "" for n in range(256)})
        assert refused.value.field == "message.headers"
        with pytest.raises(InvalidArgument):
            await client.claim("typed", -1)


def test_the_synchronous_face_does_the_same(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance, "STATUS_S", 60.0)
    with slatemq.sync.connect(stack.endpoint) as client:
        client.create_queue("sync")
        ids = client.publish_many(
            [slatemq.OutgoingMessage(b"%d" % n, {"queue": "sync"}) for n in range(20)]
        )
        got = []
        with client.consume("sync", prefetch=5) as messages:
            for message in messages:
                with message:
                    got.append(message.message_id)
                if len(got) == 7:
                    break
        with client.consume_batches("sync", 5) as batches:
            for batch in batches:
                with batch:
                    got += [one.message_id for one in batch]
                if len(got) == 20:
                    break
        assert sorted(got) == sorted(ids)
        assert client.claim("sync") == []
        assert "sync" in {queue.queue_id for queue in client.list_queues("s")}
        assert all(service.serving for service in client.status().services)
        watched = client.watch_queues()
        next(watched)
        del watched
    with pytest.raises(Unavailable) as refused:
        client.publish(b"late")
    assert refused.value.reason == "CLIENT_CLOSED"
    client.close()


def interrupt(messages: slatemq.sync.Consumer, over: threading.Event) -> None:
    """Sends Ctrl-C once the stream is open, and a message is waited for.

    Nothing if `over` is set before; after a long time it sends it anyway, and sets `over`.
    """
    consumer = messages._inner
    late_s = time.monotonic() + WAIT_SECONDS
    while not (consumer._consumer_id and consumer._arrived._waiters):
        if over.wait(0.01):
            return
        if time.monotonic() > late_s:
            over.set()
            break
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_wait_and_loses_nothing(stack: LocalStack) -> None:
    with slatemq.sync.connect(stack.endpoint) as client:
        client.create_queue("interrupted", max_attempts=1)
        with client.consume("interrupted") as messages:
            over = threading.Event()
            interrupting = threading.Thread(target=interrupt, args=(messages, over), daemon=True)
            interrupting.start()
            try:
                with pytest.raises(KeyboardInterrupt):
                    next(messages)
                assert not over.is_set(), "no message was waited for"
            finally:
                over.set()
            interrupting.join()
            client.publish(b"x", {"queue": "interrupted"})
            message = next(messages)
            with pytest.raises(KeyboardInterrupt), message:
                raise KeyboardInterrupt
            again = next(messages)
            assert (again.payload, again.attempts_count) == (b"x", 1)
            again.ack()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_must_make_its_own(stack: LocalStack) -> None:
    client = slatemq.sync.connect(stack.endpoint)  # Not entered: gRPC itself has not begun.
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            client.publish(b"x")
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert b"before a fork" in os.read(reading, 1000)
    os.close(reading)
    os.close(writing)
    client.close()


def test_a_program_that_just_ends_says_nothing(stack: LocalStack, tmp_path: Path) -> None:
    # Given a program that leaves without closing anything, in the middle of work
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, sys, slatemq\n"
        "async def main():\n"
        "    asyncio.get_running_loop().slow_callback_duration = 60\n"  # a busy machine is no fault
        "    async with slatemq.connect(sys.argv[1]) as client:\n"
        "        await client.create_queue('ends')\n"
        "        await client.publish('x', {'queue': 'ends'})\n"
        "        messages = client.consume('ends')\n"
        "        message = await anext(messages)\n"
        "        asyncio.create_task(client.process('ends', lambda m: asyncio.sleep(60)))\n"
        "        asyncio.create_task(client.publish('y'))\n"
        "        await asyncio.sleep(0)\n"
        "asyncio.run(main(), debug=True)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(program), stack.endpoint],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
