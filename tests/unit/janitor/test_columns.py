"""Columns that are not asked for are not made, and the others are as if all were."""

from __future__ import annotations

import re

import pytest

from libs.storage.arrow.log import log_batches
from libs.storage.arrow.queues import QueueShard
from libs.storage.errors import CorruptRecord
from libs.storage.layout.keys import (
    active_key,
    attempts_key,
    done_key,
    failed_key,
    log_key,
    payload_key,
)
from libs.storage.layout.own_keys import archived_key
from libs.storage.layout.primitives import Row
from libs.storage.records.archived_records import ArchivedMessage, encode_archived
from libs.storage.records.metadata import MessageMetadata, encode_log_entry
from libs.storage.records.payloads import encode_inline, encode_uri
from libs.storage.records.queues import (
    AvailableMessage,
    DoneMessage,
    FailedAttempt,
    FailedMessage,
    InFlightMessage,
    encode_active,
    encode_attempts,
    encode_done,
    encode_failed,
)
from services.janitor.spark.tables import TABLES, Bucketed

HERE = Bucketed(QueueShard("orders", 3), head_order=7, head_offset=1)

ONE = MessageMetadata(1, 10, 20, 30, 40, {"a": "b", "c": "ü"}, 5, 6, "")
OF_ALL_FORMS = [
    (log_key(1), encode_log_entry([ONE, ONE._replace(message_id=2, direct_queue_id="q")])),
    # Messages of different times: the exact decoder reads it.
    (log_key(3), encode_log_entry([ONE._replace(message_id=3, received_at_ms=n) for n in (1, 2)])),
]

ROWS: dict[str, list[Row]] = {
    "messages": OF_ALL_FORMS,
    "payloads": [(payload_key(1), encode_inline(b"x")), (payload_key(2), encode_uri("s3://b/c"))],
    "active": [
        (
            active_key("orders", 7),
            encode_active(
                [AvailableMessage(n, 2, 3, 4, 5) for n in (1, 2)],
                [InFlightMessage(6, 7, 8, 9, 10, 11, 12, "c", 13)],
            ),
        )
    ],
    "done": [(done_key("orders", 1), encode_done([DoneMessage(1, 2, 3, "w", 4, 5, "q")] * 2))],
    "failed": [(failed_key("orders", 1), encode_failed([FailedMessage(1, 2, 3, 4, 5, "why")]))],
    "archived": [
        (archived_key("orders", 1), encode_archived([ArchivedMessage(1, 2, 3, 4, 5, 6, "run")]))
    ],
    "attempts": [
        (attempts_key("orders", 1), encode_attempts([FailedAttempt("a", 1, "b", "c")] * 2))
    ],
}


@pytest.mark.parametrize("name", ROWS)
def test_each_column_alone_is_what_it_is_among_all(name: str) -> None:
    table, rows = TABLES[name], ROWS[name]
    assert table.decode is not None
    whole = table.decode(rows, HERE, table.schema)
    assert sum(batch.num_rows for batch in whole) > 0
    first, *others = table.schema.names
    for names in [[first], *([other, first] for other in others)]:
        some = table.only(names)
        assert some.decode is not None
        text = some.decode(rows, HERE, some.schema)
        assert [batch.schema for batch in text] == [some.schema] * len(whole)
        for batch, among in zip(text, whole, strict=True):
            batch.validate(full=True)
            assert batch.to_pylist() == among.select(some.schema.names).to_pylist()


def test_who_wants_ids_of_payloads_does_not_look_at_their_contents() -> None:
    rows = [*ROWS["payloads"], (payload_key(3), b"\x09damaged")]
    ids = TABLES["payloads"].only(["ingest_shard", "message_id"])
    assert ids.decode is not None
    (batch,) = ids.decode(rows, HERE, ids.schema)
    assert batch.column("message_id").to_pylist() == [1, 2, 3]
    with pytest.raises(CorruptRecord):
        ids.decode(rows, HERE, TABLES["payloads"].schema)


def test_who_does_not_want_headers_does_not_look_at_their_texts() -> None:
    entry = encode_log_entry([ONE])
    rows = [(log_key(1), entry.replace("ü".encode(), b"\xff\xff"))]
    sizes = TABLES["messages"].only(["payload_bytes"])
    (batch,) = log_batches(rows, sizes.schema)
    assert batch.to_pylist() == [{"payload_bytes": 6}]
    with pytest.raises(CorruptRecord):
        log_batches(rows)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["message_id", "id"], "'id' is not a column of done, which has queue, broker_shard"),
        (["queue", "day", "queue"], "column 'queue' is named twice"),
        ([], "no column of done is named"),
    ],
)
def test_columns_that_a_table_does_not_have_are_named(names: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        TABLES["done"].only(names)
