"""Copies each message of one instance into another, once.

An event says that a message is there, and which: its payload is read from the instance that stores
it, by ID. The copy has the event's ID as its dedupe key, so that an event which comes again stores
nothing, within the other instance's window `dedupe_window_s`: set that to more than this program
may be down for. A copy has the header `replicated-from`, and is not replicated again, so that two
instances may replicate into each other.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator, Sequence

import slatemq
from examples.events.queues import ATTEMPTS_MAX, ensure_queue, parser
from slatemq.errors import DataLoss, InvalidArgument, SlateMQError
from slatemq.events import Event, decode_event
from slatemq.events.envelope import parse_timestamp

log = logging.getLogger("replicate")

FROM_HEADER = "replicated-from"

DAMAGED_IDS = "message_ids"
"""The fact of the error of read_messages that names those which are damaged, with commas."""

BATCH = 500
READ_BYTES_MAX = 32 << 20
"""Of payloads in memory at once, unless one alone has more."""


class Replicator:
    """From one instance into another."""

    def __init__(self, source: slatemq.Client, target: slatemq.Client, name: str) -> None:
        """`name` is what copies say of the source."""
        self._source = source
        self._target = target
        self._name = name

    async def copy(self, batch: Sequence[slatemq.Received]) -> None:
        """Copy the messages of these events, in their order; durable when this returns."""
        events = []
        for received in batch:
            try:
                event = decode_event(received.payload)
                events.append((received, event, int(event.data["size"])))
            except (InvalidArgument, KeyError) as error:
                await received.fail(f"not an event of a message: {error}")
        for part in _parts(events):
            await self._copy_part(part)

    async def _copy_part(self, part: Sequence[tuple[slatemq.Received, Event]]) -> None:
        ids = [int(event.data["message_id"]) for _, event in part]
        try:
            stored = await self._source.read_messages(ids)
        except DataLoss as error:
            await self._copy_others(part, error)
            return
        copies = []
        for message_id, (received, event) in zip(ids, part, strict=True):
            message = stored.get(message_id)
            if message is None:
                log.warning("message %d is removed already, and not copied", message_id)
            elif FROM_HEADER not in message.headers:
                copies += [(received, copy) for copy in self._copies_of(event, message)]
        try:
            await self._target.publish_many([copy for _, copy in copies])
        except InvalidArgument:
            await self._publish_each(copies)

    async def _copy_others(
        self, part: Sequence[tuple[slatemq.Received, Event]], error: DataLoss
    ) -> None:
        """The events of damaged messages become dead letters, the others are copied."""
        damaged = set(error.metadata[DAMAGED_IDS].split(","))
        others = []
        for received, event in part:
            if str(event.data["message_id"]) in damaged:
                await received.fail("the stored bytes of the message are damaged")
            else:
                others.append((received, event))
        if len(others) == len(part):
            raise error
        await self._copy_part(others)

    def _copies_of(
        self, event: Event, message: slatemq.StoredMessage
    ) -> Iterator[slatemq.OutgoingMessage]:
        """The copy; none of a message whose time is over."""
        retention_s = message.retention_s
        if retention_s:
            age_s = time.time() - message.received_at_ms / 1000
            retention_s = int(retention_s - age_s)
            if retention_s <= 0:
                return
        visible_at = event.data.get("visible_at")
        yield slatemq.OutgoingMessage(
            message.payload,
            {**message.headers, FROM_HEADER: self._name},
            created_at_ms=message.created_at_ms,
            retention_s=retention_s,
            visible_at_ms=parse_timestamp("visible_at", visible_at) if visible_at else None,
            dedupe_key=event.id,
        )

    async def _publish_each(
        self, copies: Sequence[tuple[slatemq.Received, slatemq.OutgoingMessage]]
    ) -> None:
        """One of them is refused, by bounds that are lower there: it becomes a dead letter."""
        for received, copy in copies:
            try:
                await self._target.publish_many([copy])
            except InvalidArgument as error:
                await received.fail(f"the other instance refuses it: {error}")


def _parts(
    events: Sequence[tuple[slatemq.Received, Event, int]],
) -> Iterator[list[tuple[slatemq.Received, Event]]]:
    """Events in order, few enough at once for their payloads."""
    part: list[tuple[slatemq.Received, Event]] = []
    part_bytes = 0
    for received, event, size in events:
        if part and part_bytes + size > READ_BYTES_MAX:
            yield part
            part, part_bytes = [], 0
        part.append((received, event))
        part_bytes += size
    if part:
        yield part


async def run(endpoint: str, queue_id: str, prefix: str, target: str, name: str) -> None:
    """Copy until ended."""
    async with slatemq.connect(endpoint) as source, slatemq.connect(target) as other:
        await ensure_queue(
            source, queue_id, prefix, ["message.published"], max_attempts=ATTEMPTS_MAX
        )
        replicator = Replicator(source, other, name)
        async with source.consume_batches(queue_id, BATCH) as batches:
            async for batch in batches:
                async with batch:  # leaving acks; what goes wrong nacks, and ends this program
                    await replicator.copy(batch)


def main() -> None:
    """The command."""
    flags = parser("replicate", __doc__, "replicate")
    flags.add_argument("--name", default="source", help=f"value of {FROM_HEADER} (%(default)s)")
    flags.add_argument("target", help="any process of the other instance: HOST:PORT")
    given = flags.parse_args()
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(run(given.endpoint, given.queue, given.prefix, given.target, given.name))
    except SlateMQError as error:
        sys.exit(f"replicate: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
