"""Pages of listings, in the same words for all callers."""

from __future__ import annotations

from slatemq.errors import InvalidArgument

PAGE_SIZE = 100
PAGE_SIZE_MAX = 1000


def checked_page_size(asked: int, default: int = PAGE_SIZE, most: int = PAGE_SIZE_MAX) -> int:
    """How many items a page may have; InvalidArgument where less than none are asked for."""
    if asked < 0:
        raise InvalidArgument("page_size", "must not be negative", reason="OUT_OF_RANGE")
    return min(asked or default, most)


def bad_page_token() -> InvalidArgument:
    return InvalidArgument(
        "page_token",
        "was not returned by this listing; start again without a page token",
        reason="INVALID_PAGE_TOKEN",
    )
