"""What every request passes before a page sees it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import pytest
from opentelemetry import trace
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.serving.process.logs import AUDIT_LOGGER
from services.console import sessions
from services.console.config import LOOPBACK_NAMES, ConsoleConfig
from services.console.guard import BODIES_MAX, BODY_BYTES_MAX, FORM_TOKEN, LARGE_BYTES, Guard
from services.console.service import check
from services.console.sessions import Session, SessionSeal
from slatemq.errors import InvalidArgument

SEAL = SessionSeal(600)
SESSION = Session("smq_secret")
FORM = {"content-type": "application/x-www-form-urlencoded"}


async def page(scope: Scope, receive: Receive, send: Send) -> None:
    state = Request(scope).state
    trace_id = trace.get_current_span().get_span_context().trace_id
    headers = {"trace-id": f"{trace_id:032x}"}
    text = f"{state.session.token} {state.form}"
    await PlainTextResponse(text, headers=headers)(scope, receive, send)


class Answer:
    def __init__(self, messages: list[Message]) -> None:
        self.status: int = messages[0]["status"]
        self.headers = [(key.decode(), value.decode()) for key, value in messages[0]["headers"]]
        self.text = b"".join(one.get("body", b"") for one in messages[1:]).decode()

    def __getitem__(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")


def scope_of(
    method: str, host: str = "localhost:7424", scheme: str = "http", **headers: str
) -> dict[str, Any]:
    given = {"host": host} | {name.replace("_", "-"): value for name, value in headers.items()}
    return {
        "type": "http",
        "method": method,
        "scheme": scheme,
        "path": "/",
        "client": ("10.0.0.7", 50123),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }


def ask(
    method: str = "GET",
    parts: Iterable[bytes] = (),
    host: str = "localhost:7424",
    scheme: str = "http",
    hosts: frozenset[str] = LOOPBACK_NAMES,
    page: ASGIApp = page,
    **headers: str,
) -> Answer:
    scope = scope_of(method, host, scheme, **headers)
    incoming = [
        *({"type": "http.request", "body": part, "more_body": True} for part in parts),
        {"type": "http.request", "body": b"", "more_body": False},
    ]
    answers: list[Message] = []

    async def receive() -> Message:
        return incoming.pop(0)

    async def send(message: Message) -> None:
        answers.append(message)

    asyncio.run(Guard(page, SEAL, hosts)(scope, receive, send))
    return Answer(answers)


def post(fields: dict[str, str], *, session: Session = SESSION, **headers: str) -> Answer:
    body = urlencode({FORM_TOKEN: SEAL.form_token(SESSION), **fields}).encode()
    cookie = f"slatemq={SEAL.seal(session)}"
    given: dict[str, Any] = {"content_type": FORM["content-type"], **headers}
    return ask("POST", [body], cookie=cookie, **given)


def test_a_form_of_a_page_of_ours_arrives_with_the_persons_token() -> None:
    answer = post({"queue": "a b"}, origin="http://localhost:7424", sec_fetch_site="same-origin")

    assert answer.status == 200
    assert answer.text.startswith("smq_secret {")
    assert "'queue': ['a b']" in answer.text


LARGE = b"&x=" + b"y" * LARGE_BYTES


def sender_of(
    guard: Guard, session: Session, *, is_whole: bool = True
) -> Callable[..., Coroutine[Any, Any, int]]:
    """Sends the parts of a form of a session, and returns the status of its answer."""
    cookie = f"slatemq={SEAL.seal(session)}"
    form = urlencode({FORM_TOKEN: SEAL.form_token(session)}).encode()

    async def send_form(*more: bytes) -> int:
        parts = [form, *more]
        incoming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        answers: list[Message] = []

        async def receive() -> Message:
            if incoming:
                return incoming.pop(0)
            if not is_whole:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            answers.append(message)

        await guard(scope_of("POST", cookie=cookie, **FORM), receive, send)
        return int(answers[0]["status"])

    return send_form


async def test_slow_large_forms_hold_up_no_small_one() -> None:
    guard = Guard(page, SEAL, LOOPBACK_NAMES)
    send, stall = sender_of(guard, SESSION), sender_of(guard, SESSION, is_whole=False)

    # Given more forms that stall than there are places for large ones
    stalled = [asyncio.create_task(stall(LARGE)) for _ in range(BODIES_MAX + 1)]
    await asyncio.sleep(0)

    # Then a small one is read at once, and a large one waits
    assert await asyncio.wait_for(send(), 60) == 200
    waiting = asyncio.create_task(send(LARGE))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    stalled[0].cancel()
    stalled[-1].cancel()
    assert await asyncio.wait_for(waiting, 60) == 200
    for task in stalled:
        task.cancel()
    await asyncio.gather(*stalled, return_exceptions=True)


async def test_large_forms_without_a_login_hold_up_none_with_one() -> None:
    guard = Guard(page, SEAL, LOOPBACK_NAMES)
    unknown = sender_of(guard, Session(), is_whole=False)
    stalled = [asyncio.create_task(unknown(LARGE)) for _ in range(BODIES_MAX + 1)]
    await asyncio.sleep(0)

    assert await asyncio.wait_for(sender_of(guard, SESSION)(LARGE), 60) == 200

    for task in stalled:
        task.cancel()
    await asyncio.gather(*stalled, return_exceptions=True)


async def test_where_nothing_is_shown_without_a_login_no_large_form_is_read_without_one() -> None:
    guard = Guard(page, SEAL, LOOPBACK_NAMES, needs_login=True)

    # It does not wait for the rest, which never comes
    assert await sender_of(guard, Session(), is_whole=False)(LARGE) == 413

    assert await sender_of(guard, Session())() == 200
    assert await sender_of(guard, SESSION)(LARGE) == 200
    exposed = ConsoleConfig(host="0.0.0.0")
    assert exposed.needs_login
    assert not replace(exposed, insecure=True).needs_login
    assert not ConsoleConfig().needs_login


async def test_a_large_form_keeps_its_place_until_its_answer() -> None:
    entered, answered = asyncio.Semaphore(0), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        entered.release()
        await answered.wait()
        await page(scope, receive, send)

    guard = Guard(slow, SEAL, LOOPBACK_NAMES)
    body = urlencode({FORM_TOKEN: SEAL.form_token(SESSION), "x": "y" * LARGE_BYTES}).encode()
    cookie = f"slatemq={SEAL.seal(SESSION)}"

    async def send_form() -> int:
        answers: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            answers.append(message)

        await guard(scope_of("POST", cookie=cookie, **FORM), receive, send)
        return int(answers[0]["status"])

    forms = [asyncio.create_task(send_form()) for _ in range(BODIES_MAX + 1)]
    for _ in range(BODIES_MAX):
        await asyncio.wait_for(entered.acquire(), 60)
    await asyncio.sleep(0.01)
    assert entered.locked()
    answered.set()
    assert await asyncio.wait_for(asyncio.gather(*forms), 60) == [200] * (BODIES_MAX + 1)


def test_an_act_is_logged_with_the_browsers_address_and_the_trace_of_its_calls(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    answer = post({})

    (record,) = caplog.records
    facts = vars(record)
    assert (facts["path"], facts["peer"]) == ("/", "10.0.0.7:50123")
    assert facts["request_id"] == answer["trace-id"]
    assert int(answer["trace-id"], 16)

    # Not of those who are not logged in, and could fill the log; nor of a look.
    assert post({}, session=Session(session_id=SESSION.session_id)).status == 200
    ask(cookie=f"slatemq={SEAL.seal(SESSION)}")
    assert caplog.records == [record]


def test_an_act_is_in_the_trace_of_its_request_where_that_is_traced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    context = trace.SpanContext(0xABC, 1, is_remote=False)

    with trace.use_span(trace.NonRecordingSpan(context)):
        answer = post({})

    (record,) = caplog.records
    assert vars(record)["request_id"] == answer["trace-id"] == f"{0xABC:032x}"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "localhost:7424"}, 403),
        ({"origin": "http://user@localhost:7424"}, 403),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/json"}, 415),
        ({"cookie": ""}, 403),
    ],
)
def test_a_form_from_elsewhere_is_refused(changes: dict[str, str], status: int) -> None:
    body = urlencode({FORM_TOKEN: SEAL.form_token(SESSION)}).encode()
    given: dict[str, Any] = {
        "cookie": f"slatemq={SEAL.seal(SESSION)}",
        "content_type": FORM["content-type"],
    }

    answer = ask("POST", [body], **(given | changes))

    assert answer.status == status
    assert "default-src 'none'" in answer["content-security-policy"]
    # Its cookie was held back, and one in its place would log the person out.
    assert answer["set-cookie"] == ""


def test_a_page_that_fails_is_logged_and_has_the_headers_of_all_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def failing(_: Scope, __: Receive, ___: Send) -> None:
        raise RuntimeError("boom")

    answer = ask(page=failing)

    assert (answer.status, "its log says why" in answer.text) == (500, True)
    assert "default-src 'none'" in answer["content-security-policy"]
    (record,) = caplog.records
    assert record.exc_info is not None


def test_a_form_with_the_token_of_another_session_is_refused() -> None:
    assert post({}, session=Session("smq_secret")).status == 403
    assert post({FORM_TOKEN: ""}).status == 403
    assert post({FORM_TOKEN: "ü"}).status == 403


def test_a_form_has_a_bounded_size_whatever_its_header_says() -> None:
    parts = [b"x" * (1 << 20)] * (BODY_BYTES_MAX >> 20) + [b"x"]

    assert ask("POST", parts, content_type=FORM["content-type"], content_length="3").status == 413


def test_a_browser_that_leaves_in_the_middle_of_a_form_is_no_fault_to_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    incoming: list[Message] = [
        {"type": "http.request", "body": b"token=", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return incoming.pop(0)

    async def send(_: Message) -> None:
        pass

    scope = scope_of("POST", content_type=FORM["content-type"])
    asyncio.run(Guard(page, SEAL, LOOPBACK_NAMES)(scope, receive, send))

    assert caplog.records == []


@pytest.mark.parametrize("body", [b"a=%ff", b"\xff", b"&".join([b"a=1"] * 3000)])
def test_a_form_that_cannot_be_read_is_refused(body: bytes) -> None:
    assert ask("POST", [body], content_type=FORM["content-type"]).status == 400


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7424", "localhost.evil.example", ""]
)
def test_on_loopback_a_name_that_points_there_is_refused(host: str) -> None:
    answer = ask(host=host)

    assert answer.status == 421
    assert "smq" not in answer.text


@pytest.mark.parametrize("host", ["[", "a b", "a/b", "a@b", "a:b", "a:1:2", "[::1", "\x00"])
def test_a_host_that_is_none_is_refused_everywhere(host: str) -> None:
    assert ask(host=host, hosts=frozenset()).status == 400


@pytest.mark.parametrize("host", ["", "console.example:443", "my_console", "[fd00::1]:7424"])
def test_other_machines_reach_it_by_any_name(host: str) -> None:
    assert ask(host=host, hosts=frozenset()).status == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:7424", "[::1]:7424"])
def test_on_loopback_its_own_names_are_taken(host: str) -> None:
    assert ask(host=host).status == 200


def test_each_answer_says_that_nothing_from_elsewhere_may_run() -> None:
    for answer in (ask(), ask(host="evil.example"), ask("POST")):
        policy = answer["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer["x-content-type-options"] == "nosniff"
        assert answer["cache-control"] == "no-store"


def test_a_cookie_is_for_this_host_alone_and_with_tls_for_tls_alone() -> None:
    plain, tls = ask()["set-cookie"], ask(scheme="https")["set-cookie"]

    assert "HttpOnly; SameSite=Lax" in plain
    assert tls.startswith("__Host-slatemq=")
    assert tls.endswith("HttpOnly; SameSite=Lax; Secure")
    assert ask(scheme="https")["strict-transport-security"]


def test_a_session_that_is_known_gets_no_other_cookie() -> None:
    assert ask(cookie=f"slatemq={SEAL.seal(SESSION)}")["set-cookie"] == ""


@pytest.mark.parametrize("cookie", ["slatemq=", "slatemq=gAAAA", "slatemq=ü", "; ;=", "a" * 9000])
def test_a_cookie_that_is_not_ours_proves_nothing(cookie: str) -> None:
    answer = ask(cookie=cookie)

    assert answer.status == 200
    assert answer.text.startswith(" {")


def test_a_cookie_has_no_secret_that_its_reader_sees_and_ends() -> None:
    assert "smq_secret" not in SEAL.seal(SESSION)
    assert SEAL.open(SEAL.seal(SESSION)) == SESSION
    assert SessionSeal(600).open(SEAL.seal(SESSION)) is None
    assert SessionSeal(-1).open(SEAL.seal(SESSION)) is None
    ended = SessionSeal(-1)
    assert ended.open(ended.seal(SESSION)) is None
    assert "smq_secret" not in repr(SESSION)


def test_a_session_that_is_open_ends_with_its_cookie(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SEAL.open(SEAL.seal(SESSION))
    assert opened is not None
    assert not SEAL.has_ended(opened)

    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + SEAL.session_s + 2)
    assert SEAL.has_ended(opened)


def test_a_session_is_no_notice_and_a_notice_is_no_session() -> None:
    assert SEAL.open_notice(SEAL.seal(SESSION)) == ""
    assert SEAL.open(SEAL.seal_notice(f"{SESSION.session_id}\n{SESSION.token}")) is None
    assert SEAL.open_notice(SEAL.seal_notice("Done.")) == "Done."


def test_the_cookie_of_who_has_logged_out_proves_nothing() -> None:
    seal = SessionSeal(600)
    other = Session("smq_secret")
    cookies = [seal.seal(SESSION), seal.seal(other)]

    seal.end(SESSION)

    assert [seal.open(one) for one in cookies] == [None, other]


def test_who_has_logged_out_is_remembered_for_as_long_as_the_cookie_lasts_and_in_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_old = SessionSeal(-2)
    for _ in range(3):
        too_old.end(Session("smq_secret"))
    assert len(too_old._ended) == 1

    monkeypatch.setattr(sessions, "ENDED_MAX", 2)
    seal, ended = SessionSeal(600), [Session("smq_secret") for _ in range(3)]
    for one in ended:
        seal.end(one)
    assert [seal.open(seal.seal(one)) for one in ended] == [ended[0], None, None]


def test_it_is_not_open_to_other_machines_without_tls(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidArgument, match="there is no TLS"):
        check(ConsoleConfig(host="0.0.0.0"))
    with pytest.raises(InvalidArgument, match="tls_key: needed"):
        check(ConsoleConfig(tls_cert="c", tls_ca="a"))
    with pytest.raises(InvalidArgument, match="endpoint"):
        check(ConsoleConfig(endpoint="nowhere"))
    check(ConsoleConfig(host="0.0.0.0", tls_cert="c", tls_key="k", tls_ca="a"))
    check(ConsoleConfig(insecure=True))
    assert not caplog.messages

    check(ConsoleConfig(host="0.0.0.0", insecure=True))
    assert caplog.record_tuples == [
        (AUDIT_LOGGER, logging.WARNING, "open to other machines without TLS")
    ]


def test_behind_a_proxy_its_name_is_taken() -> None:
    config = ConsoleConfig(console_hosts="Console.Example, ")

    assert ask(host="console.example", hosts=config.allowed_hosts).status == 200
    assert ConsoleConfig(host="10.0.0.1").allowed_hosts == frozenset()
