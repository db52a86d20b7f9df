"""`slatemq consume`: messages as they come, for a program or to stdout."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from slatemq._cancelling import end_all
from slatemq._secrets import KEY_HEADER
from slatemq.cli.consume.claiming import message_fields
from slatemq.cli.consume.programs import (
    NOT_RUN,
    SIGPIPE_STATUS,
    Outcome,
    check_syntax,
    has_reader_gone,
    run_program,
)
from slatemq.cli.entry_output import note_encrypted, opened
from slatemq.cli.failures import EXIT_REFUSED, BadInput, ReaderGone
from slatemq.cli.output import json_line, note, write_bytes
from slatemq.cli.parameters import DURATION, Number, consumer_option, queue_argument
from slatemq.cli.session import Session, command, in_thread
from slatemq.errors import FailedPrecondition, NotFound, SlateMQError

if TYPE_CHECKING:
    from slatemq._consume.consumer import Consumer
    from slatemq._consume.delivered import Received
    from slatemq.client import Client

LOOK_S = 0.25
"""How often an idle consumer checks for outages and pauses."""

NOT_RUN_MAX = 3
"""After this many messages in a row, a command that ends with 126 or 127 cannot be run, or can no
longer: its script was replaced, say."""

ALONE_S = 2.0
"""How long fewer messages wait for another one, for which the command may run."""

PRINTED_MAX = 1000
"""Messages prefetched for printing, and printed messages with acks under way."""

EPILOG = """\
Examples:
  slatemq consume orders --exec ./handle-order.sh
  slatemq consume orders --concurrency 8 --exec 'curl -fsS --data-binary @- localhost:8080/in'
  slatemq consume orders --wait 10s > orders.jsonl
  slatemq consume orders --max 100 --json

--exec runs CMD with the shell for each message, with the payload on stdin.
Exit status 0 acks the message; any other nacks it, and the end of what CMD
wrote to stderr is the reason. Exit status 126 or 127 means that the shell
cannot run CMD: if that happens for three messages in a row, or for every
message, `consume` ends with exit code 2, and returns the messages without
counting an attempt. Once CMD has ended in any other way, 126 and 127 for fewer
messages in a row are failures like all others; CMD || exit 1 makes every one a
failure. When the reader of stdout is gone, and CMD ends by SIGPIPE, `consume`
ends as on Ctrl-C, with exit code 141. The environment has SLATEMQ_MESSAGE_ID,
SLATEMQ_QUEUE, SLATEMQ_ATTEMPTS (1 for the first) and SLATEMQ_HEADERS (a JSON
object; omitted over 100,000 bytes).

Without --exec each payload is written to stdout, followed by a newline, and
acked once it is written. --json writes messages as `claim` does; with --exec
it writes the outcome of each message.

A message whose payload cannot be decrypted is nacked, and neither written nor
given to CMD. If three have keys that are not among those given, before any was
decrypted, `consume` ends with exit code 2, and returns the messages without
counting an attempt.

Leases are extended while messages are processed. Ctrl-C stops: messages being
processed are returned, and no attempt is counted. The exit code is 1 when there
were messages and all of them failed, and 3 when a broker or ingest that it
needs is down for longer than --timeout while it processes no message.
"""


@command("consume", epilog=EPILOG)
@queue_argument
@click.option(
    "--exec", "program", metavar="CMD", help="Run CMD for each message, payload on stdin."
)
@click.option(
    "--concurrency",
    type=Number(1, 10_000),
    default=1,
    help="Run up to N programs in parallel.  [default: 1]",
)
@click.option("--max", "most", type=Number(min=1), help="Stop after N messages.")
@click.option(
    "--wait",
    type=DURATION,
    help="Stop after this long without a message, not counting outages.  [default: never]",
)
@click.option(
    "--lease",
    type=DURATION,
    help="How long a lease lasts unless it is extended.  [default: the queue's]",
)
@consumer_option
def consume(
    session: Session,
    queue: str,
    program: str | None,
    concurrency: int,
    most: int | None,
    wait: timedelta | None,
    lease: timedelta | None,
    consumer: str,
) -> None:
    """Take messages of QUEUE as they come, and ack them."""
    if program is None and concurrency != 1:
        raise click.UsageError("--concurrency needs --exec")
    if program is not None and not program.strip():
        raise click.UsageError("--exec: give a command")
    if wait is not None and not wait:
        raise click.UsageError("--wait: give messages time to arrive, as in --wait 1s")
    tally: Counter[str] = Counter()
    worker = (
        _Printer(session, tally) if program is None else _Executor(session, tally, program, queue)
    )
    slots = PRINTED_MAX if program is None else concurrency

    async def work(client: Client) -> None:
        if program is not None:
            try:
                await check_syntax(program)
            except ValueError as error:
                raise BadInput(f"--exec: the shell cannot read the command: {error}") from None
        prefetch = min(slots, most or slots)
        async with client.consume(
            queue, prefetch=prefetch, lease=lease, consumer_id=consumer
        ) as messages:
            wait_s = wait.total_seconds() if wait is not None else None
            give_up_s = session.timeout.total_seconds()
            await _Pump(messages, worker, slots, most, wait_s, give_up_s).run()

    is_reported = program is not None
    try:
        session.call(work)
        if tally["nacked"] and not tally["acked"]:
            sys.exit(EXIT_REFUSED)
    except SlateMQError:
        # A command that could not start has nothing to sum up.
        is_reported = is_reported and tally["acked"] + tally["nacked"] > 0
        raise
    finally:
        if is_reported or tally["lost"] or tally["nacked"]:
            counts = f"{tally['acked']} acked, {tally['nacked']} nacked"
            note(f"{counts}, {tally['lost']} whose lease was lost")


class _Worker:
    def __init__(self, session: Session, tally: Counter[str]) -> None:
        self.session = session
        self.tally = tally
        self._has_decrypted = False
        self._unknown: set[int] = set()  # messages of keys that are not there
        self._unread: list[tuple[Received, SlateMQError]] = []  # those that wait

    async def take(self, message: Received) -> None:
        """Called first, for one message at a time, in order."""
        note_encrypted(self.session, message.headers)

    async def finish(self, message: Received) -> Sequence[Received]:
        """Called then, in parallel; returns the messages that are finished now."""
        problem = opened(message).problem
        if problem is None:
            self._has_decrypted = self._has_decrypted or KEY_HEADER in message.headers
            return [*await self._fail_unread(), *await self.process(message)]
        if problem.reason == "KEY_UNKNOWN" and not self._has_decrypted:
            # One message that comes again and again is at fault itself: it is counted once.
            self._unread.append((message, problem))
            self._unknown.add(message.message_id)
            if len(self._unknown) >= NOT_RUN_MAX:
                raise _wrong_keys(problem)
            return []
        await self.fail(message, problem.message)
        return [message]

    async def _fail_unread(self) -> list[Received]:
        unread, self._unread = self._unread, []
        for message, problem in unread:
            await self.fail(message, problem.message)
        return [message for message, _ in unread]

    async def process(self, message: Received) -> Sequence[Received]:
        """As `finish`, of a message whose payload can be read."""
        await self.settle(message, "acked", message.ack())
        return [message]

    async def fail(self, message: Received, why: str, status: int | None = None) -> str:
        """Nack, and say why; returns the result. `status`: the exit status of its command."""
        note(f"message {message.message_id}, attempt {message.attempts_count}: {why}")
        return await self.settle(message, "nacked", message.nack(why))

    async def finish_waiting(self) -> Sequence[Received]:
        """Called while no messages come; returns the messages that are finished now.

        Raises BadInput if none can be processed.
        """
        return await self._fail_unread()

    async def settle(self, message: Received, result: str, call: Awaitable[None]) -> str:
        """Await an ack or nack; return and count its result, or that the lease was lost."""
        try:
            await call
        except (FailedPrecondition, NotFound) as error:
            note(f"message {message.message_id} may be delivered again: {error.message}")
            result = "lost"
        self.tally[result] += 1
        return result


def _wrong_keys(problem: SlateMQError) -> BadInput:
    # Not the messages' fault: all are returned, and no attempt is counted.
    return BadInput(
        f"{problem.message}: none was decrypted, and {NOT_RUN_MAX} are of keys that are not among "
        "those given. The messages were returned, and no attempt was counted: add the key to the "
        "file of --encryption-keys, or cancel the messages"
    )


class _Printer(_Worker):
    async def take(self, message: Received) -> None:
        await super().take(message)
        payload = opened(message)
        if payload.problem is not None:
            return
        if self.session.json:
            content = json_line(message_fields(message, payload))
        else:
            content = payload.payload + b"\n"
        await in_thread(lambda: write_bytes(content))


class _Executor(_Worker):
    def __init__(self, session: Session, tally: Counter[str], program: str, queue: str) -> None:
        super().__init__(session, tally)
        self._program = program
        self._queue = queue
        self._can_run = False  # until it has ended with another exit status
        self._not_run: set[int] = set()  # messages, since it last did
        self._held: list[tuple[Received, Outcome]] = []

    async def process(self, message: Received) -> Sequence[Received]:
        try:
            outcome = await run_program(self._program, message, self._queue)
        except OSError as error:
            raise BadInput(f"--exec: the shell cannot be run: {error.strerror}") from None
        if outcome.status == SIGPIPE_STATUS and has_reader_gone():
            raise ReaderGone  # Not the message's fault: every other command would end so too.
        self._held.append((message, outcome))
        if outcome.status in NOT_RUN:
            # One message that comes again and again is at fault itself: it is counted once.
            self._not_run.add(message.message_id)
            if len(self._not_run) >= NOT_RUN_MAX:
                raise self._cannot_run()
            return []
        self._can_run = True
        self._not_run.clear()
        return await self._settle_held()

    async def finish_waiting(self) -> Sequence[Received]:
        if self._held and not self._can_run:
            raise self._cannot_run()
        return [*await super().finish_waiting(), *await self._settle_held()]

    def _cannot_run(self) -> BadInput:
        _, (status, why) = self._held[-1]
        # Not the messages' fault: all are returned, and no attempt is counted.
        return BadInput(
            f"--exec: {why}; exit status {status} means that the shell cannot run it. The "
            "messages were returned, and no attempt was counted; if they are at fault, use "
            "`CMD || exit 1` to count attempts"
        )

    async def _settle_held(self) -> Sequence[Received]:
        held, self._held = self._held, []
        for message, (status, why) in held:
            await self._settle(message, status, why)
        return [message for message, _ in held]

    async def _settle(self, message: Received, status: int, why: str) -> None:
        if status == 0:
            result = await self.settle(message, "acked", message.ack())
            await self._report(message, result, status)
        else:
            await self.fail(message, why, status)

    async def fail(self, message: Received, why: str, status: int | None = None) -> str:
        result = await super().fail(message, why)
        await self._report(message, result, status)
        return result

    async def _report(self, message: Received, result: str, status: int | None) -> None:
        if self.session.json:
            fields = {
                "message_id": str(message.message_id),
                "attempts_count": message.attempts_count,
                "result": result,
                "exit_status": status,
            }
            await in_thread(lambda: write_bytes(json_line(fields)))


@dataclass(eq=False)
class _Pump:
    """Passes the messages of a consumer to a worker, up to `slots` in parallel."""

    _messages: Consumer
    _worker: _Worker
    _slots: int
    _most: int | None
    _wait_s: float | None
    _give_up_s: float
    _running: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _unfinished: dict[str, Received] = field(default_factory=dict, init=False)
    _over: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _problem: BaseException | None = field(default=None, init=False)
    _is_paused: bool = field(default=False, init=False)

    async def run(self) -> None:
        """Run until `most` messages or `wait` without one. Raises what the worker raised."""
        taken = 0
        try:
            while self._most is None or taken < self._most:
                while len(self._running) >= self._slots:
                    await self._reap()
                message = await self._next()
                if message is None:
                    break
                taken += 1
                self._unfinished[message.lease_token] = message
                await self._worker.take(message)
                self._start(message)
            while self._running:
                await self._reap()
            await self._finish_waiting()
        except BaseException:
            await self._release()
            raise

    async def _release(self) -> None:
        """Stop the work, and return unfinished messages without counting an attempt."""
        # Closed first, or released messages would be delivered here again.
        await self._messages.close()
        await end_all(self._running)
        outcomes = await asyncio.gather(
            *(message.release() for message in self._unfinished.values()), return_exceptions=True
        )
        for outcome in outcomes:
            # After an ack without an answer, neither a release nor a failure can be known.
            if isinstance(outcome, Exception) and not isinstance(outcome, SlateMQError):
                raise outcome

    async def _next(self) -> Received | None:
        """The next message; None when none came in time, and none is in process.

        Raises Unavailable when a server is down for too long.
        """
        waited_s, looked_at_s = 0.0, time.monotonic()
        while True:
            if self._problem is not None:
                raise self._problem
            left_s = LOOK_S if self._wait_s is None else max(0.0, self._wait_s - waited_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    return await anext(self._messages)
            self._note_pause()
            now_s, outage = time.monotonic(), self._messages.outage
            # Messages in process are not interrupted: their acks find out if the broker is back.
            if not self._running:
                if outage is None:
                    waited_s += now_s - looked_at_s
                else:
                    outage.check(self._give_up_s)
            if self._wait_s is not None and waited_s >= self._wait_s:
                return None
            if waited_s >= ALONE_S:
                await self._finish_waiting()
            looked_at_s = now_s

    def _note_pause(self) -> None:
        queue_id = self._messages.queue_id
        if self._messages.paused and not self._is_paused:
            note(f"{queue_id} is paused: waiting until `slatemq queue resume {queue_id}`")
        self._is_paused = self._messages.paused

    def _start(self, message: Received) -> None:
        task = asyncio.create_task(self._finish(message))
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def _finish(self, message: Received) -> None:
        for finished in await self._worker.finish(message):
            del self._unfinished[finished.lease_token]

    async def _finish_waiting(self) -> None:
        for finished in await self._worker.finish_waiting():
            del self._unfinished[finished.lease_token]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            self._problem = self._problem or problem
        self._over.set()

    async def _reap(self) -> None:
        """Wait until a task ends. Raises what any raised."""
        if self._problem is None:
            self._over.clear()
            await self._over.wait()
        if self._problem is not None:
            raise self._problem
