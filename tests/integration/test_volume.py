"""A generated instance is one: the real services start on it and give back what it was to have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import slatemq
from benchmarks.suite import payloads, servers
from benchmarks.volume import Layout, Volume, write
from benchmarks.volume.plan import State
from slatemq import EntryState
from slatemq.client import Client

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # starts the whole stack

BYTES = 64
SCATTERED = Volume(
    cleaned=1000,
    done=700,
    failed=60,
    expired=210,
    in_flight=150,
    delayed=600,
    waiting=3000,
    queues=3,
    payload_bytes=BYTES,
    entry=100,
    # Some share a millisecond, and so a bucket.
    delayed_hours=0.0001,
    scattered=True,
)


def expected(volume: Volume, *states: State) -> dict[str, list[int]]:
    """The IDs of the messages in these states, by queue, in the order in which they came."""
    layout = Layout(volume)
    told = layout.states().tolist()
    queues = volume.queue_ids()
    found: dict[str, list[int]] = {queue_id: [] for queue_id in queues}
    for place, state in enumerate(told):
        if state in states:
            found[queues[place % len(queues)]].append(layout.id_of(place))
    return found


async def claimed(client: Client, queue_id: str) -> list[int]:
    """Claims and acks until nothing comes any more; gives the IDs, as they came."""
    ids = []
    while messages := await client.claim(queue_id, 1000):
        for message in messages:
            assert payloads.read(message.payload, BYTES)[0] == message.message_id
            assert message.headers == {"topic": queue_id}
        ids += [message.message_id for message in messages]
        assert await client.ack([message.lease_token for message in messages]) == [None] * len(
            messages
        )
    return ids


async def listed(client: Client, queue_id: str, state: EntryState) -> list[int]:
    return sorted([entry.message_id async for entry in client.list_entries(queue_id, state)])


async def test_what_is_generated_is_served_as_if_it_had_been_published(tmp_path: Path) -> None:
    # Given
    await write((tmp_path / "data").as_uri(), SCATTERED)
    with servers.slatemq(tmp_path) as server:
        async with slatemq.connect(server.url) as client:
            # When all is counted and listed
            counts = {q: (await client.get_queue(q)).counts for q in SCATTERED.queue_ids()}
            states = (EntryState.DONE, EntryState.FAILED, EntryState.IN_FLIGHT, EntryState.DELAYED)
            lists = {q: {s: await listed(client, q, s) for s in states} for q in counts}

            # Then
            for state in states:
                meant = expected(SCATTERED, State[state.name])
                assert {q: lists[q][state] for q in lists} == meant
                count = f"{state.name.lower()}_count"
                assert {q: getattr(counts[q], count) for q in counts} == {
                    q: len(ids) for q, ids in meant.items()
                }
            waiting = expected(SCATTERED, State.WAITING, State.EXPIRED)
            assert {q: counts[q].available_count for q in counts} == {
                q: len(ids) for q, ids in waiting.items()
            }

            # When all is claimed, what is past its retention does not come
            taken = {q: await claimed(client, q) for q in counts}
            assert taken == expected(SCATTERED, State.WAITING)

            # When one is published behind them, which the router takes to its queue
            await client.publish(b"new", {"topic": "volume-1"})
            (message,) = await client.claim("volume-1", 10, wait=30)
            assert message.payload == b"new"
            assert message.message_id > SCATTERED.messages


async def test_delayed_messages_come_when_their_time_has_come(tmp_path: Path) -> None:
    # Given a thousand, written as if it were an hour ago
    volume = Volume(delayed=1000, payload_bytes=BYTES, delayed_hours=0.001, entry=100)
    layout = Layout(volume)
    await write(
        (tmp_path / "data").as_uri(), volume, Layout(volume, now_ms=layout.now_ms - 3_600_000)
    )
    with servers.slatemq(tmp_path) as server:
        async with slatemq.connect(server.url) as client:
            # When
            ids: list[int] = []
            async with asyncio.timeout(30):
                while len(ids) < volume.delayed:
                    ids += await claimed(client, volume.queue)

    # Then
    assert sorted(ids) == [layout.id_of(place) for place in range(volume.delayed)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Volume(),
        lambda: Volume(waiting=1, queues=0),
        lambda: Volume(waiting=1, entry=65_536),
        lambda: Volume(waiting=1, days=30),
        lambda: Volume(waiting=2, done=-1),
    ],
)
async def test_what_cannot_be_made_is_refused(tmp_path: Path, wrong: Callable[[], Volume]) -> None:
    with pytest.raises(ValueError, match="must be"):
        await write(tmp_path.as_uri(), wrong())


async def test_nothing_is_written_over_an_instance(tmp_path: Path) -> None:
    await write(tmp_path.as_uri(), Volume(waiting=10))
    with pytest.raises(ValueError, match="already"):
        await write(tmp_path.as_uri(), Volume(waiting=10))
