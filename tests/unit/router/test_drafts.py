"""Drafts of queues, which the router judges in threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.router.servicer import DRAFTS_MAX, RouterServicer
from slatemq.errors import InvalidArgument, ResourceExhausted
from slatemq.v1 import queue_pb2, router_pb2


async def test_no_more_than_some_drafts_are_in_work_also_of_calls_that_were_cancelled() -> None:
    unused: Any = None  # A draft is judged by itself.
    servicer = RouterServicer(unused, unused)
    good = router_pb2.ExplainRequest(draft=queue_pb2.Queue(filter="size == 0"))
    bad = router_pb2.ExplainRequest(draft=queue_pb2.Queue(filter="size >"))

    # Given as many calls as may be, good and bad, of which all but one are cancelled
    released = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(released.wait))
    requests = [good, good, *[bad] * (DRAFTS_MAX - 2)]
    calls = [asyncio.create_task(servicer.Explain(one, None)) for one in requests]
    await asyncio.sleep(0)
    for call in calls[1:]:
        call.cancel()
    await asyncio.wait(calls[1:])

    # Then another one is refused
    with pytest.raises(ResourceExhausted) as caught:
        await servicer.Explain(good, None)
    assert caught.value.reason == "TOO_MANY_DRAFTS"
    assert caught.value.retry_after_ms is not None

    # Until their threads have ended
    released.set()
    await busy
    assert (await calls[0]).queues[0].matched
    async with asyncio.timeout(60):
        while servicer._drafts_count:
            await asyncio.sleep(0.01)
    assert (await servicer.Explain(good, None)).queues[0].matched
    with pytest.raises(InvalidArgument):
        await servicer.Explain(bad, None)
