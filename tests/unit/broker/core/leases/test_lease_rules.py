"""The odd rules of leases, each with the story that needs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice, pairwise

import pytest

from libs.storage.layout.keys import (
    attempts_key,
)
from libs.storage.records.states import FinishedLeasesRecord, LeaseOutcome
from services.broker.core import lease_table
from services.broker.core.leases import PLACE_BITS
from services.broker.core.shard import Finish, Nack
from tests.forms import proof
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import stored_queue


async def test_a_lease_that_was_alive_gets_its_length_or_30_s_after_a_restart() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    (short,) = await rig.claim(1, lease_ms=10_000)
    (long,) = await rig.claim(1, lease_ms=60_000)
    (longest,) = await rig.claim(1, lease_ms=3_600_000)
    rig.commit()

    await rig.restart(away_ms=600_000)

    ends = {lease.token: lease.deadline_ms - rig.now_ms for lease in rig.queue().leases}
    assert ends == {
        short.token: 10_000,
        long.token: 30_000,
        longest.token: 3_000_000,
    }


async def test_a_lease_that_had_ended_at_the_last_commit_ends() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])
    (lease,) = await rig.claim(1, lease_ms=1000)
    rig.commit()
    rig.now_ms += 2000
    await rig.route([2])
    rig.commit()

    await rig.restart()

    assert [queue.queue_id for queue in await rig.expire()] == ["orders"]
    assert rig.shard.leases.ack([lease.token], rig.now_ms) == [Finish.ENDED]


async def test_a_second_restart_leaves_a_lease_the_grace_that_the_first_one_gave() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])
    (lease,) = await rig.claim(1, lease_ms=10_000)
    rig.commit()
    await rig.restart(away_ms=60_000)
    rig.commit()

    await rig.restart(away_ms=5_000)

    assert await rig.expire() == []
    assert rig.shard.leases.ack([lease.token], rig.now_ms) == [Finish.OK]


async def test_a_finished_lease_is_distinguished_from_a_forged_one_also_after_a_restart() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    acked, nacked, ended = await rig.claim(3, lease_ms=1000)
    rig.shard.leases.ack([acked.token], rig.now_ms)
    await rig.nack(Nack(nacked.token))
    rig.now_ms += 1000
    await rig.expire()
    rig.commit()
    await rig.restart()
    tokens = [acked.token, nacked.token, ended.token, 12345]

    acks = rig.shard.leases.ack(tokens, rig.now_ms)
    nacks = await rig.nack(*(Nack(token) for token in tokens))
    extensions = rig.shard.leases.extend(tokens, 0, rig.now_ms)

    assert acks == [Finish.OK, Finish.ENDED, Finish.ENDED, Finish.UNKNOWN]
    assert nacks == [Finish.ENDED, Finish.OK, Finish.ENDED, Finish.UNKNOWN]
    assert [finish for finish, _ in extensions] == [Finish.ENDED] * 3 + [Finish.UNKNOWN]


async def test_an_ack_is_taken_until_the_end_of_its_lease_was_carried_out() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])
    (lease,) = await rig.claim(1, lease_ms=1000)
    rig.now_ms += 5000

    assert rig.shard.leases.ack([lease.token], rig.now_ms) == [Finish.OK]
    assert await rig.expire() == []


async def test_the_clock_ends_a_lease_that_was_extended_at_its_new_end() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2])
    extended, other = await rig.claim(2, lease_ms=1000)
    rig.shard.leases.extend([extended.token], 5000, rig.now_ms)

    ended = {}
    for rig.now_ms in (START_MS + 1000, START_MS + 4999, START_MS + 5000):
        await rig.expire()
        ended[rig.now_ms - START_MS] = 2 - rig.queue().leases.count

    assert ended == {1000: 1, 4999: 1, 5000: 2}
    assert rig.shard.leases.ack([other.token, extended.token], rig.now_ms) == [Finish.ENDED] * 2


@pytest.mark.parametrize("restarted", [False, True])
async def test_leases_that_are_taken_back_end_and_their_messages_wait_uncounted(
    restarted: bool,
) -> None:
    # Given three leases, of which a restart would forget where their messages lay
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3, 4])
    tokens = [lease.token for lease in await rig.claim(3)]
    rig.commit()
    if restarted:
        await rig.restart()

    # When they are taken back, two at a time
    left = []
    while rig.queue().leases.count:
        rig.shard.leases.take_back(rig.queue(), 2, rig.now_ms)
        left.append(rig.queue().leases.count)

    # Then their consumers cannot finish them, and others get all, each as at its first attempt
    assert left == [1, 0]
    assert rig.shard.leases.ack(tokens, rig.now_ms) == [Finish.ENDED] * 3
    given = await rig.claim(10)
    while more := await rig.claim(10):
        given += more
    assert [lease.message_id for lease in given] == ([4, 1, 2, 3] if restarted else [1, 2, 3, 4])
    assert {lease.attempts for lease in given} == {1}


async def test_released_messages_go_back_in_place_and_uncounted() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3, 4, 5, 6])
    first = await rig.claim(2, skip=[2])
    second = await rig.claim(2, skip=[2])
    rig.commit()

    rig.release(first)
    rig.release(second)

    given = await rig.claim(10)
    assert [lease.message_id for lease in given] == [1, 2, 3, 4, 5, 6]
    assert {lease.attempts for lease in given} == {1}


async def test_a_released_message_stays_before_one_that_joined_its_bucket_later() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    given = await rig.claim(1, skip=[1, 2])
    await rig.route([4])

    rig.release(given)

    assert await rig.ids(10) == [1, 2, 3, 4]


async def test_a_released_message_that_fell_due_stays_before_one_that_was_routed_later() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])
    await rig.route([2], visible_at_ms=START_MS + 10)
    rig.now_ms += 20
    given = await rig.claim(1, skip=[1])
    await rig.route([3])

    rig.release(given)

    assert await rig.ids(10) == [1, 2, 3]


async def test_released_messages_are_before_the_rest_after_a_restart_too() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    rig.commit()
    given = await rig.claim(2)
    rig.commit()

    rig.release(given)
    rig.commit()
    await rig.restart()

    assert await rig.ids(10) == [1, 2, 3]


async def test_a_message_that_cannot_be_delivered_fails_with_the_attempts_that_were_made() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])

    rig.shard.leases.fail(await rig.claim(1), "payload gone", rig.now_ms)
    rig.commit()

    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    assert (stored.failed[1].attempts, stored.failed[1].reason) == (0, "payload gone")


async def test_attempts_that_a_setting_takes_away_later_are_not_made() -> None:
    rig = Rig()
    rig.create(max_attempts=5)
    await rig.route([1])
    for _ in range(2):
        (lease,) = await rig.claim(1)
        await rig.nack(Nack(lease.token, "no"))
    rig.shard.update_queue(rig.queue(), rig.queue().settings.changed(max_attempts=2))

    assert await rig.ids(1) == []
    rig.commit()

    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    assert (stored.failed[1].attempts, stored.failed[1].reason) == (2, "no attempts left")


async def test_only_failed_attempts_are_written_down() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2])
    good, bad = await rig.claim(2)

    rig.shard.leases.ack([good.token], rig.now_ms)
    await rig.nack(Nack(bad.token, "boom"))
    rig.commit()

    assert attempts_key("orders", 1) not in rig.store.rows
    assert attempts_key("orders", 2) in rig.store.rows


async def test_a_lease_that_is_extended_for_hours_is_watched_once() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])
    (lease,) = await rig.claim(1, lease_ms=10_000)

    for _ in range(5000):
        rig.now_ms += 5000
        assert rig.shard.leases.extend([lease.token], 0, rig.now_ms)[0][0] is Finish.OK
        assert await rig.expire() == []

    assert len(rig.shard.leases.deadlines._heap) <= 3


def write(rows: dict[int, FinishedLeasesRecord], finished: lease_table.FinishedLeases) -> None:
    """Commits what the drain gives."""
    for slot, record in finished.drain():
        if record is None:
            del rows[slot]
        else:
            rows[slot] = record


def test_100_000_finished_leases_are_remembered_with_one_commit_each() -> None:
    finished = lease_table.FinishedLeases()
    slots: dict[int, FinishedLeasesRecord] = {}
    for token in range(1, 200_001):
        finished.add([token], LeaseOutcome.ACKED)
        if token % 7 == 0:
            write(slots, finished)
    write(slots, finished)

    again = lease_table.FinishedLeases(slots.values())

    assert len(slots) <= lease_table.FINISHED_SLOTS
    for one in (finished, again):
        assert all(one.outcome(token) for token in range(100_001, 200_001))
        assert one.outcome(1) is None
        assert one.outcome(999_999) is None


@pytest.mark.parametrize(
    ("commits", "in_blocks"),
    [
        ([250_000, 60_000], True),
        ([300_000, 200], False),
        *(proof(commits, True) for commits in ([310_000], [300_000, 200], [60_010, 9])),
        *(proof(commits, False) for commits in ([310_000], [250_000, 60_000], [60_010, 9])),
    ],
)
def test_the_last_100_000_finished_leases_are_remembered_however_large_commits_are(
    commits: list[int], in_blocks: bool
) -> None:
    finished = lease_table.FinishedLeases()
    tokens = [block << 8 | place for block in range(1, 5000) for place in range(100)]
    end = 0
    for count in commits:
        first, end = end, end + count
        for at in range(first, end, 100):
            part = tokens[at : min(at + 100, end)]
            finished.add(part, LeaseOutcome.ACKED, whole_block=in_blocks and len(part) == 100)
        finished.drain()
        known = [token for token in tokens[:end] if finished.outcome(token)]
        assert set(tokens[max(0, end - 100_000) : end]) <= set(known)
        assert len(known) == finished._count <= lease_table.FINISHED_MAX
    for at in range(1 << 40, (1 << 40) + 400_000, 10_000):
        finished.add(range(at, at + 10_000), LeaseOutcome.ACKED)
        finished.drain()
    assert not any(map(finished.outcome, tokens[:end]))
    assert not finished._blocks


@pytest.mark.parametrize("sizes", [(700, 1), (30, 5, 2_000), (1, 900, 900, 64)])
def test_the_ring_holds_no_more_finished_leases_than_memory(
    sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_table, "FINISHED_MAX", 5_000)
    monkeypatch.setattr(lease_table, "FINISHED_SLOTS", 64)
    monkeypatch.setattr(lease_table, "SLOT_LEASES_MAX", 400)
    monkeypatch.setattr(lease_table, "FORGOTTEN_AT_ONCE", 300)
    finished = lease_table.FinishedLeases()
    rows: dict[int, FinishedLeasesRecord] = {}
    tokens = iter(range(1, 1_000_000))
    for commit in range(70):
        made = list(islice(tokens, sizes[commit % len(sizes)]))
        for at in range(0, len(made), 100):
            finished.add(made[at : at + 100], LeaseOutcome.ACKED)
        write(rows, finished)
        stored = {token for record in rows.values() for token in record.leases}
        assert len(stored) <= 5_000 + max(sizes)  # Rows go when their commit is forgotten.
        known = {token for token in range(1, made[-1] + 1) if finished.outcome(token)}
        assert known <= stored
        if commit % 7 == 0:
            finished = lease_table.FinishedLeases(rows.values())


async def test_what_is_visible_before_the_last_look_waits_for_nothing_but_a_claim() -> None:
    # Given a lease that ends, while what fell due later is looked at already
    rig = Rig()
    rig.create()
    await rig.route([1])
    (lease,) = await rig.claim(1)
    await rig.route([2], visible_at_ms=rig.now_ms + 500)
    arrived_ms = rig.now_ms
    rig.now_ms += 1000
    rig.queue().waiting.drop_expired(rig.now_ms, 100)

    # When its command says that it is visible from before then on
    await rig.run(lambda: rig.shard.leases.nack([Nack(lease.token, "no", 100)], arrived_ms))

    assert (rig.queue().waiting.ready_count, rig.queue().waiting.timed_count) == (1, 1)


async def test_queues_take_turns_when_the_leases_of_one_end_by_the_thousand() -> None:
    # Given many leases of one queue, and behind them few of others, that have all ended
    rig = Rig()
    for queue_id in ("many", "few", "one"):
        rig.create(queue_id)
    await rig.route(range(1, 4001), queue_id="many")
    await rig.route(range(5001, 5101), queue_id="few")
    await rig.route([6001], queue_id="one")
    for queue_id in ("many", "few", "one"):
        while await rig.claim(1000, lease_ms=1000, queue_id=queue_id):
            pass
    rig.now_ms += 2000

    # when they are ended in turns of three hundred
    turns = []
    while due := rig.shard.leases.deadlines.ended(rig.now_ms, 300):
        turns.append(Counter(lease.queue.queue_id for lease in due))
        await rig.run(partial(rig.shard.leases.expire, due, rig.now_ms))

    # then the first turn has a share of each, and then what is left of the first queue
    assert turns[0]["one"] == 1
    assert sum(turn["few"] for turn in turns[:2]) == 100
    assert sum(turns, Counter()) == {"many": 4000, "few": 100, "one": 1}
    assert rig.shard.leases.deadlines.next_ms() is None


async def test_a_lease_that_was_extended_or_acked_after_it_was_chosen_does_not_end() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    leases = {lease.message_id: lease for lease in await rig.claim(3, lease_ms=1000)}
    rig.now_ms += 2000
    due = rig.shard.leases.deadlines.ended(rig.now_ms, 10)
    assert len(due) == 3

    rig.shard.leases.extend([leases[1].token], 60_000, rig.now_ms)
    rig.shard.leases.ack([leases[2].token], rig.now_ms)
    await rig.run(partial(rig.shard.leases.expire, due, rig.now_ms))

    assert rig.shard.leases.running(leases[1].token) is leases[1]
    assert rig.queue().done.count == 1
    assert await rig.ids(10) == [3]


async def test_a_token_says_nothing_of_those_of_other_claims() -> None:
    # Given claims of one message and of many, by turns
    rig = Rig()
    rig.create()
    await rig.route(range(1, 6001))
    blocks: list[int] = []
    for count in [1, 300] * 20:
        tokens = [lease.token for lease in await rig.claim(count)]
        blocks += dict.fromkeys(token >> PLACE_BITS for token in tokens)

    # then no block is near another one, above or below it
    assert len(blocks) == 20 + 40
    ordered = sorted(blocks)
    assert min(later - sooner for sooner, later in pairwise(ordered)) > 1 << 20
    assert blocks != ordered


async def test_a_bucket_that_waits_for_its_turn_and_gets_shorter_leases_comes_once() -> None:
    rig = Rig()
    rig.create()
    await rig.route(range(1, 11))
    first = await rig.claim(5, lease_ms=2000)
    rig.now_ms += 3000
    assert len(rig.shard.leases.deadlines.ended(rig.now_ms, 2)) == 2

    shorter = await rig.claim(5, lease_ms=-2000)

    due = rig.shard.leases.deadlines.ended(rig.now_ms, 100)
    assert sorted(one.token for one in due) == sorted(one.token for one in (*first, *shorter))
    await rig.run(partial(rig.shard.leases.expire, due, rig.now_ms))
    assert rig.shard.leases.deadlines.next_ms() is None


async def test_leases_that_wait_for_their_turn_end_though_those_behind_them_were_acked() -> None:
    # Given leases in three buckets that have all ended, of which one had its turn
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    leases = []
    for _ in range(3):
        leases += await rig.claim(1, lease_ms=1000)
        rig.commit()
    rig.now_ms += 1000
    assert len(rig.shard.leases.deadlines.ended(rig.now_ms, 1)) == 1

    # When the first and the last are acked
    rig.shard.leases.ack([leases[0].token, leases[2].token], rig.now_ms)

    # Then the one between them ends
    assert rig.shard.leases.deadlines.next_ms() == 0
    assert rig.shard.leases.deadlines.ended(rig.now_ms, 10) == [leases[1]]


async def test_leases_end_in_time_also_after_most_of_the_others_were_given_back() -> None:
    # Given so many leases that ended before their deadlines that these are dropped
    rig = Rig()
    rig.create()
    ids = range(1, 1101)
    await rig.route(ids)
    running: dict[int, int] = {}
    for message_id in ids:
        if message_id == 1000:
            returned = [token for number, token in enumerate(running) if number % 3]
            rig.shard.leases.ack(returned, rig.now_ms)
            running = {t: at_ms for t, at_ms in running.items() if t not in set(returned)}
        lease_ms = 60_000 + 7919 * message_id % 10_007
        [lease] = await rig.claim(1, lease_ms=lease_ms)
        running[lease.token] = rig.now_ms + lease_ms
        rig.commit()

    # Then each of the others ends at its own
    while running:
        rig.now_ms = min(running.values())
        next_ms = rig.shard.leases.deadlines.next_ms()
        assert next_ms is not None
        assert next_ms <= rig.now_ms
        ended = [token for token, at_ms in running.items() if at_ms == rig.now_ms]
        assert len(await rig.expire()) == len(ended)
        for token in ended:
            del running[token]
    assert rig.shard.leases.deadlines.next_ms() is None
