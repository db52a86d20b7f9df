"""The programs of examples/events: what they refuse, and what they leave out."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from types import ModuleType

import pytest

from examples.events import audit_log, cached_files, replicate, webhooks
from examples.events.audit_log_redis import events_of
from slatemq.events import encode_event
from tests.unit.events.test_kafka_events import created


@pytest.mark.parametrize("secret", ["", "secret", "whsec_", "whsec_c2hvcnQ=", "whsec_" + "A" * 88])
def test_webhooks_are_not_sent_with_what_is_no_secret(
    secret: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEBHOOK_SECRET", secret)
    monkeypatch.setattr(sys, "argv", ["webhooks", "http://127.0.0.1:9/"])
    with pytest.raises(SystemExit) as ended:
        webhooks.main()
    assert ended.value.code == 2
    assert "WEBHOOK_SECRET" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("120", 120),
        ("86400", 3600),
        ("0", None),
        ("Mon, 30 Nov 2026 01:02:00 GMT", 120),
        ("Monday, 30-Nov-26 01:02:00 GMT", 120),
        ("Mon Nov 30 01:02:00 2026", 120),
        ("Tue, 01 Dec 2026 01:00:00 GMT", 3600),
        ("Mon, 30 Nov 2026 00:59:00 GMT", None),
        ("", None),
        ("soon", None),
        ("Mon, 32 Nov 2026 01:02:00 GMT", None),
    ],
)
def test_a_receiver_says_how_long_to_wait_in_seconds_or_by_a_date(
    header: str, wait_s: float | None
) -> None:
    assert webhooks.wait_s(header, datetime(2026, 11, 30, 1, tzinfo=UTC)) == wait_s


def test_an_audit_log_leaves_out_what_is_not_an_event(caplog: pytest.LogCaptureFixture) -> None:
    event = created("photos")
    entries: list[tuple[bytes, dict[bytes, bytes]]] = [
        (b"1-0", {b"data": b"not JSON"}),
        (b"2-0", {b"another": b"field"}),
        (b"3-0", {}),
        (b"4-0", {b"data": encode_event(event)}),
    ]
    assert events_of(entries) == [event]
    assert [message.partition(" is not")[0] for message in caplog.messages] == [
        "entry 1-0",
        "entry 2-0",
    ]


@pytest.mark.parametrize("program", [audit_log, cached_files, replicate, webhooks])
def test_the_help_of_a_program_has_no_marks_of_a_markup_language(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit):
        program.main()
    assert "::" not in capsys.readouterr().out
