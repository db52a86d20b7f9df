"""Pages that stay open: they follow the instance, whatever becomes of it and of the session."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

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
