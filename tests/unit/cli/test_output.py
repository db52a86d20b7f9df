"""Tables for people."""

import pytest

from slatemq.cli.output import PIECE_LENGTH, json_line, json_pieces, write_table


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


def test_a_long_text_is_the_same_json_in_pieces() -> None:
    text = '"\\\n\t\x00\x7fé漢😀' * PIECE_LENGTH
    fields = {"offset": 1, "text": text, "variables": [{"name": None, "value": "x"}], "state": "y"}

    pieces = list(json_pieces(fields))

    assert b"".join(pieces) == json_line(fields)
    assert max(map(len, pieces)) < len(json_line(fields)) / 4
