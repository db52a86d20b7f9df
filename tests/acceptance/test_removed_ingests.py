"""Draining and removing an ingest shard under load, while it and others are killed."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import slatemq
from libs.storage.layout.ids import shard_of
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import FailedPrecondition, NotFound, Unavailable
from slatemq.v1.purge_pb2 import PURGE_REASON_UNREFERENCED, PurgeMessagesRequest
from slatemq.v1.purge_pb2_grpc import PurgeServiceStub
from tests.forms import proof
from tests.integration.janitor.instances import SHORT, Instance, instance
from tests.integration.stack.processes import Service

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]

QUEUES = ("a", "b")
"""One on each of two broker shards."""

REMOVED = 1
BATCH = 20
LEASE_S = 5
WAIT_S = 120


class Workload:
    """Queues that get messages by publishes and by pushes, and are worked through meanwhile."""

    def __init__(self, made: Instance) -> None:
        self.sent: set[bytes] = set()
        self.ids: defaultdict[bytes, set[int]] = defaultdict(set)
        self.acked: dict[int, str] = {}
        self._acked_payloads: set[bytes] = set()
        self.is_over = asyncio.Event()
        self._producing = 0
        self._made = made
        self._number = 0

    def _next(self) -> bytes:
        self._number += 1
        return b"%d" % self._number

    async def publish(self) -> None:
        with self._counted():
            while not self.is_over.is_set():
                messages = [
                    slatemq.OutgoingMessage(
                        self._next(),
                        {"queue": QUEUES[n % 2]},
                        delay_ms=1_500 if n % 5 == 0 else None,
                    )
                    for n in range(BATCH)
                ]
                await self._made.client.publish_many(messages)
                self.sent |= {message.payload for message in messages}
                await asyncio.sleep(0.05)

    async def push(self) -> None:
        with self._counted():
            while not self.is_over.is_set():
                payload, queue = self._next(), QUEUES[self._number % 2]
                await self._made.client.execute([slatemq.Push(queue, payload)])
                self.sent.add(payload)
                await asyncio.sleep(0.01)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Of a producer: what it has under way is sent once it is answered."""
        self._producing += 1
        try:
            yield
        finally:
            self._producing -= 1

    @property
    def _is_done(self) -> bool:
        return self.is_over.is_set() and not self._producing and self._acked_payloads >= self.sent

    async def consume(self, queue: str) -> None:
        while not self._is_done:
            try:
                messages = await self._made.client.claim(queue, 2 * BATCH, wait=1, lease=LEASE_S)
            except Unavailable:
                continue
            for message in messages:
                self.ids[message.payload].add(message.message_id)
            answers = await self._made.client.ack([one.lease_token for one in messages])
            # An ack that is refused was too late: the message comes again.
            for message, refused in zip(messages, answers, strict=True):
                if refused is None:
                    self.acked[message.message_id] = queue
                    self._acked_payloads.add(message.payload)


class Removal:
    """The ingest shard that is drained and removed, with kills."""

    def __init__(self, made: Instance, run: Workload, service: Service, folder: Path) -> None:
        self.service = service
        self._client = made.client
        self._run = run
        self._data = folder / "data"
        self._purged: set[int] = set()

    async def state(self) -> str:
        shards = (await self._client.shards("ingest")).shards
        return next(one.state for one in shards if one.shard == REMOVED)

    async def drain(self, luck: random.Random) -> None:
        while True:
            draining = asyncio.create_task(self._client.drain_shard("ingest", REMOVED))
            await asyncio.sleep(luck.uniform(0, 0.05))
            await self.service.kill()
            await self.service.start()
            with suppress(Unavailable):
                await draining
                return

    async def purge(self) -> None:
        """What the janitor's job `unreferenced` does: here each message has one queue."""
        over = {one for one in self._run.acked if shard_of(one) == REMOVED} - self._purged
        epoch = 0
        while over:
            request = PurgeMessagesRequest(
                purge_epoch=epoch, reason=PURGE_REASON_UNREFERENCED, message_ids=sorted(over)[:5000]
            )
            try:
                with raising_slatemq_errors():
                    stub = PurgeServiceStub(self.service.there)
                    answer = await stub.PurgeMessages(request, timeout=30)
            except FailedPrecondition as error:
                epoch = int(error.metadata["purge_epoch"])
                continue
            except Unavailable:
                return
            done = set(request.message_ids) - set(answer.refused_ids)
            self._purged |= done
            if not done:
                return  # They are too new.
            over -= done

    async def remove(self, step: str, luck: random.Random) -> None:
        """Removes it; killed at this step, or anywhere."""
        tries = 0
        while not await self._is_finished():
            tries += 1
            removing = asyncio.create_task(self._client.remove_shard("ingest", REMOVED))
            await self._come_to(step, removing, luck.uniform(0, tries / 2))
            await self.service.kill()
            # A supervisor starts it again, which ends at once where it is removed.
            with suppress(AssertionError):
                await self.service.start()
            # Where pushes wait at a broker, they arrive, and are worked through.
            with suppress(Unavailable, NotFound, FailedPrecondition):
                await removing
            await self.purge()
            await asyncio.sleep(0.1)

    async def _come_to(self, step: str, removing: asyncio.Task[None], seconds: float) -> None:
        marks: dict[str, Callable[[], bool]] = {
            "recorded": lambda: (self._data / "removed-shards" / "ingest-1.json").exists(),
            "withdrawn": lambda: not (self._data / "topology" / "ingest-1.json").exists(),
            "deleting": lambda: not (self._data / "ingest" / "1" / "manifest").exists(),
            "anywhere": lambda: False,
        }
        until = asyncio.get_running_loop().time() + seconds
        if step != "anywhere":
            until += WAIT_S
        while not marks[step]() and asyncio.get_running_loop().time() < until:
            if removing.done() and removing.exception() is not None:
                return
            await asyncio.sleep(0)

    async def _is_finished(self) -> bool:
        if self.service.process.returncode not in (0, 2):
            return False
        left = [path for path in (self._data / "ingest" / "1").rglob("*") if path.is_file()]
        return not left and not (self._data / "topology" / "ingest-1.json").exists()


@pytest.mark.parametrize(
    "step", ["recorded", "anywhere", proof("withdrawn"), proof("deleting"), proof("anywhere ")]
)
async def test_an_ingest_removed_under_load_and_kills_loses_and_doubles_nothing(
    tmp_path: Path, step: str
) -> None:
    luck = random.Random()
    seed = luck.randrange(2**32)
    luck.seed(seed)
    async with instance(tmp_path, 2, SHORT, WAIT_S) as made:
        second = Service(tmp_path, "ingest", "--shard", str(REMOVED), *SHORT)
        try:
            await second.start()
            for shard, queue in enumerate(QUEUES):
                await made.client.create_queue(queue, shard=shard, max_attempts=1_000)
            async with asyncio.timeout(WAIT_S):
                while len((await made.client.shards("ingest")).shards) < 2:
                    await asyncio.sleep(0.1)
            run = Workload(made)
            removal = Removal(made, run, second, tmp_path)
            works = [run.publish(), run.push(), *map(run.consume, QUEUES)]
            async with asyncio.timeout(500), asyncio.TaskGroup() as tasks:
                for work in works:
                    tasks.create_task(work)
                while {shard_of(one) for one in run.acked} != {0, REMOVED}:
                    await asyncio.sleep(0.02)
                await removal.drain(luck)
                for victim in (made.router, made.brokers[0], second):
                    await victim.kill()
                    await victim.start()
                while await removal.state() != "drained":
                    await removal.purge()
                    await asyncio.sleep(0.1)
                await removal.remove(step.strip(), luck)
                # What goes on afterwards needs it no more.
                await made.brokers[1].kill()
                await made.brokers[1].start()
                await made.client.create_queue("late", start_from="beginning")
                await asyncio.sleep(1)
                run.is_over.set()

            assert run.ids.keys() == run.sent, seed
            assert [ids for ids in run.ids.values() if len(ids) > 1] == [], seed
            assert {shard_of(one) for one in run.acked} == {0, REMOVED}, seed
            for queue in QUEUES:
                acked = sorted(one for one, where in run.acked.items() if where == queue)
                async with asyncio.timeout(WAIT_S):
                    done = [one.message_id async for one in made.client.list_entries(queue, "done")]
                assert sorted(done) == acked, seed
                counts = (await made.client.get_queue(queue)).counts
                assert (counts.available_count, counts.failed_count) == (0, 0), seed
            found = await made.client.shards("ingest")
            assert ([one.shard for one in found.shards], found.removed) == ([0], [REMOVED])
        finally:
            await second.close()
