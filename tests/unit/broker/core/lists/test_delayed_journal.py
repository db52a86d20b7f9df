"""What the journal of delayed messages writes, and what it costs those who have none."""

from __future__ import annotations

from libs.storage.layout.buckets import order_of, split_order
from libs.storage.layout.keys import RecordType, config_key
from libs.storage.layout.own_keys import parse_delayed_key
from libs.storage.records.delayed_records import DelayedMessage, decode_delayed
from services.broker.core.batches.execute import Execution, Transfer, execute
from services.broker.core.queue import Choice
from services.broker.core.shard import Assignment, Nack, Range, Shard
from services.broker.core.waiting.delayed_journal import ROW_MAX
from services.broker.shard.loading import Loader
from tests.unit.broker.core.applied import assign_all
from tests.unit.broker.core.golden_plain_queue import COMMITS
from tests.unit.broker.core.shards import START_MS, Each, Rig

Journal = dict[int, list[DelayedMessage]]


def journal(rig: Rig, queue_id: str = "orders") -> Journal:
    """What stands in the database, by order."""
    rows: Journal = {}
    for key, value in sorted(rig.store.rows.items()):
        if key[1] == RecordType.DELAYED:
            queue, order, _ = parse_delayed_key(key)
            assert order is not None
            if queue == queue_id:
                rows[order] = decode_delayed(value)
    return rows


def ids(rows: Journal) -> list[list[int]]:
    return [[item.message_id for item in row] for row in rows.values()]


async def test_a_queue_without_delayed_messages_writes_the_same_keys_and_bytes_as_ever() -> None:
    rig = Rig()
    rig.shard = Shard(blocks=iter(range(1, 100)))
    rig.loader = Loader(rig.store, rig.shard)
    commits = []

    def commit() -> None:
        rows = rig.shard.drain(rig.now_ms)
        rig.shard.durable()
        commits.append({key.hex(): value and value.hex() for key, value in rows})

    queue = rig.create()
    commit()
    # The time of one is over: it is available at once, but no delayed message.
    columns = [3, 3, 200], [0, START_MS + 60_000, 0], [0, START_MS - 1, START_MS]
    assign_all(rig.shard, [Range(0, 0, 7, [Assignment("orders", [1, 2, 3], *columns)])], rig.now_ms)
    commit()
    rig.now_ms += 10
    claimed = rig.shard.leases.claim(
        queue, Each(lambda item: Choice.TAKE), 30_000, "worker", rig.now_ms
    )
    first, second, _ = claimed.leases()
    commit()
    rig.now_ms += 10
    rig.shard.leases.ack([first.token], rig.now_ms)
    await rig.run(lambda: rig.shard.leases.nack([Nack(second.token, "boom")], rig.now_ms))
    commit()
    rig.now_ms += 10
    assign_all(rig.shard, [Range(0, 7, 9, [Assignment("orders", [4])])], rig.now_ms)
    commit()

    del commits[0][config_key("orders").hex()]  # has a place for every setting
    assert commits == COMMITS


async def test_what_a_commit_wrote_may_be_reported_once_it_is_durable() -> None:
    # Given two commits that are under way
    rig = Rig()
    delayed = rig.create().waiting.delayed
    rig.commit()
    written: list[int] = []
    for message_id in (1, 2):
        await rig.route([message_id], visible_at_ms=START_MS + 900)
        rig.store.write(rig.shard.drain(rig.now_ms), rig.now_ms)
        written.append(delayed.last_order)
    assert list(journal(rig)) == written
    assert delayed.durable_order < written[0]

    # When one after the other is durable
    for order in written:
        rig.shard.durable()

        # Then what it wrote may be reported, and no more
        assert delayed.durable_order == order


async def test_each_commit_writes_its_delayed_messages_under_an_order_of_its_own() -> None:
    rig = Rig()
    queue = rig.create()
    rig.commit()
    await rig.route([1], visible_at_ms=START_MS + 900, priority=7, deadline_ms=START_MS + 5000)
    await rig.route([2, 3], visible_at_ms=START_MS + 500)
    await rig.route([4])
    rig.commit()
    rig.now_ms += 1
    await rig.route([5], visible_at_ms=START_MS + 100)
    rig.commit()

    rows = journal(rig)
    assert ids(rows) == [[1, 2, 3], [5]]
    assert [split_order(order).ms for order in rows] == [START_MS, START_MS + 1]
    assert queue.waiting.delayed.last_order == max(rows)
    item = next(iter(rows.values()))[0]
    assert item[:4] == (1, 7, START_MS + 900, START_MS + 5000)
    assert split_order(item.bucket_order).ms == START_MS + 900


async def test_many_delayed_messages_of_one_commit_stand_in_rows_of_bounded_length() -> None:
    rig = Rig()
    rig.create()
    many = list(range(1, 2 * ROW_MAX + 2))
    for start in range(0, len(many), 400):  # a millisecond holds no more
        await rig.route(many[start : start + 400], visible_at_ms=START_MS + 500 + start)
    rig.commit()
    rows = journal(rig)
    assert [len(row) for row in rows.values()] == [ROW_MAX, ROW_MAX, 1]
    assert [one for row in ids(rows) for one in row] == many


async def test_messages_that_wait_after_a_failed_attempt_are_not_written() -> None:
    rig = Rig()
    queue = rig.create()
    await rig.route([1])
    rig.commit()
    claimed = rig.shard.leases.claim(queue, Each(lambda item: Choice.TAKE), 30_000, "w", rig.now_ms)
    (lease,) = claimed.leases()
    await rig.run(lambda: rig.shard.leases.nack([Nack(lease.token, "", 60_000)], rig.now_ms))
    rig.commit()
    assert queue.waiting.timed_count == 1
    assert journal(rig) == {}


async def test_a_message_past_its_retention_is_not_written() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1], visible_at_ms=START_MS + 500, deadline_ms=START_MS)
    rig.commit()
    assert journal(rig) == {}


async def test_a_purge_leaves_nothing_to_be_written_and_begins_another_epoch() -> None:
    rig = Rig()
    queue = rig.create()
    await rig.route([1], visible_at_ms=START_MS + 500)
    rig.commit()
    await rig.route([2], visible_at_ms=START_MS + 500)
    queue.purge_available()
    rig.commit()
    await rig.route([3], visible_at_ms=START_MS + 500)
    rig.commit()
    rows = journal(rig)
    assert ids(rows) == [[1], [3]]
    assert [split_order(order).epoch == queue.waiting.epoch for order in rows] == [False, True]
    delayed, epoch = queue.waiting.delayed, queue.waiting.epoch
    assert delayed.last_in(epoch) == delayed.durable_in(epoch) == max(rows)
    assert delayed.first_in(epoch) == order_of(epoch, 0, 0)
    assert (delayed.last_in(epoch - 1), delayed.durable_in(epoch - 1)) == (0, 0)
    delayed.first_order = max(rows)
    assert delayed.first_in(epoch) == max(rows)
    assert delayed.first_in(epoch + 1) == order_of(epoch + 1, 0, 0)


def test_where_nothing_was_written_yet_nothing_is_looked_for() -> None:
    rig = Rig()
    waiting = rig.create().waiting
    known = [waiting.delayed.last_order > 0]

    rig.queue().purge_available()
    known.append(waiting.delayed.last_in(waiting.epoch) > 0)

    assert known == [True, True]


async def test_a_transfer_that_waits_is_reported_in_the_queue_that_it_comes_into() -> None:
    rig = Rig()
    for queue_id in ("orders", "next"):
        rig.create(queue_id)
    await rig.route([1, 2])
    waits, comes = await rig.claim(2)

    commands = [Transfer(waits.token, "next", 7, 500), Transfer(comes.token, "next")]
    await rig.run(lambda: execute(rig.shard, Execution(commands), rig.now_ms))
    rig.commit()

    assert ids(journal(rig, "next")) == [[1]]
    assert journal(rig) == {}
