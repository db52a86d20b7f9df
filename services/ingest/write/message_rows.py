"""The rows of a commit's messages: its log entries, and the payloads of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from libs.storage.database.slate import Change
from libs.storage.errors import encoding
from libs.storage.layout.keys import log_key
from libs.storage.records.metadata import encode_log_columns
from libs.storage.records.payload_packs import payload_rows
from services.ingest.batches import NOT_SET, Columns
from services.ingest.read.tailing import Recent

__all__ = ["message_rows"]


def message_rows(
    first_id: int,
    columns: Columns,
    payloads: Sequence[bytes | None],
    now_ms: int,
    entries: list[Recent],
) -> Iterator[Change]:
    """Encodes the rows of messages with IDs in a row; adds each entry to `entries` on the way.

    None stands for a payload that has a row already.
    """
    for offset, part in columns.entries():
        created = part.created_at_ms
        if NOT_SET in created:
            part.created_at_ms = [now_ms if at == NOT_SET else at for at in created]
        sequence = first_id + offset
        with encoding(f"log entry {sequence}"):
            encoded = encode_log_columns(
                sequence,
                now_ms,
                part.created_at_ms,
                part.retention_s,
                part.header_bytes,
                part.payload_bytes,
                part.visible_at_ms,
                part.delay_ms,
                part.direct_queue_id,
            )
        entries.append(Recent(sequence, sequence + len(part) - 1, encoded))
        yield log_key(sequence), encoded
        with encoding(f"payloads from message {sequence} on"):
            yield from payload_rows(sequence, payloads[offset : offset + len(part)])
