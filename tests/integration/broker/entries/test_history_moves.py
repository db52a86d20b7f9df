"""What entries tell of attempts in the queues from which their messages came."""

from __future__ import annotations

from pathlib import Path

from slatemq.v1 import entry_pb2
from slatemq.v1.consumer_pb2 import Command, ExecuteRequest, TransferCommand
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    FAILED,
    fail,
    fail_again,
    find,
    get,
    listed,
    redriven,
)
from tests.integration.broker.rig import Rig, running
from tests.manual_clock import ManualClock

ATTEMPTS = entry_pb2.ENTRY_VIEW_ATTEMPTS


def outcomes(entry: entry_pb2.Entry) -> list[tuple[str, str]]:
    return [(attempt.queue_id, attempt.outcome) for attempt in entry.attempts]


async def transfer(rig: Rig, source: str, target: str) -> None:
    [message] = await rig.claim(source)
    command = TransferCommand(lease_token=message.lease_token, target_queue_id=target)
    await rig.consumers.Execute(ExecuteRequest(commands=[Command(transfer=command)]))


async def test_the_history_comes_along_through_redrives_and_transfers(tmp_path: Path) -> None:
    # Given a message that failed here and there
    clock = ManualClock()
    queues = ("q", "repaired", "last")
    async with running(tmp_path, clock) as rig:
        for queue_id in queues:
            await rig.create(queue_id, max_attempts=1)
        await fail(rig, [1, 2], "broken")
        clock.advance(5)

        # When it moves on to other queues, before and after a restart
        one = await redriven(rig, target_queue_id="repaired", message_ids=[1])
        assert one.redriven_count == 1
        [entry] = await listed(rig, AVAILABLE, "repaired", view=ATTEMPTS)
        assert (entry.attempts_count, outcomes(entry)) == (0, [("q", "nack: broken")])
        [attempt] = entry.attempts
        assert (attempt.consumer_id, attempt.claimed_at_ms) == ("c", clock.now_ms() - 5)
        await fail_again(rig, 1, "again", "repaired")
        [entry] = await listed(rig, FAILED, "repaired", view=ATTEMPTS)
        assert outcomes(entry) == [("q", "nack: broken"), ("repaired", "nack: again")]
    async with running(tmp_path, clock) as rig:
        clock.advance(5)
        await redriven(rig, "repaired")
        await transfer(rig, "repaired", "last")

        # Then each of its entries shows what was until it came there, and since
        history = [("q", "nack: broken"), ("repaired", "nack: again")]
        [entry] = await listed(rig, AVAILABLE, "last", view=ATTEMPTS)
        assert outcomes(entry) == outcomes(await get(rig, entry.handle, ATTEMPTS)) == history
        found = [one for answer in await find(rig, 1) for one in answer.entries]
        assert {one.queue_id: outcomes(one) for one in found} == {
            "q": history[:1],
            "last": history,
            "repaired": history,
        }
        # What was left behind is as it was.
        [left] = await listed(rig, FAILED, view=ATTEMPTS)
        assert (left.message_id, outcomes(left)) == (2, [("q", "nack: broken")])


async def test_what_comes_back_reveals_nothing_twice() -> None:
    async with running() as rig:
        for queue_id in ("q", "other"):
            await rig.create(queue_id, max_attempts=1)
        await fail(rig, [1])

        for source, target in (("q", "other"), ("other", "q")):
            rig.clock.advance(5)
            await redriven(rig, source, target_queue_id=target)
            await fail_again(rig, 1, source, target)

        [entry] = await listed(rig, FAILED, view=ATTEMPTS)
        assert outcomes(entry) == [("q", "nack: no"), ("other", "nack: q"), ("q", "nack: other")]
