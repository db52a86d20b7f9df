"""The attempts at a message go along when it gets an entry in another queue."""

from __future__ import annotations

import asyncio

import pytest

from libs.storage.layout.ids import message_id as id_of
from libs.storage.layout.keys import attempts_key
from libs.storage.records.queues import FailedAttempt
from services.broker.core.batches.execute import Execution, Fail, Transfer, execute
from services.broker.core.lists import attempts
from services.broker.core.lists.attempts import RECORD_BYTES_MAX, Attempts, attempts_at
from services.broker.core.shard import Nack, Needs
from services.broker.core.waiting.bucket import Place
from services.broker.shard import loading
from services.broker.shard.loading import READ_AT_ONCE, Histories
from tests.unit.broker.core.shards import Rig
from tests.unit.broker.core.stored import stored_attempts


async def fail(rig: Rig, reason: str, queue_id: str) -> None:
    [lease] = await rig.claim(1, queue_id=queue_id)
    command = Fail(lease.token, reason)
    await rig.run(lambda: execute(rig.shard, Execution([command]), rig.now_ms))


async def fail_once(rig: Rig, reason: str) -> None:
    [lease] = await rig.claim(1)
    await rig.nack(Nack(lease.token, reason))


@pytest.mark.parametrize(("reason", "outcome"), [("no paper", "nack: no paper"), ("", "nack")])
async def test_a_nack_is_reported_with_its_reason_if_it_has_one(reason: str, outcome: str) -> None:
    rig = Rig()
    rig.create("orders")
    await rig.route([1])

    await fail_once(rig, reason)
    rig.commit()

    assert outcomes(rig, "orders") == [(outcome, "")]


async def transfer(rig: Rig, source: str, target: str) -> None:
    """From a broker that was started again: nothing that it needs is in memory."""
    rig.commit()
    await rig.restart()
    [lease] = await rig.claim(1, queue_id=source)
    command = Transfer(lease.token, target)
    await rig.run(lambda: execute(rig.shard, Execution([command]), rig.now_ms))
    rig.commit()


def outcomes(rig: Rig, queue_id: str) -> list[tuple[str, str]]:
    found = stored_attempts(rig.store.rows, queue_id, 1)
    return [(one.outcome, one.queue) for one in found]


async def test_a_transfer_takes_the_history_along_and_shows_where_it_was() -> None:
    rig = Rig()
    for queue_id in ("orders", "next"):
        rig.create(queue_id)
    await rig.route([1])
    await rig.route([1], queue_id="next")
    await fail(rig, "here", "orders")
    rig.now_ms += 10
    await fail(rig, "there", "next")
    rig.now_ms += 10
    await rig.route([1])

    await transfer(rig, "orders", "next")

    assert outcomes(rig, "next") == [("fail: here", "orders"), ("fail: there", "")]
    assert outcomes(rig, "orders") == [("fail: here", "")]

    # Back again, it has what it had, once, and what came since.
    await transfer(rig, "next", "orders")

    assert outcomes(rig, "orders") == [("fail: here", ""), ("fail: there", "next")]


async def test_a_message_that_never_failed_leaves_no_history() -> None:
    rig = Rig()
    for queue_id in ("orders", "next"):
        rig.create(queue_id)
    await rig.route([1])

    await transfer(rig, "orders", "next")

    assert outcomes(rig, "orders") == outcomes(rig, "next") == []


def test_of_very_many_attempts_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "ATTEMPTS_KEPT", 3)
    records, rig = Attempts(), Rig()
    p, q = rig.create("p"), rig.create("q")
    at_q = attempts_at(q, 1)

    for number in range(1, 6):
        records.add(at_q, FailedAttempt("c", number))
    assert [one.claimed_at_ms for one in records.get(at_q) or ()] == [3, 4, 5]

    records.add(attempts_at(p, 1), FailedAttempt("c", 6))
    records.carry(1, p, q)
    assert [one.claimed_at_ms for one in records.get(at_q) or ()] == [4, 5, 6]


def test_as_many_histories_stay_in_memory_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "BYTES_MAX", 1000)  # Two, of 417 bytes each.
    records, queue = Attempts(), Rig().create()
    keys = [attempts_at(queue, message_id) for message_id in range(1, 4)]

    for count, key in enumerate(keys):
        records.shrink(frozenset())  # nothing to drop yet
        assert sum(records.get(one) is not None for one in keys) == count
        records.offer(key, [FailedAttempt("c", 1)])
    records.shrink(frozenset())

    assert [records.get(one) is not None for one in keys] == [False, True, True]
    assert records.held_bytes == 2 * 417
    records.forget(queue, 2)
    assert records.held_bytes == 417 + 200


def test_of_many_histories_those_of_what_failed_last_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "BYTES_MAX", 1000)  # One of two attempts, and one of one.
    records, queue = Attempts(), Rig().create()
    keys = [attempts_at(queue, message_id) for message_id in (1, 2, 3)]
    for number, key in enumerate((keys[0], keys[1], keys[2], keys[0])):
        records.add(key, FailedAttempt("c", number))
        list(records.drain())

    records.shrink(frozenset())

    assert [key in records for key in keys] == [True, False, False]
    assert 0 < records.held_bytes <= 1000


def test_what_is_being_read_stays_in_memory_until_its_last_reader_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "BYTES_MAX", 1000)  # Two, of 417 bytes each.
    records, queue = Attempts(), Rig().create()
    keys = [attempts_at(queue, message_id) for message_id in range(1, 9)]

    # Given more histories than memory has room for, read by one caller, some by another too
    records.begin_read(keys)
    records.begin_read(keys[:4])
    for key in keys:
        records.offer(key, [FailedAttempt("c", 1)])
    records.shrink(frozenset())
    assert all(key in records for key in keys)

    # When the first has read, then what the other reads stays alone
    records.end_read(keys)
    records.shrink(frozenset())
    assert [key in records for key in keys] == [True] * 4 + [False] * 4

    # When the other has read too, then the bound holds, and a row is deleted by its caller
    records.end_read(keys[:4])
    records.shrink(frozenset())
    assert [key in records for key in keys] == [False] * 2 + [True] * 2 + [False] * 4
    assert records.held_bytes == 2 * 417
    assert records.forget(queue, 8) == (attempts_key(queue.queue_id, 8),)


async def test_histories_that_commands_have_read_do_not_stay_above_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a broker with messages that failed once, started again
    ids = range(1, 101)
    rig = await rig_with_history(ids, other_every=100)
    tokens = [lease.token for lease in await rig.claim(len(ids))]

    # When they fail again, which reads their attempts, and a commit is durable
    await rig.run(
        lambda: rig.shard.leases.nack([Nack(token, "again") for token in tokens], rig.now_ms)
    )
    assert sum(attempts_at(rig.queue(), one) in rig.shard.attempts for one in ids) == len(ids)
    monkeypatch.setattr(attempts, "BYTES_MAX", 1000)
    rig.commit()
    rig.queue().touch()
    rig.commit()

    # Then memory has no more of them than it may
    assert 0 < rig.shard.attempts.held_bytes <= 1000


def test_of_long_attempts_the_newest_are_kept_up_to_a_size() -> None:
    records, key = Attempts(), attempts_at(Rig().create(), 1)
    long = "nack: " + "é" * 512

    for number in range(1, 101):
        assert number < 2 or records.take_new_bytes() == min(number - 1, 31) * 1047
        records.add(key, FailedAttempt("c", number, long))
        ((_, (_, row)),) = records.drain()
        assert row is not None
        assert len(row) <= RECORD_BYTES_MAX
    assert [one.claimed_at_ms for one in records.get(key) or ()] == list(range(70, 101))

    records.add(key, FailedAttempt("c", 101, "x" * 40_000))
    assert [one.claimed_at_ms for one in records.get(key) or ()] == [101]
    records.add(key, FailedAttempt("c", 102))
    assert [one.claimed_at_ms for one in records.get(key) or ()] == [102]


async def test_histories_are_found_with_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "READ_AT_ONCE", 3)
    rig = Rig()
    queue, other = rig.create(), rig.create("other")
    stored = [2, 4, 5, 6, 7, 8, 90]
    for one in stored:
        rig.shard.attempts.add(attempts_at(queue, one), FailedAttempt("c", one))
    rig.shard.attempts.add(attempts_at(other, 50), FailedAttempt("c", 1))
    queue.touch()
    rig.commit()
    await rig.restart()
    queue = rig.queue()
    rig.shard.attempts.add(attempts_at(queue, 30), FailedAttempt("c", 1))  # in memory alone

    histories = Histories(rig.store, rig.shard.attempts, queue)

    assert await histories.of([3, 1, 2]) == {2}
    assert await histories.of(range(4, 9)) == {4, 5, 6, 7, 8}
    reads = rig.store.reads
    assert await histories.of([9, 10]) == set()
    assert await histories.of([50, 30, 40]) == {30}
    assert await histories.of([80]) == set()
    assert rig.store.reads == reads
    assert await histories.of([91, 90]) == {90}
    assert await histories.of([5]) == {5}


async def test_histories_that_lie_between_messages_are_not_read_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given dead letters of two ingests, and messages of both that were done before and after them
    monkeypatch.setattr(loading, "READ_AT_ONCE", 3)
    rig = Rig()
    queue = rig.create()
    failed = [id_of(shard, 100 + one) for shard in (0, 1) for one in range(50)]
    tried = id_of(1, 7)
    for one in [*failed, tried]:
        rig.shard.attempts.add(attempts_at(queue, one), FailedAttempt("c", 1))
    queue.touch()
    rig.commit()
    await rig.restart()
    histories = Histories(rig.store, rig.shard.attempts, rig.queue())
    rig.store.rows_read = 0

    # When rows of the done list have messages of both, and an old one from time to time
    found = [
        await histories.of([id_of(shard, first + row) for shard in (1, 0) for first in firsts])
        for row in range(20)
        for firsts in ((1, 200), (201, 300))
    ]

    # Then each history in between is read once at most
    assert set[int]().union(*found) == {tried}
    assert rig.store.rows_read < 20


async def test_histories_of_messages_that_leave_for_ever_go_with_them() -> None:
    rig = Rig()
    queue = rig.create()
    await rig.route([1, 2, 3], deadline_ms=rig.now_ms + 60_000)
    for _ in range(3):
        await fail_once(rig, "no")
    rig.commit()
    assert all(stored_attempts(rig.store.rows, "orders", one) for one in (1, 2, 3))
    await rig.restart()
    queue = rig.queue()
    assert await rig.run(lambda: queue.peek(3, lambda ids: ids, rig.now_ms)) == [1, 2, 3]
    (lane,) = queue.waiting.lanes()
    place = Place(lane.priority, lane.kind, lane.head.order if lane.head else 0)

    await rig.run(lambda: queue.waiting.cancel(place, 1))
    rig.now_ms += 60_001
    assert await rig.claim(3) == []
    rig.commit()

    assert not any(stored_attempts(rig.store.rows, "orders", one) for one in (1, 2, 3))


async def test_a_message_that_fails_past_its_retention_leaves_no_history() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1], deadline_ms=rig.now_ms + 1_000)
    await fail_once(rig, "first")
    rig.commit()
    assert outcomes(rig, "orders") == [("nack: first", "")]
    [lease] = await rig.claim(1)

    rig.now_ms += 1_000
    await rig.nack(Nack(lease.token, "too late"))
    rig.commit()

    assert outcomes(rig, "orders") == []


async def test_a_slow_read_for_a_queue_that_is_gone_shows_its_successor_nothing() -> None:
    # Given a message that failed, whose attempts are being read for the next nack
    rig = Rig()
    rig.create()
    await rig.route([1])
    await fail_once(rig, "former")
    rig.commit()
    await rig.restart()
    [lease] = await rig.claim(1)
    with pytest.raises(Needs) as raised:
        rig.shard.leases.nack([Nack(lease.token, "former")], rig.now_ms)
    rig.store.slow = True
    reading = asyncio.create_task(rig.loader.answer(raised.value))
    await asyncio.sleep(0)
    rig.store.open_gates()
    await asyncio.sleep(0)

    # When its queue is deleted, swept and made again before they have been read
    rig.shard.delete_queue(rig.queue())
    rig.shard.write_rows([(attempts_key("orders", 1), None)])
    rig.commit()
    rig.create()
    while not reading.done():
        rig.store.open_gates()
        await asyncio.sleep(0)
    rig.store.slow = False

    # Then the same message starts again there
    await rig.route([1])
    await fail_once(rig, "new")
    rig.commit()
    assert outcomes(rig, "orders") == [("nack: new", "")]


# --- Many are read at once ------------------------------------------------------


async def rig_with_history(ids: range, *, other_every: int) -> Rig:
    """Messages that failed once in `orders` and wait again; some others failed beside them."""
    rig = Rig()
    for queue_id in ("orders", "next"):
        rig.create(queue_id)
    for message_id in range(ids[0], ids[-1] + 1, other_every):
        if message_id not in ids:
            rig.shard.attempts.add(
                attempts_at(rig.queue(), message_id), FailedAttempt("other", message_id)
            )
    for message_id in ids:
        rig.shard.attempts.add(attempts_at(rig.queue(), message_id), FailedAttempt("c", message_id))
    await rig.route(ids)
    rig.commit()
    await rig.restart()
    return rig


@pytest.mark.parametrize("others", [False, True])
async def test_many_that_are_moved_take_their_histories_along_in_few_reads(others: bool) -> None:
    # Given messages in a row, or ten apart with others that failed in between
    ids = range(1, 4001, 10) if others else range(1, 401)
    rig = await rig_with_history(ids, other_every=3 if others else 1)
    leases = await rig.claim(len(ids))
    rig.store.reads = 0

    # When all are transferred
    commands = [Transfer(lease.token, "next") for lease in leases]
    await rig.run(lambda: execute(rig.shard, Execution(commands), rig.now_ms))
    rig.commit()

    # Then each has its own history
    for message_id in ids:
        [one] = stored_attempts(rig.store.rows, "next", message_id)
        assert one == FailedAttempt("c", message_id, queue="orders")
    if not others:
        assert rig.store.reads <= 2 * len(ids) // READ_AT_ONCE


async def test_a_command_that_is_cancelled_while_it_reads_leaves_what_was_read_to_the_next() -> (
    None
):
    # Given a thousand messages that failed, and a nack of all of them that reads their attempts
    ids = range(1, 1_001)
    rig = await rig_with_history(ids, other_every=1_000)
    tokens = [lease.token for lease in await rig.claim(len(ids))]

    def nack() -> None:
        rig.shard.leases.nack([Nack(token, "again") for token in tokens], rig.now_ms)

    reads = rig.store.reads
    rig.store.slow = True
    first = asyncio.create_task(rig.run(nack))
    while rig.store.reads < reads + 5:
        rig.store.open_gates()
        await asyncio.sleep(0)

    # When its caller has no more patience, and sends it again
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    rig.store.slow = False
    with pytest.raises(Needs) as raised:
        nack()

    # Then only the rest is read
    assert 0 < len(raised.value.attempts) <= len(ids) - 4 * READ_AT_ONCE
    await rig.run(nack)
    rig.commit()
    assert [len(stored_attempts(rig.store.rows, "orders", one)) for one in ids] == [2] * len(ids)
