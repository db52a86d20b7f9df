"""The live view in a terminal, and its numbers without one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group
from rich.live import Live

from slatemq._admin.rates import Sample, lags_of, take_sample, whole_lag
from slatemq.cli.monitor.board import COLUMNS, Board, QueueRow, cell_of, rows_of
from slatemq.cli.monitor.keys import Keyboard, read_keys
from slatemq.cli.output import note, write_json, write_table
from slatemq.cli.queue_options import missing_queues
from slatemq.errors import SlateMQError
from slatemq.models import now_ms

if TYPE_CHECKING:
    from slatemq.client import Client


async def write_objects(client: Client, interval: timedelta, *, once: bool) -> None:
    before = await take_sample(client)
    while True:
        await asyncio.sleep(interval.total_seconds())
        now = await take_sample(client)
        write_json(_fields(before, now))
        if once:
            return
        before = now


async def write_once(client: Client, interval: timedelta) -> None:
    before = await take_sample(client)
    await asyncio.sleep(interval.total_seconds())
    now = await take_sample(client)
    rows = sorted(rows_of(before, now), key=lambda row: row.queue.queue_id)
    cells = [(row.name, *(cell_of(column, row) for column in COLUMNS)) for row in rows]
    write_table(("queue", *(column.head for column in COLUMNS)), cells, cuts=("queue",))
    for one in now.status.services:
        if not one.serving:
            note(f"{one.service} {one.shard} at {one.address} is down: {one.detail}")
    for refusal in now.status.refusals:
        note(refusal)
    if now.status.unlisted_brokers:
        note(missing_queues(now.status.unlisted_brokers))


def _fields(before: Sample, now: Sample) -> dict[str, Any]:
    rows: list[QueueRow] = rows_of(before, now)
    return {
        "at_ms": now_ms(),
        "seconds": round(now.taken_s - before.taken_s, 3),
        "services": [
            {name: value for name, value in asdict(one).items() if name in _SERVICE}
            for one in now.status.services
        ],
        "queues": [row.fields() for row in rows],
        "lag_count": whole_lag(lags_of(now.status)),
        "unlisted_brokers": now.status.unlisted_brokers,
        "refusals": now.status.refusals,
    }


_SERVICE: Final = ("service", "shard", "address", "serving", "detail")


class Top:
    """The board in a terminal: one task asks, keys and new sizes draw again at once."""

    def __init__(self, client: Client, board: Board, interval_s: float) -> None:
        self._client = client
        self._board = board
        self._interval_s = interval_s
        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._keyboard = Keyboard(sys.stdin.fileno())
        self._ended = asyncio.Event()
        self._resumed = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        with self._keyboard.taken(), self._live:
            loop.add_reader(sys.stdin.fileno(), self._read)
            loop.add_signal_handler(signal.SIGWINCH, self._draw)
            loop.add_signal_handler(signal.SIGTSTP, self._suspend)
            loop.add_signal_handler(signal.SIGQUIT, self._ended.set)
            asking = asyncio.create_task(self._ask())
            ended = asyncio.create_task(self._ended.wait())
            try:
                self._draw()
                await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                loop.remove_reader(sys.stdin.fileno())
                loop.remove_signal_handler(signal.SIGWINCH)
                loop.remove_signal_handler(signal.SIGTSTP)
                loop.remove_signal_handler(signal.SIGQUIT)
                for task in (asking, ended):
                    task.cancel()
        if asking.done() and not asking.cancelled():
            asking.result()

    async def _ask(self) -> None:
        while True:
            if self._board.is_paused:
                self._resumed.clear()
                await self._resumed.wait()
            try:
                self._board.update(await take_sample(self._client))
            except SlateMQError as error:
                self._board.problem = f"no answer, asking again: {error.message}"
            self._draw()
            self._resumed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._resumed.wait()

    def _read(self) -> None:
        try:
            keys = read_keys(sys.stdin.fileno())
        except (EOFError, OSError):  # The terminal was closed.
            self._ended.set()
            return
        was_paused = self._board.is_paused
        for key in keys:
            if not self._board.press(key):
                self._ended.set()
                return
        if was_paused and not self._board.is_paused:
            self._resumed.set()
        self._draw()

    def _draw(self) -> None:
        size = self._console.size
        self._live.update(Group(*self._board.lines(size.width, size.height)), refresh=True)

    def _suspend(self) -> None:
        """Leave the terminal as it was while the process is stopped by Ctrl-Z."""
        self._live.stop()
        self._keyboard.restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._keyboard.take()
        self._live.start()
        self._draw()
