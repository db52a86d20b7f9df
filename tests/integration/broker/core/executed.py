"""Random histories, the part about lists of commands: all or nothing, once, also over restarts."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from slatemq.v1 import consumer_pb2
from slatemq.v1.consumer_pb2 import Command, ExecuteRequest
from tests.integration.broker.core.compared import QUEUES, is_refused
from tests.integration.broker.core.finished import Finished
from tests.integration.broker.core.plain_queue import PlainQueue, Waiting
from tests.integration.broker.outbox.pushes import Pushes

REPEATED_UNTIL_MS = 9 * 60_000
"""Request IDs are remembered for ten minutes."""

KINDS = ("complete", "fail", "release", "extend", "transfer", "transfer")


@dataclass
class Drafts:
    """A list of commands, and what it does to the plain queues."""

    commands: list[Command] = field(default_factory=list)
    effects: list[Callable[[], object]] = field(default_factory=list)
    arriving: set[tuple[str, int]] = field(default_factory=set)


class Executed(Finished):
    """Its steps run lists of commands, repeat them, and bring in what they push."""

    pushes: Pushes
    next_id: int

    def __init__(self, chosen: random.Random) -> None:
        super().__init__(chosen)
        self.pushed: list[tuple[str, bytes]] = []
        self.routed_count = 0
        self._requests: deque[tuple[int, ExecuteRequest]] = deque(maxlen=50)
        self._requests_count = 0

    async def execute(self) -> None:
        held = [(queue, token) for queue in self.queues.values() for token in queue.held]
        drafts = Drafts()
        for queue, token in self.random.sample(held, min(len(held), self.random.randint(0, 4))):
            self._finish(drafts, queue, token)
        if self.random.random() < 0.3:
            self._push(drafts)
        if not drafts.commands:
            return
        if self.random.random() < 0.2:
            await self._refused(drafts.commands)
            return
        self._requests_count += 1
        request = ExecuteRequest(request_id=f"r{self._requests_count}", commands=drafts.commands)
        answer = await self.rig.consumers.Execute(request)
        for effect in drafts.effects:
            effect()
        assert [one.lease_deadline_ms for one in answer.results] == self._ends(request)
        self._requests.append((self.now_ms, request))

    def _finish(self, drafts: Drafts, queue: PlainQueue, token: str) -> None:
        command, effects, now_ms = Command(), drafts.effects, self.now_ms
        kind, became = self.random.choice(KINDS), "acked"
        if kind == "complete":
            command.complete.lease_token = token
            effects.append(partial(queue.complete, token))
        elif kind == "fail":
            command.fail.lease_token, command.fail.reason = token, "bad"
            effects.append(partial(queue.give_up, token, "fail: bad", now_ms))
            became = "nacked"
        elif kind == "release":
            delay_ms = self.random.choice((0, 0, 5_000, 60_000))
            command.release.lease_token, command.release.delay_ms = token, delay_ms
            effects.append(partial(queue.give_back, token, delay_ms, now_ms))
            became = "nacked"
        elif kind == "extend":
            length_ms = self.random.choice((0, 2_000, 60_000))
            command.extend.lease_token, command.extend.lease_ms = token, length_ms
            effects.append(partial(queue.extend, token, length_ms, now_ms))
            became = ""
        elif not self._transfer(drafts, queue, token, command):
            return
        drafts.commands.append(command)
        if became:
            effects.append(partial(self.note, token, became))

    def _transfer(self, drafts: Drafts, queue: PlainQueue, token: str, command: Command) -> bool:
        was = queue.held[token].was
        name = self.random.choice(QUEUES)
        target = self.queues[name]
        # The plain queues hold a message once each.
        if target.has(was.message_id) or (name, was.message_id) in drafts.arriving:
            return False
        drafts.arriving.add((name, was.message_id))
        priority = self.random.choice((None, 0, 128))
        delay_ms = self.random.choice((0, 0, 5_000, 60_000))
        transfer = command.transfer
        transfer.lease_token, transfer.target_queue_id, transfer.delay_ms = token, name, delay_ms
        if priority is None:
            priority = target.fallback_priority
        else:
            transfer.priority = priority
        entry = Waiting(was.message_id, priority, self.now_ms + delay_ms, was.deadline_ms)
        drafts.effects += (
            partial(queue.complete, token, name),
            partial(queue.carry_history, was.message_id, target),
            partial(target.add, entry, self.now_ms),
        )
        return True

    async def _refused(self, commands: list[Command]) -> None:
        """One bad command, and none of the list takes effect."""
        bad = Command()
        bad.complete.lease_token, reason = "0-00000000000000aa", "LEASE_UNKNOWN"
        named = [one for one in commands if one.WhichOneof("action") == "complete"]
        if named and self.random.random() < 0.5:
            bad, reason = named[0], "LEASE_USED_TWICE"
        elif self.over and self.random.random() < 0.5:
            token, became = self.random.choice(list(self.over.items()))
            bad.complete.lease_token = token
            reason = "LEASE_UNKNOWN" if became == "gone" else "LEASE_ENDED"
        request = ExecuteRequest(commands=[*commands, bad])
        assert await is_refused(self.rig.consumers.Execute(request), reason)

    # --- Once more ----------------------------------------------------------

    async def repeat(self) -> None:
        """Runs commands again that took effect: nothing changes, and the answer says how it is."""
        known = [one for at, one in self._requests if self.now_ms - at < REPEATED_UNTIL_MS]
        if not known:
            return
        request = self.random.choice(known)
        answer = await self.rig.consumers.Execute(request)
        assert [one.lease_deadline_ms for one in answer.results] == self._ends(request)
        other = ExecuteRequest(request_id=request.request_id, commands=[*request.commands] * 2)
        assert await is_refused(self.rig.consumers.Execute(other), "REQUEST_ID_REUSED")

    def _ends(self, request: consumer_pb2.ExecuteRequest) -> list[int]:
        running = {
            token: lease.ends_ms
            for queue in self.queues.values()
            for token, lease in queue.held.items()
        }
        return [running.get(one.extend.lease_token, 0) for one in request.commands]

    # --- Pushes -------------------------------------------------------------

    def _push(self, drafts: Drafts) -> None:
        name = self.random.choice(QUEUES)
        command = Command()
        payload = b"%d/%d" % (self._requests_count, len(drafts.commands))
        command.push.queue_id, command.push.payload = name, payload
        drafts.commands.append(command)
        drafts.effects.append(partial(self.pushed.append, (name, payload)))
        if self.random.random() < 0.1:
            self.pushes.lose_answers = 1

    async def route_pushes(self) -> None:
        """What was pushed is in its queue, as when it had come by way of ingest and router."""
        for pushed in self.pushes.stored.get(0, [])[self.routed_count :]:
            queue = self.queues[pushed.queue_id]
            await self.rig.assign([self.next_id], pushed.queue_id, priorities=[7])
            queue.add(Waiting(self.next_id, 7, 0, 0), self.now_ms)
            self.next_id += 1
            self.routed_count += 1

    async def compare(self) -> None:
        """As always; and what was pushed has arrived, once and in order."""
        await super().compare()
        async with asyncio.timeout(60):
            while len(self.pushes.stored.get(0, [])) < len(self.pushed):
                await asyncio.sleep(0.01)
        arrived = [(one.queue_id, one.payload) for one in self.pushes.stored.get(0, [])]
        assert arrived == self.pushed
