"""Forked processes: gRPC does not survive a fork while it runs, so a client says so at once.

A child that calls into gRPC after it was forked beside open channels crashes, or hangs without
regard to any timeout.
"""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

SHUTDOWN_S = 2.0
"""How long a fork waits for the threads of gRPC to end, once every client is closed."""

_THREADS = ("event_engine", "grpc_", "lifeguard", "timer_manager")
"""How the names of these threads begin."""


@dataclass
class _State:
    """What is known of gRPC in this process.

    Attributes:
        opened: A channel was opened, and gRPC was not seen to have ended since.
        running: gRPC ran at the last fork.
        others_run: It ran then though every client was closed: the program has channels of its own.
        refused: This process was forked beside a gRPC that ran.
    """

    opened: bool = False
    running: bool = False
    others_run: bool = False
    refused: bool = False


_state = _State()
_open: WeakSet[Any] = WeakSet()
_inherited: list[Any] = []
"""What was open at the fork. Held, since gRPC would hang in the child when one is freed."""


_ADVICE = (
    "close every client and channel before the fork, or start the process with "
    'multiprocessing.get_context("spawn") or subprocess, and connect there'
)


def note_channel(channel: Any) -> None:
    """A gRPC channel was opened: while it exists, gRPC runs in this process."""
    _open.add(channel)
    _state.opened = True
    _state.others_run = False


def check_can_connect() -> None:
    """Raises RuntimeError in a child that was forked while gRPC ran in its parent."""
    if _state.refused:
        raise RuntimeError(
            "this process was forked while its parent had a SlateMQ client or another gRPC channel "
            f"open, and gRPC does not survive that: {_ADVICE}"
        )


def inherited_client() -> RuntimeError:
    """The error about a client of the parent that is used in a forked process."""
    return RuntimeError(f"this client was made before a fork, by the parent process: {_ADVICE}")


def _before_fork() -> None:
    if not _state.opened:
        return
    # Channels that were closed may lie in cycles, and gRPC runs until they are freed.
    gc.collect()
    until = time.monotonic() + (0 if _state.others_run else SHUTDOWN_S)
    while not _open and _grpc_threads() and time.monotonic() < until:
        time.sleep(0.001)
    _state.running = bool(_open) or _grpc_threads()
    _state.opened = _state.running
    _state.others_run = _state.running and not _open


def _after_fork_in_child() -> None:
    if _state.running:
        _state.refused = True
        _inherited.extend(_open)


def _grpc_threads() -> bool:
    """Whether threads of gRPC's core run, where the system shows their names (Linux)."""
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # It has ended meanwhile.
            if task.read_text().startswith(_THREADS):
                return True
    return False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def refuse_pickling(
    what: object, instead: str = "Pass the address, and connect in the other process"
) -> TypeError:
    """The error about a client, or a part of one, that is sent to another process."""
    return TypeError(
        f"a {type(what).__name__} cannot be pickled: it belongs to its process. {instead}"
    )
