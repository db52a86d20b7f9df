"""Streams and waiting claims, which end soon after they would be refused.

Each is judged again at its next request or response; but where nothing comes, it would go on with a
token that was removed. So each is also judged once after a change of the files that decide who may
call, and when its proof ends. In between they cost next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from slatemq._cancelling import is_cancelled
from slatemq._file_status import LOOK_S
from slatemq.errors import PermissionDenied, SlateMQError, Unauthenticated

log = logging.getLogger(__name__)

JUDGE_S: Final = 1.0
"""How long one that cannot be judged now, as without the keys of an issuer, holds up the others."""


class OpenCall:
    """One of them, made by the task that serves it.

    Attributes:
        judge: Returns until when it is let go on; raises what it is refused with.
        version: Of the files, before it was judged the last time.
        until_s: What `judge` returned then, in seconds since the Unix epoch.
    """

    __slots__ = (
        "_abort",
        "_aborting",
        "_is_sending",
        "_refusal",
        "_responses",
        "_task",
        "judge",
        "until_s",
        "version",
    )

    def __init__(
        self,
        judge: Callable[[], Awaitable[float]],
        version: object,
        until_s: float,
        responses: AsyncGenerator[Any, None] | None,
        abort: Callable[[SlateMQError], Awaitable[None]],
    ) -> None:
        """`responses` are those of a stream, as its handler makes them.

        `abort` gives the caller the status of an error where the task cannot.
        """
        task = asyncio.current_task()
        assert task is not None, "each call has a task of its own"
        self.judge = judge
        self.version = version
        self.until_s = until_s
        self._responses: Any = responses
        self._task = task
        self._is_sending = False
        self._abort = abort
        self._aborting: asyncio.Future[None] | None = None
        self._refusal: SlateMQError | None = None

    @property
    def is_ending(self) -> bool:
        return self._task.cancelling() > 0

    def go_on(self, version: object, until_s: float) -> None:
        self.version, self.until_s = version, until_s
        self._is_sending = False

    def end(self, refusal: SlateMQError) -> None:
        """End it with this error, but the first time not while gRPC sends a response of it.

        A task that is cancelled while it sends gives no status; one whose caller has stopped
        reading would send for ever.
        """
        is_sending = self._responses is not None and not self._responses.ag_running
        if is_sending and not self._is_sending:
            self._is_sending = True
            return
        self._task.cancel()
        if is_sending:
            self._aborting = asyncio.ensure_future(self._abort(refusal))
        else:
            self._refusal = refusal

    def refusal_for(self, error: BaseException | None) -> SlateMQError | None:
        """The error that its task is to raise in place of the one with which it leaves."""
        if self._refusal is None:
            return None
        is_ours = self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError)
        return self._refusal if is_ours else None


class OpenCalls:
    """Those of a port."""

    def __init__(
        self, version: Callable[[], object], clock_s: Callable[[], float] = time.time
    ) -> None:
        """`version` returns that of the files: what it is compared with, not more."""
        self._version = version
        self._clock_s = clock_s
        self._calls: dict[OpenCall, None] = {}  # In an order that does not depend on memory.

    def add(self, call: OpenCall) -> None:
        self._calls[call] = None

    def remove(self, call: OpenCall) -> None:
        self._calls.pop(call, None)

    async def watch(self) -> None:
        """End, for ever, those that would be refused."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Judge those that may be refused by now."""
        version, now_s = self._version(), self._clock_s()
        for call in tuple(self._calls):
            if call.version != version or now_s >= call.until_s:
                await asyncio.sleep(0)  # There may be thousands.
                await self._look_at(call, version)

    async def _look_at(self, call: OpenCall, version: object) -> None:
        """End a call if it is refused; where that is not known now, the next look asks again."""
        if call.is_ending:
            return
        try:
            async with asyncio.timeout(JUDGE_S):
                until_s = await call.judge()
        except (Unauthenticated, PermissionDenied) as refusal:
            if call in self._calls:
                call.end(refusal)
        except (SlateMQError, TimeoutError):
            return
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # Only what it waited for was cancelled.
        except Exception:  # a fault of ours: others must end all the same
            log.exception("an open call cannot be judged")
            call.version = version
        else:
            call.go_on(version, until_s)
