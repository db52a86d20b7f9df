"""What refused requests must leave as it is: batches of them, and the state before and after.

The requests name what is there: the victim's queue, its messages and its entries. Each has one
field at which it should fail. A batch of which one was taken proves nothing and counts as such; the
next one has a new victim.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from slatemq.v1 import (
    entry_pb2,
    entry_pb2_grpc,
    ingest_pb2,
    ingest_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    janitor_pb2,
    janitor_pb2_grpc,
    outbox_pb2,
    outbox_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
    shard_pb2,
    shard_pb2_grpc,
)
from tests.faults.hostile.calls import UNREACHED, Calls
from tests.faults.hostile.generated import BROKEN, SORTS, Generated
from tests.faults.hostile.rpcs import Rpc, all_rpcs
from tests.faults.hostile.target import Target
from tests.integration.serving.test_any_request import fill

BATCH: Final = 10

READING: Final = ("Get", "List", "Watch", "Read", "Find", "Tail", "Batch", "Explain", "Check")
"""How the names of RPCs begin that change nothing."""

OPEN_ENDED: Final = frozenset({grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, *UNREACHED})
"""Answers after which something may have changed."""

LATER_MS: Final = 600_000
"""How far ahead a message waits: below the longest delay by default."""

_CALL_S: Final = 30.0


@dataclass(frozen=True)
class Victim:
    """What requests name."""

    queue: str
    message_ids: tuple[int, ...]
    handles: tuple[str, ...]

    def value(self, chance: random.Random, field: FieldDescriptor) -> Any:
        """What a request that is meant has in a field; None: nothing in particular."""
        name = field.name
        if name in ("queue_id", "target_queue_id", "queue_ids"):
            return self.queue
        if name in ("handle", "handles"):
            return chance.choice(self.handles)
        if name in ("message_id", "message_ids"):
            return chance.choice(self.message_ids)
        return None


async def _victim(target: Target, number: int) -> Victim:
    """A queue with messages that wait, one of them for long."""
    name = f"victim-{number}"
    headers = {"queue": name}
    later = [
        ingest_pb2.PublishRun(
            payloads=[b"later"], headers=headers, visible_at_ms=LATER_MS + int(time.time() * 1000)
        )
    ]
    now = [ingest_pb2.PublishRun(payloads=[b"one", b"two"], headers=headers)]
    queue = queue_pb2.CreateQueueRequest(queue=queue_pb2.Queue(queue_id=name))
    metadata = target.authorization("ops", 0)
    # A request that was taken may have drained the only shard.
    await _stub(target, shard_pb2_grpc.ShardServiceStub, "broker").DrainShard(
        shard_pb2.DrainShardRequest(cancel=True), timeout=_CALL_S, metadata=metadata
    )
    await _stub(target, queue_pb2_grpc.QueueServiceStub, "broker").CreateQueue(
        queue, timeout=_CALL_S, metadata=metadata
    )
    ingest = _stub(target, ingest_pb2_grpc.IngestServiceStub, "ingest")
    answer = await ingest.Publish(
        ingest_pb2.PublishRequest(runs=now + later), timeout=_CALL_S, metadata=metadata
    )
    entries: list[Any] = []
    while len(entries) < len(answer.message_ids):
        entries = await _entries(target, name)
    return Victim(name, tuple(answer.message_ids), tuple(one.handle for one in entries))


def _stub(target: Target, make: Callable[[Any], Any], kind: str) -> Any:
    return make(target.channel(kind, "clients"))


async def _entries(target: Target, queue: str) -> list[Any]:
    stub = _stub(target, entry_pb2_grpc.EntryServiceStub, "broker")
    found: list[Any] = []
    for state in queue_pb2.EntryState.values():
        if state:
            request = entry_pb2.ListEntriesRequest(
                queue_id=queue, state=state, view=entry_pb2.ENTRY_VIEW_FULL
            )
            metadata = target.authorization("ops", 0)
            answer = await stub.ListEntries(request, timeout=_CALL_S, metadata=metadata)
            found += answer.entries
    return found


async def fingerprint(target: Target, victim: Victim) -> dict[str, str]:
    """All that clients see of the victim, and of the instance."""
    metadata = target.authorization("ops", 0)
    asked = (
        (
            queue_pb2_grpc.QueueServiceStub,
            "broker",
            "GetQueue",
            queue_pb2.GetQueueRequest(queue_id=victim.queue),
        ),
        (queue_pb2_grpc.QueueServiceStub, "broker", "ListQueues", queue_pb2.ListQueuesRequest()),
        (
            instance_pb2_grpc.InstanceServiceStub,
            "ingest",
            "GetInstance",
            instance_pb2.GetInstanceRequest(),
        ),
        (janitor_pb2_grpc.JanitorServiceStub, "janitor", "ListRuns", janitor_pb2.ListRunsRequest()),
        (outbox_pb2_grpc.OutboxServiceStub, "broker", "GetOutbox", outbox_pb2.GetOutboxRequest()),
        (shard_pb2_grpc.ShardServiceStub, "broker", "GetShard", shard_pb2.GetShardRequest()),
    )
    found: dict[str, str] = {}
    for make, kind, name, request in asked:
        answer: Any = await getattr(_stub(target, make, kind), name)(
            request, timeout=_CALL_S, metadata=metadata
        )
        if name == "GetQueue":
            answer.queue.counts.ClearField("oldest_claimable_age_ms")
            answer.queue.ClearField("totals")
        match name:
            case "ListQueues":
                found[name] = str(sorted(queue.queue_id for queue in answer.queues))
            case "GetShard":
                found[name] = shard_pb2.Shard.State.Name(answer.shard.state)
            case _:
                found[name] = str(answer)
    found["ListEntries"] = str(await _entries(target, victim.queue))
    return found


def refused_one(chance: random.Random, rpc: Rpc, victim: Victim, number: int) -> Generated:
    """A request that is meant, but for one field; or bytes that are none."""
    sort = chance.choice(("one field", "one field", *BROKEN))
    if sort == "one field":
        data = _one_field_wrong(chance, rpc, victim)
    else:
        data = SORTS[sort](chance, rpc.request)
    kind = chance.choice(rpc.kinds)
    return Generated(number, sort, rpc, kind, "clients", (data,), (), "ops")


def _one_field_wrong(chance: random.Random, rpc: Rpc, victim: Victim) -> bytes:
    message: Any = GetMessageClass(rpc.request)()
    for field in rpc.request.fields:
        value = victim.value(chance, field)
        if value is not None and field.is_repeated:
            getattr(message, field.name).append(value)
        elif value is not None:
            setattr(message, field.name, value)
    if rpc.request.fields:
        fill(chance, message, chance.choice(rpc.request.fields), 3)
    data: bytes = message.SerializeToString()
    return data


class StateRun:
    """Batches of refused requests.

    Attributes:
        compared, taken: Batches of which all were refused, and of which one was not.
        faults: What a batch has changed.
    """

    def __init__(self, target: Target, calls: Calls, seed: int) -> None:
        self._target = target
        self._calls = calls
        self._chance = random.Random(f"state {seed}")
        self.compared = self.taken = 0
        self.faults: list[str] = []

    async def run(self, count: int, first: int) -> None:
        """Make this many requests, with numbers from `first` on.

        More, ten times at most, until a batch is compared: on a slow machine calls end too late.
        """
        changing = [
            rpc for rpc in all_rpcs() if not rpc.path.rpartition("/")[2].startswith(READING)
        ]
        victim = await _victim(self._target, 0)
        before = await fingerprint(self._target, victim)
        for number in range(first, first + 10 * count, BATCH):
            if number >= first + count and self.compared:
                break
            batch = [
                refused_one(self._chance, self._chance.choice(changing), victim, number + n)
                for n in range(BATCH)
            ]
            codes = [await self._calls.make_one(one) for one in batch]
            if OPEN_ENDED.intersection(codes):
                self.taken += 1
                victim = await _victim(self._target, number + 1)
                before = await fingerprint(self._target, victim)
                continue
            self.compared += 1
            after = await fingerprint(self._target, victim)
            for name, text in after.items():
                if text != before[name]:
                    paths = ", ".join(sorted({one.rpc.path for one in batch}))
                    self.faults.append(f"{name} changed by refused requests: {paths}")
            before = after
