"""The pages of an export: how long they are, and what it says of those that are missing."""

import io
from types import SimpleNamespace
from typing import Any

import pytest

from slatemq._admin.entry_models import Entry, EntryPage, EntryState, StoredMessage
from slatemq.cli.files.exporting import (
    FIRST_PAGE_COUNT,
    PAGE_BYTES,
    PAGE_COUNT_MAX,
    next_size,
    write_export,
)
from slatemq.errors import INCOMPLETE, Unavailable


def entries(count: int, payload_bytes: int) -> list[Entry]:
    message = StoredMessage(1, b"x" * payload_bytes, {}, 0, 0, 0)
    return [Entry("h", "q", 1, EntryState.AVAILABLE, message=message)] * count


@pytest.mark.parametrize(
    ("payload_bytes", "count"),
    [
        (0, PAGE_COUNT_MAX),
        (100, PAGE_COUNT_MAX),
        (PAGE_BYTES // 100, 100),
        (PAGE_BYTES, 1),
        (32 * PAGE_BYTES, 1),
    ],
)
def test_a_page_has_as_many_messages_as_fit_into_its_bytes(payload_bytes: int, count: int) -> None:
    size = FIRST_PAGE_COUNT
    for _ in range(5):
        size = next_size(entries(size, payload_bytes), size)

    assert size == count


def test_pages_grow_step_by_step_and_stay_as_they_are_where_nothing_came() -> None:
    gone = Entry("h", "q", 1, EntryState.DONE)  # its message is not stored any more

    assert next_size([gone] * 3, 4) == 16
    assert next_size([], 16) == 16


class TwoPartitions:
    """A queue whose first partition is on a broker that is down."""

    async def get_queue(self, _: str) -> Any:
        return SimpleNamespace(counts=SimpleNamespace(available_count=3))

    async def entry_page(self, *_: Any, page_token: str, **__: Any) -> EntryPage:
        if not page_token:
            return EntryPage([], "1|", {4: Unavailable("does not answer")})
        return EntryPage(entries(3, 10), "", {})


@pytest.mark.parametrize("limit", [1, 3, None])
async def test_an_export_says_which_brokers_it_lacks_also_where_it_ends_at_its_limit(
    limit: int | None,
) -> None:
    client: Any = TwoPartitions()
    session: Any = SimpleNamespace(json=True)
    out = io.BytesIO()

    done = await write_export(session, client, "q", EntryState.AVAILABLE, out, limit, {})

    assert (done.messages_count, out.getvalue().count(b"\\id=")) == (limit or 3, limit or 3)
    assert isinstance(done.problem, Unavailable)
    assert done.problem.reason == INCOMPLETE
    assert "broker shard 4 does not answer" in done.problem.message
