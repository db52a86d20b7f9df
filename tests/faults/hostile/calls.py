"""Generated requests, made by gRPC's own client, and what their answers must not be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import grpc
import grpc.aio

from tests.faults.hostile.generated import LARGE, TOKENLESS, Generated, generate
from tests.faults.hostile.target import Target
from tests.unsent import UNSENT

AT_ONCE: Final = 32
"""Calls under way."""

CALL_S: Final = 0.5
"""Streams and waiting claims go on for ever."""

LARGE_S: Final = 30.0

ANSWERS_MAX: Final = 1_000
"""Of a stream."""

FAULTS: Final = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
"""What no caller is answered, whatever was sent."""

UNREACHED: Final = frozenset({grpc.StatusCode.UNAVAILABLE})
"""A call that a server has not answered."""


async def ending(target: Target, one: Generated) -> tuple[grpc.StatusCode, str]:
    """The status of a call, and its words."""

    async def sent() -> AsyncIterator[bytes]:
        for message in one.messages:
            yield message

    rpc = one.rpc
    ends = ("stream" if many else "unary" for many in (rpc.takes_many, rpc.gives_many))
    call: Any = getattr(target.channel(one.kind, one.door), "_".join(ends))(rpc.path)
    made = call(
        sent() if rpc.takes_many else one.messages[0],
        timeout=LARGE_S if one.sort in LARGE else CALL_S,
        metadata=(*target.authorization(one.proof, one.number), *one.metadata),
    )
    try:
        if rpc.gives_many:
            await _read(made)
        else:
            await made
    except grpc.aio.AioRpcError as error:
        if error.details() == UNSENT:
            return grpc.StatusCode.CANCELLED, UNSENT
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


async def _read(call: Any) -> None:
    count = 0
    async for _ in call:
        count += 1
        if count >= ANSWERS_MAX:
            call.cancel()
            return


def fault_of(target: Target, one: Generated, code: grpc.StatusCode, words: str) -> str | None:
    """What is wrong with an answer; None where nothing is."""
    if code in FAULTS:
        return f"{code.name}: {words}"
    if code is not grpc.StatusCode.OK or one.rpc.caller == "anyone":
        return None
    if one.rpc.caller == "service" and (one.door == "clients" or target.secured is not None):
        return "a client reached a call of services"
    if target.secured is None:
        return None
    # The handshake of the port for services has seen a certificate: of a client, here.
    if one.door == "services" and one.rpc.caller != "authenticated":
        return "a client was answered at the port for services"
    if one.door == "clients" and one.proof in TOKENLESS:
        return "answered to a caller who proved nothing"
    return None


class Calls:
    """Makes calls, many at once.

    Attributes:
        codes: How often each status came.
        sorts: How many calls of each sort were made.
        faults: Each with the number of its request.
    """

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._seed = seed
        self.codes: Counter[str] = Counter()
        self.sorts: Counter[str] = Counter()
        self.faults: list[tuple[int, str]] = []

    async def make(self, numbers: range, progress: Callable[[int], None]) -> None:
        """Make the calls of these numbers."""
        left = iter(numbers)
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._work(left, progress))

    async def _work(self, numbers: Iterator[int], progress: Callable[[int], None]) -> None:
        for number in numbers:
            await self.make_one(generate(self._seed, number, self._target.proofs))
            progress(sum(self.sorts.values()))

    async def make_one(self, one: Generated) -> grpc.StatusCode:
        code, words = await ending(self._target, one)
        self.codes[code.name] += 1
        self.sorts[one.sort] += 1
        fault = fault_of(self._target, one, code, words)
        if fault is not None:
            where = f"{one.rpc.path} of {one.kind} at the port for {one.door}"
            self.faults.append((one.number, f"{where}, {one.sort}: {fault}"))
        return code
