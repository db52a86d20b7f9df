"""The outbox of a real broker: sent in order from what is durable, once, whatever fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from weakref import WeakSet

import grpc
import grpc.aio
import pytest

from libs.storage.database.slate import Database
from libs.storage.errors import StoreFailed
from services.broker.outbox import sender as outbox_sender
from services.broker.outbox.targets import IngestPushes
from tests.forms import shortly
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.outbox.test_executing import complete, execute, push, refused
from tests.integration.broker.rig import Disk, Rig, memory_root, running
from tests.integration.ingest.server import serving
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock


def waiting(rig: Rig) -> int:
    return rig.owner.shard.outbox.waiting_count(0)


async def test_nothing_is_sent_before_the_disk_has_it() -> None:
    disk, pushes = Disk(), Pushes()
    async with running(disk=disk, pushes=pushes) as rig:
        await rig.create()
        disk.free.clear()
        call = asyncio.create_task(execute(rig, push()))
        # The row is in the store by now, but not synced: a power failure could take it back.
        await eventually(lambda: waiting(rig) == 1 and rig.owner.commits.overdue_ms() > 100)
        assert pushes.calls == []
        disk.free.set()

        await call
        await eventually(lambda: pushes.payloads() == [b"new"])


async def test_lost_answers_and_restarts_send_again_and_store_once_in_order() -> None:
    disk, clock, pushes = Disk(), ManualClock(), Pushes()
    root = memory_root(disk)
    wanted = []
    for round_number in range(4):
        async with running(root, clock, disk=disk, pushes=pushes) as rig:
            if not round_number:
                await rig.create()
            pushes.lose_answers = 10_000 if round_number % 2 == 0 else 0
            for n in range(5):
                wanted.append(b"%d-%d" % (round_number, n))
                await execute(rig, push(payload=wanted[-1]))
            await eventually(lambda: pushes.payloads() == wanted)
            assert waiting(rig) or round_number % 2
    assert pushes.numbers == {(0, 0): 20}
    assert sum(pushes.calls) > 20, "nothing was sent again"


async def test_an_ingest_that_is_down_for_hours_costs_no_memory_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_sender, "BATCH_ROWS", 50)
    monkeypatch.setattr(outbox_sender, "BATCH_BYTES", 20_000)
    disk, clock, pushes = Disk(), ManualClock(), Pushes()
    root = memory_root(disk)
    pushes.down = True
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await rig.create()
        for n in range(10):
            await execute(rig, *(push(payload=b"%d %d" % (n, i)) for i in range(100)))
        for n in range(20):
            await execute(rig, push(payload=b"%d" % n * 5000))
        assert waiting(rig) == 1020
    pushes.down = False
    clock.advance(5 * 3_600_000)
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await eventually(lambda: waiting(rig) == 0)

        expected = [b"%d %d" % (n, i) for n in range(10) for i in range(100)]
        assert pushes.payloads()[:1000] == expected
        assert len(pushes.payloads()) == 1020
        assert max(pushes.calls) == 50
        assert pushes.calls[-3:] <= [4, 4, 4], "too many large rows at once"
        assert rig.owner.shard.outbox.counter(0).waiting_bytes == 0
        assert rig.owner.shard.outbox.oldest_ms(0) is None


async def test_pushes_over_which_an_ingest_ended_wait_long_and_go_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushes = Pushes()
    waits: list[str] = []

    def wait_s() -> float:
        waits.append("long")
        pushes.unstorable = len(waits) < 3
        return 0.0

    # Given an ingest that ends three times over what is pushed to it
    monkeypatch.setattr(outbox_sender, "unstorable_wait_s", wait_s)
    pushes.unstorable = True
    async with running(pushes=pushes) as rig:
        await rig.create()
        await execute(rig, push(payload=b"first"), push(payload=b"second"))

        # Then each try waits as long as what may end it again, and the first push goes alone
        await eventually(lambda: pushes.payloads() == [b"first", b"second"])
        assert waits == ["long"] * 3
        assert pushes.calls == [1, 1]


EIGHT: Final = [b"%d" % number for number in range(1, 9)]


@asynccontextmanager
async def ending_over(pushes: Pushes, payload: bytes) -> AsyncIterator[Rig]:
    """A broker that has eight pushes for an ingest, which ends over this one."""
    pushes.ends_over = payload
    async with running(pushes=pushes) as rig:
        await rig.create()
        await execute(rig, *(push(payload=one) for one in EIGHT))
        yield rig


async def test_pushes_share_calls_again_after_an_ingest_ended_over_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushes = Pushes()

    def wait_s() -> float:
        pushes.ends_over = None
        return 0.0

    # Given eight pushes in one call, during which the ingest ends over what another one sent
    monkeypatch.setattr(outbox_sender, "unstorable_wait_s", wait_s)
    async with ending_over(pushes, EIGHT[0]):
        # Then only the first goes alone
        await eventually(lambda: pushes.payloads() == EIGHT)
        assert pushes.calls == [8, 1, 2, 4, 1]


async def test_pushes_go_one_at_a_time_until_past_what_an_ingest_ended_over_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushes, ends = Pushes(), 3
    waits: list[bool] = []

    def wait_s() -> float:
        waits.append(True)
        if len(waits) == ends:
            pushes.ends_over = None
        return 0.0

    # Given eight pushes in one call, of which the sixth ends the ingest
    monkeypatch.setattr(outbox_sender, "unstorable_wait_s", wait_s)
    async with ending_over(pushes, EIGHT[5]) as rig:
        # Then none shares a call with it once it has ended the ingest a second time
        await eventually(lambda: pushes.payloads() == EIGHT)
        assert pushes.calls == [8, 1, 2, 4] + [1] * (5 + ends - 2)

        # And later ones share their calls again
        pushes.slow.clear()
        await execute(rig, push(), push(), push(), push())
        pushes.slow.set()
        await eventually(lambda: len(pushes.payloads()) == 12)
        assert max(pushes.calls[-3:]) > 1


async def test_a_full_outbox_refuses_pushes_until_ingest_is_back() -> None:
    pushes = Pushes()
    pushes.down = True
    async with running(pushes=pushes, settings={"outbox_rows_max": 3}) as rig:
        await rig.create()
        await rig.assign([1])
        [message] = await rig.claim()
        await execute(rig, push(), push())

        error = await refused(rig, complete(message.lease_token), push(), push())

        assert error.reason == "OUTBOX_FULL"
        assert await rig.counts() == {"in_flight": 1}
        pushes.down = False
        await eventually(lambda: waiting(rig) == 0)
        await execute(rig, complete(message.lease_token), push(), push())
        await eventually(lambda: len(pushes.payloads()) == 4)


# --- A store that fails at every step, before and after it has the bytes -----

LINKS = 3
FLUSHES = 9
"""Commits of a chain of three links: some more than it takes."""

UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Fault:
    """One flush of the database fails; what it was to make durable is lost, or is not.

    The first flush of each process does not count: it proves that the shard is its own, before it
    serves.
    """

    def __init__(self, at: int, kept: bool) -> None:
        self.left = at
        self.kept = kept
        self.struck = False
        self._flush = Database.flush
        self._opened: WeakSet[Database] = WeakSet()

    async def flush(self, database: Database) -> None:
        if database not in self._opened:
            self._opened.add(database)
            return await self._flush(database)
        self.left -= 1
        if self.left == 0:
            self.struck = True
            if self.kept:
                await self._flush(database)
            raise database._fail(StoreFailed("the disk broke"))
        return await self._flush(database)


async def work(rig: Rig, tokens: list[str], done: list[str]) -> None:
    """Completes each message and pushes the next in one go; raises when the broker goes away."""
    for token in tokens[len(done) :]:
        payload = b"%d" % len(done)
        await execute(rig, complete(token), push(payload=payload), request_id=token)
        done.append(token)


async def go_on(rig: Rig, tokens: list[str], done: list[str], fault: Fault) -> None:
    """Works until all is done and sent, or something fails."""
    before = fault.struck
    try:
        await work(rig, tokens, done)
    except grpc.aio.AioRpcError as error:
        if error.code() not in UNANSWERED:
            raise
    else:
        await eventually(lambda: waiting(rig) == 0 or fault.struck is not before)


@pytest.mark.parametrize("lose_answers", [0, 2])
@pytest.mark.parametrize("kept", [False, True], ids=["lost", "kept"])
@pytest.mark.parametrize("at", shortly(range(1, FLUSHES + 1), 2, 5))
async def test_complete_and_push_happen_once_whichever_commit_fails(
    monkeypatch: pytest.MonkeyPatch, at: int, kept: bool, lose_answers: int
) -> None:
    # Given messages in flight, and a fault that will strike
    disk, clock, pushes = Disk(), ManualClock(), Pushes()
    root = memory_root(disk)
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await rig.create()
        await rig.assign(range(1, LINKS + 1))
        claimed = await rig.claim(max_messages=LINKS, lease_ms=43_200_000)
        tokens = [message.lease_token for message in claimed]
    fault = Fault(at, kept)
    monkeypatch.setattr(Database, "flush", lambda database: fault.flush(database))

    # When a worker goes on after each failure with what was not answered
    done: list[str] = []
    pushes.lose_answers = lose_answers
    while len(done) < LINKS:
        async with running(root, clock, disk=disk, pushes=pushes) as rig:
            await go_on(rig, tokens, done, fault)

    # Then each message was completed once, and each push came once, in order
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await eventually(lambda: waiting(rig) == 0)
        assert await rig.counts() == {"done": LINKS}
    assert pushes.payloads() == [b"%d" % n for n in range(LINKS)]


@pytest.mark.parametrize("kept", [False, True], ids=["lost", "kept"])
@pytest.mark.parametrize("at", shortly(range(1, 2 * FLUSHES), 2, 5, 8))
async def test_complete_and_push_happen_once_beside_a_real_ingest_whichever_commit_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: int, kept: bool
) -> None:
    # Given a broker and an ingest, and a fault that will strike one of them
    clock, root = ManualClock(), tmp_path.as_uri()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        await rig.assign(range(1, LINKS + 1))
        claimed = await rig.claim(max_messages=LINKS, lease_ms=43_200_000)
        tokens = [message.lease_token for message in claimed]
    fault = Fault(at, kept)
    monkeypatch.setattr(Database, "flush", lambda database: fault.flush(database))

    # When both are started again after each failure
    done: list[str] = []
    while len(done) < LINKS:
        async with serving(root), running(tmp_path, clock, pushes=IngestPushes) as rig:
            await go_on(rig, tokens, done, fault)

    # Then the log has each push once, in order, for its queue
    async with serving(root) as ingest, running(tmp_path, clock, pushes=IngestPushes) as rig:
        await eventually(lambda: waiting(rig) == 0)
        assert await rig.counts() == {"done": LINKS}
        log = await ingest.log()
        payloads = await ingest.payloads(*(entry.message_id for entry in log))
    assert payloads == [b"%d" % n for n in range(LINKS)]
    assert {entry.direct_queue_id for entry in log} == {"q"}


async def test_what_waits_for_an_ingest_that_was_removed_goes_to_another_one_once_in_order() -> (
    None
):
    disk, clock, pushes = Disk(), ManualClock(), Pushes(ingest_shard=1)
    root = memory_root(disk)
    wanted = [b"%d" % n for n in range(5)]
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await rig.create()
        await execute(rig, push(payload=b"before"))
        await eventually(lambda: pushes.payloads(1) == [b"before"])
        # Given pushes for an ingest that refuses them, since it is about to go
        pushes.down = True
        for payload in wanted:
            await execute(rig, push(payload=payload))
        assert rig.owner.shard.outbox.waiting_count(1) == 5

    pushes.removed, pushes.down, pushes.ingest_shard = {1}, False, 0
    pushes.lose_answers = 2
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await eventually(lambda: pushes.payloads(0) == wanted)
        await eventually(lambda: not rig.owner.shard.outbox.waiting_count(0))
        assert not rig.owner.shard.outbox.waiting_count(1)
        await execute(rig, push(payload=b"after"))
        await eventually(lambda: pushes.payloads(0) == [*wanted, b"after"])
    assert pushes.payloads(1) == [b"before"]


async def test_an_outbox_is_halted_no_more_once_its_ingest_was_removed() -> None:
    disk, clock, pushes = Disk(), ManualClock(), Pushes(ingest_shard=1)
    async with running(memory_root(disk), clock, disk=disk, pushes=pushes) as rig:
        outbox = rig.owner.shard.outbox
        await rig.create()
        # Given an ingest with pushes that this broker never made
        pushes.numbers[0, 1] = 9
        await execute(rig, push(payload=b"x"))
        await eventually(lambda: 1 in outbox.halts)

        # When that ingest is given up
        pushes.removed, pushes.ingest_shard = {1}, 0

        await eventually(lambda: pushes.payloads(0) == [b"x"])
        await eventually(lambda: not outbox.halts)
