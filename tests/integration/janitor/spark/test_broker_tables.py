"""The tables of a broker: what a snapshot says of queues is what the broker says of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, In

from libs.storage.database.roots import open_root
from services.janitor.spark import planning
from slatemq.v1 import queue_pb2, removal_pb2
from tests.integration.broker import entry_calls
from tests.integration.broker.dead_letters.removal_calls import (
    ARCHIVED,
    archive,
    failed_rows,
    remove,
)
from tests.integration.broker.moves.movers import (
    Steps,
    begin_move,
    create_partitions,
    listed_moves,
    route_all,
    shard_of,
    two_brokers,
)
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import Rig, introduce, running
from tests.integration.janitor.spark.tables_read import Read, read
from tests.integration.storage.test_snapshots import stub_of, take

DAY_MS = 86_400_000
FIRST_DAY = date(2026, 1, 1)


async def options_of(rig: Rig) -> dict[str, str]:
    """The options that read a snapshot of the broker, taken now."""
    snapshot = await take(stub_of(rig))
    return {
        "root": rig.root.url,
        "database": snapshot.database,
        "snapshot": snapshot.snapshot_id,
    }


async def fail(rig: Rig, queue_id: str, count: int, reason: str = "boom") -> None:
    """Lets `count` messages run out of attempts."""
    while count:
        claimed = await rig.claim(queue_id, max_messages=count)
        await rig.nack(*(one.lease_token for one in claimed), reason=reason)
        count -= sum(one.attempts_count == 2 for one in claimed)


def ids(rows: Iterable[dict[str, Any]], **fields: object) -> list[int]:
    return sorted(
        row["message_id"]
        for row in rows
        if all(row[name] == value for name, value in fields.items())
    )


async def said(rig: Rig, state: queue_pb2.EntryState.ValueType, queue_id: str = "q") -> list[int]:
    """What the broker lists."""
    return sorted(await entry_calls.ids(rig, state, queue_id=queue_id))


async def test_every_state_of_a_queue_is_read_as_the_broker_shows_it(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.create("q", max_attempts=2, default_delay_ms=0)
        now_ms = rig.clock.now_ms()
        await rig.assign(range(1, 301), priorities=[n % 3 for n in range(300)])
        await rig.assign(range(301, 401), visible_at_ms=[now_ms + 1000 * n for n in range(1, 101)])
        first = await rig.claim("q", max_messages=50, consumer_id="worker-a")
        await rig.ack(*(one.lease_token for one in first[:20]))
        rig.clock.advance(50_000)
        while (await rig.counts("q")).get("in_flight"):
            await asyncio.sleep(0.01)  # the broker ends the leases whose time has come
        await fail(rig, "q", 30)
        await rig.claim("q", max_messages=40, consumer_id="worker-b")

        options = await options_of(rig)
        active, done = await read(options, "active"), await read(options, "done")
        failed, attempts = await read(options, "failed"), await read(options, "attempts")

        waiting = await said(rig, entry_calls.AVAILABLE) + await said(rig, entry_calls.DELAYED)
        assert ids(active.rows, state="available") == sorted(waiting)
        assert ids(active.rows, state="in-flight") == await said(rig, entry_calls.IN_FLIGHT)
        assert ids(done.rows) == await said(rig, entry_calls.DONE)
        assert ids(failed.rows) == await said(rig, entry_calls.FAILED)
        assert len(failed.rows) == 30
        tried = [row for row in attempts.rows if row["message_id"] in ids(failed.rows)]
        assert [row["attempt"] for row in tried].count(2) == 30
        assert "nack: boom" in {row["outcome"] for row in tried}


async def test_a_partition_that_moves_is_read_on_one_shard(tmp_path: Path) -> None:
    async with (
        two_brokers(tmp_path) as (first, second),
        running(tmp_path, shard=2) as third,
        running(tmp_path, shard=3) as beside,
    ):
        rigs = (first, second, third, beside)
        await introduce(*rigs)
        await create_partitions(beside, first)
        for rig in rigs:
            await route_all(rig, 10)

        async def shards() -> list[int]:
            each = [await options_of(rig) for rig in rigs]
            names = ("database", "snapshot")
            options = each[0] | {name: ",".join(one[name] for one in each) for name in names}
            queues, active = await read(options, "queues"), await read(options, "active")
            found = sorted(row["broker_shard"] for row in queues.rows)
            assert Counter(row["broker_shard"] for row in active.rows) == dict.fromkeys(found, 10)
            return found

        assert await shards() == [0, 3]
        for source, target in ((first, second), (second, third)):
            held = [Steps(1), Steps(1)]
            held[0].between(source.broker.departures._targets, "arrive")
            held[1].between(source.broker.arrived._epochs, "raise_all")
            await begin_move(source, target)
            await held[0].reached.wait()
            assert await shards() == [shard_of(source), 3]
            held[0].thawed.set()
            await held[1].reached.wait()
            assert await shards() == [shard_of(target), 3]
            assert not await listed_moves(source)  # It has arrived.


async def test_columns_have_what_the_broker_knows(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.create("q", max_attempts=1, lease_ms=20_000)
        now_ms = rig.clock.now_ms()
        at = datetime.fromtimestamp(now_ms / 1000, UTC)
        await rig.assign([1, 2, 3], retention_deadlines_ms=[now_ms + DAY_MS, 0, 0])
        claimed = await rig.claim("q", max_messages=3, consumer_id="worker")
        await rig.ack(claimed[1].lease_token)
        await rig.nack(claimed[2].lease_token, reason="boom")
        options = await options_of(rig)

        (active,) = (await read(options, "active")).rows
        (done,) = (await read(options, "done")).rows
        (failed,) = (await read(options, "failed")).rows
        (queue,) = (await read(options, "queues")).rows

    assert active["message_id"] == 1
    assert active["claimed_at"] == at
    assert active["lease_length_ms"] == 20_000
    assert active["consumer"] == done["consumer"] == "worker"
    assert active["retention_deadline"].date() == date(2026, 1, 2)
    assert (done["message_id"], done["done_at"], done["day"]) == (2, at, at.date())
    assert done["first_claimed_at"] == at
    assert (failed["message_id"], failed["failed_at"], failed["attempts"]) == (3, at, 1)
    assert "boom" in failed["reason"]
    assert (queue["queue"], queue["max_attempts"]) == ("q", 1)
    assert dict(queue["settings"])["lease_ms"] == "20000"
    counts = ("waiting_count", "in_flight_count", "done_count", "failed_count")
    assert [queue[name] for name in counts] == [0, 1, 1, 1]


async def test_archived_dead_letters_have_a_table_of_their_own_with_the_run_of_each(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as rig:
        await rig.create("q", max_attempts=1, failed_retention_s=7)
        await entry_calls.fail(rig, range(1, 5))
        dead_letters = failed_rows(await entry_calls.listed(rig, entry_calls.FAILED))
        for day, run in enumerate(("first", "second")):
            rig.clock.advance(DAY_MS)
            await archive(rig, dead_letters[2 * day : day + 2], run)
        options = await options_of(rig)

        archived, failed = await read(options, "archived"), await read(options, "failed")
        one_day = await read(options, "archived", EqualTo(("day",), date(2026, 1, 3)))
        (queue,) = (await read(options, "queues")).rows
        listed = await entry_calls.listed(rig, ARCHIVED)

    assert [
        (row["message_id"], row["run"], row["bucket_order"], row["attempts"])
        for row in archived.rows
    ] == [
        (one.message_id, one.archived.run, one.archived.bucket_order, one.attempts_count)
        for one in listed
    ]
    assert [row["day"] for row in archived.rows] == [date(2026, 1, 2)] * 2 + [date(2026, 1, 3)]
    assert {row["failed_at"].date() for row in archived.rows} == {FIRST_DAY}
    assert ids(failed.rows) == [4]
    assert (ids(one_day.rows), one_day.rows_read) == ([3], 1)
    help_text = ("archived_count", "failed_count", "failed_retention_s", "created_revision")
    assert [queue[name] for name in help_text] == [3, 1, 7, 1]


async def test_what_was_purged_or_belongs_to_a_deleted_queue_is_not_read(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        for queue_id in ("gone", "again", "q"):
            await rig.create(queue_id)
            await rig.assign(range(1, 21), queue_id)
            claimed = await rig.claim(queue_id, max_messages=10)
            await rig.ack(*(one.lease_token for one in claimed[:5]))
        await delete(rig, "gone")
        await delete(rig, "again")
        await rig.queues.PurgeQueue(
            queue_pb2.PurgeQueueRequest(queue_id="q", states=[entry_calls.AVAILABLE])
        )
        await rig.assign([21], "q")

        options = await options_of(rig)
        active, done = await read(options, "active"), await read(options, "done")
        queues = await read(options, "queues")

    assert {row["queue"] for row in (*active.rows, *done.rows)} == {"q"}
    assert ids(active.rows, state="available") == [21]
    assert len(ids(active.rows, state="in-flight")) == len(ids(done.rows)) == 5
    assert [row["queue"] for row in queues.rows] == ["q"]


async def many_queues(rig: Rig) -> None:
    """Six queues, each with five waiting and five done messages in rows of their own."""
    for number in range(6):
        queue_id = f"q{number}"
        await rig.create(queue_id)
        for n in range(10):
            await rig.assign([100 * number + n + 1], queue_id)
        for _ in range(5):
            (claimed,) = await rig.claim(queue_id, max_messages=1)
            await rig.ack(claimed.lease_token)


async def test_a_query_on_one_queue_reads_its_rows_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await many_queues(rig)
        options = await options_of(rig)
        one = EqualTo(("queue",), "q3")

        active = await read(options, "active", one)
        done = await read(options, "done", one)
        two = await read(options, "active", In(("queue",), ("q3", "q5", "no such queue")))
        queues = await read(options, "queues", one)
        everything = await read(options, "done")
        none = await read(options, "done", one, EqualTo(("broker_shard",), 7))

    assert {row["queue"] for row in (*active.rows, *done.rows)} == {"q3"}
    assert (len(active.rows), len(done.rows)) == (5, 5)
    assert active.rows_read <= 5
    assert done.rows_read == 5
    assert {row["queue"] for row in two.rows} == {"q3", "q5"}
    assert two.rows_read <= 10
    assert [row["queue"] for row in queues.rows] == ["q3"]
    assert everything.rows_read == len(everything.rows) == 30
    assert none == Read([], 0, 0)


async def test_a_query_on_one_queue_reads_its_dead_letters_and_their_attempts_alone(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as rig:
        for number in range(4):
            await rig.create(f"q{number}", max_attempts=1)
            for n in range(6):  # in rows of their own
                await entry_calls.fail(rig, [100 * number + n + 1], queue_id=f"q{number}")
            dead_letters = failed_rows(
                await entry_calls.listed(rig, entry_calls.FAILED, queue_id=f"q{number}")
            )
            for dead_letter in dead_letters[:2]:
                removal = removal_pb2.ArchiveRemoval(rows=[dead_letter], run="run")
                await remove(rig, f"q{number}", archive=removal)
        options = await options_of(rig)
        tables = ("failed", "archived", "attempts", "queues")
        one, id_ = EqualTo(("queue",), "q2"), EqualTo(("message_id",), 205)

        of_one = {table: await read(options, table, one) for table in tables}
        everything = {table: await read(options, table) for table in tables}
        one_id = await read(options, "attempts", one, id_)

    for table, count in (("failed", 4), ("archived", 2), ("attempts", 4), ("queues", 1)):
        found, all_ = of_one[table], everything[table]
        assert [row["queue"] for row in found.rows] == ["q2"] * count, table
        assert len(all_.rows) == 4 * count
        assert found.rows_read * 4 <= all_.rows_read, (table, found.rows_read, all_.rows_read)
    assert (ids(one_id.rows), one_id.rows_read) == ([205], 1)


async def test_a_query_on_one_day_of_done_or_failed_messages_reads_its_rows_alone(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as rig:
        await rig.create("q", max_attempts=1)
        rig.clock.advance(DAY_MS // 2)
        for day in range(5):
            for n in range(4):
                await rig.assign([10 * day + n + 1])
                (claimed,) = await rig.claim("q", max_messages=1)
                await (rig.nack if n % 2 else rig.ack)(claimed.lease_token)
            rig.clock.advance(DAY_MS)
        options = await options_of(rig)
        day_two = EqualTo(("day",), date(2026, 1, 3))
        since = GreaterThanOrEqual(("done_at",), datetime(2026, 1, 4, tzinfo=UTC))

        done = await read(options, "done", day_two)
        failed = await read(options, "failed", day_two)
        late = await read(options, "done", since)

    assert ids(done.rows) == [21, 23]
    assert ids(failed.rows) == [22, 24]
    assert (done.rows_read, failed.rows_read) == (2, 2)
    assert ids(late.rows) == [31, 33, 41, 43]


async def test_lists_are_cut_into_tasks_of_a_like_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as rig:
        await many_queues(rig)
        options = {**await options_of(rig), "partitions": "5"}
        monkeypatch.setattr(planning, "PIECE_ROWS", 4)

        done, active = await read(options, "done"), await read(options, "active")

    assert len(done.rows) == len({row["message_id"] for row in done.rows}) == 30
    assert len(active.rows) == len({row["message_id"] for row in active.rows}) == 30
    assert 4 <= done.tasks_count <= 10
    assert 4 <= active.tasks_count <= 10


async def test_a_deep_lane_is_cut_and_its_taken_head_is_left_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as rig:
        await rig.create("q")
        for start in range(0, 2000, 100):
            await rig.assign(range(start + 1, start + 101))
            rig.clock.advance(1000)
        claimed = await rig.claim("q", max_messages=30)
        await rig.ack(*(one.lease_token for one in claimed))
        options = {**await options_of(rig), "partitions": "4"}
        monkeypatch.setattr(planning, "PIECE_ROWS", 100)

        active = await read(options, "active")

    assert ids(active.rows) == list(range(31, 2001))
    assert 3 <= active.tasks_count <= 8


async def test_an_instance_is_read_by_another_root_object_while_its_owner_runs(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as rig:
        await rig.create("q")
        options = await options_of(rig)
        options["root"] = open_root(tmp_path.as_uri()).url

        assert len((await read(options, "queues")).rows) == 1
