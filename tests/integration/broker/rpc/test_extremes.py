"""Each command with each field at its extremes: refused, or stored so that a restart reads it.

What a broker takes and cannot encode would end it, and its successor, when the caller tries again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import pytest

from libs.storage.database.clocks import LAST_MS
from services.broker.entries import editor
from slatemq.v1 import entry_pb2, queue_pb2
from tests.forms import proof
from tests.integration.broker.entry_calls import entries
from tests.integration.broker.rig import Disk, Rig, memory_root, running
from tests.integration.broker.rpc.extreme_requests import REQUESTS, prepare
from tests.integration.extreme_fields import caller, count_taken
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock
from tests.services import service_of

READING: Final = {
    "GetQueue",
    "ListQueues",
    "GetShardLoad",
    "LocateQueue",
    "WatchQueues",
    "GetRoutingState",
    "ListEntries",
    "GetEntry",
    "FindMessage",
    "WatchDelayed",
    "GetRedrive",
    "ListRedrives",
    "GetOutbox",
    "GetRefusedPush",
    "CheckArrival",
}
"""They change nothing."""

STREAMS: Final = {"Consume"}
"""Its claims are those of Claim."""

SERVICES: Final = (
    "Queue",
    "Consumer",
    "Assignment",
    "Entry",
    "Delayed",
    "DeadLetter",
    "Archived",
    "Removal",
    "Outbox",
    "Arrival",
)


def methods() -> dict[str, Any]:
    """All commands of a broker, by name."""
    found = [method for name in SERVICES for method in service_of(f"{name}Service").methods]
    return {one.name: one for one in found if one.name not in READING | STREAMS}


async def state(rig: Rig) -> list[Any]:
    """What a broker shows of queues and redrives, once no redrive runs."""
    await eventually(lambda: not rig.owner.shard.redrives.running())
    request = queue_pb2.ListQueuesRequest(page_size=1000)
    queues = list((await rig.queues.ListQueues(request)).queues)
    for queue in queues:
        queue.counts.oldest_claimable_age_ms = 0
        queue.ClearField("totals")  # since the start
    redrives = await entries(rig).ListRedrives(entry_pb2.ListRedrivesRequest(page_size=1000))
    return [queues, redrives]


NOTHING_THERE: Final = {
    "CancelRedrive",
    "ResumeRedrive",
    "RetryRefusedPush",
    "DiscardRefusedPush",
    "ResumeOutbox",
}
"""They have a name alone, of something that there is not."""

NOW_MS: Final = ManualClock().now_ms()


def test_each_command_has_its_extremes_tried() -> None:
    assert set(REQUESTS) == set(methods())


@pytest.mark.repeated
@pytest.mark.parametrize("now_ms", [NOW_MS, proof(LAST_MS)])
@pytest.mark.parametrize("name", sorted(REQUESTS))
async def test_what_is_taken_is_stored_and_read_again(
    name: str, now_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(editor, "LOOKS", 1)  # most extreme IDs are never assigned
    disk, clock = Disk(), ManualClock(now_ms)
    root = memory_root(disk)
    async with running(root, clock, disk=disk) as rig:
        await prepare(rig)
        call = caller(rig.channel, methods()[name])
        taken = await count_taken(call, partial(REQUESTS[name], rig))
        before = await state(rig)
    assert taken or name in NOTHING_THERE
    assert rig.exit is not None
    assert rig.exit.code == 0
    async with running(root, clock, disk=disk) as rig:
        assert await state(rig) == before
