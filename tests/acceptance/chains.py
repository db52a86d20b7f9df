"""Workers that complete a message and push the next in one go, from queue to queue; and a judge.

Each message of the first queue must become exactly one message of each queue that follows,
whichever process is killed meanwhile.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, defaultdict
from functools import partial

import grpc
import grpc.aio

from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.v1 import consumer_pb2, ingest_pb2, queue_pb2
from tests.acceptance.stubs import Stubs, persist
from tests.claimed_runs import messages_of

QUEUES = ("raw", "checked", "shipped")
LEASE_MS = 4_000
PUBLISH_BATCH = 1_000
LINKS_MAX = 20
"""Messages claimed, and completed together, at most."""

CALL_SECONDS = 20
STALLED_SECONDS = 150.0
LOST_LEASES = ("LEASE_ENDED", "LEASE_UNKNOWN")


class Chains:
    """One run: `count` messages through all queues.

    Attributes:
        acked_count: Messages completed, in all queues together.
        redelivered_count: Messages whose lease had ended when they were to be completed.
        seen: By payload, the IDs of the messages with it that came out of the last queue.
    """

    def __init__(self, count: int) -> None:
        self.published_count = count
        self.acked_count = 0
        self.redelivered_count = 0
        self.seen: dict[bytes, set[int]] = defaultdict(set)
        self._found: list[str] = []
        self._progress_at = time.monotonic()

    @property
    def progress(self) -> float:
        """Part of the work that is done, 0 to 1."""
        return self.acked_count / (self.published_count * len(QUEUES))

    @property
    def done(self) -> bool:
        """Whether every message came out of the last queue."""
        return len(self.seen) >= self.published_count

    async def begin(self, stubs: Stubs) -> None:
        """Make the queues, and publish to the first."""
        for queue_id in QUEUES:
            queue = queue_pb2.Queue(queue_id=queue_id, max_attempts=100)
            queue.backoff.kind = queue_pb2.Backoff.KIND_NONE  # what fails comes again at once
            await stubs.queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue), timeout=60)
        for first in range(0, self.published_count, PUBLISH_BATCH):
            request = ingest_pb2.PublishRequest(request_id=str(uuid.uuid4()))
            for n in range(first, min(first + PUBLISH_BATCH, self.published_count)):
                request.runs.add(payloads=[b"%d" % n], headers={"queue": QUEUES[0]})
            await persist(partial(stubs.ingest.Publish, request, timeout=CALL_SECONDS))

    async def work(self, stubs: Stubs) -> None:
        """Work on all queues until everything came out of the last, or nothing moves any more."""
        self._progress_at = time.monotonic()
        followers = (*QUEUES[1:], "")
        await asyncio.gather(
            *(
                self._worker(stubs, queue_id, follower)
                for queue_id, follower in zip(QUEUES, followers, strict=True)
            )
        )

    async def _worker(self, stubs: Stubs, queue_id: str, follower: str) -> None:
        claim = consumer_pb2.ClaimRequest(
            queue_id=queue_id, max_messages=LINKS_MAX, lease_ms=LEASE_MS, wait_ms=300
        )
        while not self.done:
            assert time.monotonic() - self._progress_at < STALLED_SECONDS, self.progress
            answer = await persist(lambda: stubs.consumer.Claim(claim, timeout=CALL_SECONDS))
            claimed = messages_of(answer)
            if not claimed:
                continue
            request = consumer_pb2.ExecuteRequest(request_id=str(uuid.uuid4()))
            for message in claimed:
                request.commands.add().complete.lease_token = message.lease_token
                if follower:
                    push = request.commands.add().push
                    push.queue_id, push.payload = follower, message.message.payload
            if not await _executed(stubs, request):
                self.redelivered_count += len(claimed)
                continue
            self.acked_count += len(claimed)
            self._progress_at = time.monotonic()
            if not follower:
                for message in claimed:
                    self.seen[message.message.payload].add(message.message.message_id)

    def faults(self) -> list[str]:
        """Everything that should not have happened, as judged; empty is what tests want."""
        return self._found

    async def judge(self, stubs: Stubs) -> None:
        """Look at what came out, and at what is where, once all is done."""
        found = [f"{payload!r} came as {ids}" for payload, ids in self.seen.items() if len(ids) > 1]
        found += [f"{n} is lost" for n in range(self.published_count) if b"%d" % n not in self.seen]
        for queue in await stubs.list_queues():
            counts = queue.counts
            counter = Counter(
                done=counts.done_count, waiting=counts.available_count, failed=counts.failed_count
            )
            if counter != Counter(done=self.published_count):
                found.append(f"{queue.queue_id}: {dict(counter)}")
        self._found = found


async def _executed(stubs: Stubs, request: consumer_pb2.ExecuteRequest) -> bool:
    """Whether the commands took effect; they did not when a lease had ended first."""
    try:
        await persist(lambda: stubs.consumer.Execute(request, timeout=CALL_SECONDS))
    except grpc.aio.AioRpcError as error:
        if from_rpc_error(error).reason in LOST_LEASES:
            return False
        raise
    return True
