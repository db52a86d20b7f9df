"""A shard that takes no publishes, and is removed once it has nothing.

Draining takes effect with the commit that has its row: what that commit, or a later one, would
store of publishes is refused, so nothing is accepted behind the answer. Pushes are stored, since a
broker has numbered them for this shard; brokers choose another one for those that follow.

Before a shard is removed, nothing more is stored, and no broker may have a row that is perhaps
stored here: a row that a broker numbers for this shard later was never stored, and goes to another
one. Then it is leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.removal import ShardDrain
from libs.storage.layout.ids import MAX_SEQUENCE, message_id
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.layout.primitives import RowChange
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.small_objects import Objects
from libs.storage.objects.task_folders import task_folder
from services.ingest.read.entries import ROWS_MIN, decoded
from services.ingest.shard import Shard
from slatemq._counts import counted
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from slatemq.v1.outbox_pb2 import GetOutboxRequest
from slatemq.v1.outbox_pb2_grpc import OutboxServiceStub

COUNTED_ENTRIES_MAX: Final = 256
"""Log entries that are read to count what is left; of more, it is said that there are more."""

ASK_DEADLINE_S: Final = 10.0
"""A broker that has not answered by then counts as down."""


class Drain(ShardDrain):
    def __init__(
        self,
        shard: Shard,
        directory: TopologyDirectory,
        channels: Channels,
        objects: Objects,
        announce: Callable[[], Awaitable[None]],
        *,
        has_tasks: bool,
    ) -> None:
        """Drain this shard, whose publishes are tasks of a queue backend, or not (`has_tasks`).

        `announce` puts into the topology whether it drains, which may have changed.
        """
        publisher, removed_shards = shard.publisher, RemovedShards(objects)
        super().__init__(shard.database, shard.clock, publisher.commits, publisher, removed_shards)
        self._publisher = publisher
        self._log = shard.log
        self._directory = directory
        self._channels = channels
        self._objects = objects
        self._announce = announce
        self._has_tasks = has_tasks

    async def begin(self) -> None:
        """As in ShardDrain; raises FailedPrecondition where the shard may not be drained, too."""
        await self._check_may_drain()
        await super().begin()
        # Also where nothing has changed: an earlier call may have failed here.
        await self._announce()
        if not (await self._directory.read(max_age_ms=0)).open_ingests:
            # All others were drained at the same time: the last to announce itself sees it.
            await self.cancel()
            raise self._last_ingest()

    async def cancel(self) -> None:
        await super().cancel()
        await self._announce()

    async def _check_may_drain(self) -> None:
        if self._has_tasks:
            raise FailedPrecondition(
                "PUBLISHES_ARE_TASKS",
                f"{self._title} has its publishes as tasks of a queue backend: wait until no task "
                "is pending, start the ingest without the queue settings, and drain it then "
                "(docs/how-to/async.md, Switch it off)",
                subject=self.name,
            )
        topology = await self._directory.read(max_age_ms=0)
        if not set(topology.open_ingests) - {self.number}:
            raise self._last_ingest()

    def _last_ingest(self) -> FailedPrecondition:
        return FailedPrecondition(
            "LAST_INGEST",
            f"no ingest but shard {self.number} takes publishes: start another one first "
            "(`slatemq shard add` says how), or end the drain of one",
            subject=self.name,
        )

    async def shown(self) -> Sequence[str]:
        """As in ShardDrain; nothing while it serves, since its log would have to be read."""
        return await self.remaining() if self.is_draining else ()

    async def _others_have(self) -> Sequence[str]:
        """As in ShardDrain. Raises Unavailable, StoreUnavailable."""
        topology = await self._directory.read(max_age_ms=0)
        found = await asyncio.gather(*map(self._waiting_at, topology.brokers))
        left = [text for text in found if text]
        if bodies := len(await self._objects.describe(task_folder(self.number))):
            left.append(f"{bodies} bodies of publishes that are tasks")
        return left

    async def _waiting_at(self, broker_shard: int) -> str:
        """The pushes for this shard that wait at a broker; empty = none."""
        try:
            with raising_slatemq_errors():
                stub = OutboxServiceStub(await self._channels.to("broker", broker_shard))
                answer = await stub.GetOutbox(GetOutboxRequest(), timeout=ASK_DEADLINE_S)
        except (Unavailable, DeadlineExceeded) as error:
            self._channels.doubt("broker", broker_shard)
            raise Unavailable(
                f"broker {broker_shard} does not say whether pushes for ingest {self.number} wait "
                f"there: {error.message}",
                reason="BROKER_DOWN",
            ) from error
        for line in answer.lines:
            if line.ingest_shard == self.number and line.waiting_count:
                waiting = counted(line.waiting_count, "push that waits", "pushes that wait")
                return f"{waiting} at broker {broker_shard}"
        return ""

    async def _contents(self) -> list[str]:
        """As in ShardDrain; reads at most some entries."""
        count = for_ever = entries_count = 0
        async for sequence, value in self._entries(COUNTED_ENTRIES_MAX + 1):
            entries_count += 1
            if entries_count <= COUNTED_ENTRIES_MAX:
                found = (await decoded(sequence, value)).messages.values()
                count += len(found)
                for_ever += sum(one.retention_s == 0 for one in found)
                await asyncio.sleep(0)  # Others have their turn between two entries.
        return self._counted(count, for_ever, is_all=entries_count <= COUNTED_ENTRIES_MAX)

    async def _entries(self, limit: int) -> AsyncIterator[tuple[int, bytes]]:
        """The log's first entries by their sequences, read a few at a time: one may have 16 MiB."""
        first = max(self._log.bounds.first_sequence, message_id(self.number, 1))
        last = message_id(self.number, MAX_SEQUENCE)
        while limit:
            rows_max = min(ROWS_MIN, limit)
            scan = self._database.scan(*log_range(first, last), limit=rows_max)
            rows = [(parse_log_key(key), value) async for some in scan for key, value in some]
            for row in rows:
                yield row
            if len(rows) < rows_max:
                return
            first = rows[-1][0] + 1
            limit -= rows_max

    @staticmethod
    def _counted(count: int, for_ever: int, *, is_all: bool) -> list[str]:
        if not count:
            return []
        more = "" if is_all else "more than "
        left = [
            f"{more}{counted(count, 'message')}, which `slatemq janitor run retention` and "
            f"`slatemq janitor run unreferenced` remove once no queue needs "
            f"{'it' if count == 1 else 'them'} and the replay window is over"
        ]
        if for_ever:
            are_kept = "is" if for_ever == 1 else "are"
            left.append(
                f"of these {more}{for_ever:,} with retention 0, which {are_kept} kept for ever"
            )
        return left

    async def _write(self, change: Callable[[int], Sequence[RowChange]]) -> None:
        if rows := change(self._clock.now_ms()):
            self._publisher.put(rows)
