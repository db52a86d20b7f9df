"""Few payloads are in the console's memory at once."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from starlette.types import Message, Scope

from services.console import payloads
from services.console.payloads import DOWNLOADS_MAX, PART_BYTES, Download, Payloads
from slatemq.errors import ResourceExhausted

SCOPE: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}

PAYLOAD = bytes(range(256)) * (3 * PART_BYTES // 256) + b"end"


class Browser:
    """Takes a part of a download each time that it is asked to."""

    def __init__(self, parts_count: int) -> None:
        self.messages: list[Message] = []
        self._parts = asyncio.Semaphore(parts_count)

    def read_on(self) -> None:
        for _ in range(100):
            self._parts.release()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Message) -> None:
        await self._parts.acquire()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.messages)


async def download(places: Payloads, browser: Browser) -> None:
    async with AsyncExitStack() as place:
        await place.enter_async_context(places.place_of_download())
        response = Download(PAYLOAD, "a.bin", place.pop_all())
    await response(SCOPE, browser.receive, browser.send)


async def test_a_message_is_read_once_the_one_before_it_is_a_page() -> None:
    places = Payloads()
    pages: list[int] = []

    async def show(number: int) -> None:
        async with places.place_to_read():
            await asyncio.sleep(0)
            pages.append(number)
            await asyncio.sleep(0)
            assert pages[-1] == number

    await asyncio.gather(*map(show, range(5)))
    assert pages == [0, 1, 2, 3, 4]


async def test_a_person_without_a_place_sees_why(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Payloads()
    async with places.place_to_read():
        monkeypatch.setattr(payloads, "CALL_S", 0)
        with pytest.raises(ResourceExhausted, match="others are reading messages"):
            async with places.place_to_read():
                pass
    monkeypatch.undo()
    async with places.place_to_read():
        pass


async def test_a_download_keeps_its_place_until_the_browser_has_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = Payloads()
    browsers = [Browser(2) for _ in range(DOWNLOADS_MAX)]
    downloads = [asyncio.create_task(download(places, browser)) for browser in browsers]
    async with asyncio.timeout(60):
        while any(len(browser.messages) < 2 for browser in browsers):
            await asyncio.sleep(0)
    monkeypatch.setattr(payloads, "CALL_S", 0)
    with pytest.raises(ResourceExhausted, match="being downloaded"):
        await download(places, Browser(0))

    browsers[0].read_on()
    await asyncio.wait_for(downloads[0], 60)
    assert browsers[0].body == PAYLOAD
    assert (b"content-length", b"%d" % len(PAYLOAD)) in browsers[0].messages[0]["headers"]

    # One that the browser gives up leaves its place, too.
    downloads[1].cancel()
    await asyncio.gather(downloads[1], return_exceptions=True)
    monkeypatch.undo()
    async with AsyncExitStack() as all_places:
        for _ in range(DOWNLOADS_MAX):
            await all_places.enter_async_context(places.place_of_download())


async def test_a_browser_that_reads_too_slowly_loses_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(payloads, "DOWNLOAD_S", 0)
    monkeypatch.setattr(payloads, "DOWNLOADS_MAX", 1)
    places, browser = Payloads(), Browser(1)

    await asyncio.wait_for(download(places, browser), 60)

    assert browser.body == b""
    assert caplog.messages == ["a download was ended after 0 s"]
    async with places.place_of_download():
        pass
