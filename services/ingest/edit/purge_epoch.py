"""The shard's purge epoch: a purge carries the epoch it was decided in, an older is refused."""

from __future__ import annotations

from functools import partial
from typing import Final

from libs.storage.database.slate import Database
from libs.storage.layout.own_keys import PURGE_EPOCH_KEY
from libs.storage.records.states import decode_purge_epoch, encode_purge_epoch
from services.ingest.write.publishing import Publisher
from slatemq.errors import FailedPrecondition

__all__ = ["PurgeEpoch"]

STALE: Final = "STALE_PURGE_EPOCH"


class PurgeEpoch:
    """A number that only rises.

    Attributes:
        durable: The last one that is durable; 0 at the beginning.
    """

    def __init__(self, number: int, publisher: Publisher) -> None:
        self.durable = number
        self._number = number
        self._publisher = publisher

    @classmethod
    async def load(cls, database: Database, publisher: Publisher) -> PurgeEpoch:
        value = await database.get(PURGE_EPOCH_KEY)
        return cls(0 if value is None else decode_purge_epoch(value), publisher)

    def check(self, number: int) -> None:
        """Raises FailedPrecondition unless this is the epoch, one that is being raised included.

        What is put into a commit without waiting since then is durable before, or together with,
        the next raise.
        """
        if number != self._number:
            raise FailedPrecondition(
                STALE,
                f"decided in purge epoch {number}, the shard is in {self._number}",
                subject="purge_epoch",
                metadata={"purge_epoch": str(self._number)},
            )

    async def raise_by_one(self) -> int:
        """Raise the epoch; durable on return. Raises the errors of the store."""
        self._number = number = self._number + 1
        records = [(PURGE_EPOCH_KEY, encode_purge_epoch(number))]
        self._publisher.put(records, partial(self._settle, number))
        await self._publisher.commits.durable()
        return number

    def _settle(self, number: int) -> None:
        self.durable = number
