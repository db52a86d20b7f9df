"""How long the pages of an export are."""

import pytest

from slatemq._admin.entry_models import Entry, EntryState, StoredMessage
from slatemq.cli.files.exporting import FIRST_PAGE_COUNT, PAGE_BYTES, PAGE_COUNT_MAX, next_size


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
