"""Calls of the services of entries that several tests make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from slatemq.v1 import entry_pb2, queue_pb2
from tests.entry_stubs import EntryStubs
from tests.integration.broker.rig import Rig

AVAILABLE = queue_pb2.ENTRY_STATE_AVAILABLE
DELAYED = queue_pb2.ENTRY_STATE_DELAYED
IN_FLIGHT = queue_pb2.ENTRY_STATE_IN_FLIGHT
DONE = queue_pb2.ENTRY_STATE_DONE
FAILED = queue_pb2.ENTRY_STATE_FAILED

MINUTE = 60_000

RUNNING = entry_pb2.Redrive.STATE_RUNNING


def entries(rig: Rig) -> Any:
    return EntryStubs(rig.channel)


async def listed(
    rig: Rig,
    state: queue_pb2.EntryState.ValueType,
    queue_id: str = "q",
    page_size: int = 1000,
    **rest: Any,
) -> list[entry_pb2.Entry]:
    """All entries of a state, page by page."""
    found: list[entry_pb2.Entry] = []
    token = ""
    while True:
        request = entry_pb2.ListEntriesRequest(
            queue_id=queue_id, state=state, page_size=page_size, page_token=token, **rest
        )
        answer = await entries(rig).ListEntries(request)
        assert len(answer.entries) <= page_size
        found += answer.entries
        token = answer.next_page_token
        if not token:
            return found


async def ids(rig: Rig, state: queue_pb2.EntryState.ValueType, **rest: Any) -> list[int]:
    return [one.message_id for one in await listed(rig, state, **rest)]


async def get(
    rig: Rig,
    handle: str,
    view: entry_pb2.EntryView.ValueType = entry_pb2.ENTRY_VIEW_BASIC,
) -> entry_pb2.Entry:
    request = entry_pb2.GetEntryRequest(handle=handle, view=view)
    return (await entries(rig).GetEntry(request)).entry  # type: ignore[no-any-return]


async def cancel(rig: Rig, handle: str) -> None:
    await entries(rig).CancelEntry(entry_pb2.CancelEntryRequest(handle=handle))


async def reschedule(rig: Rig, handle: str, visible_at_ms: int) -> entry_pb2.Entry:
    request = entry_pb2.RescheduleEntryRequest(handle=handle, visible_at_ms=visible_at_ms)
    return (await entries(rig).RescheduleEntry(request)).entry  # type: ignore[no-any-return]


async def one_of_each(rig: Rig, queue_id: str = "q") -> dict[int, str]:
    """A queue with message 1 available, 2 delayed, 3 in flight, 4 done, 5 failed; their handles."""
    await rig.create(queue_id, max_attempts=1)
    await rig.assign([3, 4, 5], queue_id, priorities=[9, 10, 11])
    claimed = await rig.claim(queue_id, max_messages=3, consumer_id="worker")
    tokens = {one.message.message_id: one.lease_token for one in claimed}
    await rig.ack(tokens[4])
    await rig.nack(tokens[5], reason="broken")
    await rig.assign([1], queue_id)
    await rig.assign([2], queue_id, visible_at_ms=[rig.clock.now_ms() + MINUTE])
    states = (AVAILABLE, DELAYED, IN_FLIGHT, DONE, FAILED)
    return {
        entry.message_id: entry.handle
        for state in states
        for entry in await listed(rig, state, queue_id=queue_id)
    }


async def find(rig: Rig, message_id: int, *queue_ids: str) -> list[entry_pb2.FindMessageResponse]:
    request = entry_pb2.FindMessageRequest(message_id=message_id, queue_ids=queue_ids)
    answers = []
    async for answer in entries(rig).FindMessage(request):
        copied = entry_pb2.FindMessageResponse()
        copied.CopyFrom(answer)
        answers.append(copied)
    return answers


async def fail(rig: Rig, numbers: Sequence[int], reason: str = "no", queue_id: str = "q") -> None:
    """Makes dead letters of messages that are not in the queue yet; `max_attempts` must be 1."""
    await rig.assign(numbers, queue_id)
    await fail_again(rig, len(numbers), reason, queue_id)


async def fail_again(rig: Rig, count: int, reason: str = "no", queue_id: str = "q") -> None:
    """Claims this many messages, and fails them."""
    left = count
    while left:
        claimed = await rig.claim(queue_id, max_messages=min(left, 1000), consumer_id="c")
        assert claimed
        await rig.nack(*(one.lease_token for one in claimed), reason=reason)
        left -= len(claimed)


async def start(rig: Rig, queue_id: str = "q", **rest: Any) -> entry_pb2.Redrive:
    request = entry_pb2.StartRedriveRequest(queue_id=queue_id, **rest)
    return (await entries(rig).StartRedrive(request)).redrive  # type: ignore[no-any-return]


async def redrive(rig: Rig, redrive_id: str) -> entry_pb2.Redrive:
    request = entry_pb2.GetRedriveRequest(redrive_id=redrive_id)
    return (await entries(rig).GetRedrive(request)).redrive  # type: ignore[no-any-return]


async def until(
    rig: Rig, redrive_id: str, condition: Callable[[entry_pb2.Redrive], bool]
) -> entry_pb2.Redrive:
    """The redrive when it is as wanted."""
    async with asyncio.timeout(60):
        while not condition(result := await redrive(rig, redrive_id)):
            await asyncio.sleep(0.005)
    return result


async def ended(rig: Rig, redrive_id: str) -> entry_pb2.Redrive:
    """The redrive when it does not run any more."""
    return await until(rig, redrive_id, lambda one: one.state != RUNNING)


async def redriven(rig: Rig, queue_id: str = "q", **rest: Any) -> entry_pb2.Redrive:
    """Redrives, to the end."""
    return await ended(rig, (await start(rig, queue_id, **rest)).redrive_id)
