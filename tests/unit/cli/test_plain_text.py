"""Plain text of encrypted messages, on its way to be published by a client without keys."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from slatemq.cli.output import payload_fields
from slatemq.cli.publish.lines import LineError, LineReader, parse_pointers
from slatemq.cli.publish.plain_text import publish_problem
from slatemq.encryption import KEY_HEADER, KeyRing, new_key
from slatemq.models import OutgoingMessage

RING = KeyRing({"2026": new_key()}, "2026")
KEYED = {KEY_HEADER: "2026"}
SEALED = RING.encrypt(b"PIN 4711")


def printed(payload: bytes, headers: dict[str, str]) -> bytes:
    """A message as `claim --json` prints it."""
    return json.dumps({"message_id": "7", **payload_fields(payload), "headers": headers}).encode()


@pytest.mark.parametrize("payload", [b"PIN 4711", b"", b"\xff" * 200])
def test_a_printed_message_that_was_decrypted_is_published_with_keys_alone(payload: bytes) -> None:
    line = printed(payload, KEYED)

    for text in (line, line + b"\n", printed(b"", {}) + b"\n" + line, b" [1]\n" + line):
        assert "it is plain text" in publish_problem(text, {}, has_keys=False)
        assert publish_problem(text, {}, has_keys=True) == ""


@pytest.mark.parametrize(
    "text",
    [
        printed(SEALED, KEYED),
        printed(b"PIN 4711", {"about": KEY_HEADER}),
        json.dumps({"message_id": "7", "headers": KEYED}).encode(),
        json.dumps([KEYED]).encode(),
        json.dumps({"headers": None, "payload": KEY_HEADER}).encode(),
        json.dumps({"headers": KEYED, "payload": None}).encode(),
        b"slatemq-key is a header",
        b"\xffslatemq-key",
    ],
)
def test_what_shows_no_plain_text_is_published_by_any_client(text: bytes) -> None:
    assert publish_problem(text, {}, has_keys=False) == ""
    assert publish_problem(text, {}, has_keys=True) == ""


def test_a_header_of_a_key_goes_with_what_is_encrypted() -> None:
    assert "it is plain text" in publish_problem(b"PIN 4711", KEYED, has_keys=False)
    assert publish_problem(SEALED, KEYED, has_keys=False) == ""
    assert publish_problem(b"PIN 4711", KEYED, has_keys=True) == ""
    assert "is encrypted already" in publish_problem(SEALED, KEYED, has_keys=True)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (printed(b"PIN 4711", KEYED), {}),
        (b'{"slatemq-key": "2026"}', {"pointers": parse_pointers(["/slatemq-key"])}),
        (b"PIN 4711", {"template": OutgoingMessage(b"", KEYED)}),
    ],
)
def test_a_line_of_plain_text_is_named(line: bytes, options: dict[str, Any]) -> None:
    batch = LineReader(io.BytesIO(line), **options, has_keys=True).next_batch()
    assert batch is not None
    assert batch.messages[0].payload == line

    with pytest.raises(LineError, match=r"^line 1: .* it is plain text"):
        LineReader(io.BytesIO(line), **options).next_batch()
