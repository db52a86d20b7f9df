"""Every page and every action of the console, in a real browser, with the right and without."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, ViewportSize, expect
from starlette.routing import Route

from services.console.app import routes
from slatemq.encryption import KEY_HEADER
from slatemq.errors import NotFound
from tests.acceptance.local_stack import wait_until
from tests.integration.console.looking import CONTRAST, DESK, PHONE, UNNAMED, Console, Scheme

pytestmark = pytest.mark.slow

Form = dict[str, str | float | bool]

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}"


class Action(NamedTuple):
    """Something that a person does.

    `prepare` returns the queue; `act` does it in a page; `notice` is what is then said; `is_done`
    asks the instance.
    """

    prepare: Callable[[Console], str]
    act: Callable[[Console, Page, str], object]
    notice: str
    is_done: Callable[[Console, str], bool]


def confirm(page: Page, queue: str, button: str) -> None:
    page.get_by_label(f"Type {queue} to confirm").fill(queue)
    page.get_by_role("button", name=button, exact=True).click()


def of_queue(link: str, button: str) -> Callable[[Console, Page, str], object]:
    def act(_: Console, page: Page, queue: str) -> None:
        page.goto(f"/queue?queue={queue}")
        page.get_by_role("link", name=link).click()
        confirm(page, queue, button)

    return act


def of_message(state: str, button: str) -> Callable[[Console, Page, str], object]:
    def act(console: Console, page: Page, queue: str) -> None:
        page.goto(f"/messages?queue={queue}&state={state}")
        message = console.entry(queue, state).message_id
        page.get_by_role("link", name=str(message), exact=True).click()
        page.get_by_role("button", name=button).click()

    return act


def choose(page: Page, queue: str) -> None:
    page.goto(f"/dead-letters?queue={queue}")
    for box in page.get_by_role("checkbox").all():
        box.check()


def redrive_chosen(_: Console, page: Page, queue: str) -> None:
    choose(page, queue)
    page.get_by_role("button", name="Redrive the chosen").click()


def drop_chosen(_: Console, page: Page, queue: str) -> None:
    choose(page, queue)
    page.get_by_role("button", name="Drop the chosen…").click()
    confirm(page, queue, "Drop")


def replace(_: Console, page: Page, queue: str) -> None:
    page.goto(f"/dead-letters?queue={queue}")
    page.locator("tbody a").first.click()
    expect(page.get_by_label("Payload")).to_have_value('{"number": 0}')
    page.get_by_label("Payload").fill('{"number": 1,\n "tür": true}')
    page.get_by_role("button", name="Replace").click()


def redrive_all(_: Console, page: Page, queue: str) -> None:
    page.goto(f"/dead-letters?queue={queue}")
    page.get_by_text("Redrive all that match…").click()
    page.get_by_label("Filter").fill('reason.contains("customer")')
    page.get_by_role("button", name="Begin").click()


def create(_: Console, page: Page, queue: str) -> None:
    page.goto("/")
    page.get_by_role("link", name="New queue…").click()
    page.get_by_label("Name").fill(f"{queue}-new")
    page.get_by_label("Filter", exact=True).fill("size > 10")
    page.get_by_label("Failed retention").fill("7d")
    page.get_by_label("Partitions").fill("1")
    page.get_by_label("Ordering header").fill("customer")
    page.get_by_role("button", name="Create the queue").click()


def is_created(console: Console, queue: str) -> bool:
    found = [one for one in console.client.list_queues() if one.queue_id == f"{queue}-new"]
    settings = [(one.filter, one.failed_retention_s, one.lease_ms) for one in found]
    places = [(one.partitions_count, one.ordering_header) for one in found]
    return (settings, places) == ([("size > 10", 7 * 86_400, 30_000)], [(1, "customer")])


def edit_settings(_: Console, page: Page, queue: str) -> None:
    page.goto(f"/queue?queue={queue}")
    page.get_by_role("link", name="Edit settings…").click()
    page.get_by_label("Lease", exact=True).fill("5m")
    page.get_by_label("Max attempts").fill("")
    page.get_by_role("button", name="Save").click()


def is_edited(console: Console, queue: str) -> bool:
    found = console.client.get_queue(queue)
    return (found.lease_ms, found.max_attempts, found.max_in_flight) == (300_000, 5, 7)


def is_gone(console: Console, queue: str) -> bool:
    return not [one for one in console.client.list_queues() if one.queue_id == queue]


def lift(_: Console, page: Page, queue: str) -> None:
    page.goto(f"/queue?queue={queue}")
    expect(page.get_by_text("In quarantine since")).to_contain_text("of the router's time")
    page.get_by_role("link", name="lift the quarantine", exact=True).click()
    confirm(page, queue, "Lift the quarantine")


def stopped_redrive(console: Console) -> str:
    queue = console.slow_redrive()
    (redrive,) = console.client.list_redrives(queue)
    console.client.cancel_redrive(redrive.redrive_id)
    assert is_cancelled(console, queue)
    return queue


def resume_redrive(_: Console, page: Page, queue: str) -> None:
    page.goto(f"/dead-letters?queue={queue}")
    page.get_by_role("button", name="Resume").click()


def cancel_redrive(_: Console, page: Page, queue: str) -> None:
    page.goto(f"/dead-letters?queue={queue}")
    page.get_by_role("button", name="Cancel").click()


def is_cancelled(console: Console, queue: str) -> bool:
    return [one.state for one in console.client.list_redrives(queue)] == ["cancelled"]


def retry_tasks(_: Console, page: Page, __: str) -> None:
    page.goto("/events")
    page.get_by_role("button", name="Retry all of them").click()


def begin_job(_: Console, page: Page, __: str) -> None:
    page.goto("/janitor")
    page.locator("input[value=done]").check()
    page.get_by_label("only count").check()
    page.get_by_role("button", name="Begin").click()


def failed_count(count: int) -> Callable[[Console, str], bool]:
    return lambda console, queue: console.client.get_queue(queue).counts.failed_count == count


def is_replaced(console: Console, queue: str) -> bool:
    found = console.client.entry_page(queue, "available", view="full").entries
    return [one.message.payload for one in found if one.message is not None] == [
        '{"number": 1,\n "tür": true}'.encode()
    ]


ACTIONS = {
    "pause": Action(
        Console.waiting,
        of_queue("Pause…", "Pause"),
        "is paused",
        lambda console, queue: console.client.get_queue(queue).paused,
    ),
    "resume": Action(
        Console.paused,
        of_queue("Resume…", "Resume"),
        "delivers again",
        lambda console, queue: not console.client.get_queue(queue).paused,
    ),
    "purge": Action(
        Console.waiting,
        of_queue("Purge…", "Purge"),
        "Removed 1 message",
        lambda console, queue: console.client.get_queue(queue).counts.available_count == 0,
    ),
    "remove": Action(
        Console.waiting,
        of_message("available", "Remove from the queue"),
        "was removed",
        lambda console, queue: not console.client.entry_page(queue, "available").entries,
    ),
    "deliver": Action(
        Console.delayed,
        of_message("delayed", "Deliver now"),
        "is available now",
        lambda console, queue: bool(console.client.entry_page(queue, "available").entries),
    ),
    "redrive": Action(
        lambda console: console.dead_letters(2),
        redrive_chosen,
        "Redrove 2 dead letters",
        failed_count(0),
    ),
    "drop": Action(
        lambda console: console.dead_letters(2),
        drop_chosen,
        "Dropped 2 dead letters",
        failed_count(0),
    ),
    "replace": Action(Console.dead_letters, replace, "A new message", is_replaced),
    "redrive all": Action(
        lambda console: console.dead_letters(2),
        redrive_all,
        "has begun",
        lambda console, queue: bool(list(console.client.list_redrives(queue))),
    ),
    "create": Action(Console.queue, create, "was created", is_created),
    "edit": Action(
        lambda console: console.queue(max_attempts=2, max_in_flight=7),
        edit_settings,
        "new settings: max attempts, lease",
        is_edited,
    ),
    "delete": Action(Console.waiting, of_queue("Delete…", "Delete"), "was deleted", is_gone),
    "lift": Action(
        Console.quarantined,
        lift,
        "is routed again",
        # What was published before it is left out for the same reason, and later.
        lambda console, queue: (
            console.client.get_queue(queue).quarantine != console.first_quarantines[queue]
        ),
    ),
    "cancel redrive": Action(Console.slow_redrive, cancel_redrive, "is cancelled", is_cancelled),
    "resume redrive": Action(
        stopped_redrive,
        resume_redrive,
        "runs again",
        lambda console, queue: not is_cancelled(console, queue),
    ),
    "retry tasks": Action(
        Console.failed_task,
        retry_tasks,
        "again",
        # It fails again, and later than before.
        lambda console, task: console.failures().get(task) != console.first_failures[task],
    ),
    "job": Action(
        Console.queue,
        begin_job,
        "has begun",
        lambda console, _: bool(list(console.client.list_job_runs("done"))),
    ),
}


WITHOUT_A_BUTTON: dict[str, tuple[str, Form]] = {
    "job": ("/janitor", {"job": "done"}),
    "retry tasks": ("/events/retry", {}),
}
"""What no page offers to people who may not see what it is about."""


@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_is_done_with_the_right_and_refused_without(console: Console, name: str) -> None:
    action = ACTIONS[name]
    queue = action.prepare(console)

    with console.page("reader") as page:
        if name in WITHOUT_A_BUTTON:
            path, fields = WITHOUT_A_BUTTON[name]
            answer = page.request.post(path, form={"form_token": form_token(page), **fields})
            assert answer.status == 403
            assert "You may not do that" in answer.text()
        else:
            action.act(console, page, queue)
            expect(page.get_by_role("alert")).to_contain_text("You may not do that")
    assert not action.is_done(console, queue)
    # A browser says of each refusal that it was one.
    assert all("status of 403" in problem for problem in console.take_problems())

    with console.page("ops") as page:
        action.act(console, page, queue)
        expect(page.get_by_role("status").first).to_contain_text(action.notice)
    # A new message comes to its queue after the answer, by an ingest and a router.
    wait_until(lambda: action.is_done(console, queue), 60)
    assert console.take_problems() == []


def test_the_console_logs_the_browser_of_each_act_that_the_audit_has(console: Console) -> None:
    action = ACTIONS["pause"]
    queue = action.prepare(console)
    with console.page("ops") as page:
        action.act(console, page, queue)
        expect(page.get_by_role("status").first).to_contain_text(action.notice)

    def request_ids(word: str, *facts: str) -> set[str]:
        logs = (console.secured.folder / "data" / "logs").iterdir()
        lines = [line for file in logs for line in file.read_text().splitlines()]
        found = [line for line in lines if word in line and all(fact in line for fact in facts)]
        return {line.partition("request_id=")[2].partition(" ")[0] for line in found}

    acts = request_ids("slatemq.audit: act ", "peer=127.0.0.1:", "path=/queue/do/pause")
    pauses = request_ids("slatemq.audit", "PauseQueue", f"subjects={queue}", "principal=ops")
    assert acts
    assert pauses <= acts
    assert len(pauses) == 1


def form_token(page: Page) -> str:
    page_with_form = page.request.get("/login").text()
    return page_with_form.partition('name="form_token" value="')[2].partition('"')[0]


def test_a_wrong_name_confirms_nothing(console: Console) -> None:
    queue = console.waiting()

    with console.page("ops") as page:
        page.goto(f"/queue/do/purge?queue={queue}")
        page.get_by_label(f"Type {queue} to confirm").fill("another")
        page.get_by_role("button", name="Purge").click()
        expect(page.get_by_role("alert")).to_contain_text("exactly")
    assert console.client.get_queue(queue).counts.available_count == 1
    console.take_problems()


def test_without_a_login_nothing_is_shown_and_a_wrong_token_is_named(console: Console) -> None:
    with console.page() as page:
        for path in ("/", "/queue?queue=q0", "/processes", "/janitor", "/dead-letters?queue=q0"):
            page.goto(path)
            expect(page.get_by_role("heading", name="Log in")).to_be_visible()
            assert "q0" not in page.inner_text("main")
        console.log_in(page, "smq_wrong")
        expect(page.get_by_role("alert")).to_be_visible()
        assert page.request.get("/live/overview").text().startswith("event: gone\n")
    console.take_problems()


def test_a_login_leads_to_where_the_person_was_going_and_nowhere_else(console: Console) -> None:
    queue = console.queue()
    token = console.token("ops")

    with console.page() as page:
        page.goto(f"/queue?queue={queue}")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", name=queue)).to_be_visible()
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("button", name="Log out").click()
        page.goto(f"/login?back={quote('//evil.example/')}")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert console.outside == []


def test_a_link_from_another_site_finds_the_person_logged_in(console: Console) -> None:
    queue = console.queue()
    other_site = "http://elsewhere.example/"
    html = f"""
        <a href="{console.address}/queue?queue={queue}">queue</a>
        <form method="post" action="{console.address}/queue/do/pause?queue={queue}">
        <input name="confirmation" value="{queue}"><button>win</button></form>"""

    with console.page("ops") as page:
        page.route(other_site, lambda route: route.fulfill(body=html, content_type="text/html"))
        page.goto(other_site)
        page.get_by_role("button", name="win").click()
        expect(page.get_by_text("from the console's own pages alone")).to_be_visible()
        for _ in range(2):
            page.goto(other_site)
            page.get_by_role("link", name="queue").click()
            expect(page.get_by_role("heading", name=queue)).to_be_visible()
            expect(page.get_by_role("button", name="Log out")).to_be_visible()
    assert not console.client.get_queue(queue).paused
    assert set(console.outside) <= {other_site, f"{other_site}favicon.ico"}
    console.outside.clear()
    assert all("status of 40" in problem for problem in console.take_problems())


def test_no_request_breaks_a_page(console: Console) -> None:
    queue = console.dead_letters()
    console.message(queue, b'{"a": "\\ud800"}')
    handle = console.entry(queue, "available").handle
    names = (
        "queue", "state", "after", "handle", "form", "run", "task", "find", "back", "payload",
        "headers", "payload_bytes", "rate", "filter", "redrive", "request_id", "states", "handles",
        "queue_id", "with_queue", "start_from", "etag", "job", "token", "lease", "max_attempts",
        "backoff", "confirmation", "action", "into", "priority", "fallback_priority",
        "shard", "partitions", "ordering_header",
    )  # fmt: skip
    texts = ("\0", "9" * 18, "9" * 5000, "-1e400s", '{"a": "\\ud800"}', "[" * 5000, "٣")
    with console.page("ops") as page:
        token = form_token(page)
        for route in routes():
            if not isinstance(route, Route) or route.path.startswith(("/live/", "/logout")):
                continue
            path = route.path.replace("{action}", "purge")
            for text in texts:
                fields = dict.fromkeys(names, text)
                known = {"queue": queue, "handle": handle, "confirmation": queue}
                for given in (fields, {**fields, **known}):
                    if "POST" in (route.methods or ()):
                        form: Form = {"form_token": token, **given}
                        answer = page.request.post(path, form=form, max_redirects=0)
                    else:
                        query: Form = {name: given[name][:100] for name in names[:9]}
                        answer = page.request.get(path, params=query, max_redirects=0)
                    assert answer.status < 500, (path, text, answer.text())
                    assert "default-src 'none'" in answer.headers["content-security-policy"]
    console.take_problems()


def test_a_message_with_a_time_that_has_no_date_has_its_pages(console: Console) -> None:
    queue, created_ms, visible_ms = console.queue(max_attempts=1), 10**15, (1 << 63) - 1
    console.client.publish(b"x", {"queue": queue}, created_at=created_ms)
    (claimed,) = console.client.claim(queue, wait=30)
    claimed.nack()
    console.client.publish(b"x", {"queue": queue}, visible_at=visible_ms)
    failed = quote(console.entry(queue, "failed").handle, safe="")
    delayed = quote(console.entry(queue, "delayed").handle, safe="")

    with console.page("ops") as page:
        for path, time_ms in (
            (f"/messages?queue={queue}&state=delayed", visible_ms),
            (f"/message?handle={delayed}", visible_ms),
            (f"/message?handle={failed}", created_ms),
        ):
            page.goto(path)
            expect(page.get_by_title(str(time_ms))).to_contain_text("in ")
        page.goto(f"/dead-letter?handle={failed}")
        expect(page.get_by_label("Payload")).to_have_value("x")
    assert console.take_problems() == []


def test_a_dead_letter_of_which_the_console_has_no_key_is_not_edited(console: Console) -> None:
    queue = console.queue(max_attempts=1)
    console.message(queue, b"sealed", **{KEY_HEADER: "2026"})
    (claimed,) = console.client.claim(queue, wait=30)
    claimed.nack()
    handle = console.entry(queue, "failed").handle

    with console.page("ops") as page:
        page.goto(f"/dead-letter?handle={quote(handle, safe='')}")
        expect(page.get_by_text("does not have the key")).to_contain_text("failed edit")
        expect(page.get_by_label("Payload")).to_have_count(0)
        expect(page.get_by_role("button", name="Redrive unchanged")).to_be_visible()
        form: Form = {
            "form_token": form_token(page),
            "queue": queue,
            "handle": handle,
            "payload": "in the clear",
            "headers": json.dumps({KEY_HEADER: "2026"}),
        }
        answer = page.request.post("/dead-letter", form=form)
        assert (answer.status, KEY_HEADER in answer.text()) == (400, True)
    assert console.client.get_queue(queue).counts.failed_count == 1


def test_who_has_no_role_sees_why_nothing_is_shown(console: Console) -> None:
    queue = console.queue()

    with console.page("stranger") as page:
        page.goto(f"/queue?queue={queue}")
        expect(page.get_by_role("alert")).to_contain_text("You may not do that")
        page.goto("/")
        assert queue not in page.inner_text("main")
        expect(page.get_by_text("queues are not shown")).to_be_visible()
    console.take_problems()


def test_hostile_payloads_and_headers_are_text(console: Console) -> None:
    queue = console.queue(max_attempts=1)
    console.message(queue, HOSTILE.encode(), hostile=HOSTILE)
    (claimed,) = console.client.claim(queue, wait=30, consumer_id=HOSTILE[:40])
    claimed.nack(reason=HOSTILE)
    handle = quote(console.entry(queue, "failed").handle, safe="")

    with console.page("ops") as page:
        alerts: list[str] = []
        page.on("dialog", lambda dialog: alerts.append(dialog.message))
        for path in (
            f"/message?handle={handle}&form=text",
            f"/dead-letter?handle={handle}",
            f"/dead-letters?queue={queue}",
            f"/messages?queue={queue}&state=failed",
            f"/?find={quote(HOSTILE)}",
        ):
            page.goto(path)
            assert HOSTILE[:20] in page.content() or "&lt;script&gt;" in page.content()
            assert page.locator("main img, main script").count() == 0
        assert alerts == []
        page.goto(f"/message?handle={handle}&form=text")
        assert page.locator("pre").inner_text() == HOSTILE
        page.get_by_role("link", name="hex").click()
        expect(page.locator("pre")).to_contain_text("00000000  3c 73 63 72")
        with page.expect_download() as download:
            page.get_by_role("link", name="download").click()
        assert download.value.path().read_bytes() == HOSTILE.encode()
    assert all("status of 40" in problem for problem in console.take_problems())


def test_a_message_shows_its_attempts_and_its_payload_in_three_forms(console: Console) -> None:
    queue = console.dead_letters()
    handle = quote(console.entry(queue, "failed").handle, safe="")

    with console.page("ops") as page:
        page.goto(f"/message?handle={handle}")
        attempt = page.get_by_role("listitem").filter(has_text="by worker-1")
        expect(attempt).to_contain_text("no such customer <b>x</b>")
        for form, text in {
            "text": '{"number": 0}',
            "JSON": '{\n  "number": 0\n}',
            "hex": "00000000  7b 22 6e 75",
        }.items():
            page.get_by_role("link", name=form, exact=True).click()
            expect(page.get_by_role("link", name=form, exact=True)).to_have_attribute(
                "aria-current", "true"
            )
            assert page.locator("pre").inner_text().startswith(text)
    assert console.take_problems() == []


def test_processes_and_routes_are_shown_with_how_they_are(console: Console) -> None:
    with console.page("ops") as page:
        page.goto("/processes")
        # On a busy machine a process may not answer in the seconds that a page waits for it.
        while page.locator(".tag.bad").count() or not page.get_by_text("0 → 0").count():
            page.reload()
        for service in ("ingest", "router", "broker", "janitor"):
            row = page.get_by_role("row").filter(has_text=f"{service} 0")
            expect(row).to_contain_text("serving")
        routes = page.get_by_role("table", name="Routes").get_by_role("row")
        expect(routes.filter(has_text="0 → 0")).to_have_count(1)
        expect(page.get_by_text("7d (604,800)").first).to_be_visible()
        page.goto("/events")
        while page.get_by_text("no answer").count():
            page.reload()
        for service in ("ingest", "broker", "janitor"):
            row = page.get_by_role("row").filter(has_text=f"{service} 0")
            expect(row).to_contain_text("redis, async")
            expect(row).to_contain_text("answers")
    assert console.take_problems() == []


def test_tasks_that_wait_are_listed_with_the_error_of_their_last_attempt(console: Console) -> None:
    with console.page("ops") as page:
        page.goto("/events")
        expect(page.get_by_text("No task waits to be applied")).to_be_visible()

        task_id = console.poison_task(max_retries=10)  # a second after each
        waits = page.get_by_role("row").filter(has_text=task_id)
        while not waits.filter(has_text="data_ref").count():
            page.reload()

        expect(page.get_by_role("heading", name="Waiting to be applied")).to_be_visible()
        expect(waits).to_contain_text("pending")
        assert int(waits.locator("[data-name=attempts]").inner_text()) > 0
    assert console.take_problems() == []


def test_the_filter_tester_says_whether_and_why(console: Console) -> None:
    queue = console.queue(filter='headers.region == "eu"', priority="7")

    with console.page("reader") as page:
        page.goto(f"/queue?queue={queue}")
        page.get_by_label("Headers").fill('{"region": "eu"}')
        page.get_by_role("button", name="Test").click()
        expect(page.locator("#explanation")).to_contain_text("reaches the queue, with priority 7")
        page.get_by_label("Headers").fill('{"region": "us"}')
        page.get_by_role("button", name="Test").click()
        expect(page.locator("#explanation")).to_contain_text("does not reach")
        page.get_by_label("Headers").fill("region: us")
        page.get_by_role("button", name="Test").click()
        expect(page.locator("#explanation")).to_contain_text("headers: is not JSON")
    assert all("status of 400" in problem for problem in console.take_problems())


def test_a_form_names_what_is_wrong_beside_each_field_and_keeps_what_was_typed(
    console: Console,
) -> None:
    queue = console.queue()

    with console.page("ops") as page:
        page.goto("/queue/new")
        page.get_by_label("Name").fill(queue)
        page.get_by_label("Filter", exact=True).fill("size >")
        page.get_by_label("Lease", exact=True).fill("3 minutes")
        page.get_by_label("Max attempts").fill("0")
        for field, problem in {
            "Lease": "not a valid duration",
            "Max attempts": "must be a whole number, 1 to 65535",
        }.items():
            page.get_by_role("button", name="Create the queue").click()
            wrong = page.get_by_label(field, exact=True)
            expect(wrong).to_have_accessible_description(re.compile(problem))
            expect(page.get_by_label("Filter", exact=True)).to_have_value("size >")
            wrong.fill("")
        # What the broker refuses, one after the other
        page.get_by_label("Partitions").fill("9")
        for field, problem, repaired in (
            ("Partitions", "must be at most 1, the number of broker shards", ""),
            ("Shard", "There is no such broker shard", ""),
            ("Filter", "line 1", "size > 1"),
            ("Name", "exists already", f"{queue}-other"),
        ):
            page.get_by_role("button", name="Create the queue").click()
            wrong = page.get_by_label(field, exact=True)
            expect(wrong).to_have_accessible_description(re.compile(problem))
            wrong.fill(repaired)
            page.get_by_label("Shard", exact=True).fill("7" if field == "Partitions" else "")
        page.get_by_role("button", name="Create the queue").click()
        expect(page.get_by_role("status").first).to_contain_text("was created")
        page.goto(f"/queue/settings?queue={queue}")
        page.get_by_label("Max lease", exact=True).fill("1ms")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("alert")).to_contain_text("1000..43200000, not 1, in milliseconds")
    assert all("status of 422" in problem for problem in console.take_problems())


def test_the_tester_judges_what_is_typed_before_it_is_saved(console: Console) -> None:
    queue = console.queue(filter="false")

    with console.page("reader") as page:
        page.goto(f"/queue/settings?queue={queue}")
        page.get_by_label("Filter", exact=True).fill('headers.region == "eu"')
        page.get_by_label("Priority", exact=True).fill("int(headers.rank)")
        page.get_by_label("Headers").fill('{"region": "eu", "rank": "3"}')
        page.get_by_role("button", name="Try").click()
        expect(page.locator("#explanation")).to_contain_text("reaches the queue, with priority 3")
        page.get_by_label("Priority", exact=True).fill("int(headers.rank")
        page.get_by_role("button", name="Try").click()
        expect(page.locator("#explanation")).to_contain_text("priority: line 1")
        page.get_by_label("Headers").fill("region: eu")
        page.get_by_role("button", name="Try").click()
        expect(page.locator("#explanation")).to_have_text(re.compile(r"^\s*headers: is not JSON"))
    assert console.client.get_queue(queue).filter == "false"
    assert console.take_problems() == []


def test_settings_that_someone_else_has_changed_meanwhile_are_not_overwritten(
    console: Console,
) -> None:
    queue = console.queue(max_attempts=3)

    with console.page("ops") as page:
        page.goto(f"/queue/settings?queue={queue}")
        console.client.update_queue(queue, max_attempts=8)
        page.get_by_label("Lease", exact=True).fill("2m")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("alert")).to_contain_text("Someone has changed this queue")
        expect(page.get_by_label("Lease", exact=True)).to_have_value("2m")
        page.goto(f"/queue/settings?queue={queue}")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("status").first).to_contain_text("Nothing was changed")
    found = console.client.get_queue(queue)
    assert (found.max_attempts, found.lease_ms) == (8, 30_000)
    assert all("status of 422" in problem for problem in console.take_problems())


def test_one_box_chooses_all_dead_letters_of_a_page(console: Console) -> None:
    queue = console.dead_letters(3)

    with console.page("ops") as page:
        page.goto(f"/dead-letters?queue={queue}")
        page.get_by_label("all on this page").check()
        page.get_by_role("button", name="Redrive the chosen").click()
        expect(page.get_by_role("status").first).to_contain_text("Redrove 3 dead letters")
    assert console.client.get_queue(queue).counts.failed_count == 0


def test_a_run_is_cancelled_with_the_right_and_not_without(console: Console) -> None:
    # The second one waits for the first.
    first = console.client.run_job("report")
    run = console.client.run_job("retention", dry_run=True)

    for person in ("reader", "ops"):
        with console.page(person) as page:
            page.goto(f"/run?run={run.run_id}")
            if person == "reader":
                token = form_token(page)
                form: Form = {"form_token": token, "run": run.run_id}
                assert page.request.post("/run/cancel", form=form).status == 403
                assert console.client.get_job_run(run.run_id).state == "waiting"
            else:
                page.get_by_role("button", name="Cancel").click()
                expect(page.locator("#run")).to_contain_text("cancelled")
    console.client.cancel_job_run(first.run_id)
    console.take_problems()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_each_page_can_be_read_and_has_names_for_everything(
    console: Console, scheme: Scheme, viewport: ViewportSize
) -> None:
    queue = console.dead_letters(2)
    console.message(queue, b"x" * 300, **{"a-long-name" * 6: "a long value " * 20})
    handle = quote(console.entry(queue, "failed").handle, safe="")

    with console.page("ops", viewport, scheme) as page:
        for path in (
            "/", f"/queue?queue={queue}", f"/messages?queue={queue}", f"/message?handle={handle}",
            f"/dead-letters?queue={queue}", f"/dead-letter?handle={handle}", "/processes",
            "/janitor", "/events", f"/queue/do/purge?queue={queue}", "/login", "/queue/new",
            f"/queue/settings?queue={queue}", f"/queue/do/delete?queue={queue}", "/absent",
        ):  # fmt: skip
            page.goto(path)
            assert page.evaluate(CONTRAST) == [], path
            assert page.evaluate(UNNAMED) == [], path
            width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert width <= 0, path
            assert page.locator("h1").count() == 1, path
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(17, 17, 19)") == (scheme == "dark")
    assert all("status of 404" in problem for problem in console.take_problems())
    assert console.outside == []


def test_the_keyboard_alone_pauses_a_queue(console: Console) -> None:
    queue = console.queue()

    with console.page("ops") as page:
        page.goto(f"/?find={queue}")
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        page.get_by_role("link", name=queue, exact=True).focus()
        # The table is drawn again meanwhile, and the focus stays.
        expect(page.locator("[data-live-state]")).to_have_text("live")
        expect(page.get_by_role("link", name=queue, exact=True)).to_be_focused()
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Pause…").press("Enter")
        page.get_by_label(f"Type {queue} to confirm").press_sequentially(queue)
        page.keyboard.press("Enter")
        expect(page.get_by_role("status").first).to_contain_text("is paused")
    assert console.client.get_queue(queue).paused


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/queue?queue=absent", 404, "does not exist"),
        ("/message?handle=nonsense", 400, "handle"),
        ("/messages?queue=absent&state=lost", 400, "must be one of"),
        ("/run?run=nonsense", 400, "run_id"),
        ("/redrives", 400, "queue_id"),
        ("/redrives?queue=absent", 404, "does not exist"),
        ("/absent", 404, "no such page"),
        ("/queue/do/explode?queue=q0", 404, "no such page"),
        ("/events?task=nonsense", 400, "task"),
    ],
)
def test_an_error_says_what_is_wrong(console: Console, path: str, status: int, text: str) -> None:
    with console.page("ops") as page:
        answer = page.goto(path)
        assert answer is not None
        assert answer.status == status
        assert text in page.inner_text("main")
    console.take_problems()


def test_a_queue_that_is_gone_is_named(console: Console) -> None:
    with pytest.raises(NotFound):
        console.client.get_queue("absent")
