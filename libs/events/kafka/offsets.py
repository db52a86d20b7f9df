"""Which records of each partition are finished, and how far groups are in their topics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from aiokafka import TopicPartition, errors
from aiokafka.abc import ConsumerRebalanceListener

from libs.events.kafka.connection import OPERATION_S, Connection

log = logging.getLogger(__name__)

LOOK_MS: Final = 200


class _Partition:
    """A partition of which records were delivered.

    Attributes:
        open: The offsets of those that are not finished.
        next: The offset behind the newest one.
        lost: Offsets of records that were not finished as the topic was lost.
    """

    __slots__ = ("lost", "next", "open")

    def __init__(self, lost: Iterable[int] = ()) -> None:
        self.open: set[int] = set()
        self.next = 0
        self.lost = set(lost)

    @property
    def position(self) -> int:
        return min(self.open, default=self.next)


class Offsets(ConsumerRebalanceListener):  # type: ignore[misc]
    """Commits each partition up to its first record that is not finished."""

    def __init__(self, consumer: Any) -> None:
        """Nothing is delivered yet. Give this to the consumer as its listener."""
        self._consumer = consumer
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._committing = asyncio.Lock()

    def resume(self, partition: TopicPartition, offset: int) -> None:
        """What is before this offset was finished earlier."""
        known = self._partitions.setdefault(partition, _Partition())
        known.next = max(known.next, offset)

    def begin(self, partition: TopicPartition, offset: int) -> None:
        """A record was delivered.

        None comes twice: one that was delivered before is of a topic that was created again, of
        which nothing is finished.
        """
        known = self._partitions.setdefault(partition, _Partition())
        if offset < known.next:
            log.warning("%s begins again at offset %d", partition, offset)
            known = self._partitions[partition] = _Partition(known.open | known.lost)
        known.open.add(offset)
        known.next = max(known.next, offset + 1)

    def is_open(self, partition: TopicPartition, offset: int) -> bool:
        """Whether a record was delivered here and is not finished."""
        known = self._partitions.get(partition)
        return known is not None and offset in known.open

    def finish(self, partition: TopicPartition, offset: int) -> bool:
        """A record is finished; finishing it again does nothing.

        Returns False for one whose partition went to another consumer: it comes again, there. And
        where the topic was created again, once for each record of before: which of two it is about
        does not matter, since both offsets are finished after the second end.
        """
        known = self._partitions.get(partition)
        if known is None:
            return False
        if offset in known.lost:
            known.lost.remove(offset)
            return False
        if known.next <= offset:  # it may have come back since
            return False
        known.open.discard(offset)
        return True

    async def end(self, partition: TopicPartition, offset: int) -> None:
        """Finish a record, and commit; where that raises, the record is as open as before."""
        known = self._partitions.get(partition)
        is_finished = self.finish(partition, offset)
        try:
            await self.commit()
        except BaseException:
            if known is not None and is_finished:
                known.open.add(offset)
            raise

    @property
    def committed(self) -> Mapping[TopicPartition, int]:
        """The offset of each partition that was committed last."""
        return dict(self._committed)

    async def commit(self, *, again: bool = False) -> bool:
        """Commit what can be. Those that wait for a commit under way share the next one.

        Returns whether all of it is committed. `again`: also what is committed already. Raises
        TimeoutError where brokers do not answer: the consumer itself repeats it for ever.
        """
        async with asyncio.timeout(OPERATION_S), self._committing:
            wanted = {
                partition: known.position
                for partition, known in self._partitions.items()
                if (again or known.position != self._committed.get(partition))
                and partition in self._consumer.assignment()
            }
            if not wanted:
                return True
            try:
                await self._consumer.commit(wanted)
            except (errors.CommitFailedError, errors.IllegalStateError) as error:
                log.info("partitions went to other consumers, which get these again: %s", error)
                return False
            self._committed.update(wanted)
            return True

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Commit while they are still this consumer's, then forget them."""
        try:
            await self.commit()
        except (errors.KafkaError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            log.info("not committed before the partitions went: %s", why)
        for partition in revoked:
            self._partitions.pop(partition, None)
            self._committed.pop(partition, None)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Nothing is delivered of them yet."""


async def commit_within(consumer: Any, offsets: Mapping[TopicPartition, int]) -> None:
    """Commit for a consumer of one process. Raises TimeoutError as `Offsets.commit` does."""
    async with asyncio.timeout(OPERATION_S):
        await consumer.commit(offsets)


class TopicReader:
    """Looks at topics without taking part in a group, and without moving it.

    One consumer for each group reads offsets, and no record; records have readers of their own.
    Some servers list the end of a partition late, but never with a fetch: so the first look at a
    partition fetches, too.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._consumers: dict[str, Any] = {}
        self._turn = asyncio.Lock()

    async def ranges(self, topic: str, group: str) -> dict[TopicPartition, tuple[int, int]]:
        """For each partition what the group has committed, or its beginning, and its end.

        That is the end which the server lists, unless this process knows a later one.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(OPERATION_S):
                    return await self._ranges(await self._consumer(group), topic, group)
            except BaseException:
                await self._drop(group)
                raise

    @asynccontextmanager
    async def reader(self, group: str) -> AsyncIterator[Any]:
        """A consumer that can be assigned any partition."""
        consumer = self._connection.consumer(group, fetch_max_wait_ms=LOOK_MS)
        try:
            async with asyncio.timeout(OPERATION_S):
                await consumer.start()
            yield consumer
        finally:
            await consumer.stop()

    async def read(self, consumer: Any, topic: str, group: str) -> AsyncGenerator[Any, None]:
        """The records behind what a group has committed; one partition after another.

        Each up to the end that comes with its first fetch.
        """
        for partition, (begin, _) in (await self.ranges(topic, group)).items():
            consumer.assign([partition])
            consumer.seek(partition, begin)
            position, end = begin, None
            while end is None or position < end:
                async with asyncio.timeout(OPERATION_S):
                    records: list[Any] = []
                    while not records and (end is None or position < end):
                        fetched = await consumer.getmany(timeout_ms=LOOK_MS)
                        records = fetched.get(partition, [])
                        end = self._note_end(consumer, partition) if end is None else end
                for record in records:
                    position = record.offset + 1
                    yield record

    async def close(self) -> None:
        async with self._turn:
            for group in list(self._consumers):
                await self._drop(group)

    async def _ranges(
        self, consumer: Any, topic: str, group: str
    ) -> dict[TopicPartition, tuple[int, int]]:
        numbers = await self._connection.partitions(topic)
        partitions = [TopicPartition(topic, number) for number in numbers]
        begins = await consumer.beginning_offsets(partitions)
        ends = await consumer.end_offsets(partitions)
        committed = {one: await consumer.committed(one) for one in partitions}
        nexts = {one: max(begins[one], committed[one] or 0) for one in partitions}
        known = self._connection.ends
        if unknown := {one: offset for one, offset in nexts.items() if one not in known}:
            await self._fetch_ends(unknown, group)
        for one in partitions:
            known[one] = max(ends[one], known.get(one, 0))
        return {one: (nexts[one], known[one]) for one in partitions}

    async def _fetch_ends(self, offsets: Mapping[TopicPartition, int], group: str) -> None:
        async with self.reader(group) as consumer:
            consumer.assign(list(offsets))
            for partition, offset in offsets.items():
                consumer.seek(partition, offset)
            waiting = list(offsets)
            while waiting:
                await consumer.getmany(*waiting, timeout_ms=LOOK_MS)
                waiting = [one for one in waiting if self._note_end(consumer, one) is None]

    def _note_end(self, consumer: Any, partition: TopicPartition) -> int | None:
        """The end that came with the newest fetch; None without one."""
        end: int | None = consumer.highwater(partition)
        if end is not None:
            known = self._connection.ends
            known[partition] = max(end, known.get(partition, 0))
        return end

    async def _consumer(self, group: str) -> Any:
        if group not in self._consumers:
            consumer = self._connection.consumer(group)
            self._consumers[group] = consumer
            await consumer.start()
        return self._consumers[group]

    async def _drop(self, group: str) -> None:
        consumer = self._consumers.pop(group, None)
        if consumer is not None:
            await consumer.stop()
