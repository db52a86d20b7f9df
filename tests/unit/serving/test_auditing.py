"""Which acts are recorded: all that were permitted, and some of many refusals."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.access import audit
from libs.access.audit import READ_MAX, SUBJECTS_MAX, Act, subjects_of
from libs.access.principals import Principal
from libs.serving.process import logs
from libs.serving.process.logs import AUDIT_LOGGER, REPEAT_S, REPEATS_MAX, RepeatLimit
from libs.serving.requests.auditing import Auditor
from slatemq._rpc.rpc_status import grpc_code, to_status
from slatemq._secrets import redacted
from slatemq.errors import PermissionDenied, ResourceExhausted, SlateMQError, Unauthenticated
from tests.manual_clock import ManualSeconds

PURGE = "/slatemq.v1.QueueService/PurgeQueue"


@pytest.fixture
def clock() -> ManualSeconds:
    return ManualSeconds()


@pytest.fixture
def published() -> list[Act]:
    return []


@pytest.fixture
def auditor(published: list[Act], clock: ManualSeconds) -> Auditor:
    return Auditor("broker-0", published.append, clock)


def act(outcome: str, principal: str = "shop") -> Act:
    return Act(
        principal, "token", PURGE, ("orders",), ("job=repair",), "ipv4:127.0.0.1:5", outcome, ""
    )


def test_a_flood_of_refusals_is_counted_and_hides_no_other_caller(
    auditor: Auditor, published: list[Act], clock: ManualSeconds
) -> None:
    for _ in range(1000):
        auditor.record(act("PERMISSION_DENIED"))
    auditor.record(act("PERMISSION_DENIED", "other"))
    clock.now_s += REPEAT_S + 1
    auditor.record(act("PERMISSION_DENIED"))

    assert [one.principal for one in published] == ["shop"] * REPEATS_MAX + ["other", "shop"]
    assert [one.held_back for one in published] == [0] * (REPEATS_MAX + 1) + [1000 - REPEATS_MAX]


@pytest.mark.parametrize("outcome", ["OK", "NOT_FOUND", "UNAVAILABLE", "CANCELLED"])
def test_each_act_of_who_may_do_it_is_recorded(
    auditor: Auditor, published: list[Act], outcome: str
) -> None:
    for _ in range(100):
        auditor.record(act(outcome))

    assert len(published) == 100


class Call:
    """Of its connection nothing may be read once it has ended."""

    def __init__(self, code: int = 0) -> None:
        self.has_ended = False
        self._code = code
        self._callbacks: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        assert not self.has_ended
        return "ipv4:127.0.0.1:5"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        assert not self.has_ended
        return (("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"),)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def code(self) -> int:
        return self._code

    def end(self) -> None:
        self.has_ended = True
        for callback in self._callbacks:
            callback(self)


def test_where_a_call_came_from_is_read_while_it_lasts(
    auditor: Auditor, published: list[Act]
) -> None:
    """Read at its end, it crashed processes of which hostile clients had closed the connections."""
    call: Any = Call(5)
    auditor.watch(call, PURGE, ("orders",), (), None)

    call.end()

    (act,) = published
    assert (act.peer, act.outcome, act.request_id) == ("ipv4:127.0.0.1:5", "NOT_FOUND", "1" * 32)


@pytest.mark.parametrize(
    ("principal", "refusal"),
    [
        (Principal("shop", "token"), PermissionDenied("no rule")),
        (None, Unauthenticated("forged")),
        (None, ResourceExhausted("too many tokens wait to be checked")),
    ],
)
def test_callers_that_cancel_what_is_refused_are_held_back_as_others(
    auditor: Auditor, published: list[Act], principal: Principal | None, refusal: SlateMQError
) -> None:
    for _ in range(100):
        call: Any = Call()  # gRPC has no code of a call that its caller has cancelled.
        auditor.watch(call, PURGE, (), (), principal, refusal)
        call.end()

    assert len(published) == REPEATS_MAX
    assert {one.outcome for one in published} == {grpc_code(to_status(refusal)).name}


def test_a_line_says_who_did_what_from_where_with_which_result(
    auditor: Auditor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    auditor.record(act("OK"))
    auditor.record(act("PERMISSION_DENIED"))

    permitted, refused = caplog.records
    facts = ("source", "principal", "proof", "act", "subjects", "details", "peer", "outcome")
    assert [getattr(permitted, name) for name in facts] == [
        "broker-0",
        "shop",
        "token",
        PURGE,
        "orders",
        "job=repair",
        "ipv4:127.0.0.1:5",
        "OK",
    ]
    assert (permitted.levelno, refused.levelno) == (logging.INFO, logging.WARNING)


def test_an_event_has_no_secret_that_the_line_lacks(
    auditor: Auditor, published: list[Act], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)
    detail = 'filter=headers.t == "smq_abc23_SECRET-x_4yz0987654321"'
    auditor.record(replace(act("OK"), subjects=("redis://:SECRET@h",), details=(detail,)))

    (one,), (record,) = published, caplog.records
    assert (one.subjects, one.details) == (("redis://***@h",), ('filter=headers.t == "***"',))
    assert "SECRET" not in str(vars(record))


def test_each_new_version_of_a_file_is_an_act_at_every_level(
    auditor: Auditor, published: list[Act]
) -> None:
    out = io.StringIO()
    with configured("error", out):
        for version in range(2, 102):
            auditor.record_file(Path("/etc/policy.yaml"), version)

    assert len(published) == len(out.getvalue().splitlines()) == 100
    assert published[0].details == ("file=/etc/policy.yaml", "version=2")
    assert "source=broker-0" in out.getvalue()
    assert "act=read-file" in out.getvalue()


@contextmanager
def configured(level: str, out: io.StringIO) -> Iterator[None]:
    """The log of a process, and then the one before."""
    root, audit = logging.getLogger(), logging.getLogger(AUDIT_LOGGER)
    before = root.handlers[:], root.level, audit.level
    logs.configure("broker", level, "text", out)
    try:
        yield
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        audit.setLevel(before[2])


def test_the_log_holds_back_no_more_of_them(
    auditor: Auditor, caplog: pytest.LogCaptureFixture
) -> None:
    limit = RepeatLimit()
    for name in map(str, range(100)):
        auditor.record(act("PERMISSION_DENIED", name))

    assert all(limit.filter(record) for record in caplog.records)
    assert len(caplog.records) == 100


def test_an_act_names_a_bounded_number_of_bounded_queues() -> None:
    named = subjects_of(f"{number}-{'x' * 1_000_000}" for number in range(1000))

    assert len(named) == SUBJECTS_MAX
    assert max(map(len, named)) == 255
    assert subjects_of(["b", "a", "b"]) == ("b", "a")


@pytest.mark.parametrize(
    "secret",
    ["redis://user:hunter2-of-some-length@h", "smq_abcdefghij_hunter2abcdefghijklmnopqrst"],
)
@pytest.mark.parametrize("place", range(200, 256, 5))
def test_what_is_cut_has_no_part_of_a_secret(secret: str, place: int) -> None:
    (detail,) = subjects_of([f"filter=a != '{'p' * place}' && b == '{secret}'"])

    assert len(detail) <= 255
    assert "hunter2" not in detail


def test_secrets_are_looked_for_in_the_texts_that_an_act_has_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []

    def counted(text: str) -> str:
        lengths.append(len(text))
        return redacted(text)

    monkeypatch.setattr(audit, "redacted", counted)

    subjects_of(["x" * 5_000] * READ_MAX)
    subjects_of(f"{number}-{'x' * 5_000}" for number in range(READ_MAX))

    assert lengths == [1_024] * (1 + SUBJECTS_MAX)


@pytest.mark.parametrize(("distinct", "read"), [(READ_MAX, SUBJECTS_MAX), (1, READ_MAX)])
def test_no_more_of_a_request_is_read_than_its_act_can_name(distinct: int, read: int) -> None:
    texts = iter([str(number % distinct) for number in range(2 * READ_MAX)])

    assert len(subjects_of(texts)) == min(distinct, SUBJECTS_MAX)
    assert len(list(texts)) == 2 * READ_MAX - read
