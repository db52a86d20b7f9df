"""Limits the rate at which queues change, so that messages keep moving meanwhile.

A change takes 3 ms of the broker's event loop, 1 ms of the router's, and two writes; more where the
machine is slow. If callers make as many as they can, a message takes five times as long from
publish to delivery as on a quiet instance (decision 0053). So changes come at a limited rate, and
at a lower one where they and all else keep the loop busy: behind each the loop rests first. The
principals whose changes wait have turns one after the other, so none of them waits for all that
another asks for.
Pausing and resuming are not limited: an operator may be in a hurry.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from aiolimiter import AsyncLimiter

from slatemq.errors import ResourceExhausted

PER_S: Final = 80

BURST_S: Final = 0.1
"""The changes of this time may come in one burst."""

WAIT_S: Final = 10.0
"""How long a change waits for its turn; then its caller has to retry."""

BUSY_SHARE_MAX: Final = 0.5
"""The next change waits until the loop's thread was busy for no more of the time since the last."""

SLOWER_MAX: Final = 8
"""However busy the loop, changes come no slower than the limit by this factor."""

LOOKS: Final = 20
"""How often the loop is looked at before a change: whether it has rested."""

_WAITED = Path("/proc/thread-self/schedstat")
"""Linux: the second number is for how many ns the thread waited for a processor."""


class FairLock:
    """A lock for which lines wait: they get it in turn, each for its first that waits."""

    def __init__(self) -> None:
        self._is_held = False
        # Those that have just got the lock are no longer in here. No line is empty.
        self._lines: OrderedDict[str, dict[asyncio.Future[None], None]] = OrderedDict()

    @asynccontextmanager
    async def held(self, line: str) -> AsyncIterator[None]:
        """Wait in a line for the lock, and hold it."""
        if self._is_held:
            await self._wait(line)
        self._is_held = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, line: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(line, {})[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(line, turn)
            else:  # It got the lock at the same moment.
                self._pass_on()
            raise

    def _leave(self, line: str, turn: asyncio.Future[None]) -> None:
        del self._lines[line][turn]
        if not self._lines[line]:
            del self._lines[line]

    def _pass_on(self) -> None:
        """Give the lock to the next line; that line then waits behind the others.

        Who cancels a waiter has to let it run before it leaves: it is passed over.
        """
        for line, waiting in list(self._lines.items()):
            turn = next((one for one in waiting if not one.done()), None)
            if turn is None:
                continue
            self._lines.move_to_end(line)
            self._leave(line, turn)
            turn.set_result(None)
            return
        self._is_held = False


class ChangePace:
    """Lets changes through at a limited rate; those of one principal in the order they came."""

    def __init__(
        self,
        per_s: int = PER_S,
        wait_s: float = WAIT_S,
        busy_ns: Callable[[], int] | None = None,
    ) -> None:
        """Let `per_s` changes through each second; each waits at most `wait_s`.

        `busy_ns` counts for how long the loop's thread has worked, or waited for a processor.
        """
        burst = max(1.0, per_s * BURST_S)
        self._limiter = AsyncLimiter(burst, burst / per_s)
        self._rest_s = SLOWER_MAX / per_s
        self._busy_ns = busy_ns or thread_busy_ns
        self._last: tuple[int, int] | None = None
        self._next = FairLock()  # The limiter alone lets a late caller overtake waiting ones.
        self._per_s = per_s
        self._wait_s = wait_s

    async def turn(self, principal: str) -> None:
        """Wait for the turn of one change of this principal. Raises ResourceExhausted."""
        try:
            async with asyncio.timeout(self._wait_s), self._next.held(principal):
                await self._limiter.acquire()
                await self._rest()
        except TimeoutError:
            raise ResourceExhausted(
                f"this broker makes at most {self._per_s} changes of queues a second, and fewer "
                "while it is busy: no turn came in time",
                reason="QUEUE_CHANGES",
                retry_after_ms=1000,
            ) from None

    async def _rest(self) -> None:
        """Wait until the loop has rested since the last change, but not for long."""
        for _ in range(LOOKS):
            now_ns, busy_ns = time.monotonic_ns(), self._busy_ns()
            if self._last is None:
                break
            passed_ns, worked_ns = now_ns - self._last[0], busy_ns - self._last[1]
            if worked_ns <= BUSY_SHARE_MAX * passed_ns:
                break
            await asyncio.sleep(self._rest_s / LOOKS)
        self._last = now_ns, busy_ns


def thread_busy_ns() -> int:
    """For how long the calling thread has worked, or waited for a processor where that is known."""
    try:
        waited_ns = int(_WAITED.read_bytes().split()[1])
    except (OSError, IndexError):  # Not on Linux, or by a kernel that does not count it.
        waited_ns = 0
    return time.thread_time_ns() + waited_ns
