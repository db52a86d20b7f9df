"""Publishes in one mode of event queues, while ingest and the backend are killed along the way.

Judged by what is stored, and by the events that a consumer of the backend got: each answered
publish is stored exactly once, and each stored message has its event at least once, with one ID.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

import grpc.aio

from libs.events.backends import open_backend
from libs.events.settings import Consistency, QueueSettings
from slatemq.errors import DeadlineExceeded, SlateMQError, Unavailable
from slatemq.events.envelope import Event
from slatemq.v1 import ingest_pb2, task_pb2
from tests.faults.shard_processes import Member
from tests.integration.events.backends.servers import Server, running
from tests.integration.events.conftest import SERVERS
from tests.integration.events.tasks.queued_ingest import (
    QueuedIngest,
    beside,
    queue_settings,
    write_config,
)
from tests.integration.ingest.server import message

MODES: Final[tuple[str, ...]] = get_args(Consistency)
TASK_MODES: Final = ("async", "sync")
BACKENDS: Final = tuple(SERVERS)

INGEST: Final = "ingest"
BACKEND: Final = "backend"

PUBLISHERS: Final = 32
CALL_S: Final = 10.0
STALLED_S: Final = 240.0
"""How long nothing may move before a run is over, with something missing or not."""

QUIET_S: Final = 15.0
"""Longer than a consumer waits before it tries a server again."""

AT_ONCE: Final = 1_000


@dataclass
class EventRun:
    """What was published, answered and stored, and its events.

    Attributes:
        answered: What each publish was answered, by its number.
        failed_calls: Calls that had no answer, and were repeated.
        event_ids: The IDs of the events of each message; a message with two is a fault.
        events_count: Events delivered, repeats included.
        stored: The numbers of the publishes whose messages are stored, by message ID.
        wrong: What else went wrong.
    """

    mode: str
    publishes: int
    answered: dict[int, ingest_pb2.PublishResponse] = field(default_factory=dict)
    failed_calls: int = 0
    event_ids: dict[int, set[str]] = field(default_factory=dict)
    events_count: int = 0
    stored: dict[int, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def moved(self) -> tuple[int, int]:
        """Changes while anything goes on."""
        return len(self.answered), self.events_count

    def faults(self) -> list[str]:
        """All that is not as it should be."""
        copies = Counter(self.stored.values())
        found = list(self.wrong)
        for number in range(self.publishes):
            if number not in self.answered:
                found.append(f"publish {number} was never answered")
            elif copies[number] != 1:
                found.append(f"publish {number} is stored {copies[number]} times")
        found += [f"{number} was never published" for number in copies.keys() - self.answered]
        for number, answer in self.answered.items():
            found += [
                f"publish {number} was answered with message {one}, which is another's"
                for one in answer.message_ids
                if one and self.stored.get(one) != number
            ]
        for message_id, ids in self.event_ids.items():
            if len(ids) > 1:
                found.append(f"message {message_id} has {len(ids)} event IDs")
            if message_id not in self.stored:
                found.append(f"message {message_id} has an event and is not stored")
        if self.mode != "fire-and-forget":
            missing = self.stored.keys() - self.event_ids.keys()
            found += [f"message {message_id} has no event" for message_id in sorted(missing)]
        if len(set().union(*self.event_ids.values())) != len(self.event_ids):
            found.append("two messages share an event ID")
        return found


class _Rig:
    """The backend's server, the ingest, and their settings."""

    def __init__(
        self,
        folder: Path,
        run: EventRun,
        server: Server,
        settings: QueueSettings,
        victims: Sequence[str],
    ) -> None:
        self.run = run
        self.server = server
        self._victims = victims
        self._killed_count = 0
        self._last_error = ""
        self.settings = settings
        (folder / "data").mkdir()
        config = write_config(folder, settings)
        self.ingest = Member(folder, INGEST, 0, "--config", str(config))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[QueuedIngest]:
        async with QueuedIngest.at(self.ingest.peer_address) as client:
            assert isinstance(client, QueuedIngest)
            yield client

    # --- Publishing -----------------------------------------------------------

    def _due(self, kill: int) -> int:
        """How many publishes go before a kill."""
        return self.run.publishes * (kill + 1) // (len(self._victims) + 1)

    async def publish(self, numbers: itertools.count[int]) -> None:
        """Publish one after another, each until it is answered."""
        async with self.client() as client:
            for number in numbers:
                if number >= self.run.publishes:
                    return
                # Each kill is to fall among publishes.
                while number >= self._due(self._killed_count + 1):
                    await asyncio.sleep(0.01)
                request = ingest_pb2.PublishRequest(
                    runs=[message(b"%d" % number, queue="orders")], request_id=f"p{number}"
                )
                while (answer := await self._try(client, request)) is None:
                    await asyncio.sleep(0.05)
                self.run.answered[number] = answer

    async def _try(
        self, client: QueuedIngest, request: ingest_pb2.PublishRequest
    ) -> ingest_pb2.PublishResponse | None:
        try:
            answer: ingest_pb2.PublishResponse = await client.stub.Publish(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            self.run.failed_calls += 1
            self._last_error = f"{error.code()} {error.details()}"
            if error.code() not in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.ABORTED,
            ):
                raise RuntimeError(f"a publish was refused: {self._said()}") from error
            return None
        return answer

    async def end_stalled(self, down_s: float) -> None:
        """Raise when no publish has been answered for long, though the backend was back."""
        count, moved_at = 0, time.monotonic()
        while count < self.run.publishes:
            if (now := len(self.run.answered)) != count:
                count, moved_at = now, time.monotonic()
            if time.monotonic() - moved_at > STALLED_S + down_s:
                raise RuntimeError(f"no publish is answered after {count}: {self._said()}")
            await asyncio.sleep(0.2)

    def _said(self) -> str:
        return f"{self._last_error}\n{self.ingest.last_words()}"

    # --- Kills ----------------------------------------------------------------

    async def kill_along(self, down_s: float) -> None:
        """Kill all victims, spread over the run; the backend stays away for a while at first."""
        for at, victim in enumerate(self._victims):
            while len(self.run.answered) < self._due(at):
                await asyncio.sleep(0.01)
            print(f"{len(self.run.answered)} answered: kill of {victim}", flush=True)
            if victim == INGEST:
                await self.ingest.kill()
            else:
                await asyncio.to_thread(self.server.kill)
                await asyncio.sleep(down_s if BACKEND not in self._victims[:at] else 0)
                await asyncio.to_thread(self.server.start)
            self._killed_count = at + 1

    # --- Afterwards -----------------------------------------------------------

    async def until(self, is_over: Any) -> None:
        """Wait until something is over, or nothing has moved for long."""
        seen, moved_at = None, time.monotonic()
        while not await is_over():
            if (now := self.run.moved) != seen:
                seen, moved_at = now, time.monotonic()
            if time.monotonic() - moved_at > STALLED_S:
                return
            await asyncio.sleep(0.2)

    async def until_quiet(self) -> None:
        """Wait until no event has come for a while."""
        seen = None
        while seen != (seen := self.run.events_count):
            await asyncio.sleep(QUIET_S)

    async def settle(self) -> None:
        """Wait until no task waits anywhere: what a killed consumer had comes again by then."""

        async def is_over() -> bool:
            try:
                async with beside(self.settings) as backend:
                    stats = await backend.stats()
            except SlateMQError:
                return False
            if stats.dead_letter_count:
                self.run.wrong.append(f"{stats.dead_letter_count} dead letters")
                return True
            return stats.pending_tasks == 0

        await self.until(is_over)

    async def check_tasks(self) -> None:
        """Every task that was answered with its ID is applied, with messages of its own number."""
        tasks = [(n, one.task_id) for n, one in self.run.answered.items() if one.task_id]
        async with self.client() as client:
            for start in range(0, len(tasks), AT_ONCE // 10):
                some = tasks[start : start + AT_ONCE // 10]
                results = await asyncio.gather(
                    *(self._until_done(client, task_id) for _, task_id in some)
                )
                for (number, task_id), task in zip(some, results, strict=True):
                    if task.state != task_pb2.TASK_STATE_APPLIED:
                        self.run.wrong.append(f"task {task_id} is {task.state}: {task.error}")
                    self.run.answered[number] = ingest_pb2.PublishResponse(
                        message_ids=task.message_ids
                    )

    async def _until_done(self, client: QueuedIngest, task_id: str) -> task_pb2.Task:
        """The task once it is over, or as it is after long: on a busy disk an answer takes seconds.

        On SlateMQ it may also be one that no count had, since it was not routed yet.
        """
        end = time.monotonic() + STALLED_S
        while True:
            try:
                return await client.wait(task_id, CALL_S)
            except (DeadlineExceeded, Unavailable):
                if time.monotonic() >= end:
                    return await client.task(task_id)
                await asyncio.sleep(0.2)

    async def read(self) -> None:
        """Read all that is stored."""
        async with self.client() as client:
            ids = [one.message_id for one in await client.log()]
            for start in range(0, len(ids), AT_ONCE):
                some = ids[start : start + AT_ONCE]
                payloads = await client.payloads(*some)
                self.run.stored.update(zip(some, map(int, payloads), strict=True))


@asynccontextmanager
async def _recording(settings: QueueSettings, run: EventRun) -> AsyncIterator[None]:
    """A consumer group that gets every event from now on."""
    backend = open_backend(settings.backend)

    async def record(event: Event) -> None:
        if event.type == "message.published":
            run.events_count += 1
            run.event_ids.setdefault(int(event.data["message_id"]), set()).add(event.id)
        with suppress(Unavailable):  # it comes again
            await backend.acknowledge(event.id)

    await backend.connect(getattr(settings, settings.backend))
    await backend.subscribe([], record)
    try:
        yield
    finally:
        await backend.close()


async def _work(rig: _Rig, down_s: float, publishers: int) -> None:
    run = rig.run

    async def have_events() -> bool:
        return run.stored.keys() <= run.event_ids.keys()

    async with _recording(rig.settings, run):
        await asyncio.sleep(rig.server.settle_s)
        await rig.ingest.start()
        try:
            numbers = itertools.count()
            began = time.monotonic()
            async with asyncio.TaskGroup() as works:
                for _ in range(publishers):
                    works.create_task(rig.publish(numbers))
                works.create_task(rig.kill_along(down_s))
                works.create_task(rig.end_stalled(down_s))
            took = time.monotonic() - began
            print(f"all answered after {took:.0f} s", flush=True)
            if run.mode in TASK_MODES:
                await rig.settle()
                print(f"no task waits after {time.monotonic() - began:.0f} s", flush=True)
                await rig.check_tasks()
            await rig.read()
            print(f"all read after {time.monotonic() - began:.0f} s", flush=True)

            if run.mode == "fire-and-forget":  # any of them may be missing
                await rig.until_quiet()
            else:
                await rig.until(have_events)
            print(f"all events after {time.monotonic() - began:.0f} s", flush=True)
        finally:
            await rig.ingest.close()


def victims_of(kills: int, seed: int) -> list[str]:
    """N kills of the ingest, and N of the backend, in a random order."""
    victims = [INGEST, BACKEND] * kills
    random.Random(seed).shuffle(victims)
    return victims


def run_events(
    folder: Path,
    mode: Consistency,
    backend: str,
    publishes: int,
    victims: Sequence[str],
    down_s: float,
    publishers: int = PUBLISHERS,
) -> EventRun:
    """Publishes in a mode, on a fresh backend and ingest, with kills along the way."""
    run = EventRun(mode, publishes)
    name, make = SERVERS[backend]
    (folder / "server").mkdir()
    with running(make(folder / "server")) as server:
        settings = queue_settings(name, server, mode)
        asyncio.run(_work(_Rig(folder, run, server, settings, victims), down_s, publishers))
    return run
