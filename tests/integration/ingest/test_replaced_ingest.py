"""An ingest that was replaced and does not know it yet: what it says of what is not there.

Both run in this process, so the first one goes on serving: nothing ends it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from services.broker.delivery.message_cache import FETCH_BYTES, IngestMessages, Ingests
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import SlateMQError, Unavailable
from slatemq.v1 import ingest_pb2, snapshot_pb2, snapshot_pb2_grpc
from tests.integration.ingest.server import Ingest, serving

Call = Callable[[Ingest, int], Awaitable[Any]]
"""Asks an ingest for something, given an ID that it has skipped."""


def push(first_number: int) -> ingest_pb2.PushRequest:
    row = ingest_pb2.PushedMessage(payload=b"pushed", queue_id="q")
    return ingest_pb2.PushRequest(first_number=first_number, messages=[row])


async def refusal(call: Awaitable[Any]) -> SlateMQError | None:
    """What the call is refused with, if it is."""
    try:
        with raising_slatemq_errors():
            await call
    except SlateMQError as refused:
        return refused
    return None


ASKED: dict[str, Call] = {
    "a message that it has not": lambda ingest, skipped: ingest.read(skipped),
    "a message behind its end": lambda ingest, skipped: ingest.read(skipped + 10**9),
    "the log behind its end": lambda ingest, skipped: ingest.tail(skipped + 10**9),
    "replacing one that it has not": lambda ingest, skipped: ingest.stub.ReplaceMessage(
        ingest_pb2.ReplaceMessageRequest(message_id=skipped, keep_headers=True)
    ),
    "what decides who may edit one that it has not": lambda ingest, skipped: (
        ingest.stub.GetMessageMetadata(ingest_pb2.GetMessageMetadataRequest(message_id=skipped))
    ),
    "rows behind a gap": lambda ingest, _: ingest.stub.Push(push(first_number=7)),
    "a place in the log": lambda ingest, _: ingest.stub.FindLogPosition(
        ingest_pb2.FindLogPositionRequest(received_at_ms=1 << 45)
    ),
    "a snapshot": lambda ingest, _: snapshot_pb2_grpc.SnapshotServiceStub(
        ingest.channel
    ).CreateSnapshot(snapshot_pb2.CreateSnapshotRequest()),
}


@pytest.mark.parametrize("what", ASKED)
async def test_it_never_says_that_something_is_not_there(tmp_path: Path, what: str) -> None:
    # Given an ingest with a message and an ID that it never gave out
    root = (tmp_path / "data").as_uri()
    async with serving(root) as earlier:
        (skipped,) = await earlier.send(b"before")
        skipped += 1
    async with serving(root) as first:
        await first.send(b"known to both")

        # When another one has the shard by now
        async with serving(root) as second:
            await second.send(b"known to the second alone")

            # Then the first one says nothing that would be believed
            with pytest.raises(Unavailable), raising_slatemq_errors():
                await ASKED[what](first, skipped)

            # And the second one answers, if only that there is none
            refused = await refusal(ASKED[what](second, skipped))
            assert not isinstance(refused, Unavailable) or refused.reason == "NOT_YET_STORED"


async def test_a_broker_that_was_idle_finds_messages_with_the_new_ingest(tmp_path: Path) -> None:
    root = (tmp_path / "data").as_uri()
    directory = TopologyDirectory(open_root(root).objects)
    channels = Channels(directory)
    client = Ingests(channels)
    async with serving(root) as first:
        (old,) = await first.send(b"old")
        # Given a broker that knows the first ingest, and has a connection to it
        held, _, gone, _ = await client.fetch(0, [old], FETCH_BYTES)
        assert (list(held), gone) == ([old], {})

        async with serving(root) as second:
            # When it wants messages that the second one has stored since
            new = await second.send(b"new", b"newer")
            answers: list[IngestMessages] = []
            async with asyncio.timeout(60):
                while not answers:
                    try:
                        answers.append(await client.fetch(0, [old, *new], FETCH_BYTES))
                    except Unavailable:
                        await asyncio.sleep(0.01)

            # Then it has them, and none is gone
            held, _, gone, _ = answers[0]
            assert (sorted(held), gone) == ([old, *new], {})
    await channels.close()
    await directory.close()
