"""Publishers and competing consumers that write down all they see, and a judge of their notes.

The judge knows the lines published, the filters as Python, and the notes; nothing that the system
says of itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import grpc.aio

from slatemq.v1 import consumer_pb2, ingest_pb2, queue_pb2
from tests.acceptance.stubs import Stubs, persist
from tests.claimed_runs import messages_of

LEASE_MS = 5_000
LONG_LEASE_MS = 20_000
"""Where no lease may end: a consumer acks before, on a machine that stands still for seconds too.
The look at the end waits for as long."""

PUBLISH_BATCH = 250
CLAIM_MAX = 400
CALL_SECONDS = 20
STALLED_SECONDS = 150.0
PAYLOAD_BYTES = 1_024

Judge = Callable[[dict[str, str]], bool]

FILTERS: dict[str, tuple[str, Judge]] = {
    "q0": ('headers["kind"] == "a"', lambda h: h["kind"] == "a"),
    "q1": ('headers["kind"] == "b"', lambda h: h["kind"] == "b"),
    "q2": ('headers["kind"] in ["a", "c"]', lambda h: h["kind"] in ("a", "c")),
    "q3": ('headers["region"] == "eu"', lambda h: h["region"] == "eu"),
    "q4": (
        'headers["region"] == "us" && headers["kind"] == "c"',
        lambda h: h["region"] == "us" and h["kind"] == "c",
    ),
    "q5": ("int(headers['n']) % 7 == 0", lambda h: int(h["n"]) % 7 == 0),
    "q6": ('headers["rare"] == "yes"', lambda h: h.get("rare") == "yes"),
    "q7": (
        'headers["kind"] == "b" || headers["region"] == "apac"',
        lambda h: h["kind"] == "b" or h["region"] == "apac",
    ),
    "q8": ('headers["kind"] == "none"', lambda h: h["kind"] == "none"),
    "q9": ('headers["n"].endsWith("42")', lambda h: h["n"].endswith("42")),
}
"""Ten queues: overlapping, disjoint, one that gets little and one that gets nothing."""


@dataclass(frozen=True)
class Line:
    """A line to publish, and its headers."""

    payload: bytes
    headers: dict[str, str]


def make_lines(count: int, seed: int = 1) -> list[Line]:
    """JSON lines of 1 KiB, all different."""
    random_ = random.Random(seed)
    lines = []
    for n in range(count):
        headers = {
            "kind": random_.choice("aabbccdd"),
            "region": random_.choice(("eu", "us", "apac", "sa")),
            "n": str(n),
        }
        if random_.random() < 0.01:
            headers["rare"] = "yes"
        text = json.dumps(headers | {"text": ""})
        filler = f"{random_.getrandbits(64):x}" * 64
        payload = json.dumps(headers | {"text": filler[: PAYLOAD_BYTES - len(text)]}).encode()
        lines.append(Line(payload, headers))
    return lines


@dataclass(slots=True)
class Note:
    """A consumer's note of one delivery; `acked` once an ack was answered with OK."""

    message_id: int
    attempt: int
    deadline_ms: int
    acked: bool = False


class Ack(NamedTuple):
    """The ack of what one claim brought."""

    lease_tokens: Sequence[str]
    notes: Sequence[Note]


@dataclass
class Run:
    """One workload: what to publish, and everything that consumers saw."""

    lines: Sequence[Line]
    lease_ms: int = LEASE_MS
    notes: dict[tuple[str, bytes], list[Note]] = field(default_factory=lambda: defaultdict(list))
    acked_count: int = 0
    published_count: int = 0
    early_end: str = ""
    _unanswered: list[Ack] = field(default_factory=list)
    _progress_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.expected = {
            queue: {line.payload for line in self.lines if matches(line.headers)}
            for queue, (_, matches) in FILTERS.items()
        }
        self.entries_count = sum(map(len, self.expected.values()))

    @contextmanager
    def ending_early(self) -> Iterator[None]:
        """A wait that runs out ends what is done with it, and is a fault of the run."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            self.early_end = f"{error.code().name}: {error.details()}"
        except (AssertionError, TimeoutError) as error:
            self.early_end = str(error) or repr(error)

    @property
    def done(self) -> bool:
        """Whether as many entries are acked as there should be."""
        return self.acked_count >= self.entries_count

    @property
    def progress(self) -> float:
        """Part of the work that is done, 0 to 1."""
        return self.acked_count / self.entries_count

    async def create_queues(self, stubs: Stubs, max_attempts: int = 20) -> None:
        """Create the ten queues."""
        for queue_id, (text, _) in FILTERS.items():
            queue = queue_pb2.Queue(queue_id=queue_id, filter=text, max_attempts=max_attempts)
            queue.backoff.kind = queue_pb2.Backoff.KIND_NONE  # what fails comes again at once
            await stubs.queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue), timeout=60)

    async def publish(self, stubs: Stubs, publishers: int = 2) -> None:
        """Publish all lines, each batch until it is answered."""
        batches = [
            self.lines[begin : begin + PUBLISH_BATCH]
            for begin in range(0, len(self.lines), PUBLISH_BATCH)
        ]

        async def publisher(mine: Sequence[Sequence[Line]]) -> None:
            for batch in mine:
                await self.publish_batch(stubs, batch)

        await asyncio.gather(*(publisher(batches[i::publishers]) for i in range(publishers)))

    async def publish_batch(self, stubs: Stubs, batch: Sequence[Line]) -> None:
        """Publish some of the lines, until that is answered."""
        request = ingest_pb2.PublishRequest(request_id=str(uuid.uuid4()))
        for line in batch:
            request.runs.add(payloads=[line.payload], headers=line.headers)
        answer = await persist(lambda: stubs.ingest.Publish(request, timeout=CALL_SECONDS))
        assert len(answer.message_ids) == len(batch)
        self.published_count += len(batch)

    async def consume(self, stubs: Stubs, consumers_per_queue: int = 1) -> None:
        """Consume from all queues until everything is acked, or nothing moves any more."""
        self.note_standstill()
        await asyncio.gather(
            *(self._consumer(stubs, queue) for queue in FILTERS for _ in range(consumers_per_queue))
        )

    def note_standstill(self) -> None:
        """Nothing could move until now: only what stands still from here on is at an end."""
        self._progress_at = time.monotonic()

    async def _consumer(self, stubs: Stubs, queue: str) -> None:
        claim = consumer_pb2.ClaimRequest(
            queue_id=queue, max_messages=CLAIM_MAX, lease_ms=self.lease_ms, wait_ms=500
        )
        while not self.done:
            still_s = time.monotonic() - self._progress_at
            assert still_s < STALLED_SECONDS, f"no ack for {still_s:.0f} s: {self.missing()}"
            answer = await persist(lambda: stubs.consumer.Claim(claim, timeout=CALL_SECONDS))
            if answer.runs:
                await self._finish(stubs, queue, messages_of(answer))

    async def _finish(self, stubs: Stubs, queue: str, claimed: Sequence[Any]) -> None:
        notes = []
        for message in claimed:
            note = Note(
                message.message.message_id, message.attempts_count, message.lease_deadline_ms
            )
            self.notes[queue, message.message.payload].append(note)
            notes.append(note)
        await self._ack(stubs, Ack([one.lease_token for one in claimed], notes))

    async def _ack(self, stubs: Stubs, ack: Ack) -> None:
        self._unanswered.append(ack)
        request = consumer_pb2.AckRequest(lease_tokens=ack.lease_tokens)
        answer = await persist(lambda: stubs.consumer.Ack(request, timeout=CALL_SECONDS))
        self._unanswered.remove(ack)
        for note, result in zip(ack.notes, answer.results, strict=True):
            note.acked = result.code == 0
            self.acked_count += note.acked
        self._progress_at = time.monotonic()

    async def repeat_acks(self, stubs: Stubs) -> None:
        """Repeat the acks of consumers that were cancelled before an answer: they may be stored."""
        unanswered, self._unanswered = self._unanswered, []
        for ack in unanswered:
            await self._ack(stubs, ack)

    async def find_nothing_more(self, stubs: Stubs, queues: Iterable[str] = FILTERS) -> None:
        """Look into every queue once all leases have ended; what comes then is noted."""
        ended_s = self.lease_ms / 1000 + 1
        await asyncio.sleep(ended_s)
        for queue in queues:
            claim = consumer_pb2.ClaimRequest(
                queue_id=queue, max_messages=CLAIM_MAX, lease_ms=self.lease_ms, wait_ms=200
            )
            look = partial(stubs.consumer.Claim, claim, timeout=CALL_SECONDS)
            # One without an answer may have leased what the next one is to find.
            while (answer := await persist(look, ended_s)).runs:
                await self._finish(stubs, queue, messages_of(answer))

    def missing(self) -> dict[str, int]:
        """How many entries of each queue are not acked."""
        return {
            queue: sum(
                not any(note.acked for note in self.notes.get((queue, payload), ()))
                for payload in payloads
            )
            for queue, payloads in self.expected.items()
        }

    def faults(self) -> list[str]:
        """Everything that should not have happened; empty is what tests want.

        What has not come before an early end is not lost.
        """
        if self.early_end:
            found = [f"ended early: {self.early_end}"]
        else:
            found = [f"{queue} lost {count}" for queue, count in self.missing().items() if count]
        for (queue, payload), notes in self.notes.items():
            if payload not in self.expected[queue]:
                found.append(f"{queue} got what its filter refuses: {payload[:60]!r}")
            found += [
                f"{queue}: {fault}: {payload[:60]!r}" for fault in find_faults(notes, self.lease_ms)
            ]
        return found

    @property
    def redelivered_count(self) -> int:
        """Deliveries beyond the first of each entry."""
        return sum(len(notes) - 1 for notes in self.notes.values())


def find_faults(notes: Sequence[Note], lease_ms: float) -> list[str]:
    """What is wrong with the deliveries of one entry, each claimed with a lease of `lease_ms`."""
    found = []
    if len({note.message_id for note in notes}) > 1:
        found.append("stored twice")
    ordered = sorted(notes, key=lambda note: note.attempt)
    for earlier, later in itertools.pairwise(ordered):
        if earlier.attempt == later.attempt:
            found.append(f"attempt {later.attempt} delivered twice")
        if earlier.acked:
            found.append("delivered again after an answered ack")
        # Both by the broker's clock: when the later claim began, the earlier lease had ended.
        if later.deadline_ms - lease_ms < earlier.deadline_ms:
            found.append("delivered again before its lease ended")
    return found
