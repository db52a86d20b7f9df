"""What a stack says of its processes."""

import pytest

from services.stack.stack import listed


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["ingest"], "ingest"),
        (["ingest", "broker"], "ingest and broker"),
        (["router", "janitor", "console"], "router, janitor and console"),
    ],
)
def test_processes_are_listed_as_a_sentence_does(names: list[str], text: str) -> None:
    assert listed(names) == text
