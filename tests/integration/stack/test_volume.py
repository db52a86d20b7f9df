"""A generated instance is one: the real services start on it and give back what it was to have."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import slatemq
from benchmarks.suite import payloads
from benchmarks.suite.servers import UNSCHEDULED
from benchmarks.volume import Layout, Volume, write
from benchmarks.volume.plan import State
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Database
from libs.storage.database.snapshots import SnapshotReader
from libs.storage.layout.keys import log_key
from libs.storage.layout.primitives import Row
from libs.storage.objects.shard_owners import Owner
from services.ingest.config import IngestConfig
from services.ingest.edit.purge_rules import Reason
from services.ingest.edit.purging import PIECE_MESSAGES, Purge
from services.ingest.shard import open_shard
from services.janitor.jobs.owners import Owners
from services.janitor.jobs.removing import MessagePurge
from services.janitor.snapshots import SnapshotName, renewed_snapshots
from services.janitor.spark.source import NarrowingSource, options_of
from slatemq import EntryState
from slatemq.client import Client
from slatemq.errors import Unavailable
from slatemq.v1 import purge_pb2
from tests.acceptance.local_stack import LocalStack
from tests.integration.waiting import WAIT_SECONDS

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # starts the whole stack


@pytest.fixture(autouse=True)
def _unscheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of the janitor beside the tests."""
    for name, value in UNSCHEDULED.items():
        monkeypatch.setenv(name, value)


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
    tolist = layout.states().tolist()
    queues = volume.queue_ids()
    found: dict[str, list[int]] = {queue_id: [] for queue_id in queues}
    for place, state in enumerate(tolist):
        if state in states:
            found[queues[place % len(queues)]].append(layout.id_of(place))
    return found


async def claimed(client: Client, queue_id: str) -> list[int]:
    """Claims and acks until nothing is available any more; gives the IDs, as they came."""
    ids: list[int] = []
    async with asyncio.timeout(WAIT_SECONDS):
        while (await client.get_queue(queue_id)).counts.available_count:
            try:
                messages = await client.claim(queue_id, 1000, wait=1)
            except Unavailable:
                continue
            for message in messages:
                assert payloads.read(message.payload, BYTES)[0] == message.message_id
                assert message.headers == {"topic": queue_id}
            ids += [message.message_id for message in messages]
            tokens = [message.lease_token for message in messages]
            assert await client.ack(tokens) == [None] * len(tokens)
    return ids


async def listed(client: Client, queue_id: str, state: EntryState) -> list[int]:
    return sorted([entry.message_id async for entry in client.list_entries(queue_id, state)])


async def test_what_is_generated_is_served_as_if_it_had_been_published(tmp_path: Path) -> None:
    # Given
    await write((tmp_path / "data").as_uri(), SCATTERED)
    with LocalStack(tmp_path, ready=True) as stack:
        async with slatemq.connect(stack.endpoint) as client:
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
    with LocalStack(tmp_path, ready=True) as stack:
        async with slatemq.connect(stack.endpoint) as client:
            # When
            ids: list[int] = []
            async with asyncio.timeout(60):
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


# --- What the janitor reads of it -------------------------------------------

LISTS = ("messages", "active", "done", "failed")


def scanned(root: str, names: list[SnapshotName], table: str) -> tuple[list[pa.RecordBatch], int]:
    """A table as the tasks of Spark read it, and how many rows of the store that took."""
    source: Any = NarrowingSource({**options_of(root, names), "table": table})
    reader = source.reader(source.schema())
    batches = [batch for piece in reader.partitions() for batch in reader.read(piece)]
    return batches, reader.rows_read


async def rows_read(folder: Path, volume: Volume) -> dict[str, int]:
    """How many rows of the store each table of a new instance takes, all messages being there."""
    await write(folder.as_uri(), volume)
    root = open_root(folder.as_uri())
    names = []
    for kind in (Kind.INGEST, Kind.BROKER):
        database = await root.database(f"{kind}/0", kind)
        names.append(SnapshotName(database.name, await root.snapshots(database).take(600_000)))
        await database.close()
    fields = {}
    for table in LISTS:
        batches, fields[table] = await asyncio.to_thread(scanned, root.url, names, table)
        assert (
            sum(batch.num_rows for batch in batches)
            == {
                "messages": volume.stored,
                "active": volume.expired + volume.waiting,
                "done": volume.done,
                "failed": volume.failed,
            }[table]
        )
    return fields


async def test_ten_times_the_messages_are_ten_times_the_rows_to_read_and_cleaned_ones_are_none(
    tmp_path: Path,
) -> None:
    def of(times: int, cleaned: int = 0) -> Volume:
        return Volume(
            cleaned=cleaned,
            done=2000 * times,
            failed=200 * times,
            expired=800 * times,
            waiting=2000 * times,
            payload_bytes=BYTES,
            entry=100,
        )

    few = await rows_read(tmp_path / "few", of(1))
    many = await rows_read(tmp_path / "many", of(10))
    left = await rows_read(tmp_path / "left", of(1, cleaned=45_000))

    assert few == {"messages": 50, "active": 28, "done": 20, "failed": 2}
    assert many == {table: 10 * count for table, count in few.items()}
    assert left == few


def placed(batches: list[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Each with the number of rows before it."""
    at = 0
    for batch in batches:
        yield at, batch
        at += batch.num_rows


def counting(call: Callable[..., Any], asked: Counter[str]) -> Callable[..., Any]:
    """The same, counted by service."""

    def counted(owners: Owners, service: str, *rest: Any) -> Any:
        asked[service] += 1
        return call(owners, service, *rest)

    return counted


def noting(scan: Callable[..., Any], begins: list[bytes]) -> Callable[..., Any]:
    """The same, with the keys noted at which scans begin."""

    def noted(reader: SnapshotReader, start: bytes, *rest: Any, **more: Any) -> Any:
        begins.append(start)
        return scan(reader, start, *rest, **more)

    return noted


async def test_removals_go_out_in_batches_and_what_they_removed_is_not_passed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a log of 20,000, three quarters of which are older than any new queue may start
    volume = Volume(done=15_000, waiting=5000, payload_bytes=BYTES, entry=100, days=28)
    layout = Layout(volume)
    root = (tmp_path / "data").as_uri()
    await write(root, volume, layout)
    asked: Counter[str] = Counter()
    begins: list[bytes] = []
    monkeypatch.setattr(Owners, "call", counting(Owners.call, asked))
    monkeypatch.setattr(SnapshotReader, "scan", noting(SnapshotReader.scan, begins))

    def purge() -> int:
        with renewed_snapshots(root) as taken:
            batches, count = scanned(root, taken.names, "messages")
            epochs = {one.name.shard: one.purge_epoch or 0 for one in taken.all}
        task = MessagePurge(root, epochs, purge_pb2.PURGE_REASON_UNREFERENCED)
        old = [batch.slice(0, max(0, 14_000 - at)) for at, batch in placed(batches)]
        fields = {row["name"]: row["count"] for one in task(iter(old)) for row in one.to_pylist()}
        assert fields["messages_purged"] == 14_000
        return count

    def read_again() -> int:
        with renewed_snapshots(root) as taken:
            begins.clear()
            return scanned(root, taken.names, "messages")[1]

    with LocalStack(tmp_path, ready=True):
        # When 14,000 are removed, as a task of Spark does it
        before = await asyncio.to_thread(purge)
        after = await asyncio.to_thread(read_again)

    # Then there were three requests, and nothing looks for what is gone
    assert asked == {"ingest": 3}
    assert (before, after) == (200, 60)
    # A removal tells where the log began before it.
    assert min(begins) >= log_key(layout.id_of(14_000 - PIECE_MESSAGES))


class Reads:
    """Counts what is read of the databases of this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows = self.calls = 0
        scan, get = Database.scan, Database.get

        async def scanned(database: Database, *span: Any, **more: Any) -> AsyncIterator[list[Row]]:
            self.calls += 1
            async for rows in scan(database, *span, **more):
                self.rows += len(rows)
                yield rows

        async def got(database: Database, *key: Any, **more: Any) -> bytes | None:
            self.calls += 1
            return await get(database, *key, **more)

        patch.setattr(Database, "scan", scanned)
        patch.setattr(Database, "get", got)


async def reads_of_a_purge(folder: Path, messages: int) -> tuple[int, int]:
    """How many calls and rows it takes to remove half of the messages, and to ask once more."""
    volume = Volume(
        expired=messages // 2, waiting=messages // 2, payload_bytes=BYTES, entry=100, scattered=True
    )
    layout, root = Layout(volume), open_root(folder.as_uri())
    await write(root.url, volume, layout)
    over = [layout.id_of(at) for at, one in enumerate(layout.states()) if one == State.EXPIRED]
    shard = await open_shard(root, IngestConfig(root=root.url), Owner())
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        removed = [
            (await shard.purger.purge(Purge(0, Reason.EXPIRED, over[at : at + 1000]))).count
            for _ in range(2)
            for at in range(0, len(over), 1000)
        ]
    assert sum(removed) == len(over)
    await shard.close()
    return reads.calls, reads.rows


async def test_ten_times_the_messages_to_remove_are_ten_times_the_reads(
    tmp_path: Path,
) -> None:
    few_calls, few_rows = await reads_of_a_purge(tmp_path / "few", 4000)
    many_calls, many_rows = await reads_of_a_purge(tmp_path / "many", 40_000)

    # Each of 40 entries is read by the call that removes its messages, and by the one that asks
    # again; one at the seam between two calls by both of them.
    # Those of the seven packs of an entry out of which payloads go are read once.
    assert 80 + 6 * 40 <= few_rows <= 80 + 2 * 2 + 7 * 40
    assert 800 + 6 * 400 <= many_rows <= 800 + 2 * 20 + 7 * 400
    # A request looks for its first entry and for those that follow, in two steps, and for the
    # packs of each.
    assert few_calls <= 3 * 4 + 40 + 2 * 2
    assert many_calls <= 3 * 40 + 400 + 2 * 20
