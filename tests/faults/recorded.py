"""A client that writes down what it asks and gets, in the format of docs/reference/histories.md.

What a call that fails did is known only where the server refused it. A claim is made once, and so
are its notes; other calls are repeated by the client, under one request ID.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import slatemq
from slatemq._consume.batches import claim_request
from slatemq._consume.commands import Command
from slatemq._consume.delivered import Claimed, claimed_of, received
from slatemq.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SlateMQError,
    Unavailable,
)
from slatemq.v1.consumer_pb2_grpc import ConsumerServiceStub

REFUSED: Final = (AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, PermissionDenied)
"""Errors after which nothing has happened, also where the call was repeated."""

UNKNOWN: Final = (Unavailable, DeadlineExceeded)

DIGEST_DIGITS: Final = 16
"""Of a SHA-256: enough to tell payloads of a run apart."""

AGAIN_S: Final = 0.1
"""After a call that failed."""

CLAIM_S: Final = 10.0
"""How long a claim may take beyond its wait."""


class Recorder:
    """Writes a history. Each operation is on disk before it is sent, for the recorder's own end."""

    def __init__(self, file: Path) -> None:
        """Writes to this file, which is made."""
        self.file = file
        self._out = file.open("w", encoding="utf-8", buffering=1)

    def close(self) -> None:
        self._out.close()

    def line(self, process: str, kind: str, f: str, value: Mapping[str, Any]) -> None:
        line = {"time": time.monotonic_ns(), "process": process, "type": kind, "f": f}
        self._out.write(json.dumps({**line, "value": value}, separators=(",", ":")) + "\n")

    @contextmanager
    def operation(self, process: str, f: str, value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Notes its beginning, and its end with what is put into the dict; errors go on."""
        self.line(process, "invoke", f, value)
        result: dict[str, Any] = {}
        try:
            yield result
        except REFUSED as error:
            self.line(process, "fail", f, {"error": error.reason})
            raise
        except BaseException as error:
            self.line(process, "info", f, {"error": _name(error)})
            raise
        self.line(process, "ok", f, result)


class RecordedClient:
    """The calls of a public client that a history may have. Each task has a process of its own."""

    def __init__(self, recorder: Recorder, process: str, client: slatemq.Client) -> None:
        self._recorder = recorder
        self._process = process
        self._turns = itertools.count()
        self.client = client

    def named(self, process: str) -> RecordedClient:
        """The same for another process."""
        return RecordedClient(self._recorder, process, self.client)

    async def publish(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Publish messages; each payload names its key, and has `payload_bytes` at least."""
        payloads = [payload_of(one["key"], one.get("payload_bytes", 0)) for one in messages]
        asked = [
            {**one, "digest": digest_of(payload)}
            for one, payload in zip(messages, payloads, strict=True)
        ]
        with self._operation("publish", {"messages": asked}) as result:
            now_ms = time.time_ns() // 1_000_000
            outgoing = [
                slatemq.OutgoingMessage(
                    payload,
                    one["headers"],
                    visible_at_ms=now_ms + one["delay_ms"] if one.get("delay_ms") else None,
                    retention_s=one["retention_ms"] // 1000 if one.get("retention_ms") else None,
                )
                for one, payload in zip(messages, payloads, strict=True)
            ]
            published = await self.client.publish_batch(outgoing)
            result["ids"] = [int(one) for one in published]
        return [int(one) for one in published]

    async def claim(
        self, queue: str, count: int, *, lease_s: float, wait_s: float = 1
    ) -> list[slatemq.Received]:
        lease_ms = round(lease_s * 1000)
        asked = {"queue": queue, "max": count, "lease_ms": lease_ms, "wait_ms": wait_s * 1000}
        with self._operation("claim", asked) as result:
            claimed = await self._claimed_once(queue, count, wait_s, lease_s)
            result["messages"] = [
                {
                    "key": key_of(one.payload),
                    "digest": digest_of(one.payload),
                    "headers": dict(one.headers),
                    "id": one.message_id,
                    "attempt": one.attempts_count,
                    "token": one.lease_token,
                    "deadline_ms": one.lease_deadline_ms,
                }
                for one in claimed
            ]
        return claimed

    async def ack(self, tokens: Sequence[str]) -> list[SlateMQError | None]:
        with self._operation("ack", {"tokens": list(tokens)}) as result:
            answers = await self.client.ack(tokens)
            result["results"] = list(map(_result, answers))
        return answers

    async def nack(
        self, tokens: Sequence[str], delay_s: float | None = None, *, release: bool = False
    ) -> list[SlateMQError | None]:
        asked: dict[str, Any] = {"tokens": list(tokens), "release": release}
        if delay_s is not None:
            asked["delay_ms"] = delay_s * 1000
        with self._operation("nack", asked) as result:
            answers = await self.client.nack(tokens, delay=delay_s, release=release)
            result["results"] = list(map(_result, answers))
        return answers

    async def extend(self, tokens: Sequence[str], lease_s: float) -> None:
        asked = {"tokens": list(tokens), "lease_ms": lease_s * 1000}
        with self._operation("extend", asked) as result:
            answers = await self.client.extend(tokens, lease_s)
            errors = [one if isinstance(one, SlateMQError) else None for one in answers]
            result["results"] = list(map(_result, errors))
            result["deadlines_ms"] = [one if isinstance(one, int) else 0 for one in answers]

    async def complete_and_push(
        self, completed: Sequence[slatemq.Received], pushes: Sequence[tuple[str, str]]
    ) -> None:
        """Complete messages and push others, given by queue and key, together."""
        commands: list[dict[str, Any]] = [
            {"do": "complete", "token": one.lease_token} for one in completed
        ]
        commands += [
            {"do": "push", "queue": queue, "key": key, "digest": digest_of(payload_of(key))}
            for queue, key in pushes
        ]
        sent: list[Command] = [
            *(slatemq.Complete(one.lease_token) for one in completed),
            *(slatemq.Push(queue, payload_of(key)) for queue, key in pushes),
        ]
        with self._operation("execute", {"commands": commands}):
            await self.client.execute(sent)

    async def redrive(self, queue: str) -> int:
        """All dead letters of a queue; returns how many were moved."""
        with self._operation("redrive", {"queue": queue}) as result:
            redrive = await self.client.wait_redrive(await self.client.start_redrive(queue))
            result["moved_count"] = redrive.redriven_count
        return redrive.redriven_count

    async def move(self, queue: str) -> None:
        """To another broker, however often that takes; several tries are one move."""
        with self._operation("move", {"queue": queue}):
            while True:
                try:
                    await self.client.move_queue(queue)
                    return
                except UNKNOWN:
                    await asyncio.sleep(AGAIN_S)
                except FailedPrecondition as error:
                    if error.reason != "MOVE_CANCELLED":
                        raise

    async def create_queue(
        self,
        queue: str,
        text: str,
        max_attempts: int = 1000,
        with_queue: str = "",
        partitions: int | None = None,
        backoff_ms: int = 0,
    ) -> None:
        asked = {
            "queue": queue,
            "filter": text,
            "max_attempts": max_attempts,
            "partitions": partitions or 1,
            "backoff_ms": backoff_ms,
        }
        backoff = slatemq.Backoff.fixed(backoff_ms / 1000) if backoff_ms else None
        with self._operation("create-queue", asked):
            await self.client.create_queue(
                queue,
                filter=text,
                max_attempts=max_attempts,
                backoff=backoff or slatemq.Backoff.none(),
                with_queue=with_queue,
                partitions=partitions,
            )

    async def update_queue(self, queue: str, text: str) -> None:
        with self._operation("update-queue", {"queue": queue, "filter": text}):
            await self.client.update_queue(queue, filter=text)

    async def purge(self, queue: str) -> None:
        with self._operation("purge", {"queue": queue}):
            await self.client.purge_queue(queue)

    async def pause(self, queue: str) -> None:
        with self._operation("pause", {"queue": queue}):
            await self.client.pause_queue(queue)

    async def resume(self, queue: str) -> None:
        with self._operation("resume", {"queue": queue}):
            await self.client.resume_queue(queue)

    async def is_empty(self, queue: str) -> bool:
        """Whether the queue has nothing but dead letters and what is done, as its broker counts."""
        counts = (await self.client.get_queue(queue)).counts
        return not (counts.available_count + counts.delayed_count + counts.in_flight_count)

    def trouble(self, what: str) -> Any:
        """A context in which what is stored cannot be read, or not in time."""
        return self._operation("trouble", {"what": what})

    async def note_clock(self, ahead_ms: float) -> None:
        """Write down by how much clocks of services are ahead of ours at most, from now on."""
        with self._operation("clock", {"ahead_ms": ahead_ms}):
            pass

    async def drain(self, queue: str) -> None:
        """Note that the queue is empty but for its dead letters."""
        with self._operation("drain", {"queue": queue}) as result:
            listed = self.client.list_entries(queue, "failed")
            result["dead"] = [
                {"id": one.message_id, "attempt": one.attempts_count, "reason": one.reason}
                async for one in listed
            ]

    async def _claimed_once(
        self, queue: str, count: int, wait_s: float, lease_s: float
    ) -> list[slatemq.Received]:
        """As `Client.claim`, but never repeated: each attempt that is lost is of a noted claim.

        Of a partitioned queue each claim is one of the next partition.
        """
        request = claim_request(queue, count, wait=wait_s, lease=lease_s, consumer_id="")
        locations = self.client._locations

        async def attempt(shard: int, timeout: float) -> Claimed:
            stub: Any = ConsumerServiceStub(await locations.peers.broker(shard))
            return claimed_of(await stub.Claim(request, timeout=timeout))

        partition = next(self._turns) % len(await locations.located(queue))
        claimed = await locations.call(
            queue,
            attempt,
            partition,
            attempt_s=CLAIM_S + wait_s,
            wait_s=wait_s,
            repeat_unknown=False,
        )
        return received(claimed, self.client._origin(queue))

    def _operation(self, f: str, value: Mapping[str, Any]) -> Any:
        return self._recorder.operation(self._process, f, value)


@asynccontextmanager
async def recorded_client(file: Path, endpoint: str) -> AsyncIterator[RecordedClient]:
    """A client that writes its history into this file."""
    recorder = Recorder(file)
    try:
        async with slatemq.connect(endpoint) as client:
            yield RecordedClient(recorder, "main", client)
    finally:
        recorder.close()


def payload_of(key: str, size_bytes: int = 0) -> bytes:
    """A payload that names its key, and has this size at least."""
    return json.dumps({"key": key}).encode().ljust(size_bytes)


def digest_of(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()[:DIGEST_DIGITS]


def key_of(payload: bytes) -> str:
    return str(json.loads(payload)["key"])


def _result(error: SlateMQError | None) -> str:
    if error is None:
        return "ok"
    return "unknown" if isinstance(error, UNKNOWN) else error.reason


def _name(error: BaseException) -> str:
    return error.reason if isinstance(error, SlateMQError) else type(error).__name__
