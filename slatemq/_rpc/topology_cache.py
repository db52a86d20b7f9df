"""Where the processes of an instance are: learned from any of them, and kept up to date."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import grpc.aio

from slatemq._cancelling import end_all, is_cancelled
from slatemq._rpc.connection_faults import HUNG_UP
from slatemq._rpc.rpc_status import fault_of, from_rpc_error
from slatemq.errors import DeadlineExceeded, InvalidArgument, SlateMQError, Unavailable
from slatemq.models import Topology
from slatemq.v1 import topology_pb2, topology_pb2_grpc

K = TypeVar("K")
T = TypeVar("T")

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""How long the only known address may take to answer."""

LOOK_UP_S = 2.0
"""How long an address may take to answer where there are others to ask."""

STAGGER_S = 0.25
"""The next address is asked when the one before has not answered for so long."""

REFRESH_S = 0.25
"""While a process is down, the topology is read again this often at most."""

AGE_S = 10.0
"""A client that is in use learns of new processes after this: one small call in the background."""

NOT_SLATEMQ = "NOT_SLATEMQ"
"""The reason of an error about an address where another server answers."""


class TopologyCache:
    """The topology known last, and when to ask again."""

    def __init__(
        self,
        endpoints: Sequence[str],
        channel_at: Callable[[str], grpc.aio.Channel],
        mismatch: Callable[[str], Awaitable[SlateMQError | None]],
    ) -> None:
        """Ask `endpoints` first, then every process known from the last answer.

        `mismatch` finds out whether an address cannot be reached since only one side speaks TLS.
        """
        self._endpoints = endpoints
        self._mismatch = mismatch
        self._channel_at = channel_at
        self._known: Topology | None = None
        self.is_stale = True  # also after `forget`, until the next answer
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def known(self) -> Topology | None:
        """The last answer, without asking; a client in use gets a newer one in the background."""
        if self._known is not None and time.monotonic() - self._asked_at >= AGE_S:
            self._begin_refresh()
        return self._known

    def forget(self) -> None:
        """A process is down or has moved: ask again before the next call."""
        self.is_stale = True

    async def get(self) -> Topology:
        """The topology: asked once, after `forget`, and in the background every `AGE_S`.

        While no process answers, the addresses known last are the best guess. Raises Unavailable
        when there never were any, and InvalidArgument (NOT_SLATEMQ) as `fresh`.
        """
        known = self.known
        if known is not None and not self._must_ask():
            return known
        async with self._asking:
            if self._known is None or self._must_ask():
                try:
                    self._known = await self._ask(self._is_doubted)
                    self.is_stale = False
                except (Unavailable, DeadlineExceeded, InvalidArgument):
                    if self._known is None or self._closed:
                        raise
                finally:
                    self._asked_at = time.monotonic()
            return self._known

    async def fresh(self, *, is_doubted: bool = False) -> Topology:
        """The topology, asked now; `is_doubted`: a server is to read it, too, if its own is old.

        Raises Unavailable when no process answers, and InvalidArgument (NOT_SLATEMQ) when other
        servers do at all of the addresses given.
        """
        async with self._asking:
            self._known = await self._ask(is_doubted or self._is_doubted)
            self.is_stale = False
            self._asked_at = time.monotonic()
            return self._known

    async def close(self) -> None:
        """Ends what runs in the background."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])

    @property
    def _is_doubted(self) -> bool:
        """Whether a process did not answer where the last answer had it."""
        return self.is_stale and self._known is not None

    def _must_ask(self) -> bool:
        return self.is_stale and time.monotonic() - self._asked_at >= REFRESH_S

    def _begin_refresh(self) -> None:
        if self._closed or (self._refreshing is not None and not self._refreshing.done()):
            return
        self._asked_at = time.monotonic()
        with suppress(RuntimeError):  # Without a running loop the next call asks.
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> None:
        try:
            await self.fresh()
        except SlateMQError as error:
            log.debug("the topology could not be refreshed: %s", error)

    async def _ask(self, is_doubted: bool) -> Topology:
        addresses = list(self._endpoints)
        if (known := self._known) is not None:
            addresses += [address for _, _, address in known.processes()]
        addresses = list(dict.fromkeys(addresses))
        timeout_s = LOOK_UP_S if len(addresses) > 1 else CONNECT_S
        answer, problems = await first_answer(
            addresses, lambda address: self._ask_one(address, timeout_s, is_doubted), STAGGER_S
        )
        if answer is not None:
            return answer
        for problem in problems.values():
            if problem.reason == "CLIENT_CLOSED":
                raise problem
        raise _unreachable(await self._explained(problems))

    async def _explained(self, problems: Mapping[str, SlateMQError]) -> dict[str, SlateMQError]:
        """Why none of the addresses given leads to an instance, each."""
        down = [
            address
            for address in self._endpoints
            if isinstance(problems[address], Unavailable | DeadlineExceeded)
            or problems[address].reason == NOT_SLATEMQ
        ]
        found = await asyncio.gather(*(self._mismatch(address) for address in down))
        mismatches = {address: error for address, error in zip(down, found, strict=True) if error}
        return {address: mismatches.get(address, problems[address]) for address in self._endpoints}

    async def _ask_one(self, address: str, timeout_s: float, is_doubted: bool) -> Topology:
        stub: Any = topology_pb2_grpc.TopologyServiceStub(self._channel_at(address))
        try:
            request = topology_pb2.GetTopologyRequest(is_doubted=is_doubted)
            answer = await stub.GetTopology(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _other_server(address, error) or _unreached(error) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise Unavailable("the client is closed", reason="CLIENT_CLOSED") from None
        return Topology(
            {peer.shard: peer.address for peer in answer.ingests},
            {peer.shard: peer.address for peer in answer.brokers},
            {peer.shard: peer.address for peer in answer.routers},
            {peer.shard: peer.address for peer in answer.janitors},
            frozenset(peer.shard for peer in answer.ingests if peer.is_draining),
        )


async def first_answer(
    keys: Sequence[K], ask: Callable[[K], Awaitable[T]], stagger_s: float
) -> tuple[T | None, dict[K, SlateMQError]]:
    """The first answer of any, or None and why each of them did not answer.

    Asks the next one when the one before has failed, or has not answered for `stagger_s`: 0 asks
    all at once. Cancels the rest. What is not a SlateMQError is raised.
    """
    waiting = list(keys)
    running: dict[asyncio.Future[T], K] = {}
    problems: dict[K, SlateMQError] = {}
    try:
        while waiting or running:
            if waiting:
                key = waiting.pop(0)
                running[asyncio.ensure_future(ask(key))] = key
            if waiting and not stagger_s:
                continue
            timeout_s = stagger_s if waiting else None
            done, _ = await asyncio.wait(
                running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                key = running.pop(task)
                try:
                    return task.result(), problems
                except SlateMQError as error:
                    problems[key] = error
        return None, problems
    finally:
        await end_all(running)


def _other_server(address: str, error: grpc.RpcError) -> InvalidArgument | None:
    """The error about a server that is not one of SlateMQ's; None when it may be one."""
    call: Any = error
    details = call.details() or ""
    if call.code() is grpc.StatusCode.UNIMPLEMENTED and "http2 header" not in details:
        what = "a gRPC server answers there that does not know slatemq.v1.TopologyService"
    elif "Received http2 header with status" in details or "invalid content-type" in details:
        what = f"an HTTP/2 server answers there ({details})"
    elif "http1.x server" in details:
        what = "an HTTP/1 server answers there"
    elif "Expected SETTINGS frame" in details:
        what = "a server answers there that does not speak HTTP/2"
    else:
        return None
    return InvalidArgument("endpoint", f"{address} is not SlateMQ: {what}", reason=NOT_SLATEMQ)


def _unreached(error: grpc.RpcError) -> SlateMQError:
    """Why an address did not answer, without the address."""
    problem, fault = from_rpc_error(error), fault_of(error)
    if fault is not None:
        return Unavailable(fault.why, reason=problem.reason)
    return problem


def _closing(problem: SlateMQError) -> str:
    """A word on a server that hangs up: one of SlateMQ's does while it ends, others always do."""
    return ", so perhaps it is not SlateMQ" if problem.message == HUNG_UP else ""


def _unreachable(problems: dict[str, SlateMQError]) -> SlateMQError:
    """Why none of the addresses given leads to an instance."""
    texts = [
        problem.description
        if isinstance(problem, InvalidArgument)
        else f"{address} is not reachable: {problem.message}{_closing(problem)}"
        for address, problem in problems.items()
    ]
    if all(isinstance(problem, InvalidArgument) for problem in problems.values()):
        reasons = {problem.reason for problem in problems.values()}
        reason = reasons.pop() if len(reasons) == 1 else NOT_SLATEMQ
        return InvalidArgument("endpoint", "; ".join(texts), reason=reason)
    for problem in problems.values():
        if not isinstance(problem, Unavailable | DeadlineExceeded | InvalidArgument):
            return problem
    return Unavailable("; ".join(texts), reason="UNREACHABLE")
