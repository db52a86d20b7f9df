"""Pages that stay open: they follow the instance, whatever becomes of it and of the session."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import APIResponse, Page, expect

from services.console.rendering import POLLING_ENDS
from tests.acceptance.local_stack import wait_until
from tests.integration.console.looking import Console

pytestmark = pytest.mark.slow


def test_numbers_and_charts_follow_the_instance(console: Console) -> None:
    queue = console.queue()

    with console.page("ops") as page:
        page.goto(f"/?find={queue}")
        expect(page.locator("[data-live-state]")).to_have_text("live")
        console.message(queue)
        expect(page.locator("[data-name=available]")).to_have_text("1")
        expect(page.locator("td.chart polyline")).to_have_count(1)
        page.get_by_role("button", name="Pause updates").click()
        expect(page.locator("[data-live-state]")).to_have_text("paused")
    assert console.take_problems() == []


def test_a_redrive_shows_its_progress_and_is_cancelled_and_resumed(console: Console) -> None:
    queue = console.dead_letters(40)

    with console.page("ops") as page:
        page.goto(f"/dead-letters?queue={queue}")
        page.get_by_text("Redrive all that match…").click()
        page.get_by_label("Messages per second").fill("1")
        page.get_by_role("button", name="Begin").click()
        expect(page.get_by_role("progressbar")).to_be_visible()
        # Drawn again by itself, once a second.
        expect(page.locator("#redrives")).to_contain_text("1 moved")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#redrives")).to_contain_text("cancelled")
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#redrives")).to_contain_text("running")
    assert console.take_problems() == []


def test_a_page_says_of_when_its_numbers_are_while_a_broker_is_silent(console: Console) -> None:
    queue = console.queue()
    with console.page("ops") as page:
        page.goto(f"/?find={queue}")
        state = page.locator("[data-live-state]")
        expect(state).to_have_text("live")
        broker = console.stack.signal("broker", signal.SIGSTOP)
        try:
            expect(state).to_have_text(re.compile(r"^as of \d"))
            expect(page.get_by_text("The queues of broker 0 are missing")).to_be_visible()
            expect(page.get_by_text("No queue is shown.")).to_be_visible()
        finally:
            os.kill(broker, signal.SIGCONT)
        expect(page.get_by_role("link", name=queue)).to_be_visible()
    assert console.take_problems() == []


def clear_cookies(_: Console, page: Page) -> None:
    page.context.clear_cookies()
    # It asks for its stream again, as it does every ten minutes
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def log_out_elsewhere(_: Console, page: Page) -> None:
    with page.context.new_page() as other:
        other.goto("/processes")
        other.get_by_role("button", name="Log out").click()
        expect(other.get_by_role("heading", name="Log in")).to_be_visible()


def restart(console: Console, _: Page) -> None:
    old = console.stack.signal("console", signal.SIGTERM)
    console.stack.wait_restarted("console", old)
    console.forget_logins()


@pytest.mark.parametrize("end_session", [clear_cookies, log_out_elsewhere, restart])
def test_a_page_whose_session_has_ended_leads_to_the_login_and_back(
    console: Console, end_session: Callable[[Console, Page], None]
) -> None:
    queue = console.queue()
    with console.page() as page:
        console.log_in(page, console.token("ops"))
        page.goto(f"/?find={queue}")
        expect(page.locator("[data-live-state]")).to_have_text("live")

        end_session(console, page)

        expect(page.get_by_role("heading", name="Log in")).to_be_visible()
        page.get_by_label("Token").fill(console.token("ops"))
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_label("Find queues")).to_have_value(queue)
        expect(page.locator("[data-live-state]")).to_have_text("live")
    console.take_problems()


def test_a_cookie_is_worth_nothing_once_its_session_has_logged_out(console: Console) -> None:
    with console.page() as page, console.page() as other:
        console.log_in(page, console.token("ops"))
        cookies = {one["name"]: one["value"] for one in page.context.cookies()}
        headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}

        def answer() -> APIResponse:
            return other.request.get("/processes", headers=headers, max_redirects=0)

        assert answer().status == 200
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("heading", name="Log in")).to_be_visible()
        assert answer().headers["location"] == "/login?back=%2Fprocesses"
    console.take_problems()


@contextmanager
def frozen(console: Console, service: str) -> Iterator[None]:
    console.stack.signal(service, signal.SIGSTOP)
    try:
        yield
    finally:
        console.stack.signal(service, signal.SIGCONT)


def moved_count(page: Page) -> int:
    """How many dead letters are moved, by what the page says; -1 where it does not."""
    found = re.search(r"(\d+) moved", page.locator("#redrives").inner_text())
    return int(found[1]) if found else -1


def test_the_progress_of_a_redrive_goes_on_once_its_frozen_broker_answers_again(
    console: Console,
) -> None:
    queue = console.slow_redrive()

    with console.page("ops") as page:
        page.goto(f"/dead-letters?queue={queue}")
        wait_until(lambda: moved_count(page) > 0, 60)
        before = moved_count(page)
        with frozen(console, "broker"):
            expect(page.locator("#redrives").get_by_role("alert")).to_be_visible()

        wait_until(lambda: moved_count(page) > before, 60)
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#redrives")).to_contain_text("cancelled")
    console.take_problems()


def test_the_progress_of_a_run_goes_on_once_its_frozen_janitor_answers_again(
    console: Console,
) -> None:
    # The second one waits for the first
    first, second = map(console.client.run_job, ("report", "retention"))

    with console.page("ops") as page:
        page.goto(f"/run?run={second.run_id}")
        with frozen(console, "janitor"):
            expect(page.locator("#run").get_by_role("alert")).to_be_visible()

        expect(page.locator("#run").get_by_role("button", name="Cancel")).to_be_visible()
        for run in (first, second):
            console.client.cancel_job_run(run.run_id)
        expect(page.locator("#run .tag")).to_have_text("cancelled")
    console.take_problems()


def test_a_page_asks_for_progress_until_there_is_none(console: Console) -> None:
    queue = console.dead_letters(5)
    console.client.start_redrive(queue, rate=1)

    with console.page("ops") as page:
        with page.expect_response(lambda answer: answer.status == POLLING_ENDS):
            page.goto(f"/dead-letters?queue={queue}")
            expect(page.get_by_role("progressbar")).to_be_visible()
        expect(page.locator("#redrives")).to_contain_text("done")
        page.reload()
        expect(page.locator("#redrives")).to_contain_text("done")
        expect(page.locator("[hx-trigger]")).to_have_count(0)
    assert console.take_problems() == []


def test_a_part_of_a_page_whose_session_has_ended_leads_to_the_login_and_back(
    console: Console,
) -> None:
    queue = console.slow_redrive()

    with console.page() as page:
        console.log_in(page, console.token("ops"))
        page.goto(f"/dead-letters?queue={queue}")
        expect(page.get_by_role("progressbar")).to_be_visible()
        page.context.clear_cookies()
        page.get_by_label("Token").fill(console.token("ops"))
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", name=queue)).to_be_visible()
        expect(page.get_by_role("navigation").get_by_text("Dead letters")).to_have_attribute(
            "aria-current", "page"
        )
    console.take_problems()
