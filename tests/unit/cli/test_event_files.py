"""Files of notifications, read before anything is published."""

from __future__ import annotations

import io
import json
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from slatemq.cli.app import invoke
from slatemq.cli.failures import BadInput
from slatemq.cli.publish.events import DOCUMENT_BYTES_MAX, read_documents
from tests.unit.events.test_s3 import document, record

OTHER = document(record("s3:ObjectRemoved:Delete"), record("ObjectTagging:Put"))


def types(text: bytes) -> list[list[str]]:
    """The types of the events, by document."""
    found = read_documents(io.BytesIO(text), "f")
    return [[event.type for event in one.notifications.events] for one in found]


def test_a_file_is_one_document_or_one_on_each_line() -> None:
    one = document(record())
    pretty = json.dumps(json.loads(one), indent=2).encode()

    assert types(one) == types(one + b"\n") == types(pretty) == types(b"\n\n" + pretty + b"\n")
    assert types(one) == [["object.created"]]
    assert types(one + b"\n\n" + OTHER + b"\r\n" + one) == [
        ["object.created"],
        ["object.deleted"],
        ["object.created"],
    ]
    assert types(b"") == types(b"\n \n") == []


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    one = document(record())
    pretty = json.dumps(json.loads(one), indent=2).encode()

    for text in (one, pretty, one + b"\n" + OTHER):
        (*_, last) = read_documents(io.BytesIO(BOM_UTF8 + text), "f")
        assert types(BOM_UTF8 + text) == types(text)
        assert last.end == len(BOM_UTF8 + text)
    assert types(BOM_UTF8) == []


def test_each_document_says_where_it_ends_and_what_is_left_out() -> None:
    text = document(record()) + b"\n" + OTHER + b"\n"
    first, second = read_documents(io.BytesIO(text), "f")
    assert first.end == len(document(record())) + 1
    assert second.end == len(text)
    assert second.notifications.skipped_count == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (document(record()) + b"\n\n{\n", "f, line 3: notification: is not JSON"),
        (document(record()) + b"\n" + document(5), "f, line 2: Records[0]: "),
        (b"\n" + document(record(), record(eventTime="soon")), "f, line 2: Records[1].eventTime"),
        (b'{"Records": [\n {},\n 5 x\n]}', "f, line 3: notification: is not JSON"),
        (b'\n{"Records": [\n {}\n]}', "f, line 2: Records[0]"),
        (b"no JSON", "f, line 1: notification: is not JSON"),
        (b"{" + b" " * DOCUMENT_BYTES_MAX, "f, line 1: has more than 16,777,216 bytes"),
        (b"{\n" + b"\n" * DOCUMENT_BYTES_MAX, "f, line 1: is neither JSON"),
    ],
)
def test_what_is_wrong_is_named_by_file_line_and_field(text: bytes, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        list(read_documents(io.BytesIO(text), "f"))
    assert str(refused.value).startswith(said), str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (document(record()) + b"\n{\n", "f.json, line 2: notification: is not JSON"),
        (
            document(record(eventTime="9999-12-31T23:59:59.9999Z")),
            "f.json, line 1: Records[0].eventTime: must be ISO 8601",
        ),
        (b"\n", "f.json has no notifications"),
    ],
)
def test_a_wrong_file_ends_with_2_before_any_server_is_asked(
    text: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.json"
    file.write_bytes(text)

    assert invoke(["events", "import", str(file), "--endpoint", "127.0.0.1:1"]) == 2
    assert said in capsys.readouterr().err
