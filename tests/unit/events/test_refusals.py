"""How large a message may be, by what a server says of one that is larger."""

from __future__ import annotations

import pytest

from libs.events.refusals import bytes_max_by


@pytest.mark.parametrize(
    ("text", "bytes_max"),
    [
        (
            "PRECONDITION_FAILED - message size 200233 is larger than configured max size 65536",
            65_536,
        ),
        ("PRECONDITION_FAILED - message size 600000000 is larger than max size 536870912", 1 << 29),
        ("PRECONDITION_FAILED - queue limit in vhost '/' (10) is reached", None),
    ],
)
def test_rabbitmq_says_how_large_a_message_may_be(text: str, bytes_max: int | None) -> None:
    assert bytes_max_by(text) == bytes_max
