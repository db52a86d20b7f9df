"""Which broker has a queue, and questions to all brokers: those that are down hide no other."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, Unpack

import grpc

from slatemq._rpc.peers import (
    ATTEMPT_S,
    BACKOFF_S,
    BACKOFF_S_MAX,
    CallOptions,
    Method,
    Peers,
    errors_translated,
    translated,
)
from slatemq._rpc.topology_cache import STAGGER_S, first_answer
from slatemq.errors import (
    INCOMPLETE,
    PARTITION,
    SHARD,
    SHARDS,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
    brokers_silent,
    incomplete,
)
from slatemq.v1.queue_pb2 import LocateQueueRequest
from slatemq.v1.queue_pb2_grpc import QueueServiceStub

if TYPE_CHECKING:
    from slatemq.encryption import KeyRing

log = logging.getLogger(__name__)

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

ANSWER_S = 5.0
"""How long a question to all brokers waits for one of them, when others have answered."""

PARTITIONS = "partitions"
"""The fact of an error that names the partitions which are missing, or have not changed."""

HOPS_MAX = 8
"""How often a queue that is not where it was is looked for: it may move while a call waits."""

REFUSED_S = 1.0
"""How long it waits for a broker whose address refuses connections, and which may be restarting."""


class Answers(NamedTuple, Generic[T]):
    """What brokers answered, by shard, and why the others did not."""

    by_shard: dict[int, T]
    problems: dict[int, SlateMQError]

    def check_complete(self) -> None:
        """Raises Unavailable (INCOMPLETE) that names the brokers which did not answer."""
        if self.problems:
            raise incomplete(self.problems)


class QueueLocations:
    """Finds queues, by one call to any broker, and remembers where they are.

    A queue is on one shard, or has a partition on each of several: their shards are in the order of
    the partitions' indexes.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._known: dict[str, tuple[int, ...]] = {}
        self._partitioned: set[str] = set()
        self._outdated: set[str] = set()

    async def shards_of(self, queue_id: str, *, fresh: bool = False) -> tuple[int, ...]:
        """The broker shards of a queue, by partition; their brokers may be down.

        What is known may be outdated, unless one of its shards was removed; `fresh` has the claim
        of the name read now. Raises NotFound when no shard has it, Unavailable or DeadlineExceeded
        when no broker answers.
        """
        brokers = await self.peers.some_broker_shards()
        known = self._known.get(queue_id)
        fresh = fresh or queue_id in self._outdated
        if known is not None and not fresh and _are_there(known, brokers):
            return known
        if len(brokers) == 1:
            return (brokers[0],)
        shards = await self._look_up(queue_id, brokers, fresh=fresh or known is not None)
        self.note(queue_id, shards)
        self._outdated.discard(queue_id)
        return shards

    def note(self, queue_id: str, shards: tuple[int, ...]) -> None:
        """Remembers where a queue is."""
        self._known[queue_id] = shards
        if len(shards) > 1:
            self._partitioned.add(queue_id)
        else:
            self._partitioned.discard(queue_id)

    async def located(
        self, queue_id: str, *, fresh: bool = False, call_s: float | None = None
    ) -> tuple[int, ...]:
        """As `shards_of`, with the patience of a call."""
        return await self.peers.call(lambda _: self.shards_of(queue_id, fresh=fresh), call_s=call_s)

    async def shard_of(self, queue_id: str, partition: int = 0) -> int:
        """The broker shard of a partition, or of a queue without any. Raises as `shards_of`.

        NotFound, too, when the queue has no such partition.
        """
        shards = await self.shards_of(queue_id)
        if partition >= len(shards):
            shards = await self.shards_of(queue_id, fresh=True)
        if partition >= len(shards):
            raise NotFound("queue", queue_id, f"queue {queue_id!r} has no partition {partition}")
        return shards[partition]

    async def _look_up(self, queue_id: str, brokers: list[int], *, fresh: bool) -> tuple[int, ...]:
        """As `_ask_place`. What a broker remembers proves neither absence nor a removed shard."""
        if not fresh:
            try:
                shards = await self._ask_place(queue_id, brokers, fresh=False)
            except NotFound:
                shards = ()
            if shards and _are_there(shards, brokers):
                return shards
        return await self._ask_place(queue_id, brokers, fresh=True)

    async def _ask_place(
        self, queue_id: str, brokers: list[int], *, fresh: bool
    ) -> tuple[int, ...]:
        """What the first of these brokers that answers says; `fresh`: by a claim read now."""
        request = LocateQueueRequest(queue_id=queue_id, fresh=fresh)

        async def look(broker: int) -> tuple[int, ...] | NotFound:
            stub = QueueServiceStub(await self.peers.broker(broker))
            try:
                with errors_translated(self.peers.process("broker", broker)):
                    call = stub.LocateQueue(request, timeout=ATTEMPT_S)
                    return tuple((await self.peers.unless_closed(call)).broker_shards)
            except NotFound as error:
                return error  # as any other broker would say

        asked = random.sample(brokers, len(brokers))
        found, problems = await first_answer(asked, look, STAGGER_S)
        if isinstance(found, tuple):
            return found
        raise found or next(iter(problems.values()), NotFound("queue", queue_id))

    async def has_moved(
        self,
        queue_id: str,
        asked: int,
        error: NotFound,
        partition: int = 0,
        *,
        fresh: bool = False,
    ) -> bool:
        """Whether another shard than the one that was asked in vain has the partition.

        The error may say which have it; else, or to be sure (`fresh`), it is looked up, by a fresh
        claim. Raises as `shards_of`, but not NotFound.
        """
        if not is_absent(error, queue_id):
            return False
        self.forget(queue_id)
        named = error.metadata.get(SHARD)
        if named is not None and not fresh:
            shards = tuple(map(int, named.split(",")))
            self.note(queue_id, shards)
        else:
            try:
                shards = await self.shards_of(queue_id, fresh=True)
            except NotFound:
                return False
        return partition < len(shards) and shards[partition] != asked

    async def may_have_moved(
        self, queue_id: str, asked: int | None, error: SlateMQError, partition: int = 0
    ) -> bool:
        """As `has_moved`, but True where that cannot be asked: the next try asks again."""
        if not isinstance(error, NotFound) or asked is None:
            return False
        try:
            return await self.has_moved(queue_id, asked, error, partition)
        except (Unavailable, DeadlineExceeded) as failed:
            log.debug("where %s is cannot be asked: %s", queue_id, failed)
            return True

    def naming(self, queue_id: str, partition: int) -> tuple[tuple[str, str]] | None:
        """The metadata of a call to a partition, which is refused by the shard of another one.

        None for a queue without partitions.
        """
        return partition_named(queue_id, partition) if queue_id in self._partitioned else None

    def forget(self, queue_id: str) -> None:
        """The queue is not where it was: ask again. That it has partitions is still known."""
        self._known.pop(queue_id, None)

    def note_count(self, queue_id: str, partitions_count: int) -> bool:
        """Notes what a broker says of a queue: 0 partitions are none. Returns whether it changed.

        A queue of the name may have been deleted and created again since it was looked up.
        """
        known = self._known.get(queue_id)
        has_changed = known is not None and len(known) != (partitions_count or 1)
        if has_changed:
            self._outdated.add(queue_id)
        return has_changed

    async def call(
        self,
        queue_id: str,
        attempt: Callable[[int, float], Awaitable[T]],
        partition: int = 0,
        **options: Unpack[CallOptions],
    ) -> T:
        """A call to the broker of a partition; `attempt` gets its shard and a timeout in seconds.

        One that is not where it was is looked for again. Options and errors as in `Peers.call`.
        """
        asked: int | None = None

        async def ask(timeout: float) -> T:
            nonlocal asked
            asked = None
            asked = await self.shard_of(queue_id, partition)
            try:
                return await attempt(asked, timeout)
            except grpc.RpcError as error:
                raise translated(error, self.peers.process("broker", asked)) from None

        for hop in range(HOPS_MAX):
            try:
                return await self.peers.call(ask, **options)
            except NotFound as error:
                # A broker may remember where the queue was a move ago: its claim knows better.
                if asked is None:
                    raise
                moved = await self.has_moved(queue_id, asked, error, partition, fresh=hop > 0)
                if not moved:
                    if SHARD not in error.metadata:
                        raise
                    # It says that another has the queue, whose claim names it: the queue has moved
                    # meanwhile, or this is a process that was replaced.
                    self.peers.forget()
                    await asyncio.sleep(min(BACKOFF_S * 2**hop, BACKOFF_S_MAX))
        return await self.peers.call(ask, **options)

    async def outcomes(
        self,
        queue_id: str,
        attempt: Callable[[int, int, float], Awaitable[T]],
        **options: Unpack[CallOptions],
    ) -> list[T | SlateMQError]:
        """Calls to the brokers of all partitions at once; by index the result, or the error.

        `attempt` gets the index, its shard and a timeout. Raises as `call` for a queue that is not
        partitioned.
        """
        count = len(await self.located(queue_id))
        if count == 1:
            return [await self.call(queue_id, partial(attempt, 0), **options)]
        return await asyncio.gather(
            *(self.outcome(queue_id, attempt, index, **options) for index in range(count))
        )

    async def outcomes_there(
        self, queue_id: str, attempt: Callable[[int, int, float], Awaitable[T]]
    ) -> list[T | SlateMQError]:
        """As `outcomes`, but does not wait long for silent brokers where another one has answered.

        Where none has, calls them again, and raises as `Peers.call`.
        """
        patience_s = ANSWER_S / 2

        async def ask(timeout: float) -> list[T | SlateMQError]:
            nonlocal patience_s
            patience_s *= 2  # All of them may be busy.
            options = bounded(min(patience_s, timeout))
            outcomes = await self.outcomes(queue_id, attempt, **options)
            silent = [one for one in outcomes if isinstance(one, Unavailable | DeadlineExceeded)]
            if silent and all(one in silent or is_absent(one, queue_id) for one in outcomes):
                raise silent[0]
            return outcomes

        if len(await self.located(queue_id)) == 1:
            return await self.outcomes(queue_id, attempt)
        return await self.peers.call(ask, attempt_s=self.peers.call_s)

    async def outcome(
        self,
        queue_id: str,
        attempt: Callable[[int, int, float], Awaitable[T]],
        index: int,
        **options: Unpack[CallOptions],
    ) -> T | SlateMQError:
        """As `outcomes`, of one partition."""
        try:
            return await self.call(queue_id, partial(attempt, index), index, **options)
        except SlateMQError as error:
            return error

    async def each(
        self,
        queue_id: str,
        attempt: Callable[[int, int, float], Awaitable[T]],
        facts: Callable[[list[T]], dict[str, str]] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[T]:
        """As `outcomes`, but raises an error once all calls have ended: the first refusal, if any.

        Where the queue is, is looked up first: a change must not miss a partition.
        FailedPrecondition (PARTITIONS_MISSING) where some partitions do not exist, Unavailable
        (INCOMPLETE) where only some have the change: with `facts` of what they returned.
        """
        shards = await self.located(queue_id, fresh=True)
        outcomes = await self.outcomes(queue_id, attempt, **options)
        _check_partitions(queue_id, outcomes)
        results = [one for one in outcomes if not isinstance(one, SlateMQError)]
        check_all_changed(queue_id, shards, outcomes, facts(results) if facts and results else {})
        return results

    async def answers(
        self, queue_id: str, attempt: Callable[[int, int, float], Awaitable[T]]
    ) -> Answers[T]:
        """As `each`, of the partitions whose brokers answer."""
        shards = await self.located(queue_id, fresh=True)
        outcomes = await self.outcomes_there(queue_id, attempt)
        _check_partitions(queue_id, outcomes)
        answers = Answers[T]({}, {})
        for shard, one in zip(shards, outcomes, strict=True):
            if not isinstance(one, SlateMQError):
                answers.by_shard[shard] = one
            elif isinstance(one, Unavailable | DeadlineExceeded):
                answers.problems[shard] = one
            else:
                raise one
        return answers

    async def ask(
        self,
        queue_id: str,
        method: Method[Q, R],
        request: Q,
        partition: int = 0,
        **options: Unpack[CallOptions],
    ) -> R:
        """Calls a method of the broker of a partition; the rest as in `call`."""
        attempt = partial(self.asking(queue_id, method, request), partition)
        return await self.call(queue_id, attempt, partition, **options)

    async def ask_each(
        self,
        queue_id: str,
        method: Method[Q, R],
        request: Q,
        facts: Callable[[list[R]], dict[str, str]] | None = None,
    ) -> list[R]:
        """Calls a method of the brokers of all partitions; the rest as in `each`."""
        return await self.each(queue_id, self.asking(queue_id, method, request), facts)

    def asking(
        self, queue_id: str, method: Method[Q, R], request: Q
    ) -> Callable[[int, int, float], Awaitable[R]]:
        """One try of a call to a partition: by its index, its shard, and a timeout in seconds."""

        async def attempt(index: int, shard: int, timeout: float) -> R:
            metadata = self.naming(queue_id, index)
            call = method(await self.peers.broker(shard))
            return await call(request, timeout=timeout, metadata=metadata)

        return attempt

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
        request = request_type(**{field: name})
        shard: int | None = getattr(named, "broker_shard", None)

        async def answer_of(shard: int) -> tuple[R, int]:
            return await self.peers.ask_broker(shard, method, request), shard

        if shard is not None:
            return await answer_of(shard)
        return await self._first(resource, name, await self.peers.some_broker_shards(), answer_of)

    async def ask_all(
        self, method: Method[Q, R], request: Q, answer_s: float = ANSWER_S
    ) -> Answers[R]:
        """Asks all brokers at once. Raises as `Peers.call` when none answers, or one refuses.

        Brokers that do not answer within `answer_s` are left out when another one does.
        """
        patience_s = answer_s / 2

        async def attempt(_: float) -> Answers[R]:
            nonlocal patience_s
            shards = await self.peers.some_broker_shards()
            patience_s *= 2  # All of them may be busy.
            options = bounded(min(patience_s, self.peers.call_s))
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

    async def pages(
        self, shard: int, method: Method[Any, R], request: Any, answers: Answers[R]
    ) -> AsyncIterator[R]:
        """All pages of one broker; notes in its first answers why it does not answer any more."""
        page: Any = answers.by_shard[shard]
        request = deepcopy(request)
        while True:
            yield page
            request.page_token = page.next_page_token
            if not request.page_token:
                return
            try:
                page = await self.peers.ask_broker(shard, method, request)
            except (Unavailable, DeadlineExceeded) as error:
                answers.problems[shard] = error
                return

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
            raise brokers_silent(
                f"no broker that answers has {resource} {name!r}", silent, "BROKER_DOWN"
            )
        raise NotFound(resource, name)


def _are_there(shards: Sequence[int], brokers: Sequence[int]) -> bool:
    """Whether the topology has these shards: one that it lacks was removed, or is new."""
    return set(shards) <= set(brokers)


def partition_named(queue_id: str, partition: int) -> tuple[tuple[str, str]]:
    """The metadata of a call to this partition."""
    return ((PARTITION, f"{queue_id}/{partition}"),)


def bounded(bound_s: float) -> CallOptions:
    """Options of a call to one broker of several, for which others need not wait long."""
    refused_s = min(REFUSED_S, bound_s)
    return {"call_s": refused_s, "attempt_s": bound_s, "wait_s": bound_s - refused_s}


def _check_partitions(queue_id: str, outcomes: Sequence[object]) -> None:
    """Raises FailedPrecondition where some partitions do not exist, and others do."""
    missing = [index for index, one in enumerate(outcomes) if is_absent(one, queue_id)]
    if missing and len(missing) < len(outcomes):
        raise partitions_missing(queue_id, missing)


def partitions_missing(queue_id: str, missing: Sequence[int]) -> FailedPrecondition:
    """The error about a queue of which these partitions do not exist, and others do."""
    return FailedPrecondition(
        "PARTITIONS_MISSING",
        f"queue {queue_id!r} has no partition {missing[0]}: its creation or deletion broke off; "
        "repeat it",
        subject=queue_id,
        metadata={PARTITIONS: ",".join(map(str, missing))},
    )


def without_partitions(
    queue_id: str, shards: Sequence[int], problems: Mapping[int, SlateMQError]
) -> SlateMQError:
    """The error about partitions that do not answer, or do not exist: by index, some or all."""
    silent = {n: one for n, one in problems.items() if not is_absent(one, queue_id)}
    if silent:
        return incomplete({shards[n]: one for n, one in silent.items()})
    if len(problems) == len(shards):
        return next(iter(problems.values()))
    return partitions_missing(queue_id, sorted(problems))


def check_all_changed(
    queue_id: str,
    shards: Sequence[int],
    outcomes: Sequence[object],
    facts: Mapping[str, str] | None = None,
    changed: str = "changed",
) -> None:
    """Raises the first refusal of a change; Unavailable (INCOMPLETE) where some partitions have it.

    That one names the others, and has the `facts` about those that have it.
    """
    problems = {n: one for n, one in enumerate(outcomes) if isinstance(one, SlateMQError)}
    for problem in problems.values():
        is_refused = not isinstance(problem, Unavailable | DeadlineExceeded | ResourceExhausted)
        if is_refused or len(problems) == len(outcomes):
            raise problem
    if problems:
        facts = facts or {}
        done = [str(n) for n in range(len(outcomes)) if n not in problems]
        done += [f"{name} {value}" for name, value in facts.items()]
        left = ", ".join(f"{n} on broker shard {shards[n]}" for n in problems)
        raise Unavailable(
            f"queue {queue_id!r} is {changed} only in some partitions ({', '.join(done)}), so "
            f"repeat it; the others ({left}) failed: {problems[min(problems)].message}",
            reason=INCOMPLETE,
            metadata={
                SHARDS: ", ".join(str(shards[n]) for n in problems),
                PARTITIONS: ",".join(map(str, problems)),
                **facts,
            },
        )


def is_absent(outcome: object, queue_id: str) -> bool:
    """Whether a call found that its shard does not have the queue."""
    return (
        isinstance(outcome, NotFound)
        and outcome.resource_type == "queue"
        and outcome.resource_name == queue_id
    )


class Calls:
    """A part of the client: calls about one kind of thing."""

    def __init__(self, locations: QueueLocations, encryption: KeyRing | None = None) -> None:
        """`encryption`: the keys of payloads; None: they are published as they are."""
        self._locations = locations
        self._peers = locations.peers
        self._encryption = encryption
