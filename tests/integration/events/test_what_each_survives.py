"""Each mode of event queues, with its process, its backend, both, or its store down for a while.

The table is in docs/how-to/event-queues.md. What holds on each backend, and at each step of a
task, is in the files that it names.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from libs.serving.peers.channels import open_channel
from slatemq.errors import Unavailable
from slatemq.v1.ingest_pb2 import PublishRequest
from tests.faults.faulty_store import Fault, Outcome, faulty_store
from tests.forms import proof
from tests.integration.events.backends.servers import Server
from tests.integration.events.conftest import served
from tests.integration.events.tasks.queued_ingest import QueuedIngest, eventually
from tests.integration.events.test_write_through import Suite
from tests.integration.ingest.server import message
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

pytestmark = pytest.mark.slow  # Real servers, killed and restarted.


@pytest.fixture(scope="module", params=["redis"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    yield from served(request, tmp_path_factory)


@pytest.mark.parametrize(
    ("mode", "victim"),
    [
        *(proof("write-through", victim) for victim in ("ingest", "backend", "both")),
        ("fire-and-forget", "ingest"),
        proof("fire-and-forget", "backend"),
        ("fire-and-forget", "both"),
        *(proof("async", victim) for victim in ("ingest", "backend")),
        ("async", "both"),
        proof("sync", "ingest"),
        ("sync", "backend"),
        proof("sync", "both"),
    ],
)
async def test_what_was_answered_is_stored_once_and_events_go_on_whatever_ends(
    tmp_path: Path, server: tuple[str, Server], mode: str, victim: str
) -> None:
    async with Suite(tmp_path, server, consistency=mode) as suite, AsyncExitStack() as stack:
        # Given publishes that were answered just before an end
        started, ingest = await stack.enter_async_context(serving(suite))
        answered = [f"before {n}" for n in range(20)]
        await asyncio.gather(*(publish(ingest, name) for name in answered))
        if victim in ("backend", "both"):
            await asyncio.to_thread(suite.server.kill)
        if victim == "backend":
            # Without the backend publishes go on, or are refused where it has them first
            if mode in ("async", "sync"):
                with pytest.raises(Unavailable) as refused:
                    await ingest.enqueue(message(b"refused"))
                assert refused.value.reason == "BACKEND_DOWN"
            else:
                await publish(ingest, "meanwhile")
                answered.append("meanwhile")
        else:
            started.kill()
            await started.wait()

        # When all are up again, then what was answered is stored once
        if victim in ("backend", "both"):
            await asyncio.to_thread(suite.server.start)
        if victim in ("ingest", "both"):
            _, ingest = await stack.enter_async_context(serving(suite))
        await publish(ingest, "after")
        wanted = Counter(name.encode() for name in [*answered, "after"])

        async def are_stored() -> bool:
            stored = Counter(await ingest.stored())
            del stored[b"refused"]  # the backend may have it
            assert stored <= wanted
            return stored == wanted

        await eventually(are_stored)

        # And each message has its event, in fire-and-forget those that come from now on
        if mode != "fire-and-forget":
            await suite.has_all([one.message_id for one in await ingest.log()])
            return
        later: set[int] = set()

        async def have_event() -> bool:
            later.update((await ingest.enqueue(message(b"later"))).message_ids)
            return not later.isdisjoint(suite.recorder.message_ids)

        await eventually(have_event)


@asynccontextmanager
async def serving(suite: Suite) -> AsyncIterator[tuple[asyncio.subprocess.Process, QueuedIngest]]:
    async with suite.ingest() as (started, address), open_channel(address) as channel:
        yield started, QueuedIngest(channel)


async def publish(ingest: QueuedIngest, name: str) -> None:
    """Publish until it is answered."""

    async def is_answered() -> None:
        await ingest.enqueue(message(name.encode()), request_id=name)

    await eventually(is_answered)


@pytest.mark.s3
@pytest.mark.parametrize("mode", ["write-through", proof("fire-and-forget")])
async def test_while_the_store_is_down_publishes_fail_at_their_deadlines_and_events_come(
    tmp_path: Path, server: tuple[str, Server], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with moto() as port, faulty_store(port) as store:
        root = root_url(store.port, f"away-{mode}")
        async with (
            Suite(tmp_path, server, root, consistency=mode) as suite,
            serving(suite) as (_, ingest),
        ):
            # Given a message that was stored just before nothing reaches the store
            before = await ingest.enqueue(message(b"before"))
            store.set(Fault(Outcome.HOLD))

            # When others are published, then they fail at their deadline, and it has its event
            request = PublishRequest(runs=[message(b"away")], request_id="away")
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await ingest.stub.Publish(request, timeout=2)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await suite.has_all(list(before.message_ids))

            # And once it is back, a repeat is stored, with its event
            store.set()
            again = await ingest.enqueue(message(b"away"), request_id="away")
            await suite.has_all(list(again.message_ids))
            assert Counter(await ingest.stored()) == Counter([b"before", b"away"])
