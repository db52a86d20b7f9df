"""What happens in the demo of tasks, in order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from examples.demo.queues import headers_of
from examples.demo.stack import DemoStack
from examples.demo.tasks.judge import Answer, Delivery, Outcome
from examples.demo.tasks.servers import TaskServer
from slatemq import Client, OutgoingMessage, TaskState, connect
from slatemq.errors import SlateMQError

QUEUE = "everything"

PUBLISHERS = 4
TASK_MESSAGES = 10
PUBLISH_PAUSE_SECONDS = 0.01
"""Slow enough to see tasks applied, and processes die, while messages come in."""

CALL_SECONDS = 60.0
"""How long a publish is repeated: longer than any process needs to be back."""

DOWN_SECONDS = 1.0
"""How long the backend stays dead."""

STALLED_SECONDS = 60.0
"""Without any progress for so long, the demo stops waiting; the judge says what is missing. More
than the 30 s after which a backend gives out again what a killed ingest had taken."""

WAITS_MAX = 64

Report = Callable[[str], None]


@dataclass
class PlayedTasks:
    """What is left of a run."""

    answers: list[Answer] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def arrived_count(self) -> int:
        """Events of which something arrived."""
        return len({delivery.payload for delivery in self.deliveries})


async def play_tasks(
    stack: DemoStack, server: TaskServer, name: str, lines: Sequence[bytes], report: Report
) -> PlayedTasks:
    """Publish the lines, kill the ingest and the backend, and find out what became of it all."""
    played = PlayedTasks()
    async with connect(
        stack.endpoint, call_timeout=CALL_SECONDS, credentials=stack.credentials
    ) as client:
        await client.create_queue(QUEUE, filter="true")
        consuming = asyncio.create_task(_consume(client, played))
        await _publish(client, stack, server, name, lines, played, report)
        await _find_outcomes(client, played, report)
        await _until_arrived(played, len(lines), consuming)
        consuming.cancel()
        await asyncio.wait([consuming])
    return played


async def _consume(client: Client, played: PlayedTasks) -> None:
    async with client.consume(QUEUE) as messages:
        async for message in messages:
            async with message:
                played.deliveries.append(Delivery(message.payload, message.message_id))


async def _publish(
    client: Client,
    stack: DemoStack,
    server: TaskServer,
    name: str,
    lines: Sequence[bytes],
    played: PlayedTasks,
    report: Report,
) -> None:
    """Publish in three phases, with a kill between each two."""
    phase = "at first"
    kill_at = {len(lines) // 3: "the ingest", 2 * len(lines) // 3: name}
    begins = iter(range(0, len(lines), TASK_MESSAGES))
    reviving: list[asyncio.Task[None]] = []

    def kill(victim: str) -> str:
        pid = stack.kill("ingest") if victim != name else server.kill()
        answered = sum(len(answer.payloads) for answer in played.answers)
        report(f"killed {victim} (SIGKILL, process {pid}) after {answered} messages answered")
        if victim == name:
            reviving.append(asyncio.create_task(_revive(server, name, report)))
        return f"{victim} killed".removeprefix("the ")

    async def publish_some() -> None:
        nonlocal phase
        for begin in begins:
            for place, victim in kill_at.items():
                if begin <= place < begin + TASK_MESSAGES:
                    phase = kill(victim)
            batch = lines[begin : begin + TASK_MESSAGES]
            played.answers.append(await _publish_batch(client, phase, batch))
            await asyncio.sleep(PUBLISH_PAUSE_SECONDS)

    await asyncio.gather(*(publish_some() for _ in range(PUBLISHERS)))
    await asyncio.gather(*reviving)
    report(f"all {len(lines)} messages are answered; {played.arrived_count} have arrived so far")


async def _publish_batch(client: Client, phase: str, batch: Sequence[bytes]) -> Answer:
    """Publish some; the client repeats the request under its ID until it is answered."""
    began = time.monotonic()
    messages = [OutgoingMessage(line, headers_of(json.loads(line))) for line in batch]
    published = await client.publish_batch(messages)
    return Answer(
        phase,
        batch,
        published[0].task_id,
        [one.message_id for one in published if one.message_id],
        (time.monotonic() - began) * 1000,
    )


async def _revive(server: TaskServer, name: str, report: Report) -> None:
    await asyncio.sleep(DOWN_SECONDS)
    await asyncio.to_thread(server.revive)
    report(f"{name} is back, on what it had")


async def _find_outcomes(client: Client, played: PlayedTasks, report: Report) -> None:
    """Wait for every task."""
    places = asyncio.Semaphore(WAITS_MAX)

    async def find(task_id: str) -> None:
        async with places:
            try:
                task = await client.wait_task(task_id, timeout=STALLED_SECONDS)
            except SlateMQError as error:
                played.outcomes[task_id] = Outcome(problem=str(error))
                return
        if task.state is TaskState.APPLIED:
            message_ids = [one.message_id for one in task.published]
            played.outcomes[task_id] = Outcome(message_ids)
        else:
            played.outcomes[task_id] = Outcome(problem=f"{task.state.value} {task.error}")

    report("waiting for every task; what the killed ingest had taken may take 30 s to come again")
    await asyncio.gather(*(find(answer.task_id) for answer in played.answers if answer.task_id))
    report(f"{len(played.outcomes)} tasks are known to be over")


async def _until_arrived(
    played: PlayedTasks, lines_count: int, consuming: asyncio.Task[None]
) -> None:
    """Wait until each event has arrived, or nothing moves."""
    noted, moved_at = -1, time.monotonic()
    while not consuming.done() and (arrived := played.arrived_count) < lines_count:
        if arrived != noted:
            noted, moved_at = arrived, time.monotonic()
        if time.monotonic() - moved_at > STALLED_SECONDS:
            return
        await asyncio.sleep(0.1)
