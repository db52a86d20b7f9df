"""Requests of a start, and of a process that serves, while the store does not answer."""

from __future__ import annotations

import asyncio
import logging

import pytest
from obstore.exceptions import BaseError, GenericError

from libs.storage.objects import patience
from libs.storage.objects.patience import patience_s, patiently, repeated

AWAY = "Error performing GET http://store/a in 5s - HTTP error: error sending request"
BUSY = "Error performing GET http://store/a in 0.2s, after 2 retries, max_retries: 2 - 503"
NO_BUCKET = "Error performing GET http://store/a in 0.1s - Client error with status 400"
NO_KEYS = "Error performing PUT http://169.254.169.254/latest/api/token in 5s - HTTP error"


class Store:
    """Fails the first requests."""

    def __init__(self, failures: int, error: BaseError) -> None:
        self.requests_count = 0
        self._failures = failures
        self._error = error

    async def request(self) -> str:
        self.requests_count += 1
        if self.requests_count <= self._failures:
            raise self._error
        return "answer"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "AGAIN_S", 0.001)


@pytest.mark.parametrize("said", [AWAY, BUSY])
async def test_a_start_repeats_what_the_store_did_not_serve_and_says_so_once(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = Store(5, GenericError(said))

    with patiently():
        assert await repeated(store.request) == "answer"

    assert store.requests_count == 6
    (record,) = caplog.records
    assert record.getMessage() == f"the start waits for the store, 30 s: {said}"


@pytest.mark.parametrize("said", [NO_BUCKET, NO_KEYS])
async def test_a_start_does_not_repeat_what_will_not_pass(said: str) -> None:
    store = Store(1, GenericError(said))

    with patiently(), pytest.raises(GenericError):
        await repeated(store.request)

    assert store.requests_count == 1


async def test_a_start_gives_up_once_it_has_waited() -> None:
    store = Store(10**9, GenericError(AWAY))

    with patiently(0.02), pytest.raises(GenericError):
        await repeated(store.request)

    assert store.requests_count > 1


async def test_a_process_that_serves_has_a_caller_who_waits_and_repeats_nothing() -> None:
    store = Store(1, GenericError(AWAY))

    with pytest.raises(GenericError):
        await repeated(store.request)

    assert (store.requests_count, patience_s()) == (1, 0)


async def test_what_a_start_leaves_running_is_patient_until_it_serves() -> None:
    store, serves = Store(10**9, GenericError(AWAY)), asyncio.Event()

    async def work() -> None:
        await serves.wait()
        await repeated(store.request)

    with patiently():
        working = asyncio.create_task(work())
        await asyncio.sleep(0)
    serves.set()

    with pytest.raises(GenericError):
        await working
    assert store.requests_count == 1
