"""What people see of payloads, whatever is in them."""

from __future__ import annotations

import pytest

from services.console import formats
from services.console.charts import sparkline
from services.console.pages.dead_letters import _editable, _payload_of

DEEP = b"[" * 900 + b"1," * 31_000 + b"1" + b"]" * 900


@pytest.mark.parametrize(
    ("payload", "form"),
    [
        (b'{"a": 1}', "json"),
        (b"[1, 2]", "json"),
        (b"{not json", "text"),
        (b"Hello\r\nworld", "text"),
        ("Tür".encode(), "text"),
        (b"\xff\xfe", "hex"),
        (b"a\x00b", "hex"),
        (b"x" * (formats.SHOWN_BYTES_MAX - 1) + "ü".encode(), "text"),
        (b"[" * 100_000, "text"),
        (b'{"a": "\\ud800"}', "text"),
        (b'{"\\udfff": 1}', "text"),
        (b'["\\ud83d\\ude00"]', "json"),
        (DEEP, "text"),
        (b"", "text"),
    ],
)
def test_a_payload_is_shown_in_the_form_that_fits(payload: bytes, form: str) -> None:
    assert formats.best_form(payload) == form


def test_a_large_payload_is_cut_and_says_so() -> None:
    text, note = formats.shown(b"x" * 100_000, "text")

    assert len(text) == formats.SHOWN_BYTES_MAX
    assert note == "The first 64.0 KiB of 97.7 KiB: download it for all."


def test_hex_has_offsets_and_what_can_be_printed() -> None:
    text, note = formats.shown(b"0123456789abcdef\x00\xffz", "hex")

    first, second = text.splitlines()
    assert first.startswith("00000000  30 31 32")
    assert first.endswith("0123456789abcdef")
    assert second.endswith("··z")
    assert note == ""


@pytest.mark.parametrize("payload", [DEEP, b'{"a": "\\ud800"}', b"[1]" + b" " * 100_000])
def test_any_payload_is_shown_in_every_form_within_bounds(payload: bytes) -> None:
    for form in formats.FORMS:
        text, note = formats.shown(payload, form)

        assert len(text.encode()) <= formats.INDENTED_LENGTH_MAX
        assert ("shown as text" in note) == (form == "json")


def test_what_is_not_json_is_shown_as_text_with_a_note() -> None:
    assert formats.shown(b"{oops", "json") == (
        "{oops",
        "This is not JSON, or too large: shown as text.",
    )


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"one",
        b"a\nb\n",
        b"a\r\nb",
        b"\na",
        b"a\rb",
        b"a\nb\r\nc",
        b"\x00",
        b"\xff",
        "ü€".encode(),
    ],
)
def test_a_payload_that_is_edited_comes_back_unchanged(payload: bytes) -> None:
    form, text = _editable(payload)

    sent = "\r\n".join(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    assert _payload_of(sent, form) == payload


@pytest.mark.parametrize(
    ("length_ms", "text"),
    [(None, "–"), (0, "0 ms"), (999, "999 ms"), (4_200, "4.2 s"), (125_000, "2.1 min"),
     (7_200_000, "2.0 h"), (30 * 86_400_000, "30 d")],
)  # fmt: skip
def test_spans_have_two_digits(length_ms: int | None, text: str) -> None:
    assert formats.span(length_ms) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes_have_units(count: int, text: str) -> None:
    assert formats.size(count) == text


def test_a_chart_ends_at_the_right_and_its_label_cannot_break_out() -> None:
    svg = sparkline([0, 5, 10], '"><script>', slots=5)

    assert "<script>" not in svg
    assert "now 10, at most 10" in svg
    assert '<polyline points="60.0,26.0 90.0,14.0 120.0,2.0"/>' in svg
    assert "polyline" not in sparkline([], "none")
