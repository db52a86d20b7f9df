"""Who waits beside others: no one is held up by a stream that ended or an ingest that hangs."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from libs.serving.requests.doors import Visit, current_visit
from libs.storage.layout.ids import message_id, shard_of
from services.broker.delivery import late_fetches
from services.broker.delivery.message_cache import IngestMessages
from services.broker.rpc.consumer import ConsumerServicer
from slatemq.errors import PermissionDenied, Unavailable
from slatemq.v1 import assignment_pb2, consumer_pb2
from tests.integration.broker.rig import Disk, Ingest, Rig, memory_root, running
from tests.integration.waiting import eventually


async def assign(rig: Rig, queue_id: str, sequence: int, message: int) -> None:
    """Assigns a message without asking anything before, which would wait for the disk."""
    piece = assignment_pb2.LogRange(
        ingest_shard=shard_of(message),
        previous_sequence=sequence - 1,
        last_sequence=sequence,
        assignments=[assignment_pb2.QueueAssignment(queue_id=queue_id, message_ids=[message])],
        config_revision=rig.owner.durable_revision,
    )
    request = assignment_pb2.AssignRequest(ranges=[piece])
    answer = await rig.assignments.Assign(request)
    assert answer.results[0].applied


async def test_a_stream_that_ended_by_an_error_keeps_nothing_from_those_behind_it() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        # Given a stream that is first in line, and a commit that takes long
        await rig.create()
        await rig.create("other")
        queue, delivery = rig.owner.shard.queues["q"], rig.delivery
        assert delivery is not None
        credit = consumer_pb2.ConsumeCredit(messages_count=5)
        start = consumer_pb2.ConsumeStart(queue_id="q", credit=credit)
        call = rig.consumers.Consume()
        await call.write(consumer_pb2.ConsumeRequest(start=start))
        await call.read()
        await eventually(lambda: len(delivery._waiter_lines[queue].line) == 1)
        disk.free.clear()
        others = asyncio.create_task(assign(rig, "other", 1, 1))
        await eventually(lambda: rig.owner.shard.queues["other"].waiting.ready_count == 1)

        # When the stream is ended by a bad request, which its consumer hears after the commit
        waiting = asyncio.create_task(rig.claim(wait_ms=30_000))
        await eventually(lambda: len(delivery._waiter_lines[queue].line) == 2)
        bad = consumer_pb2.ConsumeCredit(messages_count=-1)
        await call.write(consumer_pb2.ConsumeRequest(credit=bad))
        await eventually(lambda: all(stream.error for stream in delivery.streams))  # type: ignore[attr-defined]
        assigning = asyncio.create_task(assign(rig, "q", 2, 2))

        # Then the claim behind it gets what comes
        await eventually(lambda: queue.leases.count == 1)
        disk.free.set()
        assert [claimed.message.message_id for claimed in await waiting] == [2]
        await asyncio.gather(others, assigning)
        call.cancel()


async def test_a_wait_that_ends_while_payloads_are_read_gives_them() -> None:
    # Given a message whose payload takes longer to read than the claim waits
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create()
        await rig.assign([1])
        ingest.read_gate.clear()

        claiming = asyncio.create_task(rig.claim(wait_ms=1))
        await eventually(lambda: bool(ingest.reads))
        await asyncio.sleep(0.05)
        ingest.read_gate.set()

        # Then it is no empty answer, which would say that nothing is there
        assert [claimed.message.message_id for claimed in await claiming] == [1]


class _HangingIngest(Ingest):
    """Shard 1 fails once, then says nothing for as long as it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = 0
        self.back = asyncio.Event()

    async def check(self, shard: int) -> None:
        if shard == 1 and not self.back.is_set():
            self.hangs += 1
            await self.back.wait()

    async def fetch(self, shard: int, ids: Sequence[int], max_bytes: int) -> IngestMessages:
        if shard == 1 and not self.back.is_set():
            self.hangs += 1
            if self.hangs == 1:
                raise Unavailable("the deadline is over")
            await self.back.wait()
        return await super().fetch(shard, ids, max_bytes)


@pytest.mark.parametrize("kind", ["fresh", "waiting"])
async def test_messages_of_other_ingests_pass_one_that_hangs(kind: str) -> None:
    # Given a message of an ingest that hangs, before all others
    ingest = _HangingIngest()
    hanging = message_id(1, 1)
    async with running(ingest=ingest) as rig:
        await rig.create()
        await assign(rig, "q", 1, hanging)
        first = asyncio.create_task(rig.claim(wait_ms=30_000))
        await eventually(lambda: ingest.hangs == 2)

        # When a message of another one comes to who waits, or waits already
        async with asyncio.timeout(60):
            if kind == "waiting":
                first.cancel()
            await rig.assign([1])
            claimed = await (first if kind == "fresh" else rig.claim())
        assert [one.message.message_id for one in claimed] == [1]

        # Then it is had, and the other one too when its ingest is back
        ingest.back.set()
        async with asyncio.timeout(60):
            (late,) = await rig.claim(wait_ms=30_000)
        assert (late.message.message_id, late.attempts_count) == (hanging, 1)


async def test_a_claim_that_ends_as_an_ingest_is_awaited_leaves_what_was_read_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_fetches, "LATE_S", 600.0)
    ingest = _HangingIngest()
    async with running(ingest=ingest, settings={"payload_cache_bytes": 0}) as rig:
        # Given messages of an ingest that fails, and of one that is still reading
        await rig.create()
        await assign(rig, "q", 1, message_id(1, 1))
        await assign(rig, "q", 1, 1)
        ingest.read_gate.clear()

        # and a claim that ends where an ingest is awaited, with another one behind it
        request = consumer_pb2.ClaimRequest(
            queue_id="q",
            max_messages=10,
            wait_ms=30_000,
            known_awaited=consumer_pb2.IngestShards(),
        )
        ending = asyncio.ensure_future(rig.consumers.Claim(request))
        await eventually(lambda: ingest.hangs and ingest.reads)
        waiting = asyncio.create_task(rig.claim(wait_ms=30_000))
        (waiter_line,) = rig.delivery._waiter_lines.values()
        await eventually(lambda: len(waiter_line.line) == 2)

        # When its message comes
        ingest.read_gate.set()
        async with asyncio.timeout(60):
            answer, claimed = await asyncio.gather(ending, waiting)

        # Then the one behind gets it, without another read
        assert (list(answer.runs), list(answer.awaited_ingest_shards)) == ([], [1])
        assert [one.message.message_id for one in claimed] == [1]
        assert ingest.reads == [[1]]


class Forbidden(Visit):
    """A call that the policy forbids once it has waited."""

    __slots__ = ()

    async def renew(self) -> None:
        raise PermissionDenied("by the new policy")


async def test_a_claim_that_was_forbidden_as_it_waited_gives_its_messages_back() -> None:
    async with running() as rig:
        await rig.create()
        [servicer] = [one for one in rig.service.servicers() if isinstance(one, ConsumerServicer)]
        request = consumer_pb2.ClaimRequest(queue_id="q", wait_ms=60_000)
        before = current_visit.set(Forbidden())
        claiming = asyncio.create_task(servicer.Claim(request, SimpleNamespace()))
        current_visit.reset(before)
        await rig.assign([1])

        with pytest.raises(PermissionDenied):
            await claiming

        (again,) = await rig.claim()
        assert (again.message.message_id, again.attempts_count) == (1, 1)
