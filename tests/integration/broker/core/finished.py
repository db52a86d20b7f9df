"""Random histories, the part about how leases end: well, badly, given back, once more, too late."""

from __future__ import annotations

import grpc

from slatemq.v1 import consumer_pb2
from slatemq.v1.consumer_pb2 import NackItem
from tests.integration.broker.core.compared import Compared

LEASE_MS_MIN = 1000
REMEMBERED = 300

OK, REFUSED, UNKNOWN = (
    code.value[0]
    for code in (
        grpc.StatusCode.OK,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
    )
)


class Finished(Compared):
    """Its steps finish leases and extend them."""

    async def ack(self) -> None:
        found = self.a_lease()
        if found:
            queue, token = found
            assert await self.rig.ack(token, token) == [OK, OK]
            queue.complete(token)
            self.note(token, "acked")

    async def nack(self) -> None:
        await self._release(release=False)

    async def release(self) -> None:
        await self._release(release=True)

    async def _release(self, *, release: bool) -> None:
        found = self.a_lease()
        if not found:
            return
        queue, token = found
        delay_ms = self.random.choice((None, 0, 1, 2_000, 40_000))
        items = [self._item(token, delay_ms, release=release)]
        if self.random.random() < 0.2:
            # A nack against a release: the first of them counts.
            items.append(self._item(token, 0, release=not release))
        answer = await self.rig.consumers.Nack(consumer_pb2.NackRequest(items=items))
        assert {status.code for status in answer.results} == {OK}
        if release:
            queue.give_back(token, delay_ms or 0, self.now_ms)
        else:
            queue.failed_attempt(token, "nack: no", delay_ms, self.now_ms)
        self.note(token, "nacked")

    def _item(self, token: str, delay_ms: int | None, *, release: bool) -> NackItem:
        return NackItem(lease_token=token, reason="no", delay_ms=delay_ms, release=release)

    async def extend(self) -> None:
        found = self.a_lease()
        if found:
            queue, token = found
            length_ms = self.random.choice((0, LEASE_MS_MIN, 60_000))
            status, ends_ms = await self._extend(token, length_ms)
            assert (status, ends_ms) == (OK, queue.extend(token, length_ms, self.now_ms))

    async def _extend(self, token: str, length_ms: int) -> tuple[int, int]:
        request = consumer_pb2.ExtendLeaseRequest(lease_tokens=[token], lease_ms=length_ms)
        (result,) = (await self.rig.consumers.ExtendLease(request)).results
        return result.status.code, result.lease_deadline_ms

    async def finish_again(self) -> None:
        """A lease that is over: a repeat is OK, and nothing else changes anything."""
        if not self.over:
            return
        token, became = self.random.choice(list(self.over.items()))
        refused = UNKNOWN if became == "gone" else REFUSED
        match self.random.choice(("ack", "nack", "release", "extend")):
            case "ack":
                assert await self.rig.ack(token) == [OK if became == "acked" else refused]
            case "extend":
                assert (await self._extend(token, 0))[0] == refused
            case verb:
                item = self._item(token, None, release=verb == "release")
                answer = await self.rig.consumers.Nack(consumer_pb2.NackRequest(items=[item]))
                expected = OK if became == "nacked" else refused
                assert [status.code for status in answer.results] == [expected]

    def note(self, token: str, became: str) -> None:
        """A lease is over."""
        self.over[token] = became
        while len(self.over) > REMEMBERED:
            del self.over[next(iter(self.over))]
