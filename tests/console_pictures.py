"""Takes the pictures of docs/how-to/console.md: `python -m tests.console_pictures`.

It starts a stack with traffic, needs Debian's chromium-headless-shell, and takes two minutes.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page, ViewportSize, sync_playwright

import slatemq.sync
from slatemq import Backoff
from slatemq.sync import SyncClient
from tests.acceptance.local_stack import LocalStack, wait_until

FOLDER: Final = Path(__file__).resolve().parents[1] / "docs/how-to/console"
DESK: Final[ViewportSize] = {"width": 1180, "height": 720}
PHONE: Final[ViewportSize] = {"width": 390, "height": 844}

TRAFFIC_S: Final = 40
"""How long the charts have grown before the first picture."""

REASONS: Final = (
    "SMTP 550: mailbox unavailable",
    "no answer of smtp.example.com within 30 s",
    "no such customer: c-31",
)


def create(client: SyncClient) -> None:
    client.create_queue(
        "orders.eu",
        filter='headers.type == "order" && headers.region == "eu"',
        priority='headers.urgent == "yes" ? 10 : 128',
    )
    client.create_queue("orders.us", filter='headers.type == "order" && headers.region == "us"')
    client.create_queue("invoices", filter='headers.type == "order"', default_delay=600)
    client.create_queue(
        "mail", filter='headers.type == "mail"', max_attempts=2, backoff=Backoff.none()
    )
    client.create_queue("reports", filter='headers.type == "report"')
    client.pause_queue("reports")


def work(client: SyncClient, ended: threading.Event) -> None:
    """Producers and consumers of which some fail, in a pattern that repeats."""
    for number in count():
        if ended.is_set():
            return
        for place in range(4 + number % 7):
            order = {"order": 10 * number + place, "customer": f"c-{number % 97}", "lines": 3}
            headers = {
                "type": ("order", "mail", "order", "order", "report")[place % 5],
                "region": ("eu", "us")[(number + place) % 2],
                "urgent": "yes" if place == 2 else "no",
            }
            client.publish(json.dumps(order).encode(), headers)
        for queue in ("orders.eu", "orders.us"):
            for message in client.claim(queue, 2 + number % 4, consumer_id=f"worker-{number % 3}"):
                message.ack()
        for message in client.claim("mail", 2, consumer_id="mailer-1"):
            if number % 3:
                message.nack(reason=REASONS[number // 3 % 3])
            else:
                message.ack()
        time.sleep(0.3)


@contextmanager
def traffic(client: SyncClient) -> Iterator[None]:
    ended = threading.Event()
    worker = threading.Thread(target=work, args=(client, ended))
    worker.start()
    try:
        yield
    finally:
        ended.set()
        worker.join()


def take(page: Page, client: SyncClient) -> None:
    def picture(name: str, path: str, *, is_live: bool = False) -> None:
        page.goto(path)
        if is_live:
            page.locator("[data-live-state]").get_by_text("live").wait_for()
        page.screenshot(path=FOLDER / f"{name}.png")

    page.goto("/")
    page.wait_for_timeout(TRAFFIC_S * 1000)
    picture("overview", "/", is_live=True)
    page.emulate_media(color_scheme="dark")
    picture("queue", "/queue?queue=orders.eu", is_live=True)
    page.emulate_media(color_scheme="light")
    dead: Any = client.entry_page("mail", "failed", newest_first=True).entries[0]
    picture("message", f"/message?handle={dead.handle}")
    picture("dead-letters", "/dead-letters?queue=mail")
    page.goto("/queue/settings?queue=orders.eu")
    page.get_by_label("Headers").fill('{"type": "order", "region": "eu", "urgent": "yes"}')
    page.get_by_role("button", name="Try").click()
    page.locator("#explanation p").wait_for()
    page.screenshot(path=FOLDER / "settings.png")
    page.set_viewport_size(PHONE)
    picture("phone", "/", is_live=True)


def main() -> int:
    program = shutil.which("chromium-headless-shell")
    if program is None:
        sys.stderr.write("chromium-headless-shell is absent: install Debian's package\n")
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="slatemq-pictures-") as folder,
        LocalStack(Path(folder)) as stack,
        slatemq.sync.connect(stack.endpoint) as client,
        sync_playwright() as playwright,
    ):
        create(client)
        with (
            traffic(client),
            playwright.chromium.launch(
                executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"]
            ) as browser,
        ):
            wait_until(lambda: client.get_queue("mail").counts.failed_count > 0, 60)
            page = browser.new_page(
                base_url=str(stack._ready()["console"]), viewport=DESK, color_scheme="light"
            )
            take(page, client)
    return 0


if __name__ == "__main__":
    sys.exit(main())
