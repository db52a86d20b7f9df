"""How far the brokers' outboxes are stored here: makes sending their rows again harmless, for ever.

A broker shard numbers the rows for this shard from 1, without gaps. The number of the last one that
is stored goes into the batch that stores it: a row is stored exactly when its number is passed. The
number of a row that the broker has set aside goes with the rows behind it, or alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from libs.storage.database.slate import Batch, Database
from libs.storage.errors import encoding
from libs.storage.layout.own_keys import (
    outbox_progress_key,
    outbox_progress_range,
    parse_outbox_progress_key,
)
from libs.storage.records.states import decode_outbox_progress, encode_outbox_progress
from slatemq.errors import FailedPrecondition

GAP: Final = "OUTBOX_GAP"


class Push(NamedTuple):
    """Which rows are sent: those of a broker shard's outbox from `first_number` on.

    `set_aside` rows right before them have a number and no message.
    """

    broker_shard: int
    first_number: int
    set_aside: int = 0


class Outboxes:
    """The last number stored of each broker shard. The commit loop calls `put`."""

    def __init__(self, last_numbers: Mapping[int, int]) -> None:
        self._last = dict(last_numbers)

    @classmethod
    async def load(cls, database: Database) -> Outboxes:
        span = outbox_progress_range()
        return cls(
            {
                parse_outbox_progress_key(key): decode_outbox_progress(value)
                async for rows in database.scan(span.start, span.end)
                for key, value in rows
            }
        )

    def last_number(self, broker_shard: int) -> int:
        """The last number put, perhaps not durable yet; 0 when there is none."""
        return self._last.get(broker_shard, 0)

    def stored_count(self, push: Push) -> int:
        """How many of the rows are stored already; FailedPrecondition when one is missing.

        Below 0: that many of those set aside before them are not counted yet.
        """
        last = self.last_number(push.broker_shard)
        first = push.first_number - push.set_aside
        if first > last + 1:
            raise FailedPrecondition(
                GAP,
                f"the first row sent is {first}, the last one stored {last}",
                subject=f"outbox of broker {push.broker_shard}",
                metadata={"last_number": str(last)},
            )
        return last + 1 - push.first_number

    def put(self, batch: Batch, push: Push, count: int) -> None:
        """Note in the batch that holds their messages that `count` rows are stored.

        And those set aside before them.
        """
        last = push.first_number + count - 1
        self._last[push.broker_shard] = last
        with encoding(f"progress of the outbox of broker {push.broker_shard}"):
            batch.put(outbox_progress_key(push.broker_shard), encode_outbox_progress(last))
