"""Push: messages that are older than their rows keep the end of their retention."""

from __future__ import annotations

from pathlib import Path

import pytest

from slatemq.errors import InvalidArgument
from tests.integration.ingest.server import serving
from tests.integration.ingest.test_push import push_rows, row, stored


async def test_an_older_message_keeps_its_end_and_one_that_is_over_is_passed_over(
    tmp_path: Path,
) -> None:
    root = tmp_path.as_uri()
    async with serving(root) as ingest:
        (published,) = await ingest.send(b"published")
        (now_ms,) = [one.received_at_ms for one in await ingest.log()]
        # However long its row has waited, it has what is left until its end, in whole seconds.
        hour = row(1, retention_deadline_ms=now_ms + 3_600_000)
        over = [row(n, retention_deadline_ms=end) for n, end in ((2, 1), (3, now_ms))]
        assert await push_rows(ingest, 1, hour, *over, row(4)) == 4
        assert await push_rows(ingest, 5, row(5, retention_deadline_ms=1)) == 5
    async with serving(root) as ingest:
        # Those passed over count as stored, also after a restart.
        assert await push_rows(ingest, 2, *over, row(4), row(5), row(6)) == 6

        log = await ingest.log()
        assert log[0].message_id == published
        assert await stored(ingest) == [b"published", b"1", b"4", b"6"]
        ends_ms = log[1].received_at_ms + log[1].retention_s * 1000
        assert now_ms + 3_599_000 <= ends_ms <= now_ms + 3_600_000


async def test_an_end_before_all_time_is_refused() -> None:
    async with serving() as ingest:
        with pytest.raises(InvalidArgument) as refused:
            await push_rows(ingest, 1, row(1), row(2, retention_deadline_ms=-1))
        assert refused.value.field == "messages[1].retention_deadline_ms"
        assert await stored(ingest) == []
