"""PublishStream: publishes over one call, answered as they become durable.

::

    requests ──read──▶ accept ──plain──▶ handed to the commit that gathers ──durable──┐
                          │                                                           ▼
                          └──keys, blobs, repeats──▶ a task, as for Publish ─────▶ answers

A call of its own costs ingest some 230 µs for a message of 1 KiB, before anything is done with it;
a message on a stream 60 (docs/decisions/0018-publish-streams.md). So nothing here makes a task per
message that is not needed: the answers of one commit share a callback and a response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from libs.serving.requests.guard import status_of
from services.ingest.batches import Accepted
from services.ingest.write.publishing import Publisher
from services.ingest.write.request_ids import Answered
from services.ingest.write.waiting import Waiting
from slatemq.errors import Internal, SlateMQError, Unavailable
from slatemq.v1 import ingest_pb2

__all__ = ["PublishStreams", "Requests", "published"]

log = logging.getLogger(__name__)

UNANSWERED_MAX: Final = 1000
"""Requests of one stream without an answer; what they hold is bounded like that of any publish."""

METHOD: Final = "/slatemq.v1.IngestService/PublishStream"

Requests = AsyncGenerator[ingest_pb2.PublishStreamRequest, bool]
"""See libs.serving.requests.reading: True releases what the last request holds."""


class PublishStreams:
    """The publish streams of an ingest."""

    def __init__(
        self,
        publisher: Publisher,
        accept: Callable[[ingest_pb2.PublishRequest], Accepted],
        publish: Callable[[Accepted], Awaitable[ingest_pb2.PublishResponse]],
        *,
        is_traced: bool,
    ) -> None:
        """`accept` checks a request; `publish` stores one in any case.

        `is_traced`: each request has a span, so `publish` stores all of them.
        """
        self.publisher = publisher
        self.accept = accept
        self.publish = publish
        self.is_traced = is_traced
        self._open: set[_Stream] = set()
        self._is_draining = False

    async def serve(
        self, requests: Requests
    ) -> AsyncGenerator[ingest_pb2.PublishStreamResponse, None]:
        """Serve one stream to its end."""
        if self._is_draining:
            raise _draining()
        stream = _Stream(self)
        self._open.add(stream)
        stream.begin(requests)
        try:
            while answers := await stream.next():
                yield ingest_pb2.PublishStreamResponse(answers=answers)
            if stream.error is not None:
                raise stream.error
        finally:
            self._open.discard(stream)
            stream.close()

    def drain(self) -> None:
        """Stop reading; requests that were read are still answered."""
        self._is_draining = True
        for stream in self._open:
            stream.end(_draining())


class _Stream:
    """One stream. `error` ends it, once everything that was read is answered."""

    def __init__(self, streams: PublishStreams) -> None:
        self.error: BaseException | None = None
        self._streams = streams
        self._publisher = streams.publisher
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._answers: list[ingest_pb2.PublishStreamAnswer] = []
        self._commit: asyncio.Future[None] | None = None
        self._of_commit: list[tuple[int, Waiting]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._is_read = False
        self._wanted: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    # --- Answers ------------------------------------------------------------

    async def next(self) -> list[ingest_pb2.PublishStreamAnswer]:
        """The next answers to send; empty at the end."""
        while not self._answers:
            if self._is_read and not self._unanswered:
                return []
            self._wanted = self._loop.create_future()
            await self._wanted
        answers, self._answers = self._answers, []
        self._unanswered -= len(answers)
        _wake(self._room)
        return answers

    def _answer(self, answer: ingest_pb2.PublishStreamAnswer) -> None:
        self._answers.append(answer)
        _wake(self._wanted)

    def _refuse(self, number: int, error: BaseException) -> None:
        status = status_of(METHOD, error)
        self._answer(ingest_pb2.PublishStreamAnswer(number=number, error=status))

    # --- Requests -----------------------------------------------------------

    def begin(self, requests: Requests) -> None:
        self._reading = asyncio.create_task(self._read(requests))

    def end(self, error: BaseException) -> None:
        """Stop reading, and end with this error."""
        self.error = self.error or error
        if self._reading is not None:
            self._reading.cancel()

    def close(self) -> None:
        """The call is over: give up requests without an answer."""
        if self._reading is not None:
            self._reading.cancel()
        for task in self._tasks:
            task.cancel()

    async def _read(self, requests: Requests) -> None:
        try:
            async for request in requests:
                self._unanswered += 1
                self._take(request.number, request.publish)
                del request
                if self._unanswered >= UNANSWERED_MAX:
                    # A client that reads no answers keeps no memory of other requests meanwhile.
                    await requests.asend(True)
                while self._unanswered >= UNANSWERED_MAX:
                    self._room = self._loop.create_future()
                    await self._room
        except SlateMQError as error:
            self.error = self.error or error
        except Exception:
            log.exception("reading the requests of a stream failed")
            self.error = Internal("internal error; the service's log says more")
        finally:
            self._is_read = True
            _wake(self._wanted)

    def _take(self, number: int, request: ingest_pb2.PublishRequest) -> None:
        waiting: Waiting | None = None
        try:
            accepted = self._streams.accept(request)
            if accepted.is_plain and not self._streams.is_traced:
                waiting = self._publisher.enqueue(accepted)
        except Exception as error:  # noqa: BLE001 - all are answered, as the guard does it
            self._refuse(number, error)
            return
        if waiting is None:
            task = asyncio.create_task(self._publish(number, accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        commit = self._publisher.commits.newest()
        if commit is self._commit:
            self._of_commit.append((number, waiting))
            return
        assert commit is not None, "something was handed over"
        self._commit, self._of_commit = commit, [(number, waiting)]
        given = self._of_commit
        commit.add_done_callback(lambda done: self._durable(done, given))

    def _durable(self, commit: asyncio.Future[None], given: list[tuple[int, Waiting]]) -> None:
        if commit is self._commit:
            self._commit = None
        error = commit.exception()
        for number, waiting in given:
            problem = error or waiting.refusal
            if problem is not None:
                if error is not None:
                    self._publisher.give_up(waiting)
                self._refuse(number, problem)
                continue
            answer = published(waiting.answered)
            self._answer(ingest_pb2.PublishStreamAnswer(number=number, published=answer))

    async def _publish(self, number: int, accepted: Accepted) -> None:
        try:
            answer = await self._streams.publish(accepted)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            self._refuse(number, Unavailable("the service is stopping", reason="STOPPING"))
        except Exception as error:  # noqa: BLE001 - all are answered, as the guard does it
            self._refuse(number, error)
        else:
            self._answer(ingest_pb2.PublishStreamAnswer(number=number, published=answer))


def published(answered: Answered) -> ingest_pb2.PublishResponse:
    return ingest_pb2.PublishResponse(
        message_ids=answered.message_ids,
        duplicates=[at for at, _ in answered.duplicates],
        received_at_ms=answered.received_at_ms,
    )


def _wake(sleeper: asyncio.Future[None] | None) -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _draining() -> Unavailable:
    return Unavailable("the service is stopping", reason="DRAINING")
