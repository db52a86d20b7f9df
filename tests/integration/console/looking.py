"""The console as a person sees it in a browser, and what happens behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, Literal

from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize

import slatemq
from libs.events.settings import QueueSettings
from slatemq import Backoff, Entry, Quarantine
from slatemq.sync import SyncClient
from tests.acceptance.local_stack import LocalStack
from tests.integration.events.tasks.queued_ingest import enqueue, new_task_id
from tests.integration.router.test_quarantine import SLOW
from tests.integration.stack.secured import Secured

LOOK_SECONDS = 0.02

PHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1280, "height": 800}

Scheme = Literal["light", "dark"]

CONTRAST = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  function rgba(text) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  }
  function light([r, g, b]) {
    const each = [r, g, b].map((one) => {
      const share = one / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * each[0] + 0.7152 * each[1] + 0.0722 * each[2];
  }
  function paper(element) {
    for (let one = element; one; one = one.parentElement) {
      const colour = rgba(getComputedStyle(one).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  }
  const weak = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!own || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(rgba(style.color)), light(paper(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) weak.push(`${ratio.toFixed(2)} ${element.outerHTML.slice(0, 120)}`);
  }
  return weak;
}
"""
"""Texts whose contrast is below 4.5, the AA of WCAG 2.2."""

UNNAMED = """
() => [...document.querySelectorAll("a, button, input, textarea, select, iframe, svg[role=img]")]
  .filter((one) => one.type !== "hidden" && one.checkVisibility())
  .filter((one) => !(one.innerText?.trim() || one.labels?.length || one.title
    || one.getAttribute("aria-label")))
  .map((one) => one.outerHTML.slice(0, 120))
"""
"""What a person who hears the page is not told the name of."""


class Console:
    """A stack, a client that may do everything, and browsers of persons who may not.

    Attributes:
        address: Of the console.
        client: With the rights of `ops`.
        problems: What browsers have complained about.
        outside: Requests for anything but the console.
        first_failures: When tasks had failed, before any was retried.
        first_quarantines: Why queues were first left out.
    """

    def __init__(
        self, browser: Browser, secured: Secured, stack: LocalStack, settings: QueueSettings
    ) -> None:
        self.stack = stack
        self.address = str(stack._ready()["console"])
        self.client: SyncClient = slatemq.sync.connect(
            stack.endpoint, credentials=secured.credentials("ops")
        )
        self.first_failures: dict[str, int] = {}
        self.first_quarantines: dict[str, Quarantine] = {}
        self.problems: list[str] = []
        self.outside: list[str] = []
        self._settings = settings
        self._browser = browser
        self.secured = secured
        self._names = count()
        self._persons: dict[str, BrowserContext] = {}

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @contextmanager
    def page(
        self, person: str = "", viewport: ViewportSize = DESK, scheme: Scheme = "light"
    ) -> Iterator[Page]:
        """A page of a browser in which this person has logged in; no one without a name."""
        context = self._persons.get(person)
        if context is None:
            context = self._context()
            if person:
                self._persons[person] = context
                with context.new_page() as page:
                    self.log_in(page, self.token(person))
        with context.new_page() as page:
            page.on("console", lambda message: self._hear(message.type, message.text))
            page.on("pageerror", lambda error: self.problems.append(str(error)))
            page.on("request", lambda request: self._note(request.url))
            page.set_viewport_size(viewport)
            page.emulate_media(color_scheme=scheme)
            yield page

    def token(self, person: str) -> str:
        return self.secured.tokens[person].token

    def _context(self) -> BrowserContext:
        context = self._browser.new_context(ignore_https_errors=True, base_url=self.address)
        context.set_default_timeout(60_000)
        return context

    def log_in(self, page: Page, token: str) -> None:
        page.goto("/login")
        page.get_by_label("Token").fill(token)
        with page.expect_navigation():
            page.get_by_role("button", name="Log in").click()

    def forget_logins(self) -> None:
        """The console was restarted: each person logs in again."""
        self._persons.clear()

    def take_problems(self) -> list[str]:
        taken, self.problems = self.problems, []
        return taken

    def queue(self, **settings: Any) -> str:
        """A new queue."""
        name = f"q{next(self._names)}"
        self.client.create_queue(name, **settings)
        return name

    def message(self, queue: str, payload: bytes = b"hello", **headers: str) -> None:
        self.client.publish(payload, {"queue": queue, **headers})

    def waiting(self) -> str:
        """A queue with a message."""
        queue = self.queue()
        self.message(queue)
        self.entry(queue, "available")
        return queue

    def delayed(self) -> str:
        """A queue with a message that waits for its time."""
        queue = self.queue(default_delay=600)
        self.message(queue)
        self.entry(queue, "delayed")
        return queue

    def paused(self) -> str:
        queue = self.queue()
        self.client.pause_queue(queue)
        return queue

    def dead_letters(self, payloads: int = 1) -> str:
        """A queue with this many dead letters."""
        queue = self.queue(max_attempts=1, backoff=Backoff.none())
        for number in range(payloads):
            self.message(queue, b'{"number": %d}' % number)
        while self.client.get_queue(queue).counts.failed_count < payloads:
            for one in self.client.claim(queue, 10, wait=30, consumer_id="worker-1"):
                one.nack(reason="no such customer <b>x</b>")
        return queue

    def slow_redrive(self) -> str:
        """A queue whose dead letters are redriven, one each second."""
        queue = self.dead_letters(60)
        self.client.start_redrive(queue, rate=1)
        return queue

    def quarantined(self) -> str:
        """A queue whose filter takes too long."""
        queue = self.queue(filter=SLOW)
        for number in count():
            if (quarantine := self.client.get_queue(queue).quarantine) is not None:
                self.first_quarantines[queue] = quarantine
                return queue
            self.message(queue, kind=f"b{number}")
        raise AssertionError

    def poison_task(self, max_retries: int) -> str:
        """A publish that was accepted, and whose body no attempt finds."""
        task_id = new_task_id()
        payload: dict[str, object] = {"content_length": 4, "data_ref": "any"}
        poison = enqueue(self._settings, task_id, payload, max_retries)
        with ThreadPoolExecutor(1) as thread:  # This one has the loop of the browser.
            thread.submit(asyncio.run, poison).result()
        return task_id

    def failed_task(self) -> str:
        """One of these that has failed permanently."""
        task_id = self.poison_task(0)
        while task_id not in self.failures():
            time.sleep(LOOK_SECONDS)
        self.first_failures = self.failures()
        return task_id

    def failures(self) -> dict[str, int]:
        """The tasks that have failed permanently, and when."""
        return {one.task_id: one.ended_at_ms for one in self.client.failed_tasks()}

    def entry(self, queue: str, state: Any) -> Entry:
        """The first message of a queue in this state, once there is one."""
        while not (found := self.client.entry_page(queue, state).entries):
            time.sleep(LOOK_SECONDS)
        return found[0]

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(text)

    def _note(self, url: str) -> None:
        if not url.startswith((self.address, "data:")):
            self.outside.append(url)
