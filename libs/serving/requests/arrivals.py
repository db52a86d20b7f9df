"""Requests that are still arriving: few at a time while they are large, many while they are small.

gRPC has all of a request in memory before anybody can see it, and says neither how large it is nor
how much of it has come. But it reads no further than some 64 KiB of a request that was not asked
for. So a few are asked for at once, the others wait in line. A small one is there within a
millisecond, and the next has its turn. While those that are slow do not grow the process, twice as
many may arrive ten times a second: they are small, and only their senders are far away.

::

    call ──► line ──► arriving ──► its bytes are counted by a budget
              │           │
              └ 2 s ──────┴ 5 s, while others wait ──► refused: come back later
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import grpc.aio

from libs.serving.limits import SILENT_CALLS_MAX
from libs.serving.process.memory import resident_bytes

log = logging.getLogger(__name__)

LOOK_S: Final = 0.02
"""Between two looks at what is arriving."""

SLOW_S: Final = 0.05
"""A request that is not there after so long is large, or its sender is slow."""

MORE_S: Final = 0.1
"""Between two times that twice as many may arrive: what they take must show by then."""

SMALL_BYTES: Final = 256 << 10
"""A request that takes no more while it arrives holds up no other."""

LARGE_FACTOR: Final = 8
"""Growth beyond this multiple of what other things may take comes from arriving requests."""

LINE_S: Final = 2.0
"""How long a request waits in line; then its caller is asked to retry."""

STALLED_S: Final = 5.0
"""A request may take so long to arrive, and longer while no others wait."""


class Arrival:
    """A request that arrives, or waits for its turn.

    Attributes:
        is_refused: Its call has ended: nothing may be done for it.
        is_whole: All of it has arrived.
    """

    __slots__ = ("_refuse", "_waiting", "began_s", "is_refused", "is_whole")

    def __init__(self, began_s: float, refuse: Callable[[], Awaitable[None]]) -> None:
        """`began_s` is a time of the event loop; `refuse` ends its call."""
        self.began_s = began_s
        self.is_refused = False
        self.is_whole = False
        self._refuse = refuse

    async def refuse(self) -> None:
        self.is_refused = True
        # The task that ends a call learns so by an error.
        with suppress(grpc.aio.AbortError):
            await self._refuse()


class Arrivals:
    def __init__(
        self,
        at_once: int,
        growth_bytes_max: int,
        resident: Callable[[], int] = resident_bytes,
        slow_max: int = SILENT_CALLS_MAX,
    ) -> None:
        """Ask for `at_once`, and for more while they do not grow the process.

        Growth up to `growth_bytes_max` is taken for that of other things. `resident` gives the
        memory of the process. At most `slow_max` may be slow: the oldest are refused.
        """
        self._at_once = at_once
        self._growth_bytes_max = growth_bytes_max
        self._resident = resident
        self._slow_max = slow_max
        self._allowed = at_once
        self._taken = 0
        self._arriving: dict[Arrival, None] = {}
        self._line: deque[asyncio.Future[None]] = deque()
        self._floor_bytes: int | None = None
        self._more_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._refusing: set[asyncio.Task[Any]] = set()

    async def begin(self, refuse: Callable[[], Awaitable[None]]) -> Arrival:
        """A request may arrive from now on; `refuse` ends its call.

        Raises TimeoutError if its turn does not come in time.
        """
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self.look)
        if self._line or self._taken >= self._allowed:
            await self._turn()
        else:
            self._taken += 1
        arrival = Arrival(loop.time(), refuse)
        self._arriving[arrival] = None
        return arrival

    def end(self, arrival: Arrival) -> None:
        """The request is whole, or never will be: stop counting it."""
        if self._arriving.pop(arrival, arrival) is None:
            self._taken -= 1
            if self._line:
                self._admit()

    def look(self) -> None:
        """Let more requests arrive, or refuse some, by the memory of the process."""
        loop = asyncio.get_running_loop()
        is_idle = not self._arriving and not self._line
        self._timer = None if is_idle else loop.call_later(LOOK_S, self.look)
        slow_s = loop.time() - SLOW_S
        slow = [one for one in self._arriving if one.began_s <= slow_s]
        if not slow:
            self._floor_bytes = None
            self._allowed = self._at_once
            return
        if len(slow) > self._slow_max:
            self._refuse_oldest(slow)
        resident = self._resident()
        if self._floor_bytes is None:
            self._floor_bytes = resident
            self._more_at_s = loop.time() + MORE_S
        growth_bytes = resident - self._floor_bytes
        small_bytes = SMALL_BYTES * self._taken
        is_short = growth_bytes > max(self._growth_bytes_max, small_bytes)
        if growth_bytes > LARGE_FACTOR * self._growth_bytes_max + small_bytes:
            self._refuse_youngest(slow)
        if is_short or any(one.is_whole for one in self._arriving):
            # Those that are whole wait for their share of the budget: more would only wait, too.
            self._allowed = self._at_once
            if self._line and is_short:
                self._refuse_stalled(slow, loop.time() - STALLED_S)
        elif self._line and loop.time() >= self._more_at_s:
            self._more_at_s = loop.time() + MORE_S
            self._allowed = 2 * self._taken
            self._admit()

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            async with asyncio.timeout(LINE_S):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._taken -= 1  # It came, and was too late.
            turn.cancel()
            self._admit()
            raise

    def _admit(self) -> None:
        while self._line and (self._line[0].done() or self._taken < self._allowed):
            turn = self._line.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)

    def _refuse_stalled(self, slow: list[Arrival], stalled_s: float) -> None:
        for arrival in slow:
            if arrival.began_s <= stalled_s and not arrival.is_whole:
                log.warning("a request took %d s to arrive, and others wait: refused", STALLED_S)
                self._refuse(arrival)

    def _refuse_oldest(self, slow: list[Arrival]) -> None:
        oldest = [one for one in slow if not one.is_whole][: len(slow) - self._slow_max]
        log.warning("%d calls wait for their request: the oldest are refused", len(slow))
        for arrival in oldest:
            self._refuse(arrival)

    def _refuse_youngest(self, slow: list[Arrival]) -> None:
        """Refuse all but those that may be large: the others were not as small as they seemed."""
        youngest = [one for one in slow if not one.is_whole][self._at_once :]
        if youngest:
            log.warning("%d requests that arrive are large: refused", len(youngest))
        self._allowed = self._at_once
        for arrival in youngest:
            self._refuse(arrival)

    def _refuse(self, arrival: Arrival) -> None:
        self.end(arrival)
        task = asyncio.create_task(arrival.refuse())
        self._refusing.add(task)
        task.add_done_callback(self._refusing.discard)


STREAMS_LOOK_S: Final = 0.05
"""Between two looks at the memory of the process: within it some 100 MB arrive on loopback."""

LOOKS: Final = 100
"""Sudden growth is what came since the lowest of the last looks: those of 5 s."""

HELD_FACTOR: Final = 2
"""What the service holds for its callers takes this multiple of its bytes, copies included."""

BUSY_S: Final = 1.0
"""On a stream that has waited for less, little has arrived of what came slowly."""


class StreamReads:
    """The reads of all streams: ended when what arrives takes too much memory.

    A stream may wait for hours for its next message, so it cannot stand in line for its turn to
    receive one, as calls do: each asks at once. gRPC says neither that a message has begun to
    arrive nor how much of it is there. But all that arrives shows in the memory of the process.
    When that grows by more than its work explains, the streams that wait are ended: what has
    arrived on them is freed, and their callers go on by calls or by other streams.

    ::

        resident ▲            ╱│ sudden: all that wait are ended
                 │           ╱ │
                 │     ____─────  lowest of 5 s ┐ lasting: those that wait
                 │ ___╱                         │ for a second are ended
                 │╱ level ──────────────────────┘
                 └────────────────────────────────────────────► time

    The level is the lowest since streams began to wait, or since some were ended: what is left then
    is not theirs, and ends no further ones.
    """

    def __init__(
        self,
        sudden_bytes_max: int,
        lasting_bytes_max: int,
        held_bytes: Callable[[], int],
        freed: Callable[[int], None],
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        """End reads when the process grows by more than this, within `LOOKS` looks or lastingly.

        It may grow besides by `held_bytes()`: what the service holds for its callers. `freed` is
        called with bytes to return to the system. `resident` returns the memory of the process.
        """
        self._sudden_bytes_max = sudden_bytes_max
        self._lasting_bytes_max = lasting_bytes_max
        self._held_bytes = held_bytes
        self._held: deque[int] = deque(maxlen=LOOKS)
        self._freed = freed
        self._resident = resident
        self._waiting: dict[asyncio.Timeout, float] = {}
        self._silent: dict[asyncio.Timeout, None] = {}
        self._resident_bytes: deque[int] = deque(maxlen=LOOKS)
        self._level_bytes: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, read: asyncio.Timeout, *, is_first: bool) -> None:
        """Begin a read in this scope; TimeoutError ends it when memory is short.

        The first of a stream is ended also when too many other streams wait for theirs.
        """
        now_s = asyncio.get_running_loop().time()
        self._waiting[read] = now_s
        if is_first:
            self._silent[read] = None
            if len(self._silent) > SILENT_CALLS_MAX:
                oldest = next(iter(self._silent))
                self.end(oldest)
                oldest.reschedule(now_s)
        if self._timer is None:
            self._look_later()

    def end(self, read: asyncio.Timeout) -> None:
        self._waiting.pop(read, None)
        self._silent.pop(read, None)

    def abandon(self, read: asyncio.Timeout) -> None:
        """End a read whose stream ends, with what has arrived of a message.

        Most streams end with nothing, and returning memory costs others time: so much must be here.
        """
        self.end(read)
        if self._level_bytes is not None:
            growth_bytes = self._resident() - self._level_bytes
            if growth_bytes > self._lasting_bytes_max / 2 + HELD_FACTOR * self._held_bytes():
                self._freed(growth_bytes)

    def look(self) -> None:
        """End reads if the process has grown by too much."""
        if not self._waiting:
            self._timer = None
            self._level_bytes = None
            self._resident_bytes.clear()
            self._held.clear()
            return
        self._look_later()
        resident = self._resident()
        self._resident_bytes.append(resident)
        self._held.append(self._held_bytes())
        held_bytes = HELD_FACTOR * max(self._held)
        lowest = min(self._resident_bytes)
        level = self._level_bytes = min(self._level_bytes or resident, resident)
        now_s = asyncio.get_running_loop().time()
        lasting_bytes_max = self._lasting_bytes_max + held_bytes
        if resident - lowest > self._sudden_bytes_max + held_bytes:
            self._end_those_before(now_s, resident, resident - lowest)
        elif lowest - level > lasting_bytes_max:
            self._end_those_before(now_s - BUSY_S, resident, lowest - level)
        elif resident - level > lasting_bytes_max:
            # Perhaps malloc has kept it: that is no growth which lasts.
            self._freed(resident - level)

    def _end_those_before(self, before_s: float, resident: int, growth_bytes: int) -> None:
        """End the reads that began by then. Growth counts from here, not again for what is over."""
        self._level_bytes = resident
        self._resident_bytes.clear()
        self._resident_bytes.append(resident)
        ended = [read for read, began_s in self._waiting.items() if began_s <= before_s]
        if not ended:
            return
        log.warning(
            "memory grew by %d MiB: ending streams that wait for messages, since large ones may be "
            "arriving on them",
            growth_bytes >> 20,
            extra={"streams": len(ended)},
        )
        now_s = asyncio.get_running_loop().time()
        for read in ended:
            self.end(read)
            read.reschedule(now_s)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(STREAMS_LOOK_S, self.look)
