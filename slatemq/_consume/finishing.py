"""Acks, nacks and extensions by lease token, gathered into few calls.

Tokens of one claim are often in a row: each is the one before it, counted up in its last two
characters. An ack names such a row once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import Context, copy_context
from itertools import chain
from typing import Final, Generic, NamedTuple, TypeVar

from google.rpc.status_pb2 import Status

from slatemq._consume.commands import Fail, execute
from slatemq._consume.handles import places_by_shard, shard_of
from slatemq._rpc.peers import closed, errors_translated
from slatemq._rpc.queue_locations import QueueLocations
from slatemq._rpc.rpc_status import from_status
from slatemq.errors import NotFound, SlateMQError
from slatemq.models import Duration, bounded_delay_ms, cut_reason
from slatemq.v1 import consumer_pb2, consumer_pb2_grpc

log = logging.getLogger(__name__)

BATCH_MAX = 1000
"""Tokens in one call at most; the server takes ten times as many."""

UNANSWERED_MAX = 1000
"""The limit of acks in the background: a consumer's crash delivers at most these again."""

KEPT_S: Final = 1.0
"""How long a client that closes waits for claims that their callers wait for no longer."""

CALL_MAX = 10_000
"""Tokens that the server takes in one call."""

I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")

Send = Callable[
    ["consumer_pb2_grpc.ConsumerServiceAsyncStub", list[I], float],
    Awaitable[list[R | SlateMQError]],
]
"""One call to one shard: items and a timeout in seconds, and one result for each item."""


OnDone = Callable[[Sequence[BaseException | None]], None]
"""Gets for each message None, or why it was refused, once all have an answer."""


class Nack(NamedTuple):
    """A message to nack or release."""

    lease_token: str
    reason: str = ""
    delay_ms: int | None = None
    release: bool = False


def nack_of(
    token: str, reason: str = "", delay: Duration | None = None, release: bool = False
) -> Nack:
    """A nack within the server's bounds: a long reason is cut, a bad delay is InvalidArgument."""
    delay_ms = None if delay is None else bounded_delay_ms(delay)
    return Nack(token, cut_reason(reason), delay_ms, release)


class _Waiting(NamedTuple, Generic[I, R]):
    """An item that is not sent yet, and the context that it came in: its trace."""

    item: I
    done: asyncio.Future[R]
    context: Context


class Batcher(Generic[I, R]):
    """Sends items together: what comes while a call is under way goes with the next one.

    Each call is in the context of its first item.
    """

    def __init__(self, send: Callable[[list[I]], Awaitable[Sequence[R | SlateMQError]]]) -> None:
        """Send with this, which returns one result for each item."""
        self._send = send
        self._waiting: list[_Waiting[I, R]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self, item: I) -> asyncio.Future[R]:
        """Sends an item with the next call; its result need not be awaited."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(item, done, copy_context()))
        if self._task is None:
            self._begin()
        return done

    async def flush(self) -> None:
        """Waits until everything asked for so far has its result."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Sends nothing more; what has no result yet is Unavailable (CLIENT_CLOSED)."""
        while self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._run(), context=self._waiting[0].context)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            log.error("a fault of the client", exc_info=fault)
        if fault is None and not task.cancelled():
            if self._waiting:
                self._begin()
            return
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            _settle(one.done, closed())

    async def _run(self) -> None:
        await asyncio.sleep(0)  # tasks that are ready now may still join
        batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
        try:
            results = await self._send([one.item for one in batch])
        except SlateMQError as error:
            results = [error] * len(batch)
        except BaseException:
            for one in batch:
                _settle(one.done, closed())
            raise
        for one, result in zip(batch, results, strict=True):
            _settle(one.done, result)


def _settle(done: asyncio.Future[R], result: R | SlateMQError) -> None:
    if done.done():
        return
    if isinstance(result, SlateMQError):
        done.set_exception(result)
        done.exception()  # The caller may not wait any more.
    else:
        done.set_result(result)


class Finisher:
    """Acks, nacks and extends by token, on the right broker shard."""

    def __init__(self, locations: QueueLocations) -> None:
        self._locations = locations
        self._peers = locations.peers
        self._acks: dict[int, Batcher[str, None]] = {}
        self._nacks: dict[int, Batcher[Nack, None]] = {}
        self._unanswered: set[asyncio.Future[None]] = set()
        self._kept: set[asyncio.Task[None]] = set()

    async def ack(self, token: str) -> None:
        """Acks one message, together with others; raises why it was refused."""
        self._peers.check_home()
        # Cancelling the caller does not undo the ack: it is on its way.
        await self._ack(token)

    def _ack(self, token: str) -> asyncio.Future[None]:
        shard = shard_of(token)
        if shard not in self._acks:
            self._acks[shard] = Batcher(self.ack_many)
        return self._acks[shard].start(token)

    async def nack(self, item: Nack) -> None:
        """Nacks one message, together with others; raises why it was refused."""
        self._peers.check_home()
        await self._nack(item)

    async def fail(self, token: str, reason: str) -> None:
        """Makes one message a dead letter; raises why it was refused."""
        self._peers.check_home()
        await execute(self._locations, [Fail(token, reason)])

    def keep(self, claiming: asyncio.Task[None]) -> None:
        """Lets a claim end in the background that its caller does not wait for any longer."""
        if not claiming.done():
            self._kept.add(claiming)
            claiming.add_done_callback(self._kept.discard)

    def release_soon(self, tokens: Iterable[str], on_done: OnDone | None = None) -> None:
        """Releases messages in the background."""
        releasing = [self._nack(Nack(token, release=True)) for token in tokens]
        for done in releasing:
            done.add_done_callback(_log_failure)
        if on_done is not None:
            _when_done(releasing, on_done)

    def _nack(self, item: Nack) -> asyncio.Future[None]:
        shard = shard_of(item.lease_token)
        if shard not in self._nacks:
            self._nacks[shard] = Batcher(self.nack_many)
        return self._nacks[shard].start(item)

    async def ack_soon(self, token: str, on_done: OnDone | None = None) -> None:
        """Acks one message in the background; waits only while very many have no answer yet."""
        self._peers.check_home()
        [done] = self.acks_soon([token], on_done)
        if len(self._unanswered) > UNANSWERED_MAX:
            await asyncio.wait([done])

    def acks_soon(
        self, tokens: Iterable[str], on_done: OnDone | None = None
    ) -> list[asyncio.Future[None]]:
        """Acks messages in the background, however many have no answer yet."""
        acking = [self._ack(token) for token in tokens]
        for done in acking:
            self._unanswered.add(done)
            done.add_done_callback(self._unanswered.discard)
            done.add_done_callback(_log_failure)
        if on_done is not None:
            _when_done(acking, on_done)
        return acking

    async def flush_acks(self) -> None:
        """Waits until what was acked in the background has its answer."""
        if self._unanswered:
            await asyncio.wait(self._unanswered)

    async def close(self, close_s: float) -> None:
        """Waits for everything under way, but not for longer than this; then drops it."""
        try:
            async with asyncio.timeout(close_s):
                if self._kept:
                    await asyncio.wait(self._kept, timeout=KEPT_S)
                for batcher in self._batchers:
                    await batcher.flush()
        except TimeoutError:
            log.warning("acks and nacks were not answered in %g s: dropped", close_s)
        finally:
            while self._kept:
                for claiming in self._kept:
                    claiming.cancel()
                await asyncio.wait(self._kept)
            for batcher in self._batchers:
                await batcher.close()

    @property
    def _batchers(self) -> list[Batcher[str, None] | Batcher[Nack, None]]:
        return [*self._acks.values(), *self._nacks.values()]

    async def ack_many(self, tokens: Sequence[str]) -> list[SlateMQError | None]:
        """Acks in one call for each shard; one result for each token."""

        async def send(
            stub: consumer_pb2_grpc.ConsumerServiceAsyncStub, part: list[str], timeout: float
        ) -> list[SlateMQError | None]:
            mine = rows if part is tokens or rows is None else rows_among(part)
            if mine is not None:
                return await self._ack_rows(stub, part, mine, timeout)
            answer = await stub.Ack(consumer_pb2.AckRequest(lease_tokens=part), timeout=timeout)
            return _errors_of(answer)

        tokens = list(tokens)
        rows = rows_among(tokens)
        return await self._by_shard(tokens, tokens, send, rows=rows)

    async def _ack_rows(
        self,
        stub: consumer_pb2_grpc.ConsumerServiceAsyncStub,
        tokens: list[str],
        rows: TokenRows,
        timeout: float,
    ) -> list[SlateMQError | None]:
        """Acks in one call, the tokens of each row as one."""
        request = consumer_pb2.AckRequest(lease_tokens=map(tokens.__getitem__, rows.others))
        for row in rows.rows:
            request.runs.add(lease_token=tokens[row.at], count=row.size)
        results = _errors_of(await stub.Ack(request, timeout=timeout))
        if not any(results):
            return results
        in_rows = chain.from_iterable(range(row.at, row.at + row.size) for row in rows.rows)
        by_place = dict(zip(chain(rows.others, in_rows), results, strict=True))
        return [by_place[place] for place in range(len(tokens))]

    async def nack_many(self, items: Sequence[Nack]) -> list[SlateMQError | None]:
        """Nacks in one call for each shard; one result for each item."""

        async def send(
            stub: consumer_pb2_grpc.ConsumerServiceAsyncStub, part: list[Nack], timeout: float
        ) -> list[SlateMQError | None]:
            wire = [
                consumer_pb2.NackItem(
                    lease_token=item.lease_token,
                    reason=item.reason,
                    delay_ms=item.delay_ms,
                    release=item.release,
                )
                for item in part
            ]
            answer = await stub.Nack(consumer_pb2.NackRequest(items=wire), timeout=timeout)
            return list(map(_error_of, answer.results))

        tokens = [item.lease_token for item in items]
        return await self._by_shard(list(items), tokens, send)

    async def extend_many(
        self, tokens: Sequence[str], lease_ms: int, call_s: float | None = None
    ) -> list[int | SlateMQError]:
        """Extends in one call for each shard; the new deadline in ms for each token."""

        async def send(
            stub: consumer_pb2_grpc.ConsumerServiceAsyncStub, part: list[str], timeout: float
        ) -> list[int | SlateMQError]:
            request = consumer_pb2.ExtendLeaseRequest(lease_tokens=part, lease_ms=lease_ms)
            answer = await stub.ExtendLease(request, timeout=timeout)
            return [
                _error_of(result.status) or result.lease_deadline_ms for result in answer.results
            ]

        tokens = list(tokens)
        return await self._by_shard(tokens, tokens, send, call_s)

    async def _by_shard(
        self,
        items: list[I],
        tokens: list[str],
        send: Send[I, R],
        call_s: float | None = None,
        rows: TokenRows | None = None,
    ) -> list[R | SlateMQError]:
        """One result for each token; raises only when no shard returned any."""
        by_shard, refused = places_by_shard(tokens, rows and rows.heads(tokens))
        parts = [
            (shard, places[start : start + CALL_MAX])
            for shard, places in by_shard.items()
            for start in range(0, len(places), CALL_MAX)
        ]
        if len(parts) == 1 and not refused:
            answered, problem = await self._of_shard(parts[0][0], items, send, call_s)
            if problem is not None:
                raise problem
            return answered
        results: list[R | SlateMQError | None] = [None] * len(items)
        for place, error in refused.items():
            results[place] = error

        async def one(shard: int, places: Sequence[int]) -> SlateMQError | None:
            part = [items[place] for place in places]
            answered, problem = await self._of_shard(shard, part, send, call_s)
            for place, result in zip(places, answered, strict=True):
                results[place] = result
            return problem

        problems = await asyncio.gather(*(one(*part) for part in parts))
        failed = [problem for problem in problems if problem is not None]
        if failed and len(failed) == len(parts):
            raise failed[0]
        return results  # type: ignore[return-value]  # None is a result of acks and nacks

    async def _of_shard(
        self, shard: int, part: list[I], send: Send[I, R], call_s: float | None
    ) -> tuple[list[R | SlateMQError], SlateMQError | None]:
        """One result for each item, and why the shard returned none, if it did not."""

        async def attempt(timeout: float) -> list[R | SlateMQError]:
            channel = await self._peers.broker(shard)
            with errors_translated(self._peers.process("broker", shard)):
                return await send(consumer_pb2_grpc.ConsumerServiceStub(channel), part, timeout)

        try:
            await self._check_known(shard)
            # Repeating is safe: a finished ack or nack answers OK again.
            answered = await self._peers.call(attempt, call_s=call_s)
        except NotFound as error:
            return [error] * len(part), None
        except SlateMQError as error:
            return [error] * len(part), error
        if len(answered) != len(part):
            raise ValueError(f"{len(part)} items were answered with {len(answered)} results")
        return answered, None

    async def _check_known(self, shard: int) -> None:
        """Raises NotFound for a shard that there never was: shards are only ever added."""
        known = await self._peers.broker_shards()
        if shard not in known and shard not in (await self._peers.fresh_topology()).brokers:
            raise NotFound("lease", "", "no broker gave out this lease", reason="LEASE_UNKNOWN")


_OK_BYTES = 2
"""What a result takes in an answer when it is OK, and no result that is not."""


def _when_done(settling: Sequence[asyncio.Future[None]], on_done: OnDone) -> None:
    every = asyncio.gather(*settling, return_exceptions=True)
    every.add_done_callback(lambda done: on_done(done.result()))


def _log_failure(done: asyncio.Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("a message could not be acked or given back, and may come again: %s", error)


def _errors_of(answer: consumer_pb2.AckResponse) -> list[SlateMQError | None]:
    if answer.ByteSize() == _OK_BYTES * len(answer.results):
        return [None] * len(answer.results)
    return list(map(_error_of, answer.results))


def _error_of(status: Status) -> SlateMQError | None:
    return from_status(status) if status.code else None


LAST: Final = [f"{number:02x}" for number in range(256)]
"""The last two characters of a token, as they are counted up."""

ROW_MIN: Final = 64
"""The shortest row that is worth detecting and sending as one."""


class TokenRow(NamedTuple):
    """Where the first one stands among other tokens, and how many there are."""

    at: int
    size: int


class TokenRows(NamedTuple):
    """Tokens by whether they are in a row; not every last row is found where there are few."""

    rows: list[TokenRow]
    others: list[int]
    """Where the tokens stand that are in none, in order."""

    def heads(self, tokens: Sequence[str]) -> list[str]:
        """The tokens that represent all: the others, then the first of each row."""
        places = [*self.others, *(row.at for row in self.rows)]
        return list(map(tokens.__getitem__, places))


def rows_among(tokens: Sequence[str]) -> TokenRows | None:
    """The rows among these tokens; None where none was found."""
    rows: list[TokenRow] = []
    at, step = 0, ROW_MIN
    while len(tokens) - at >= ROW_MIN:
        size = _row_at(tokens, at)
        if size:
            rows.append(TokenRow(at, size))
            at, step = at + size, ROW_MIN
        else:
            # Where nothing is in a row, that must be found out soon.
            at, step = at + step, step * 2
    if not rows:
        return None
    others, end = list[int](), 0
    for row in rows:
        others += range(end, row.at)
        end = row.at + row.size
    others += range(end, len(tokens))
    return TokenRows(rows, others)


def _row_at(tokens: Sequence[str], at: int) -> int:
    """How many are in a row from here on; 0 where they are too few."""
    if not isinstance(tokens[at], str):
        return 0
    prefix, first = tokens[at][:-2], _PLACES.get(tokens[at][-2:], len(LAST))
    most = min(len(tokens) - at, len(LAST) - first)
    least = ROW_MIN
    if most < least or tokens[at + least - 1] != prefix + LAST[first + least - 1]:
        return 0
    middle = most
    while least < most:
        if tokens[at + middle - 1] == prefix + LAST[first + middle - 1]:
            least = middle
        else:
            most = middle - 1
        middle = (least + most + 1) // 2
    # A few were looked at; now all. Two lists of as many texts, none of this one with a line break:
    # if they are joined to the same, they are the same.
    counted = prefix + f"\n{prefix}".join(LAST[first : first + most])
    try:
        given = "\n".join(tokens[at : at + most])
    except TypeError:
        return 0
    return most if given == counted and "\n" not in prefix else 0


_PLACES: Final = {last: place for place, last in enumerate(LAST)}
