"""Random histories, the part about lists of commands: all or nothing, once, and their pushes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import rule

from libs.storage.layout.own_keys import MINUTE_MS, outbox_key, outbox_range
from libs.storage.records.queues import FailedAttempt
from services.broker.core.batches.execute import (
    Command,
    Complete,
    Execution,
    Extend,
    Fail,
    Push,
    Release,
    Transfer,
    execute,
)
from services.broker.core.lists.executed import WINDOW_MINUTES
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, SlateMQError
from tests.unit.broker.core.histories.histories import QUEUES, slowly
from tests.unit.broker.core.histories.model import Done, Failed
from tests.unit.broker.core.histories.redrive_histories import RedriveHistory

INGEST = 3
ELSEWHERE = "far"

kinds = st.lists(
    st.tuples(
        st.sampled_from(["complete", "fail", "release", "extend", "transfer", "transfer", "push"]),
        st.integers(0, 40),  # which lease
        st.sampled_from([0, 0, 50, 300]),  # delay
        st.sampled_from([*QUEUES, *QUEUES, *QUEUES, *QUEUES, ELSEWHERE, "none"]),
    ),
    min_size=1,
    max_size=6,
)

Kind = tuple[str, int, int, str]


class ExecuteHistory(RedriveHistory):
    """Its rules run lists of commands, and send what they push."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, list[Command]]] = []
        self.ingest: list[bytes] = []  # what ingest has stored: no crash of ours takes it back
        self.pushed_count = 0

    # --- Commands -----------------------------------------------------------

    @rule(chosen=kinds, request=st.integers(0, 3), slow=slowly)
    def execute(self, chosen: list[Kind], request: int, slow: bool) -> None:
        commands = self.commands(chosen)
        if not commands:
            return
        request_id = ("", "used by several", *[f"r{len(self.requests)}"] * 2)[request]
        if request_id:
            self.requests.append((request_id, commands))
        self.run_execute(request_id, commands, slow)

    def run_execute(self, request_id: str, commands: Sequence[Command], slow: bool) -> None:
        self.tick()
        arrived_ms = self.now_ms
        self.run(lambda now_ms: self.execute_now(request_id, commands, now_ms, arrived_ms), slow)

    @rule(chosen=kinds)
    def plain_execute(self, chosen: list[Kind]) -> None:
        self.execute([kind for kind in chosen if kind[3] in QUEUES], 3, False)

    @rule(pick=st.integers(0, 5), slow=slowly)
    def execute_again(self, pick: int, slow: bool) -> None:
        if self.requests:
            request_id, commands = self.requests[-1 - pick % len(self.requests)]
            self.run_execute(request_id, commands, slow)

    @rule(minutes=st.sampled_from([1, 9, 11]), sure=st.integers(0, 3))
    def forget(self, minutes: int, sure: int) -> None:
        if not sure:
            self.tick(minutes * MINUTE_MS)
            self.shard.executed.forget(self.now_ms)

    def known(self, request_id: str, now_ms: int) -> bytes | None:
        """The fingerprint under which this took effect, as far as it is remembered."""
        for known_id, fingerprint, at_ms in reversed(self.model.executed):
            if known_id == request_id:
                if now_ms - at_ms > WINDOW_MINUTES * MINUTE_MS:
                    return self.shard.executed.fingerprint(request_id)
                return fingerprint
        return None

    def commands(self, chosen: list[Kind]) -> list[Command]:
        tokens = self.tokens([pick for _, pick, _, _ in chosen])
        running = sorted(
            held.token for queue in self.model.queues.values() for held in queue.held().values()
        )
        if chosen and chosen[0][1] % 8:
            # Most lists name running leases, each once: the others never get far.
            offset = chosen[0][1]
            running = [*running[offset % (len(running) or 1) :], *running][: len(running)]
            tokens = running[: len(chosen)]
        commands: list[Command] = []
        for (kind, pick, delay_ms, queue_id), token in zip(chosen, tokens, strict=False):
            if kind == "complete":
                commands.append(Complete(token))
            elif kind == "fail":
                commands.append(Fail(token, "no"))
            elif kind == "release":
                commands.append(Release(token, delay_ms))
            elif kind == "extend":
                commands.append(Extend(token, delay_ms))
            elif kind == "transfer":
                commands.append(Transfer(token, queue_id, pick % 2 * 7, delay_ms or None))
            else:
                self.pushed_count += 1
                commands.append(Push(queue_id, b"%d" % self.pushed_count))
        return commands

    def execute_now(
        self, request_id: str, commands: Sequence[Command], now_ms: int, arrived_ms: int
    ) -> None:
        fingerprint = hashlib.blake2b(repr(commands).encode(), digest_size=16).digest()
        # The model tells entries by their messages: two of one message in a queue it cannot.
        commands = [self.without_second_entry(command) for command in commands]
        known = self.known(request_id, now_ms)
        expected = self.expected_refusals(commands)
        execution = Execution(
            commands, request_id, fingerprint, INGEST, elsewhere=frozenset({ELSEWHERE})
        )
        try:
            ends = execute(self.shard, execution, now_ms, arrived_ms)
        except SlateMQError as error:
            acknowledged = (type(error), error.metadata.get("command", ""))
            if known is not None:
                assert known != fingerprint
                assert acknowledged == (InvalidArgument, "")
                return
            assert acknowledged in expected
            return
        assert len(ends) == len(commands)
        if known is not None:
            assert known == fingerprint
            return
        assert not expected, "a list was not refused"
        if request_id:
            self.model.executed += ((request_id, fingerprint, now_ms),)
        for command, end_ms in zip(commands, ends, strict=True):
            assert end_ms == self.expect(command, now_ms, arrived_ms)

    def without_second_entry(self, command: Command) -> Command:
        if not isinstance(command, Transfer) or command.target not in self.model.queues:
            return command
        holder = self.model.holder(command.token)
        if holder is not None and holder[1] in self.model.queues[command.target].entries:
            return Complete(command.token)
        return command

    def expected_refusals(self, commands: Sequence[Command]) -> set[tuple[type[SlateMQError], str]]:
        """What the first refused command may be answered; empty when none is refused."""
        used: set[int] = set()
        for index, command in enumerate(commands):
            place = str(index)
            if isinstance(command, Push):
                if command.queue_id not in (*self.model.queues, ELSEWHERE):
                    return {(NotFound, place)}
                continue
            if command.token in used:
                return {(InvalidArgument, place)}
            used.add(command.token)
            if self.model.holder(command.token) is None:
                if self.model.surely_remembered(command.token):
                    return {(FailedPrecondition, place)}
                if command.token in self.model.finished:
                    return {(FailedPrecondition, place), (NotFound, place)}
                return {(NotFound, place)}
            if isinstance(command, Transfer) and command.target not in self.model.queues:
                kind = FailedPrecondition if command.target == ELSEWHERE else NotFound
                return {(kind, place)}
        return set()

    def expect(self, command: Command, now_ms: int, arrived_ms: int) -> int:
        """Does to the model what a command does; gives the end of the lease that it extends."""
        if isinstance(command, Push):
            self.model.pushes += (command.value,)
            return 0
        holder = self.model.holder(command.token)
        assert holder is not None
        queue, message_id, held = holder
        if isinstance(command, Extend):
            deadline_ms = queue.end_of_extension(held, command.lease_ms, now_ms)
            held = replace(held, deadline_ms=deadline_ms)
            queue.entries[message_id] = held
            return held.deadline_ms
        if isinstance(command, Release):
            self.returned(holder, "", command.delay_ms and arrived_ms + command.delay_ms, now_ms)
        elif isinstance(command, Fail):
            queue.entries[message_id] = Failed(held.attempts, "fail: no")
            attempt = FailedAttempt(held.consumer, held.claimed_at_ms, "fail: no")
            queue.attempts[message_id] = (*queue.attempts.get(message_id, ()), attempt)
        elif isinstance(command, Transfer):
            queue.entries[message_id] = Done(held.token, held.attempts, command.target)
            self.model.carry(message_id, queue, command.target)
            target = self.model.queues[command.target]
            if not held.before.expired(max(now_ms, target.walked_ms)):
                visible_at_ms = arrived_ms + command.delay_ms if command.delay_ms else 0
                assert command.priority is not None
                target.entries[message_id] = self.waiting(
                    target, command.priority, visible_at_ms, held.before.deadline_ms, 0, now_ms
                )
        else:
            queue.entries[message_id] = Done(held.token, held.attempts)
        acked = isinstance(command, Complete | Transfer)
        self.model.finished[command.token] = "acked" if acked else "nacked"
        return 0

    # --- Pushes -------------------------------------------------------------

    @rule(limit=st.integers(1, 3), acknowledged=st.booleans())
    def send(self, limit: int, acknowledged: bool) -> None:
        """Sends what is durable; the answer may get lost."""
        outbox = self.shard.outbox
        first = outbox.counter(INGEST).first_waiting
        values = []
        for number in range(first, first + limit):
            value = self.store.durable_rows.get(outbox_key(INGEST, number))
            if value is None:
                break
            values.append(value)
        assert first <= len(self.ingest) + 1, "a gap"
        self.ingest += values[len(self.ingest) + 1 - first :]
        if acknowledged and values:
            outbox.sent(INGEST, len(values), sum(map(len, values)))
            self.model.sent_count += len(values)

    def rows_match(self) -> None:
        super().rows_match()
        span = outbox_range(INGEST, 0)
        rows = sorted(key for key in self.store.rows if span.start <= key < span.end)
        numbers = range(self.model.sent_count + 1, len(self.model.pushes) + 1)
        assert rows == [outbox_key(INGEST, number) for number in numbers]

    def everything_pushed_arrives_once(self) -> None:
        """After a last restart, when all is sent."""
        while self.shard.outbox.waiting_count(INGEST):
            self.commit()
            while self.written:
                self.durable()
            self.send(3, acknowledged=True)
        assert self.ingest == list(self.model.pushes)
