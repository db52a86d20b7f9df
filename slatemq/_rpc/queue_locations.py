"""Which broker has a queue, and questions to all brokers: those that are down hide no other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, Unpack

from slatemq._checks import check_text
from slatemq._rpc.peers import ATTEMPT_S, CallOptions, Method, Peers, errors_translated
from slatemq._rpc.topology_cache import STAGGER_S, first_answer
from slatemq.errors import (
    INCOMPLETE,
    SHARD,
    SHARDS,
    DeadlineExceeded,
    NotFound,
    SlateMQError,
    Unavailable,
)
from slatemq.v1.queue_pb2 import LocateQueueRequest
from slatemq.v1.queue_pb2_grpc import QueueServiceStub

if TYPE_CHECKING:
    from slatemq.encryption import KeyRing

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

ANSWER_S = 5.0
"""How long a question to all brokers waits for one of them, when others have answered."""

REFUSED_S = 1.0
"""How long it waits for a broker whose address refuses connections, and which may be restarting."""


class Answers(NamedTuple, Generic[T]):
    """What brokers answered, by shard, and why the others did not."""

    by_shard: Mapping[int, T]
    problems: dict[int, SlateMQError]

    def check_complete(self) -> None:
        """Raises Unavailable (INCOMPLETE) that names the brokers which did not answer."""
        if self.problems:
            raise _silent("the answer is incomplete", self.problems, INCOMPLETE)


class QueueLocations:
    """Finds queues, by one call to any broker, and remembers where they are."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._known: dict[str, int] = {}

    async def shard_of(self, queue_id: str) -> int:
        """The broker shard of a queue, whose broker may be down.

        Raises NotFound when no shard has it, Unavailable or DeadlineExceeded when no broker
        answers.
        """
        shards = await self.peers.broker_shards()
        known = self._known.get(queue_id)
        if known is not None:
            return known
        if len(shards) == 1:
            return shards[0]
        shard = self._known[queue_id] = await self._look_up(queue_id, shards)
        return shard

    async def _look_up(self, queue_id: str, brokers: list[int], *, fresh: bool = False) -> int:
        """What the first of these brokers that answers says; `fresh`: by a claim read now."""
        request = LocateQueueRequest(queue_id=queue_id, fresh=fresh)

        async def look(broker: int) -> int | NotFound:
            stub = QueueServiceStub(await self.peers.broker(broker))
            try:
                with errors_translated():
                    call = stub.LocateQueue(request, timeout=ATTEMPT_S)
                    return (await self.peers.unless_closed(call)).broker_shards[0]
            except NotFound as error:
                return error  # as any other broker would say

        asked = random.sample(brokers, len(brokers))
        found, problems = await first_answer(asked, look, STAGGER_S)
        if isinstance(found, int):
            return found
        raise found or next(iter(problems.values()))

    async def has_moved(self, queue_id: str, asked: int, error: NotFound) -> bool:
        """Whether a shard that was asked in vain for a queue is not the one that has it.

        The error may say which one does; else it is looked up, by a fresh claim. Raises as
        `shard_of`, but not NotFound.
        """
        if error.resource_type != "queue" or error.resource_name != queue_id:
            return False
        self.forget(queue_id)
        named = error.metadata.get(SHARD)
        brokers = await self.peers.broker_shards()
        if named is not None:
            self._known[queue_id] = int(named)
            return int(named) != asked
        if len(brokers) < 2:
            return False
        try:
            shard = await self._look_up(queue_id, brokers, fresh=True)
        except NotFound:
            return False
        self._known[queue_id] = shard
        return shard != asked

    def forget(self, queue_id: str) -> None:
        """The queue is not where it was: ask again."""
        self._known.pop(queue_id, None)

    async def call(
        self,
        queue_id: str,
        attempt: Callable[[int, float], Awaitable[T]],
        **options: Unpack[CallOptions],
    ) -> T:
        """A call to the broker of a queue; `attempt` gets its shard and a timeout in seconds.

        A queue that is not where it was is looked for once more. Options and errors as in
        `Peers.call`.
        """
        asked: int | None = None

        async def located(timeout: float) -> T:
            nonlocal asked
            asked = None
            asked = await self.shard_of(queue_id)
            return await attempt(asked, timeout)

        try:
            return await self.peers.call(located, **options)
        except NotFound as error:
            if asked is None or not await self.has_moved(queue_id, asked, error):
                raise
        return await self.peers.call(located, **options)

    async def ask(
        self, queue_id: str, method: Method[Q, R], request: Q, **options: Unpack[CallOptions]
    ) -> R:
        """Calls a method of the broker of a queue; the rest as in `call`."""

        async def attempt(shard: int, timeout: float) -> R:
            return await method(await self.peers.broker(shard))(request, timeout=timeout)

        return await self.call(queue_id, attempt, **options)

    async def ask_owner_of(
        self,
        resource: str,
        field: str,
        named: Any,
        method: Method[Q, R],
        request_type: Callable[..., Q],
    ) -> tuple[R, int]:
        """The response of the one broker that has a resource, and its shard.

        `named` is the resource, with its `broker_shard`, or its name, with which all brokers are
        asked; `field` has the name, in the resource as in the request. Raises NotFound when no
        broker has it, Unavailable (BROKER_DOWN) when none of those that answer has it.
        """
        name: str = getattr(named, field, named)
        check_text(field, name)
        request = request_type(**{field: name})
        shard: int | None = getattr(named, "broker_shard", None)

        async def answer_of(shard: int) -> tuple[R, int]:
            return await self.peers.ask_broker(shard, method, request), shard

        if shard is not None:
            return await answer_of(shard)
        return await self._first(resource, name, await self.peers.broker_shards(), answer_of)

    async def ask_all(
        self, method: Method[Q, R], request: Q, answer_s: float = ANSWER_S
    ) -> Answers[R]:
        """Asks all brokers at once. Raises as `Peers.call` when none answers, or one refuses.

        Brokers that do not answer within `answer_s` are left out when another one does.
        """
        patience_s = answer_s / 2

        async def attempt(_: float) -> Answers[R]:
            nonlocal patience_s
            shards = await self.peers.broker_shards()
            patience_s *= 2  # All of them may be busy.
            bound_s = min(patience_s, self.peers.call_s)
            refused_s = min(REFUSED_S, bound_s)
            options: CallOptions = {
                "call_s": refused_s,
                "attempt_s": bound_s,
                "wait_s": bound_s - refused_s,
            }
            by_shard: dict[int, R] = {}
            problems: dict[int, SlateMQError] = {}

            async def one(shard: int) -> None:
                try:
                    by_shard[shard] = await self.peers.ask_broker(
                        shard, method, request, **(options if len(shards) > 1 else {})
                    )
                except (Unavailable, DeadlineExceeded) as error:
                    problems[shard] = error

            await asyncio.gather(*map(one, shards))
            if problems and not by_shard:
                raise next(iter(problems.values()))
            return Answers(by_shard, problems)

        return await self.peers.call(attempt)

    async def _first(
        self, resource: str, name: str, shards: list[int], ask: Callable[[int], Awaitable[T]]
    ) -> T:
        answer, problems = await first_answer(shards, ask, 0)
        if answer is not None:
            return answer
        silent: dict[int, SlateMQError] = {}
        for shard, error in problems.items():
            if isinstance(error, Unavailable | DeadlineExceeded):
                silent[shard] = error
            elif not isinstance(error, NotFound) or error.resource_type != resource:
                raise error
        if silent:
            raise _silent(f"no broker that answers has {resource} {name!r}", silent, "BROKER_DOWN")
        raise NotFound(resource, name)


def _silent(what: str, problems: Mapping[int, SlateMQError], reason: str) -> Unavailable:
    """The error about brokers that did not answer."""
    named = ", ".join(str(shard) for shard in sorted(problems))
    shards = f"broker shard {named} does" if len(problems) == 1 else f"broker shards {named} do"
    why = problems[min(problems)].message
    return Unavailable(
        f"{what}: {shards} not answer ({why})", reason=reason, metadata={SHARDS: named}
    )


class Calls:
    """A part of the client: calls about one kind of thing."""

    def __init__(self, locations: QueueLocations, encryption: KeyRing | None = None) -> None:
        """`encryption`: the keys of payloads; None: they are published as they are."""
        self._locations = locations
        self._peers = locations.peers
        self._encryption = encryption
