"""Reading archived dead letters: what is listed comes, once, with what the archive has of it."""

from __future__ import annotations

import asyncio
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pyarrow.parquet as pq
import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import UNCLAIMED, QueueNames
from libs.storage.objects.small_objects import Objects
from services.janitor.archive_paths import day_path
from services.janitor.jobs import archive
from services.janitor.jobs.archive import DEAD_LETTERS, DayFolder, dead_letters_of
from services.janitor.rpc import archived
from services.janitor.rpc.archived import ArchivedDeadLetters
from slatemq.errors import NotFound, Unavailable
from slatemq.v1 import entry_pb2, entry_pb2_grpc, queue_pb2
from slatemq.v1.janitor_pb2 import ReadArchivedRequest
from tests.unit.janitor.test_archive import AT, DAY, Waits, dead_letters, put_damaged

ARCHIVED = queue_pb2.ENTRY_STATE_ARCHIVED
AT_MS = round(AT.timestamp() * 1000)


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return open_root(tmp_path.as_uri(), sync=False).objects


def listed(*ids: int, failed_ms: int = AT_MS) -> dict[archived.Key, entry_pb2.Entry]:
    return {
        (one, failed_ms): entry_pb2.Entry(
            queue_id="orders", message_id=one, state=ARCHIVED, finished_at_ms=failed_ms
        )
        for one in ids
    }


async def joined(
    objects: Objects, wanted: dict[archived.Key, entry_pb2.Entry], day: date = DAY
) -> list[entry_pb2.Entry]:
    directory = TopologyDirectory(objects)
    channels = Channels(directory)
    try:
        reader = ArchivedDeadLetters(objects, channels)
        return [one async for one in reader._of_day("orders", day, wanted)]
    finally:
        await channels.close()
        await directory.close()


async def add(objects: Objects, *ids: int, payload: bytes = b"x") -> None:
    def work() -> None:
        DayFolder(Waits(), objects, "orders", DAY).add(dead_letters(*ids, payload=payload))

    await asyncio.to_thread(work)


async def test_what_is_listed_comes_with_what_the_archive_has(objects: Objects) -> None:
    await add(objects, 1, 2, 3)

    found = {one.message_id: one for one in await joined(objects, listed(1, 3, 9))}

    assert sorted(found) == [1, 3, 9]
    assert (found[3].reason, found[3].message.payload) == ("boom", b"x")
    assert dict(found[3].message.headers) == {"n": "3"}
    assert [(one.consumer_id, one.outcome, one.queue_id) for one in found[3].attempts] == [
        ("worker", "nack: boom", "orders")
    ]
    # Parts are content, never truth: 2 is not listed any more; of 9 there is none
    assert not found[9].HasField("message")


async def test_another_failure_of_the_same_message_is_another_dead_letter(objects: Objects) -> None:
    await add(objects, 1)
    (found,) = await joined(objects, listed(1, failed_ms=AT_MS + 1))
    assert not found.HasField("message")


async def test_one_whose_payload_was_gone_comes_without_a_message(objects: Objects) -> None:
    table = dead_letters(1).drop_columns("payload").to_pylist()
    part = dead_letters(1).from_pylist(table, schema=DEAD_LETTERS)
    await asyncio.to_thread(lambda: DayFolder(Waits(), objects, "orders", DAY).add(part))
    (found,) = await joined(objects, listed(1))
    assert (found.reason, found.HasField("message")) == ("boom", False)


async def test_each_comes_once_while_a_part_absorbs_another(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given parts of which one goes, with its letters in the next, after the parts were listed
    await add(objects, 1, 2)
    reads = dead_letters_of
    looked: list[bool] = []

    def absorbed(*given: Any) -> Any:
        if not looked:
            DayFolder(Waits(), objects, "orders", DAY).add(dead_letters(3))
            looked.append(True)
        yield from reads(*given)

    monkeypatch.setattr(archive, "dead_letters_of", absorbed)

    found = await joined(objects, listed(1, 2, 3))

    assert sorted(one.message_id for one in found) == [1, 2, 3]
    assert all(one.message.payload == b"x" for one in found)


async def test_a_damaged_part_is_reported_and_nothing_is_made_up(objects: Objects) -> None:
    await objects.put(f"{day_path('orders', DAY)}/part-000001.parquet", b"no Parquet")
    with pytest.raises(Unavailable, match="day=2026-01-02"):
        await joined(objects, listed(1))


async def test_a_damaged_part_hides_none_of_the_others_nor_other_days(objects: Objects) -> None:
    # Given a damaged part before a whole one, and whole ones of two other days
    broker: Any = Lists(6)  # type: ignore[abstract]
    for days in range(3):
        rows = [
            row for row in dead_letters(*range(1, 7)).to_pylist() if row["message_id"] % 3 == days
        ]
        for row in rows:
            row["failed_at"] = AT + timedelta(days=days)
        table = dead_letters(1).from_pylist(rows, schema=DEAD_LETTERS)
        day = (AT + timedelta(days=days)).date()
        folder = await asyncio.to_thread(DayFolder, Waits(), objects, "orders", day)
        await asyncio.to_thread(folder.add, table)
    path = day_path("orders", DAY)
    whole = await objects.get(f"{path}/part-000001.parquet")
    await objects.put(f"{path}/part-000002.parquet", whole)
    await objects.put(f"{path}/part-000001.parquet", b"no Parquet")

    # Then all that is there comes, and no error where nothing is missing
    found = await read(objects, broker, ReadArchivedRequest(queue_id="orders"))
    assert sorted(one.message_id for one in found) == [1, 2, 3, 4, 5, 6]
    assert all(one.HasField("message") for one in found)

    # And the error comes after the others where something is
    broker.entries.insert(0, entry_pb2.Entry(message_id=9, state=ARCHIVED, finished_at_ms=AT_MS))
    found = []
    with pytest.raises(Unavailable, match="day=2026-01-02"):
        await read(objects, broker, ReadArchivedRequest(queue_id="orders"), found)
    assert sorted(one.message_id for one in found) == [1, 2, 3, 4, 5, 6]


async def test_content_whose_checksum_is_wrong_is_not_handed_out(
    objects: Objects, tmp_path: Path
) -> None:
    put_damaged(tmp_path, 1, 2)
    with pytest.raises(Unavailable, match="checksum"):
        await joined(objects, listed(1))


async def test_only_row_groups_that_have_a_wanted_dead_letter_are_read_whole(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a part of several row groups, in the order of failures
    rows = dead_letters(*range(1, 41), payload=bytes(1 << 20)).to_pylist()
    for place, row in enumerate(rows):
        row["failed_at"] = AT + timedelta(seconds=place)
    table = dead_letters(1).from_pylist(rows, schema=DEAD_LETTERS)
    await asyncio.to_thread(lambda: DayFolder(Waits(), objects, "orders", DAY).add(table))
    path = f"{day_path('orders', DAY)}/part-000001.parquet"
    with objects.open(path) as file:
        groups = pq.ParquetFile(file).num_row_groups
    assert groups >= 3
    whole: list[int] = []
    read = pq.ParquetFile.read_row_group

    def counted(part: Any, group: int, columns: Any = None) -> Any:
        if columns is None:
            whole.append(group)
        return read(part, group, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)

    (some,) = list(dead_letters_of(objects, path, [(40, AT_MS + 39_000)]))

    assert [one["message_id"] for one in some] == [40]
    assert whole == [groups - 1]


# --- Beside a broker that lists ---------------------------------------------


class Lists(entry_pb2_grpc.EntryServiceServicer):
    """A broker's listing, of this many letters, some of each day."""

    def __init__(self, count: int) -> None:
        self.entries = [
            entry_pb2.Entry(
                handle=f"orders/{one:x}/f1",
                queue_id="orders",
                message_id=one,
                state=ARCHIVED,
                finished_at_ms=AT_MS + (one % 3) * 86_400_000,
            )
            for one in range(1, count + 1)
        ]
        self.asked: list[entry_pb2.ListEntriesRequest] = []

    async def ListEntries(  # noqa: N802 - the RPC's name
        self, request: entry_pb2.ListEntriesRequest, context: Any
    ) -> entry_pb2.ListEntriesResponse:
        if request.queue_id != "orders":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such queue")
        self.asked.append(request)
        start = int(request.page_token or 0)
        end = start + request.page_size
        token = str(end) if end < len(self.entries) else ""
        return entry_pb2.ListEntriesResponse(entries=self.entries[start:end], next_page_token=token)


async def read(
    objects: Objects,
    broker: Lists,
    asked: ReadArchivedRequest,
    found: list[entry_pb2.Entry] | None = None,
) -> list[entry_pb2.Entry]:
    """The entries, which are in `found`, too, where it raises."""
    found = [] if found is None else found
    server = grpc.aio.server()
    entry_pb2_grpc.add_EntryServiceServicer_to_server(broker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    directory = TopologyDirectory(objects)
    channels = Channels(directory)
    try:
        await directory.announce(Peer("broker", 0, f"127.0.0.1:{port}", ""))
        await QueueNames(objects).claim("orders", (0,), UNCLAIMED)
        reader = ArchivedDeadLetters(objects, channels)
        async for one in reader.read(asked):
            found.append(one)
        return found
    finally:
        await channels.close()
        await directory.close()
        await server.stop(None)


async def test_a_listing_of_many_windows_comes_whole(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archived, "WINDOW", 20)
    monkeypatch.setattr(archived, "PAGE", 7)
    broker: Any = Lists(100)  # type: ignore[abstract]
    for days in range(3):
        day: datetime = AT + timedelta(days=days)
        rows = [
            row for row in dead_letters(*range(1, 101)).to_pylist() if row["message_id"] % 3 == days
        ]
        for row in rows:
            row["failed_at"] = day
        table = dead_letters(1).from_pylist(rows, schema=DEAD_LETTERS)
        folder = await asyncio.to_thread(DayFolder, Waits(), objects, "orders", day.date())
        await asyncio.to_thread(folder.add, table)

    found = await read(objects, broker, ReadArchivedRequest(queue_id="orders"))

    assert sorted(one.message_id for one in found) == list(range(1, 101))
    assert all(dict(one.message.headers) == {"n": str(one.message_id)} for one in found)
    assert max(asked.page_size for asked in broker.asked) == 7
    some = await read(objects, broker, ReadArchivedRequest(queue_id="orders", max_entries=9))
    assert sorted(one.message_id for one in some) == list(range(1, 10))


async def test_a_queue_that_no_broker_has_is_not_found(objects: Objects) -> None:
    with pytest.raises(NotFound):
        await read(objects, Lists(1), ReadArchivedRequest(queue_id="other"))  # type: ignore[abstract]
