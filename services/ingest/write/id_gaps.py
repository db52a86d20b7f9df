"""Where the log's IDs jump: noted with the first messages after a restart."""

from __future__ import annotations

from libs.storage.database.slate import Batch, Database
from libs.storage.errors import encoding
from libs.storage.layout.ids import message_id
from libs.storage.layout.own_keys import LOG_GAPS_KEY
from libs.storage.records.log_bounds import GAPS_MAX, LogGap, decode_log_gaps, encode_log_gaps
from services.ingest.read.tailing import MetadataLog


class IdGaps:
    """The gaps of one log.

    Attributes:
        gaps: All that are known, in ascending order. One whose commit is not durable yet lies
            behind the log's end.
    """

    def __init__(self, log: MetadataLog, shard: int, gaps: list[LogGap]) -> None:
        self.gaps = gaps
        self._log = log
        self._after = max(log.end.last_message_id, message_id(shard, 1) - 1)
        self._is_settled = False

    @classmethod
    async def load(cls, database: Database, log: MetadataLog, shard: int) -> IdGaps:
        stored = await database.get(LOG_GAPS_KEY)
        return cls(log, shard, [] if stored is None else decode_log_gaps(stored))

    def put(self, batch: Batch, first_id: int) -> None:
        """Note the gap, if any, before a commit whose messages begin with this ID."""
        if self._is_settled:
            return
        self._is_settled = True
        if first_id > self._after + 1:
            first_sequence = self._log.bounds.first_sequence
            kept = [gap for gap in self.gaps if gap.next > first_sequence]
            self.gaps = [*kept, LogGap(self._after, first_id)][-GAPS_MAX:]
            with encoding("gaps of the log"):
                batch.put(LOG_GAPS_KEY, encode_log_gaps(self.gaps))
