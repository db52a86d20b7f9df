"""What limits count of a call."""

from __future__ import annotations

from libs.access.current import headers_size


def test_headers_count_by_their_bytes() -> None:
    assert headers_size({}) == 0
    assert headers_size({"tenant": "acme"}) == 10
    assert headers_size({"name": "müller", "ä": "😀"}) == 4 + 7 + 2 + 4
