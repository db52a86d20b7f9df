"""Tables for people."""

from collections.abc import AsyncIterator

import pytest

from slatemq._admin.entry_models import Entry, EntryState, entry_of, state_wire
from slatemq.cli.entry_output import write_entries
from slatemq.cli.output import PIECE_LENGTH, json_line, json_pieces, write_table
from slatemq.cli.session import Session
from slatemq.errors import Unavailable
from slatemq.v1 import entry_pb2


def test_a_table_is_lined_up_and_never_folded(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    handle = "orders/" + "1" * 300

    write_table(("message", "state", "handle"), [(7, "日本", handle), (12345678, "open", "b\nc")])

    assert capfdbinary.readouterr().out.decode().splitlines() == [
        " message  state  handle",
        f"       7  日本   {handle}",
        "12345678  open   b\\nc",
    ]


def test_a_table_without_rows_has_its_head(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_table(("queue", "state"), [])

    assert capfdbinary.readouterr().out == b"queue  state\n"


async def test_a_listing_that_breaks_off_shows_what_came_before(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    async def listing() -> AsyncIterator[Entry]:
        state = state_wire(EntryState.AVAILABLE)
        yield entry_of(entry_pb2.Entry(message_id=7, handle="orders/7", state=state), None)
        raise Unavailable("broker 1 is down", reason="INCOMPLETE")

    with pytest.raises(Unavailable):
        await write_entries(Session(), listing(), EntryState.AVAILABLE, None, False)

    assert b"orders/7" in capfdbinary.readouterr().out


def test_a_long_text_is_the_same_json_in_pieces() -> None:
    text = '"\\\n\t\x00\x7fé漢😀' * PIECE_LENGTH
    fields = {"offset": 1, "text": text, "variables": [{"name": None, "value": "x"}], "state": "y"}

    pieces = list(json_pieces(fields))

    assert b"".join(pieces) == json_line(fields)
    assert max(map(len, pieces)) < len(json_line(fields)) / 4
