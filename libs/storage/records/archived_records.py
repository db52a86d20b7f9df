"""The value of an archived row: dead letters whose content is in the archive.

    archived 0x52     | Array<ArchivedMessage> | runs: Array<Utf8> |
    ArchivedMessage   | message ID u64 | failed at i64 | archived at i64 | attempts u16
                      | priority u8 | retention deadline i64 | run u16: its place in `runs` |

Little-endian; times in milliseconds since 1970, UTC; a retention deadline of 0 means never. A row
has a run once, however many of its messages it has.
"""

from collections.abc import Sequence
from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader, utf8_array
from libs.storage.records.queues import FailedMessage

ARCHIVED_ROW = Fixed(
    message_id="Q",
    failed_at_ms="q",
    archived_at_ms="q",
    attempts="H",
    priority="B",
    retention_deadline_ms="q",
    run="H",
)


class ArchivedMessage(NamedTuple):
    """A dead letter whose content the run of a job with this name has archived."""

    message_id: int
    failed_at_ms: int
    archived_at_ms: int
    attempts: int
    priority: int
    retention_deadline_ms: int
    run: str

    @classmethod
    def of(cls, dead_letter: FailedMessage, archived_at_ms: int, run: str) -> "ArchivedMessage":
        return cls(
            dead_letter.message_id,
            dead_letter.failed_at_ms,
            archived_at_ms,
            dead_letter.attempts,
            dead_letter.priority,
            dead_letter.retention_deadline_ms,
            run,
        )


def encode_archived(archived: Sequence[ArchivedMessage]) -> bytes:
    runs = {run: place for place, run in enumerate(dict.fromkeys(one.run for one in archived))}
    rows = [(*one[:-1], runs[one.run]) for one in archived]
    return ARCHIVED_ROW.pack_array("archived", rows) + utf8_array("runs", list(runs))


def decode_archived(data: bytes) -> list[ArchivedMessage]:
    reader = Reader("archived value", data)
    rows = list(reader.array("archived", ARCHIVED_ROW))
    runs = reader.utf8_array("runs")
    reader.finish()
    for row in rows:
        if row[-1] >= len(runs):
            raise reader.corrupt(f"run {row[-1]} of {len(runs)}")
    return [ArchivedMessage._make((*row[:-1], runs[row[-1]])) for row in rows]
