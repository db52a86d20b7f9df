"""Small commits in a thread: write, flush and sync, and one return to the event loop.

On the event loop each of these steps would end in a wake-up that waits behind everything else that
the loop has to do: under a burst of small publishes a commit took ten times as long as its steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from libs.storage.database.binding import Committer

_Job = tuple[Any, "asyncio.Future[Any]"]


class CommitThread:
    """Commits to one database, one after the other. Use it from one event loop."""

    def __init__(self, committer: Committer, sync: Callable[[], None], name: str) -> None:
        """After each commit of `committer`, call `sync`."""
        self._committer = committer
        self._sync = sync
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"commit {name}", daemon=True)
        self._thread.start()

    async def commit(self, batch: Any) -> Any:
        """Write a batch of the binding and make it durable; returns the handle of the write.

        Raises the binding's errors and OSError. Cancelling the caller does not stop the commit.
        """
        done: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((batch, done))
        return await done

    async def close(self) -> None:
        """Wait for the commits that are under way, and end the thread."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, done = job
            handle, error = None, None
            try:
                handle = self._committer.commit(batch)
                self._sync()
            except Exception as problem:  # noqa: BLE001 - the caller of `commit` gets it
                error = problem
            try:
                self._loop.call_soon_threadsafe(_settle, done, handle, error)
            except RuntimeError:  # The loop is closed, and with it all callers.
                return


def _settle(done: asyncio.Future[Any], handle: Any, error: Exception | None) -> None:
    if done.done():
        return  # cancelled
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(handle)
