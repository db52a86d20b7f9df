"""A request of each command of a broker, taken as it is: for tests that change its fields."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from services.broker.moves.rows import header_of, pages_of
from slatemq.v1 import (
    archived_pb2,
    assignment_pb2,
    consumer_pb2,
    entry_pb2,
    move_pb2,
    outbox_pb2,
    queue_pb2,
    removal_pb2,
)
from tests.integration.broker.dead_letters.removal_calls import (
    archive,
    archived_rows,
    failed_rows,
    revision,
)
from tests.integration.broker.entry_calls import DELAYED, FAILED, fail, listed
from tests.integration.broker.rig import Rig

Make = Callable[[Rig], Awaitable[Any]]


async def prepare(rig: Rig) -> None:
    """The queues that the requests are about."""
    await rig.create("q", max_attempts=65_535, max_in_flight=1_000_000)
    await rig.create("settings")
    await rig.create("slow")
    await rig.create("brittle", max_attempts=1)


async def leased(rig: Rig) -> str:
    """The token of a message that was never claimed before."""
    await assigned(rig)
    [message] = await rig.claim(max_messages=1)
    return message.lease_token


async def assigned(rig: Rig) -> int:
    number = 1 + next(iter(rig.owner.shard.cursors.values()), 0)
    await rig.assign([number])
    return number


def routed(rig: Rig, **columns: Any) -> assignment_pb2.LogRange:
    """A range at the cursor of log 0."""
    cursor = rig.owner.shard.cursors.get(0, 0)
    matches = assignment_pb2.QueueAssignment(queue_id="q", message_ids=[cursor + 1], **columns)
    return assignment_pb2.LogRange(
        previous_sequence=cursor,
        last_sequence=cursor + 1,
        assignments=[matches],
        config_revision=rig.owner.shard.revision,
    )


async def create(rig: Rig) -> Any:
    queue = queue_pb2.Queue(queue_id=f"made-{rig.owner.shard.revision}")
    return queue_pb2.CreateQueueRequest(queue=queue)


async def update(rig: Rig) -> Any:
    request = queue_pb2.UpdateQueueRequest(queue=queue_pb2.Queue(queue_id="settings"))
    settings = {field.name for field in queue_pb2.Queue.DESCRIPTOR.fields}
    request.update_mask.paths.extend(sorted(settings & set(CHANGEABLE)))
    return request


CHANGEABLE: Final = (
    *("filter", "priority", "default_delay_ms", "backoff", "max_attempts", "lease_ms"),
    *("max_lease_ms", "done_retention_s", "max_in_flight", "fallback_priority"),
    *("max_total_lease_ms", "failed_retention_s"),
)


async def nack(rig: Rig) -> Any:
    item = consumer_pb2.NackItem(lease_token=await leased(rig), reason="no")
    return consumer_pb2.NackRequest(items=[item])


async def executed(rig: Rig) -> Any:
    """All six commands."""
    commands = [
        consumer_pb2.Command(
            push=consumer_pb2.PushCommand(queue_id="q", payload=b"x", headers={"a": "b"})
        )
    ]
    for name in ("complete", "fail", "release", "extend", "transfer"):
        command = consumer_pb2.Command()
        getattr(command, name).lease_token = await leased(rig)
        commands.append(command)
    commands[-1].transfer.target_queue_id = "settings"
    return consumer_pb2.ExecuteRequest(commands=commands)


async def backfill(rig: Rig) -> Any:
    """A piece of what came while the queue was in quarantine."""
    shard = rig.owner.shard
    request = assignment_pb2.QuarantineQueueRequest(
        queue_id="slow", queue_revision=shard.revision, reason="slow"
    )
    await rig.assignments.QuarantineQueue(request)
    before = shard.cursors.get(0, 0)
    for _ in range(2):
        await rig.assignments.Assign(assignment_pb2.AssignRequest(ranges=[routed(rig)]))
    await rig.queues.LiftQuarantine(queue_pb2.LiftQuarantineRequest(queue_id="slow"))
    [part] = [one for one in shard.replays.of("slow") if one.cursor < one.end][:1]
    assert part.cursor <= before
    matches = assignment_pb2.QueueAssignment(queue_id="slow", message_ids=[part.cursor + 1])
    piece = assignment_pb2.LogRange(
        previous_sequence=part.cursor, last_sequence=part.end, assignments=[matches]
    )
    return assignment_pb2.BackfillRequest(
        queue_id="slow", queue_revision=shard.revision, range=piece
    )


async def dead_letter(rig: Rig) -> entry_pb2.Entry:
    number = 1 + rig.owner.shard.cursors.get(0, 0)
    await fail(rig, [number], queue_id="brittle")
    return (await listed(rig, FAILED, "brittle"))[-1]


async def delayed(rig: Rig) -> str:
    number = 1 + rig.owner.shard.cursors.get(0, 0)
    await rig.assign([number], visible_at_ms=[rig.clock.now_ms() + 1000])
    return (await listed(rig, DELAYED))[-1].handle


async def settled(rig: Rig) -> Any:
    letter = await dead_letter(rig)
    replace = entry_pb2.ReplaceDeadLetter(payload=b"x", headers={"a": "b"})
    one = entry_pb2.DeadLetterSettlement(handle=letter.handle, replace=replace, note="n")
    return entry_pb2.SettleDeadLettersRequest(settlements=[one])


async def redriven(rig: Rig) -> Any:
    """A redrive of nothing, which ends at once."""
    return entry_pb2.StartRedriveRequest(queue_id="q", message_ids=[1])


async def removed(rig: Rig) -> Any:
    rows = failed_rows([await dead_letter(rig)])
    return removal_pb2.RemoveEntriesRequest(
        queue_id="brittle",
        created_revision=revision(rig, "brittle"),
        archive=removal_pb2.ArchiveRemoval(rows=rows, run="run"),
    )


async def _archived(rig: Rig) -> list[Any]:
    fails = consumer_pb2.Command()
    fails.fail.lease_token = await leased(rig)
    await rig.consumers.Execute(consumer_pb2.ExecuteRequest(commands=[fails]))
    await archive(rig, failed_rows(await listed(rig, FAILED)))
    return (await archived_rows(rig))[-1:]


async def come_back(rig: Rig) -> Any:
    return archived_pb2.RedriveArchivedRequest(
        queue_id="q", created_revision=revision(rig), rows=await _archived(rig)
    )


async def dropped(rig: Rig) -> Any:
    (row,) = await _archived(rig)
    place = {name: getattr(row, name) for name in ("message_id", "failed_at_ms", "bucket_order")}
    return archived_pb2.DropArchivedRequest(queue_id="q", rows=[removal_pb2.FailedRow(**place)])


async def arriving(rig: Rig) -> Any:
    """The header and a row of a queue that comes from another shard."""
    number = rig.owner.shard.revision
    made = await rig.create(f"made-{number}")
    await assigned(rig)
    await rig.assign([number], made.queue_id)
    await rig.owner.durable()
    database = rig.owner._database
    header = await header_of(database, made.queue_id)
    rows = [row async for page in pages_of(database, made.queue_id, header) for row in page]
    await rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id=made.queue_id))
    async with asyncio.timeout(60):
        while not rig.broker.sweeper.is_done_with(made.queue_id):
            await asyncio.sleep(0.001)
    names = rig.broker.arrivals._names
    while not await names.claim(made.queue_id, (3,), claim := await names.get(made.queue_id)):
        pass  # It was freed just then.
    return move_pb2.ReceiveRowsRequest(
        queue_id=made.queue_id,
        move_number=claim.number + 1,
        from_broker_shard=3,
        header=header,
        rows=rows,
    )


def simple(make: Callable[..., Any], **needs: Callable[[Rig], Awaitable[Any]]) -> Make:
    """A request whose fields are found out by these calls."""

    async def request(rig: Rig) -> Any:
        return make(**{name: await need(rig) for name, need in needs.items()})

    return request


async def _q(rig: Rig) -> str:
    return "q"


async def _another(rig: Rig) -> str:
    queue = await rig.create(f"made-{rig.owner.shard.revision}")
    return queue.queue_id


async def _tokens(rig: Rig) -> list[str]:
    return [await leased(rig)]


async def _waiting(rig: Rig) -> list[Any]:
    await assigned(rig)
    return [queue_pb2.ENTRY_STATE_IN_FLIGHT, queue_pb2.ENTRY_STATE_DONE]


async def _ranges(rig: Rig) -> list[Any]:
    later = rig.clock.now_ms() + 1000
    return [routed(rig, priorities=[3], retention_deadlines_ms=[later], visible_at_ms=[later])]


async def _revision(rig: Rig) -> int:
    await rig.queues.LiftQuarantine(queue_pb2.LiftQuarantineRequest(queue_id="q"))
    return rig.owner.shard.revision


async def _reason(rig: Rig) -> str:
    return "slow"


async def _one(rig: Rig) -> int:
    return 1


async def _content(rig: Rig) -> bytes:
    return b"new"


REQUESTS: Final[dict[str, Make]] = {
    "CreateQueue": create,
    "ReceiveRows": arriving,
    "Arrive": simple(move_pb2.ArriveRequest, queue_id=_q, move_number=_one),
    "UpdateQueue": update,
    "DeleteQueue": simple(queue_pb2.DeleteQueueRequest, queue_id=_another),
    "PauseQueue": simple(queue_pb2.PauseQueueRequest, queue_id=_another),
    "ResumeQueue": simple(queue_pb2.ResumeQueueRequest, queue_id=_another),
    "LiftQuarantine": simple(queue_pb2.LiftQuarantineRequest, queue_id=_q),
    "PurgeQueue": simple(queue_pb2.PurgeQueueRequest, queue_id=_q, states=_waiting),
    "Claim": simple(consumer_pb2.ClaimRequest, queue_id=_q, max_messages=_one, lease_ms=assigned),
    "StopClaim": simple(consumer_pb2.StopClaimRequest, queue_id=_q, claim_id=_reason),
    "Ack": simple(consumer_pb2.AckRequest, lease_tokens=_tokens),
    "Nack": nack,
    "ExtendLease": simple(consumer_pb2.ExtendLeaseRequest, lease_tokens=_tokens),
    "Execute": executed,
    "Assign": simple(assignment_pb2.AssignRequest, ranges=_ranges),
    "Backfill": backfill,
    "QuarantineQueue": simple(
        assignment_pb2.QuarantineQueueRequest,
        queue_id=_q,
        queue_revision=_revision,
        reason=_reason,
    ),
    "CancelEntry": simple(entry_pb2.CancelEntryRequest, handle=delayed),
    "RescheduleEntry": simple(entry_pb2.RescheduleEntryRequest, handle=delayed, visible_at_ms=_one),
    "EditMessage": simple(entry_pb2.EditMessageRequest, handle=delayed, payload=_content),
    "ForgetMessage": simple(entry_pb2.ForgetMessageRequest, message_id=assigned),
    "StartRedrive": redriven,
    "CancelRedrive": simple(entry_pb2.CancelRedriveRequest, redrive_id=_reason),
    "ResumeRedrive": simple(entry_pb2.ResumeRedriveRequest, redrive_id=_reason),
    "SettleDeadLetters": settled,
    "RemoveEntries": removed,
    "RedriveArchived": come_back,
    "DropArchived": dropped,
    "RetryRefusedPush": simple(outbox_pb2.RetryRefusedPushRequest, push_id=_reason),
    "DiscardRefusedPush": simple(outbox_pb2.DiscardRefusedPushRequest, push_id=_reason),
    "ResumeOutbox": simple(outbox_pb2.ResumeOutboxRequest, ingest_shard=_one),
}
