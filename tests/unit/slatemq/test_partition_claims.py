"""Claims that gather from the partitions of a queue."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from slatemq._consume.gathering import _Gathering
from slatemq.v1 import consumer_pb2


class SilentCall:
    """A stream that does not end when it is asked to."""

    def __init__(self) -> None:
        self.written: list[consumer_pb2.ConsumeRequest] = []
        self.cancelled = asyncio.Event()

    async def write(self, request: consumer_pb2.ConsumeRequest) -> None:
        self.written.append(request)

    def cancel(self) -> None:
        self.cancelled.set()


def gathering() -> Any:
    return _Gathering(cast("Any", None), consumer_pb2.ClaimRequest(), cast("Any", None), (0, 1))


async def test_a_silent_broker_is_not_waited_for_once_another_has_brought_messages() -> None:
    call, gathered = SilentCall(), gathering()
    stopping = asyncio.create_task(gathered._stop(call, 60))
    await asyncio.sleep(0)
    assert not call.written

    gathered._found.set()
    await call.cancelled.wait()
    assert [request.HasField("stop") for request in call.written] == [True]
    await stopping


async def test_a_broker_has_its_time_where_no_other_has_messages() -> None:
    call, gathered = SilentCall(), gathering()
    stopping = asyncio.create_task(gathered._stop(call, 0))
    while not call.written:
        await asyncio.sleep(0)
    assert not call.cancelled.is_set()
    stopping.cancel()
